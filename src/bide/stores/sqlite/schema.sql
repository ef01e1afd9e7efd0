-- What bide keeps in a SQLite file: version 1. Every name begins with bide_, so that the file can be yours as well.
-- Statements are parted by lines of two dashes and a semicolon, and run in one transaction. STRICT is left out on SQLite before 3.37.

-- One row per task. A rowid table with a unique index takes 83,000 inserts/s in batches of 1000 where a WITHOUT ROWID
-- table takes 42,000: the row itself is appended, and only the narrow index entries land at random places.
-- `row` never changes over all lives of a key, so that pages can tell equal times apart by it.
-- state: 0 waiting, 1 leased, 2 done, 3 cancelled, 4 dead.
-- at: the wake_at of what lives, the finished_at of what has ended; woke_at: the last wake_at of what has ended.
-- The long columns come last: a reader of the others stops early.
CREATE TABLE bide_task (
    row         INTEGER PRIMARY KEY,
    topic       TEXT NOT NULL,
    key         TEXT NOT NULL,
    state       INTEGER NOT NULL,
    at          INTEGER NOT NULL,
    due_at      INTEGER NOT NULL,
    token       INTEGER NOT NULL,
    planned_at  INTEGER NOT NULL,
    attempt     INTEGER NOT NULL,
    failures    INTEGER NOT NULL,
    losses      INTEGER NOT NULL,
    created_at  INTEGER NOT NULL,
    deadline    INTEGER,
    woke_at     INTEGER,
    keep_until  INTEGER,
    id          TEXT NOT NULL,
    group_name  TEXT,
    holder      TEXT,
    error       TEXT,
    options     BLOB NOT NULL,
    payload     BLOB NOT NULL
) STRICT
--;
-- A task by its name; also the order of a plain list, and the list of topics by a loose scan.
CREATE UNIQUE INDEX bide_task_name ON bide_task (topic, key)
--;
-- What is due, the next wake, lists and counts by state: each state is a range of its own, so that what has ended, or
-- waits for long, costs a lease nothing. (Two partial indexes, of what lives and of what has ended, would need a term
-- such as "state < 2" in each query, and SQLite then prefers that to "state = 0", and sorts.)
CREATE INDEX bide_task_time ON bide_task (topic, state, at)
--;
-- What purge may forget; only what has ended is kept until some time.
CREATE INDEX bide_task_kept ON bide_task (keep_until) WHERE keep_until IS NOT NULL
--;
-- The members of a group.
CREATE INDEX bide_task_group ON bide_task (group_name, topic, key) WHERE group_name IS NOT NULL
--;
-- One row: the last fencing token that was given out.
CREATE TABLE bide_token (one INTEGER PRIMARY KEY CHECK (one = 1), last INTEGER NOT NULL) STRICT
--;
INSERT INTO bide_token VALUES (1, 0)
--;
-- Who works on what, until when. topics: MessagePack.
CREATE TABLE bide_worker (holder TEXT PRIMARY KEY, topics BLOB NOT NULL, until INTEGER NOT NULL) STRICT
--;
-- The log of what was out of the ordinary. `line` only rises, so that the oldest are one range.
CREATE TABLE bide_event (
    line    INTEGER PRIMARY KEY,
    topic   TEXT NOT NULL,
    key     TEXT NOT NULL,
    at      INTEGER NOT NULL,
    id      TEXT NOT NULL,
    kind    TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    who     TEXT,
    what    TEXT NOT NULL,
    was     INTEGER,
    wake_at INTEGER
) STRICT
--;
CREATE INDEX bide_event_name ON bide_event (topic, key)
--;
-- The version of all this.
CREATE TABLE bide_meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT
--;
INSERT INTO bide_meta VALUES ('version', 1), ('checkpoints', 0)
