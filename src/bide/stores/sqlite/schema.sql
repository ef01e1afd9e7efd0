-- bide's schema in a SQLite file, version 1. Every name begins with bide_, so that the file can hold your tables too.
-- Lines of two dashes and a semicolon separate the statements, which run in one transaction. STRICT is left out on
-- SQLite before 3.37.

-- One row per task. A rowid table with a unique index takes 83,000 inserts/s in batches of 1000, and a WITHOUT ROWID
-- table 42,000: here the row is appended, and only the narrow index entries go to random places.
-- `row` stays the same over all lives of a key, so that pages can tell equal times apart by it.
-- state: 0 waiting, 1 leased, 2 done, 3 cancelled, 4 dead.
-- at: the wake_at of a live task, the finished_at of an ended one; woke_at: the last wake_at of an ended task.
-- The long columns come last, so that a read of the other columns stops early.
-- spare: of a row with a payload of some pages, as many zero bytes as a lease adds to the other columns, which are the
-- holder and planned_at (6 bytes). Since the lease takes them away, the row keeps its length, and SQLite writes only the
-- pages that differ, not the payload again. 57 is the most whose length takes one byte.
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
    spare       BLOB,
    options     BLOB NOT NULL,
    payload     BLOB NOT NULL
) STRICT
--;
-- A task by topic and key; also the order of a plain list, and the list of topics by a loose scan.
CREATE UNIQUE INDEX bide_task_name ON bide_task (topic, key)
--;
-- Due tasks, the next wake, lists and counts by state. Each state is a range of its own, so tasks that have ended or
-- wait for long cost a lease nothing. (Two partial indexes, of live and of ended tasks, would need a term such as
-- "state < 2" in each query; SQLite would then prefer that to "state = 0", and sort.)
CREATE INDEX bide_task_time ON bide_task (state, topic, at)
--;
-- The tasks that purge may forget: only ended tasks have a keep_until.
CREATE INDEX bide_task_kept ON bide_task (keep_until) WHERE keep_until IS NOT NULL
--;
-- The live and the ended members of a group. With two partial indexes each write would check two conditions.
CREATE INDEX bide_task_group ON bide_task (group_name, state >= 2, topic, key) WHERE group_name IS NOT NULL
--;
-- One row: the last fencing token that was given out.
CREATE TABLE bide_token (one INTEGER PRIMARY KEY CHECK (one = 1), last INTEGER NOT NULL) STRICT
--;
INSERT INTO bide_token VALUES (1, 0)
--;
-- Notes for the watchers of other processes: a wake that came before all others of its topic, or, with a head, that
-- all tasks that woke by then were taken, and the topic's next wake. `line` only rises.
-- writer: a number of the process, which has notified its own listeners. An empty topic stands for any topic.
CREATE TABLE bide_wake (
    line INTEGER PRIMARY KEY, writer INTEGER NOT NULL, topic TEXT NOT NULL, at INTEGER NOT NULL, head INTEGER
) STRICT
--;
-- The live workers with their topics (JSON), each until some time.
CREATE TABLE bide_worker (holder TEXT PRIMARY KEY, topics BLOB NOT NULL, until INTEGER NOT NULL) STRICT
--;
-- The log of unusual events. `line` only rises, so that the oldest events are one range.
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
-- The version of this schema.
CREATE TABLE bide_meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT
--;
INSERT INTO bide_meta VALUES ('version', 1), ('checkpoints', 0)
