-- What bide keeps in MySQL or MariaDB: version 1. Statements are parted by lines of two dashes and a semicolon. {name}
-- stands for a table of the chosen database with the chosen prefix. Each may be run twice: tables cannot be made within
-- a transaction here.

-- One row per task.
-- row: never changes over all lives of a key, so that pages can tell equal times apart by it. InnoDB keeps the table in
-- this order, so new tasks, whatever their keys, come one after the other, and the other indexes stay small.
-- token: by itself the moment at which the row is written, on connections whose time zone is UTC.
-- state: 0 waiting, 1 leased, 2 done, 3 cancelled, 4 dead.
-- at: the wake_at of what lives, the finished_at of what has ended. woke_at: the wake_at that a lease was given for
-- (for the order of what is given out), or the last wake_at of what has ended.
-- Names are bytes (UTF-8): so case, accents and trailing spaces count, whatever the collation of the database, and they
-- sort by their bytes, as everywhere else in bide. CONVERT(topic USING utf8mb4) shows them.
-- holder: filled up with NUL to 48 bytes, and woke_at is never null, so that a lease does not change how long a row is:
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
    woke_at     bigint NOT NULL DEFAULT 0,
    keep_until  bigint,
    attempt     integer NOT NULL DEFAULT 0,
    failures    integer NOT NULL DEFAULT 0,
    losses      integer NOT NULL DEFAULT 0,
    state       tinyint NOT NULL DEFAULT 0,
    topic       varbinary(200) NOT NULL,
    `key`       varbinary(200) NOT NULL,
    id          varbinary(64) NOT NULL,
    group_name  varbinary(200),
    holder      varbinary(255) NOT NULL
        DEFAULT x'000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000',
    error       mediumblob,
    options     mediumblob NOT NULL,
    payload     longblob NOT NULL,
    PRIMARY KEY (`row`),
    UNIQUE KEY name (topic, `key`),
    -- what is due, oldest first, the next wake, lists and counts: each state of each topic by its time
    KEY due (topic, state, at, `row`)
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
