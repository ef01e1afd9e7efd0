-- bide's tables in PostgreSQL: version 1. Lines of two dashes and a semicolon separate the statements. {name} stands
-- for a table in the chosen schema with the chosen prefix, "{prefix}..." for the name of an index or constraint, which
-- is in the schema of its table.

-- One row per task.
-- row: never changes over all lives of a key, so that pages can order equal times by it. A connection takes a hundred
-- numbers at a time, since nothing depends on their order.
-- state: 0 waiting, 1 leased, 2 done, 3 cancelled, 4 dead.
-- at: the wake_at of a live task, the finished_at of an ended one. woke_at: the wake_at that a lease was given for (for
-- the order in which tasks are handed out), or the last wake_at of an ended task.
-- Names sort by their bytes (COLLATE "C"): the order used everywhere else in bide, and the fastest.
-- fillfactor: a task is updated twice in its life, and its new version is found faster on the page of the old one.
-- Autovacuum runs after 10,000 dead rows, whatever the size of the table, and does not pause: the table turns over
-- within minutes, and each lease visits the dead rows. It returns no pages to the system (vacuum_truncate): for that it
-- would lock the whole table once a minute, and the next burst needs the pages again.
CREATE TABLE {task} (
    row         bigint GENERATED ALWAYS AS IDENTITY (CACHE 100),
    token       bigint NOT NULL,
    at          bigint NOT NULL,
    due_at      bigint NOT NULL,
    planned_at  bigint NOT NULL,
    created_at  bigint NOT NULL,
    deadline    bigint,
    woke_at     bigint,
    keep_until  bigint,
    attempt     integer NOT NULL,
    failures    integer NOT NULL,
    losses      integer NOT NULL,
    state       smallint NOT NULL,
    topic       text COLLATE "C" NOT NULL,
    key         text COLLATE "C" NOT NULL,
    id          text COLLATE "C" NOT NULL,
    group_name  text COLLATE "C",
    holder      text COLLATE "C",
    error       text,
    options     bytea NOT NULL,
    payload     bytea NOT NULL,
    CONSTRAINT "{prefix}task_name" PRIMARY KEY (topic, key)
) WITH (
    fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000,
    autovacuum_vacuum_insert_scale_factor = 0.2, autovacuum_analyze_scale_factor = 0.1,
    autovacuum_vacuum_cost_delay = 0, vacuum_truncate = false
)
--;
-- The due tasks, oldest first, and the next wake. Waiting, leased and ended tasks have an index each. A task is in one
-- of these at a time, so a transition writes no more entries than with a single index, and no scan visits the rows of
-- another state.
CREATE INDEX "{prefix}task_waiting" ON {task} (topic COLLATE "POSIX", at, row) WHERE state = 0
--;
-- The expired leases, and the next expiry.
CREATE INDEX "{prefix}task_leased" ON {task} (topic COLLATE "POSIX", at, row) WHERE state = 1
--;
-- Lists and counts of ended tasks.
CREATE INDEX "{prefix}task_ended" ON {task} (state, topic COLLATE "POSIX", at, row) WHERE state >= 2
--;
-- The tasks to purge; only ended tasks have a retention.
CREATE INDEX "{prefix}task_kept" ON {task} (keep_until) WHERE keep_until IS NOT NULL
--;
-- The live and the ended members of a group. With two partial indexes each write would check two conditions: 2 % less
-- throughput. `state >= 2` is an integer, because the planner rewrites a condition on a boolean.
CREATE INDEX "{prefix}task_group"
ON {task} (group_name, ((state >= 2)::integer), topic COLLATE "POSIX", key COLLATE "POSIX") WHERE group_name IS NOT NULL
--;
-- Fencing tokens: a counter that is raised to the clock in microseconds. A rolled-back transaction leaves a harmless
-- gap: tokens only have to rise.
CREATE SEQUENCE {token} AS bigint
--;
-- The last call of each caller and its answer, written with the work itself. So a call that is sent again, because its
-- answer was lost, is recognised. One row per kind of call and process.
CREATE TABLE {caller} (
    name        text COLLATE "C" PRIMARY KEY,
    number      bigint NOT NULL,
    seen        bigint NOT NULL,
    now         bigint,
    tokens      bigint[],
    topics      text[],
    keys        text[],
    answer      bytea
) WITH (
    fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, vacuum_truncate = false
)
--;
ALTER TABLE {caller}
    ALTER COLUMN tokens SET STORAGE EXTERNAL, ALTER COLUMN topics SET STORAGE EXTERNAL,
    ALTER COLUMN keys SET STORAGE EXTERNAL, ALTER COLUMN answer SET STORAGE EXTERNAL
--;
-- The live workers: the topics of each, and the time until which it counts as live.
CREATE TABLE {worker} (holder text COLLATE "C" PRIMARY KEY, topics text[] NOT NULL, until bigint NOT NULL)
    WITH (
    fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, vacuum_truncate = false
)
--;
-- The log of unusual events. `line` only rises, so that the oldest lines are one range.
CREATE TABLE {event} (
    line        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at          bigint NOT NULL,
    topic       text COLLATE "C" NOT NULL,
    key         text COLLATE "C" NOT NULL,
    id          text NOT NULL,
    kind        text NOT NULL,
    attempt     integer NOT NULL,
    who         text,
    what        text NOT NULL,
    was         bigint,
    wake_at     bigint
)
--;
CREATE INDEX "{prefix}event_name" ON {event} (topic, key, line)
