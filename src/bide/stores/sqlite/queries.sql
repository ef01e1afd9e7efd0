-- All statements, with the reasons for their form. `{record}` stands for the columns of a Record, in its order, and
-- then `row`. States: 0 waiting, 1 leased.

-- name: insert_task
-- The optimistic form: existing rows are left alone, and the row count shows whether there were any.
INSERT INTO bide_task (
    topic, key, state, at, due_at, token, planned_at, attempt, failures, losses, created_at, deadline, id,
    group_name, options, payload, spare
) VALUES (
    ?, ?, 0, ?, ?, ?, 0, 0, 0, 0, ?, ?, ?, ?, ?, ?11, CASE WHEN length(?11) >= 4096 THEN zeroblob(57) END
) ON CONFLICT DO NOTHING

-- name: task_by_name
SELECT {record} FROM bide_task WHERE topic = ? AND key = ?

-- name: tasks_by_names
-- Many tasks of one topic: see `rows.by_names`. The keys are a JSON array, whose values SQLite looks up in order.
SELECT {record} FROM bide_task WHERE topic = ? AND key IN (SELECT value FROM json_each(?))

-- name: put_task
-- A complete new state of an existing task. Its row stays the same, so that pages over equal times stay correct.
UPDATE bide_task SET
    id = ?, group_name = ?, state = ?, due_at = ?, at = ?, planned_at = ?, attempt = ?, failures = ?, losses = ?,
    token = ?, holder = ?, payload = ?12, options = ?, deadline = ?, error = ?, created_at = ?, woke_at = ?,
    keep_until = ?, spare = CASE WHEN length(?12) >= 4096 THEN zeroblob(57) END
WHERE row = ?

-- name: move_task
-- A move changes only these columns of a waiting task, and so only one index.
UPDATE bide_task SET due_at = ?, at = ?, token = ?, deadline = ? WHERE row = ?

-- name: delete_task
DELETE FROM bide_task WHERE row = ?

-- name: due
-- Waiting tasks, and those with an expired lease, are two ordered ranges of one index; the caller merges them.
SELECT {record} FROM bide_task WHERE topic = ? AND state = ? AND at <= ? ORDER BY at LIMIT ?

-- name: lease_task
-- With fewer spare bytes, see `schema.sql`.
UPDATE bide_task SET
    state = 1, at = ?, planned_at = ?, attempt = ?, losses = ?, token = ?, holder = ?6,
    spare = CASE WHEN spare IS NOT NULL THEN zeroblob(57 - 6 - length(CAST(?6 AS BLOB))) END
WHERE row = ?7

-- name: heads
-- Two seeks, each to the first entry of its range.
SELECT
    (SELECT min(at) FROM bide_task WHERE topic = ?1 AND state = 0),
    (SELECT min(at) FROM bide_task WHERE topic = ?1 AND state = 1)

-- name: waiting_head
-- The head with its token, which tells whether this transaction wrote it.
SELECT at, token FROM bide_task WHERE topic = ? AND state = 0 ORDER BY at LIMIT 1

-- name: insert_wake
INSERT INTO bide_wake (writer, topic, at, head) VALUES (?, ?, ?, ?)

-- name: trim_wakes
DELETE FROM bide_wake WHERE line <= ?

-- name: wakes_after
SELECT line, writer, topic, at, head FROM bide_wake WHERE line > ? ORDER BY line

-- name: last_wake
SELECT coalesce(max(line), 0) FROM bide_wake

-- name: extend_task
UPDATE bide_task SET at = ? WHERE topic = ? AND key = ? AND token = ? AND state = 1

-- name: settle_done
-- The happy path: done, without retention. The condition is the fencing, and the row count is the answer.
DELETE FROM bide_task WHERE topic = ? AND key = ? AND token = ? AND state = 1

-- name: settle_kept
-- Done, and kept. The same condition; the start of the delivery, which the token tells, takes the place of the wake.
UPDATE bide_task SET state = 2, at = ?, woke_at = ?, token = ?, error = ?, keep_until = ?
WHERE topic = ? AND key = ? AND token = ? AND state = 1

-- name: settle_again
-- Done, and the next life begins. The same condition. A leased task has no woke_at and no keep_until.
UPDATE bide_task SET
    id = ?4, state = 0, due_at = ?5, at = ?6, token = ?7, created_at = ?8, planned_at = 0, attempt = 0, failures = 0,
    losses = 0, holder = NULL, deadline = NULL, error = NULL
WHERE topic = ?1 AND key = ?2 AND token = ?3 AND state = 1

-- name: purge
DELETE FROM bide_task WHERE row IN (
    SELECT row FROM bide_task WHERE keep_until <= ? ORDER BY keep_until LIMIT ?
)

-- name: last_token
-- And the head of a topic: one statement costs less than two.
SELECT last, (SELECT min(at) FROM bide_task WHERE topic = ? AND state = 0) FROM bide_token WHERE one = 1

