-- What bide keeps in MySQL or MariaDB: version 1. Statements are parted by lines of two dashes and a semicolon. {name}
-- stands for a table of the chosen database with the chosen prefix. Each may be run twice: tables cannot be made within
-- a transaction here.

-- One row per task.
-- row: never changes over all lives of a key, so that pages can tell equal times apart by it. InnoDB keeps the table in
-- this order, so new tasks, whatever their keys, come one after the other, and the other indexes stay small.
-- token: by itself the moment at which the row is written, on connections whose time zone is UTC.
-- state: 0 waiting, 1 leased, 2 done, 3 cancelled, 4 dead. ended: the same of what has ended, 0 of what lives.
-- at: when what waits wakes, and when what is leased woke; of what has ended finished_at. wake_at: until when it is
-- leased, and the last wake_at of what has ended. So a lease does not touch an index: what is leased stays where it was
-- among what is due, which is few, and is found by {lease}.
-- Names are bytes (UTF-8): so case, accents and trailing spaces count, whatever the collation of the database, and they
-- sort by their bytes, as everywhere else in bide. CONVERT(topic USING utf8mb4) shows them.
-- holder: filled up with NUL to 48 bytes, and wake_at is never null, so that a lease does not change how long a row is:
-- InnoDB then writes it where it lies, in half the time.
-- What only some tasks have, a group or an end to being kept, is indexed in tables of its own: here is no index without
-- entries of the others, and each costs every insert and every delete.
CREATE TABLE IF NOT EXISTS {task} (
    `row`       bigint UNSIGNED NOT NULL AUTO_INCREMENT,
    token       bigint NOT NULL DEFAULT (TIMESTAMPDIFF(MICROSECOND, TIMESTAMP'1970-01-01 00:00:00', SYSDATE(6))),
    at          bigint NOT NULL,
    due_at      bigint NOT NULL,
    planned_at  bigint NOT NULL DEFAULT 0,
    created_at  bigint NOT NULL,
    deadline    bigint,
    wake_at     bigint NOT NULL DEFAULT 0,
    keep_until  bigint,
    attempt     integer NOT NULL DEFAULT 0,
    failures    integer NOT NULL DEFAULT 0,
    losses      integer NOT NULL DEFAULT 0,
    state       tinyint NOT NULL DEFAULT 0,
    ended       tinyint NOT NULL DEFAULT 0,
    topic       varbinary(200) NOT NULL,
    `key`       varbinary(200) NOT NULL,
    id          varbinary(64) NOT NULL,
    group_name  varbinary(200),
    holder      varbinary(255) NOT NULL
        DEFAULT x'000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000',
    error       mediumblob,
    options     mediumblob NOT NULL DEFAULT (''),
    payload     longblob NOT NULL,
    PRIMARY KEY (`row`),
    UNIQUE KEY name (topic, `key`),
    -- what is due, oldest first, the next wake, lists and counts: what lives of each topic, and what ended how, by time
    KEY due (topic, ended, at, `row`)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARSET = utf8mb4
--;
-- What was leased together: one row for the tasks of one topic in one call, however many they are.
-- until: none of them is lost before. If their leases are extended it stays, and when its time has come who looks writes
-- down anew what is still held. The call that settles the last of them removes the row.
-- tasks: the row of each and the token of its lease, as MessagePack. If the task has another token, or is not leased any
-- more, this lease of it is over for good.
CREATE TABLE IF NOT EXISTS {lease} (
    topic  varbinary(200) NOT NULL,
    until  bigint NOT NULL,
    `row`  bigint UNSIGNED NOT NULL,
    token  bigint NOT NULL,
    caller varbinary(64) NOT NULL,
    tasks  longblob NOT NULL,
    -- row and token: those of its first task; caller: who wrote the row, and in which call
    PRIMARY KEY (topic, until, `row`, token, caller)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARSET = utf8mb4
--;
-- The members of groups.
CREATE TABLE IF NOT EXISTS {grouped} (
    `row`      bigint UNSIGNED NOT NULL,
    group_name varbinary(200) NOT NULL,
    topic      varbinary(200) NOT NULL,
    `key`      varbinary(200) NOT NULL,
    PRIMARY KEY (`row`),
    KEY name (group_name, topic, `key`)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARSET = utf8mb4
--;
-- What has ended, by when it may be forgotten. If the task has begun another life since, its row says so, and the line
-- here means nothing any more.
CREATE TABLE IF NOT EXISTS {kept} (
    until bigint NOT NULL,
    `row` bigint UNSIGNED NOT NULL,
    PRIMARY KEY (until, `row`)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARSET = utf8mb4
--;
-- The last call of each caller and its answer, written with the work itself: so a call that is sent again, because its
-- answer was lost, is recognised. One row per kind of call and process.
-- micros: no token that the call gave out was higher. What begins a life takes one above all of these, so that tokens
-- rise although the clock was set back. The row without a name holds what those had that are forgotten.
CREATE TABLE IF NOT EXISTS {caller} (
    name    varbinary(64) NOT NULL,
    number  bigint NOT NULL,
    seen    bigint NOT NULL,
    now     bigint NOT NULL,
    micros  bigint NOT NULL,
    answer  longblob,
    PRIMARY KEY (name)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARSET = utf8mb4
--;
INSERT INTO {caller} (name, number, seen, now, micros) VALUES ('', 0, 0, 0, 0) ON DUPLICATE KEY UPDATE number = 0
--;
-- Who works on what, until when.
CREATE TABLE IF NOT EXISTS {worker} (
    holder  varbinary(255) NOT NULL,
    topics  longblob NOT NULL,
    until   bigint NOT NULL,
    PRIMARY KEY (holder)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARSET = utf8mb4
--;
-- The log of what was out of the ordinary. `line` only rises, so that the oldest are one range.
CREATE TABLE IF NOT EXISTS {event} (
    line    bigint UNSIGNED NOT NULL AUTO_INCREMENT,
    at      bigint NOT NULL,
    topic   varbinary(200) NOT NULL,
    `key`   varbinary(200) NOT NULL,
    id      varbinary(64) NOT NULL,
    kind    varbinary(40) NOT NULL,
    attempt integer NOT NULL,
    who     mediumblob,
    what    mediumblob NOT NULL,
    was     bigint,
    wake_at bigint,
    PRIMARY KEY (line),
    KEY name (topic, `key`, line)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARSET = utf8mb4
