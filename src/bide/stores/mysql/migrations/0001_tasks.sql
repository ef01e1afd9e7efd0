-- bide's tables in MySQL or MariaDB: version 1. Lines of two dashes and a semicolon separate the statements. {name}
-- stands for a table in the chosen database with the chosen prefix. Each statement may be run twice, since tables
-- cannot be created within a transaction here.

-- One row per task.
-- row: never changes over all lives of a key, so that pages can order equal times by it. InnoDB stores the table in
-- this order, so new tasks with any keys are appended, and the secondary indexes stay small.
-- token: by default the moment at which the row is written, on connections whose time zone is UTC.
-- state: 0 waiting, 1 leased, 2 done, 3 cancelled, 4 dead. ended: the state if it is final, otherwise 0.
-- at: the wake time of a waiting task; the wake time that a leased task had; the finished_at of an ended task.
-- wake_at: the expiry of the lease, or the last wake_at of an ended task. So a lease changes no index: a leased task
-- keeps its place among the due ones, which are few, and is found through {lease}.
-- Names are bytes (UTF-8). So case, accents and trailing spaces are significant in every collation of the database, and
-- names sort by their bytes, as everywhere else in bide. CONVERT(topic USING utf8mb4) shows them.
-- holder is padded with NUL to 48 bytes, and wake_at is never null, so that a lease does not change a row's length:
-- InnoDB then updates it in place, in half the time.
-- Attributes of only some tasks (a group, the end of retention) are indexed in separate tables: MySQL has no partial
-- indexes, and each full index would slow down every insert and every delete.
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
    -- for due tasks, oldest first, the next wake, lists and counts: the live and the ended tasks of each topic, by time
    KEY due (ended, topic, at, `row`)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARSET = utf8mb4
--;
-- Batches of tasks that were leased together: one row for all tasks of one topic in one call.
-- until: none of the leases expires before this. An extension does not change it; the scan that reads the batch at this
-- time writes a new one for the tasks still held. The call that settles the last of the tasks deletes the row.
-- tasks: the row of each task and the token of its lease, as MessagePack. If the task has another token, or is no
-- longer leased, this lease of it is over for good.
CREATE TABLE IF NOT EXISTS {lease} (
    topic  varbinary(200) NOT NULL,
    until  bigint NOT NULL,
    `row`  bigint UNSIGNED NOT NULL,
    token  bigint NOT NULL,
    caller varbinary(64) NOT NULL,
    tasks  longblob NOT NULL,
    -- row and token: those of its first task; caller: the caller that wrote the row, and the number of its call
    PRIMARY KEY (topic, until, `row`, token, caller)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARSET = utf8mb4
--;
-- The members of groups; ended: 1 if the task has ended, of which there may be many.
CREATE TABLE IF NOT EXISTS {grouped} (
    `row`      bigint UNSIGNED NOT NULL,
    group_name varbinary(200) NOT NULL,
    topic      varbinary(200) NOT NULL,
    `key`      varbinary(200) NOT NULL,
    ended      tinyint NOT NULL,
    PRIMARY KEY (`row`),
    KEY name (group_name, ended, topic, `key`)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARSET = utf8mb4
--;
-- The ended tasks, by the end of their retention. If the task has begun another life since, its row says so, and the
-- line here is obsolete.
CREATE TABLE IF NOT EXISTS {kept} (
    until bigint NOT NULL,
    `row` bigint UNSIGNED NOT NULL,
    PRIMARY KEY (until, `row`)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARSET = utf8mb4
--;
-- The last call of each caller and its answer, written with the work itself. So a call that is sent again, because its
-- answer was lost, is recognised. One row per kind of call and process.
-- micros: an upper bound of the tokens that the call gave out. A new life takes a token above all of these, so that
-- tokens rise even if the clock was set back. The row without a name holds the maximum of the deleted rows.
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
-- The live workers: the topics of each, and the time until which it counts as live.
CREATE TABLE IF NOT EXISTS {worker} (
    holder  varbinary(255) NOT NULL,
    topics  longblob NOT NULL,
    until   bigint NOT NULL,
    PRIMARY KEY (holder)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARSET = utf8mb4
--;
-- The log of unusual events. `line` only rises, so that the oldest lines are one range.
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