-- name: put_token
UPDATE bide_token SET last = ? WHERE one = 1

-- name: page_by_name
SELECT {record} FROM bide_task WHERE topic = ? AND key > ? ORDER BY key LIMIT ?

-- name: page_by_group
SELECT {record} FROM bide_task INDEXED BY bide_task_group
WHERE group_name = ? AND (state >= 2) = ? AND topic = ? AND key > ? ORDER BY key LIMIT ?

-- name: page_at_instant
-- One state of one topic: the remaining tasks of one instant, after a row.
SELECT {record} FROM bide_task WHERE topic = ? AND state = ? AND at = ? AND row > ? ORDER BY row LIMIT ?

-- name: page_after_instant
-- The tasks after that instant. A separate query, because `(at, row) > (?, ?)` would seek by `at` alone, and then step
-- over all rows of the instant.
SELECT {record} FROM bide_task WHERE topic = ? AND state = ? AND at > ? AND at < ? ORDER BY at, row LIMIT ?

-- name: next_topic
-- One step of a loose scan: the next topic costs one seek, however many tasks lie between.
SELECT min(topic) FROM bide_task WHERE topic > ?

-- name: next_topic_of_state
SELECT min(topic) FROM bide_task WHERE state = ? AND topic > ?

-- name: next_topic_of_group
SELECT min(topic) FROM bide_task INDEXED BY bide_task_group WHERE group_name = ? AND (state >= 2) = ? AND topic > ?

-- name: counts
-- Counts by topic and state, of the topics after one, or of those in a JSON array. Counting stops at the limit, so that
-- a tally costs no more with ten million tasks.
WITH RECURSIVE scanned (topic) AS (
    SELECT min(topic) FROM bide_task WHERE topic > ?1 AND ?4 IS NULL
    UNION ALL
    SELECT (SELECT min(topic) FROM bide_task WHERE bide_task.topic > scanned.topic) FROM scanned WHERE topic IS NOT NULL
), topics (topic) AS (SELECT topic FROM scanned WHERE topic IS NOT NULL UNION ALL SELECT value FROM json_each(?4))
SELECT topic,
    (SELECT count(*) FROM (SELECT 1 FROM bide_task AS t WHERE t.topic = topics.topic AND state = 0 LIMIT ?2)),
    (SELECT count(*) FROM (SELECT 1 FROM bide_task AS t WHERE t.topic = topics.topic AND state = 1 LIMIT ?2)),
    (SELECT count(*) FROM (SELECT 1 FROM bide_task AS t WHERE t.topic = topics.topic AND state = 2 LIMIT ?2)),
    (SELECT count(*) FROM (SELECT 1 FROM bide_task AS t WHERE t.topic = topics.topic AND state = 3 LIMIT ?2)),
    (SELECT count(*) FROM (SELECT 1 FROM bide_task AS t WHERE t.topic = topics.topic AND state = 4 LIMIT ?2))
FROM topics LIMIT ?3

-- name: count_waiting_between
SELECT count(*) FROM (
    SELECT 1 FROM bide_task WHERE topic = ? AND state = 0 AND at >= ? AND at < ? LIMIT ?
)

-- name: rename_task
UPDATE bide_task SET key = ? WHERE row = ?

-- name: announce
INSERT INTO bide_worker (holder, topics, until) VALUES (?, ?, ?)
ON CONFLICT (holder) DO UPDATE SET topics = excluded.topics, until = excluded.until

-- name: leave
DELETE FROM bide_worker WHERE holder = ?

-- name: forget_workers
-- There is one row per worker, too few for an index.
DELETE FROM bide_worker WHERE until <= ?

-- name: workers
SELECT holder, topics FROM bide_worker

-- name: insert_event
INSERT INTO bide_event (at, topic, key, id, kind, attempt, who, what, was, wake_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)

-- name: event_span
-- The first and last line, by a seek to each end of the table.
SELECT (SELECT min(line) FROM bide_event), (SELECT max(line) FROM bide_event)

-- name: trim_events
DELETE FROM bide_event WHERE line <= ?

-- name: events
SELECT at, topic, key, id, kind, attempt, who, what, was, wake_at FROM bide_event ORDER BY line DESC LIMIT ?

-- name: events_by_name
SELECT at, topic, key, id, kind, attempt, who, what, was, wake_at FROM bide_event
WHERE topic = ? AND key = ? ORDER BY line DESC LIMIT ?

-- name: mark_checkpoint
-- A commit right before a checkpoint, where SQLite needs one: see `checkpoint`.
UPDATE bide_meta SET value = value + 1 WHERE name = 'checkpoints'

-- name: has_meta
SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = 'bide_meta'

-- name: version
SELECT value FROM bide_meta WHERE name = 'version'

-- name: put_version
UPDATE bide_meta SET value = ? WHERE name = 'version'
