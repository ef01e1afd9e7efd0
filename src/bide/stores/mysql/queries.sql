-- Every statement, with the reason for its form. {task} and the like are tables; {record} and {due} stand for columns,
-- see `queries`. States: 0 waiting, 1 leased, 2 done, 3 cancelled, 4 dead. :name is a value. What is leased stays among
-- what is due (`ended = 0`), so that a scan for what waits steps over it.
--
-- Several go to the server as one packet. It stops at the first that fails, and that is how a call is conditional:
-- `gate` fails (a subquery with two rows) unless call :number of caller :me is new, and COMMIT behind it is not reached.
-- :these and :held are conditions on `row`, see `queries.these` and `queries.held`.
-- Every big table is entered by FORCE INDEX: statistics of a table that was just filled would lead elsewhere.

-- name: begin
BEGIN

-- name: commit
COMMIT

-- name: snapshot
-- What reads several times reads the same state of the database.
SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY

-- name: begin_snapshot
START TRANSACTION WITH CONSISTENT SNAPSHOT

-- name: read_clock
-- :there is the server's clock in microseconds, or else the caller's.
SET @bide_micros = :there

-- name: tell_clock
SET @bide_now = @bide_micros DIV 1000

-- name: first_token
-- For what begins a life: above everything that was given out before, also if the clock was set back since. No SET with
-- a subquery: that would lock what it reads.
SELECT GREATEST(@bide_micros, MAX(micros) + 1) INTO @bide_token FROM {caller}

-- name: raise_floor
-- Where the caller's clock counts, which may leap: tokens come from one row, that is one call at a time.
UPDATE {caller} SET micros = LAST_INSERT_ID(GREATEST(micros, :now * 1000 - 1) + 1 + :most) WHERE name = ''

-- name: take_floor
SET @bide_micros = LAST_INSERT_ID() - :most, @bide_now = :now, @bide_token = LAST_INSERT_ID() - :most

-- name: clock
SELECT @bide_now, @bide_micros

-- name: select_clock
-- The same in one statement, where no other needs it.
SELECT :there DIV 1000, :there

-- name: pass_gate
-- Locks the caller's row, so that a call sent again waits for the end of the first one.
UPDATE {caller} SET
    number = :number, seen = @bide_now, now = @bide_now, micros = GREATEST(micros, :micros), answer = :answer
WHERE name = :me AND number < :number

-- name: gate
SET @bide_open = IF(ROW_COUNT() = 1, 1, (SELECT 1 UNION ALL SELECT 2))

-- name: all_of_them
-- Fails (a number that is too large) unless the statement before met so many rows.
SET @bide_open = 18446744073709551615 + (ROW_COUNT() <> :count)

-- name: clock_and_token
SELECT @bide_now, @bide_micros, @bide_token

-- name: insert_tasks
-- Plain: one key that is taken, and none is inserted. The clock is read for each row (:rows say how, or it is what
-- `token` is by itself), since a key may have lived and ended, with a token of that time, while the rows before it were
-- written. Each value costs time to read, so that :columns are those that are needed.
INSERT INTO {task} (:columns) VALUES :rows RETURNING token

-- name: first_row
-- The rows of one statement have consecutive numbers, in its order.
SET @bide_row = LAST_INSERT_ID()

-- name: inserted_tokens
-- For MySQL, which knows no RETURNING.
SELECT token FROM {task} FORCE INDEX (PRIMARY)
WHERE `row` >= @bide_row AND `row` < @bide_row + :count * @@auto_increment_increment ORDER BY `row`

-- name: lock_tasks
-- Those of the names that are there, locked in the order of the index.
SELECT {record} FROM {task} FORCE INDEX (name) WHERE topic = :topic AND `key` IN (:keys) FOR UPDATE

-- name: probe
-- Fails at once if another transaction has the task locked, or is inserting it.
SELECT 1 FROM {task} FORCE INDEX (name) WHERE topic = :topic AND `key` = :key FOR UPDATE NOWAIT

-- name: put_tasks
-- What was decided about locked rows, all at once: each is there, so none is inserted. What a transition cannot change
-- (payload, options, group) is left as it is.
INSERT INTO {task} (
    `row`, topic, `key`, id, state, ended, due_at, at, planned_at, attempt, failures, losses, token, holder, deadline,
    error, created_at, wake_at, keep_until, options, payload
) VALUES :rows
ON DUPLICATE KEY UPDATE
    id = VALUES(id), state = VALUES(state), ended = VALUES(ended), due_at = VALUES(due_at), at = VALUES(at),
    planned_at = VALUES(planned_at), attempt = VALUES(attempt), failures = VALUES(failures), losses = VALUES(losses),
    token = VALUES(token), holder = VALUES(holder), deadline = VALUES(deadline), error = VALUES(error),
    created_at = VALUES(created_at), wake_at = VALUES(wake_at), keep_until = VALUES(keep_until)

-- name: replace_tasks
-- The same for new lives, which bring a payload of their own.
INSERT INTO {task} (
    `row`, topic, `key`, id, state, ended, due_at, at, planned_at, attempt, failures, losses, token, holder, deadline,
    error, created_at, wake_at, keep_until, options, payload, group_name
) VALUES :rows
ON DUPLICATE KEY UPDATE
    id = VALUES(id), state = VALUES(state), ended = VALUES(ended), due_at = VALUES(due_at), at = VALUES(at),
    planned_at = VALUES(planned_at), attempt = VALUES(attempt), failures = VALUES(failures), losses = VALUES(losses),
    token = VALUES(token), holder = VALUES(holder), deadline = VALUES(deadline), error = VALUES(error),
    created_at = VALUES(created_at), wake_at = VALUES(wake_at), keep_until = VALUES(keep_until),
    options = VALUES(options), payload = VALUES(payload), group_name = VALUES(group_name)

-- name: join_groups
INSERT INTO {grouped} (`row`, group_name, topic, `key`) VALUES :rows

-- name: leave_groups
DELETE {grouped} FROM {grouped} FORCE INDEX (PRIMARY) WHERE `row` IN (:rows) AND topic > ''

-- name: keep_tasks
INSERT INTO {kept} (until, `row`) VALUES :rows ON DUPLICATE KEY UPDATE until = VALUES(until)

-- name: forget_tasks
-- In the form that is meant for several tables: the plain one takes no index hint, and would go through the whole of a
-- small table and wait for rows that others have locked. The hint is heeded only where a column outside of the index
-- is asked for: hence `state >= 0`, which all are.
DELETE {task} FROM {task} FORCE INDEX (PRIMARY) WHERE :these AND state >= 0

-- name: take_waiting
-- What others have locked is passed over. The scan begins at :floor, see `sql.leasing`, behind row :row of that instant.
-- What is leased is stepped over too, and stays locked until the lease is committed, as any row does that is read by way
-- of a second index; a settlement of it waits for that. So a lease never waits itself.
SELECT {due} FROM {task} FORCE INDEX (due)
WHERE topic = :topic AND ended = 0 AND state = 0
    AND ((at = :floor AND `row` > :row) OR (at > :floor AND at <= @bide_now))
ORDER BY at, `row` LIMIT :most FOR UPDATE SKIP LOCKED

-- name: lease_tasks
-- No column is in an index. Assignments are carried out in this order, each seeing those before.
UPDATE {task} FORCE INDEX (PRIMARY) SET
    losses = losses + (state = 1), planned_at = IF(state = 1, planned_at, at), attempt = attempt + 1,
    holder = :holder, token = GREATEST(token + 1, :micros), state = 1, wake_at = :until
WHERE :these

-- name: insert_batches
INSERT INTO {lease} (topic, until, `row`, token, caller, tasks) VALUES :rows

-- name: delete_batches
-- In this form and with a column outside of the index for the same reasons as in `forget_tasks`.
DELETE {lease} FROM {lease} FORCE INDEX (PRIMARY) WHERE :leases AND tasks > ''

-- name: expired_leases
-- Where lost tasks may be. The scan begins at :floor, here and in `leased_head`: see `mysql.leasing`.
SELECT until, `row`, token, caller, tasks FROM {lease} FORCE INDEX (PRIMARY)
WHERE topic = :topic AND until >= :floor AND until <= @bide_now
ORDER BY until LIMIT :most FOR UPDATE SKIP LOCKED

-- name: still_leased
-- Those that are leased still, also if another transaction has them locked.
SELECT wake_at, `row`, token, at FROM {task} FORCE INDEX (PRIMARY) WHERE :held AND state = 1

-- name: take_lost
-- What a lost holder left. All of it is locked before it is sorted, which is one worker's work at most.
SELECT {record} FROM {task} FORCE INDEX (PRIMARY)
WHERE :held AND state = 1 AND wake_at <= @bide_now
ORDER BY wake_at LIMIT :most FOR UPDATE SKIP LOCKED

-- name: waiting_head
SELECT at FROM {task} FORCE INDEX (due)
WHERE topic = :topic AND ended = 0 AND state = 0 AND at >= :floor ORDER BY at LIMIT 1

-- name: leased_head
SELECT until FROM {lease} FORCE INDEX (PRIMARY) WHERE topic = :topic AND until >= :floor ORDER BY until LIMIT 1

-- name: leases
-- All of a topic, which are as many as are under way.
SELECT tasks FROM {lease} FORCE INDEX (PRIMARY) WHERE topic = :topic

-- name: insert_shortened
-- A lease may be made to end sooner than it would: a row of `lease` for each, with one task in MessagePack.
INSERT INTO {lease} (topic, until, `row`, token, caller, tasks)
SELECT topic, @bide_now + :lasts, `row`, token, :me,
    UNHEX(CONCAT('9192CF', LPAD(HEX(`row`), 16, '0'), 'CF', LPAD(HEX(token), 16, '0')))
FROM {task} FORCE INDEX (name)
WHERE topic = :topic AND `key` IN (:keys) AND (`key`, token) IN (:holds) AND state = 1
    AND wake_at > @bide_now + :lasts
ON DUPLICATE KEY UPDATE {lease}.until = {lease}.until

-- name: extend_leases
-- Done twice it is the same as done once, so it has no gate.
UPDATE {task} FORCE INDEX (name) SET wake_at = @bide_now + :lasts
WHERE topic = :topic AND `key` IN (:keys) AND (`key`, token) IN (:holds) AND state = 1

-- name: held
SELECT topic, `key`, token FROM {task} FORCE INDEX (name)
WHERE topic = :topic AND `key` IN (:keys) AND (`key`, token) IN (:holds) AND state = 1

-- name: settle_done
-- Plain Done with nothing to remember, of rows that are known since they were leased: the condition is the token. By row
-- it is half as much work as by name, for what is leased together lies together.
DELETE {task} FROM {task} FORCE INDEX (PRIMARY) WHERE :held AND state = 1

-- name: repeated
-- Locked, so that a first sending that is still under way is waited for.
SELECT number, now, micros, answer FROM {caller} WHERE name = :me FOR UPDATE

-- name: new_caller
INSERT INTO {caller} (name, number, seen, now, micros) VALUES (:me, 0, :there DIV 1000, 0, 0)
ON DUPLICATE KEY UPDATE number = number

-- name: forgotten_callers
-- Those that made no call for ten minutes: a call that is sent again comes within one.
SELECT name, micros FROM {caller} WHERE seen < :there DIV 1000 - 600000 AND name NOT IN (:ours)

-- name: keep_highest
UPDATE {caller} SET micros = GREATEST(micros, :micros) WHERE name = ''

-- name: forget_callers
DELETE FROM {caller} WHERE name IN (:names) AND seen < :there DIV 1000 - 600000

-- name: kept_until_now
SELECT until, `row` FROM {kept} FORCE INDEX (PRIMARY) WHERE until <= @bide_now ORDER BY until LIMIT :most

-- name: purgeable
SELECT `row`, group_name IS NOT NULL FROM {task} FORCE INDEX (PRIMARY)
WHERE :these AND keep_until <= @bide_now FOR UPDATE SKIP LOCKED

-- name: still_there
-- Those that are purgeable, also if another transaction has them locked.
SELECT `row` FROM {task} FORCE INDEX (PRIMARY) WHERE :these AND keep_until <= @bide_now

-- name: forget_kept
-- All columns are in the index, so that it takes a join for each line to be found by itself.
DELETE {kept} FROM (:lines) AS given STRAIGHT_JOIN {kept} FORCE INDEX (PRIMARY)
ON until = given.first AND `row` = given.second

-- name: tasks_by_names
SELECT {record} FROM {task} FORCE INDEX (name) WHERE topic = :topic AND `key` IN (:keys)

-- name: tasks_by_rows
SELECT {record} FROM {task} FORCE INDEX (PRIMARY) WHERE :these

-- name: page_by_name
SELECT {record} FROM {task} FORCE INDEX (name) WHERE topic = :topic AND `key` > :key ORDER BY `key` LIMIT :most

-- name: page_by_group
SELECT {record} FROM (
    SELECT `row` AS number, `key` AS member FROM {grouped} FORCE INDEX (name)
    WHERE group_name = :group AND topic = :topic AND `key` > :key ORDER BY `key` LIMIT :most
) AS few STRAIGHT_JOIN {task} FORCE INDEX (PRIMARY) ON `row` = number ORDER BY member

-- name: page_at_instant
-- What waits, or what has ended in one way, of one topic: what is left of those of one instant, after a row.
SELECT {record} FROM {task} FORCE INDEX (due)
WHERE topic = :topic AND ended = :state AND state = :state AND at = :instant AND `row` > :row ORDER BY `row` LIMIT :most

-- name: page_after_instant
-- And what comes after. Apart, since `(at, row) > (?, ?)` is not found by an index.
SELECT {record} FROM {task} FORCE INDEX (due)
WHERE topic = :topic AND ended = :state AND state = :state AND at > :instant AND at < :before
ORDER BY at, `row` LIMIT :most

-- name: next_topic
-- One step of a loose scan: the next topic costs one seek, however many tasks lie between.
SELECT topic FROM {task} FORCE INDEX (name) WHERE topic > :topic ORDER BY topic LIMIT 1

-- name: next_topic_of_group
SELECT topic FROM {grouped} FORCE INDEX (name) WHERE group_name = :group AND topic > :topic ORDER BY topic LIMIT 1

-- name: count_living
-- Counting stops at the limit, so that a tally costs the same at ten million.
SELECT COUNT(*) FROM (
    SELECT 1 FROM {task} FORCE INDEX (due)
    WHERE topic = :topic AND ended = 0 AND at >= :low AND at < :high LIMIT :most
) AS few

-- name: count_ended
SELECT COUNT(*) FROM (
    SELECT 1 FROM {task} FORCE INDEX (due) WHERE topic = :topic AND ended = :state LIMIT :most
) AS few

-- name: announce
INSERT INTO {worker} (holder, topics, until) VALUES (:holder, :topics, :until)
ON DUPLICATE KEY UPDATE topics = VALUES(topics), until = VALUES(until)

-- name: leave
DELETE FROM {worker} WHERE holder = :holder

-- name: workers
-- As many rows as there are workers: no index is worth it.
SELECT holder, topics, until FROM {worker}

-- name: forget_workers
DELETE FROM {worker} WHERE holder IN (:holders) AND until <= :now

-- name: insert_events
INSERT INTO {event} (at, topic, `key`, id, kind, attempt, who, what, was, wake_at) VALUES :rows

-- name: event_span
-- First and last line: a seek to each end of the table.
SELECT COALESCE(MIN(line), 0), COALESCE(MAX(line), 0) FROM {event}

-- name: trim_events
DELETE FROM {event} WHERE line <= :line

-- name: events
SELECT at, topic, `key`, id, kind, attempt, who, what, was, wake_at FROM {event} ORDER BY line DESC LIMIT :most

-- name: events_by_name
SELECT at, topic, `key`, id, kind, attempt, who, what, was, wake_at FROM {event} FORCE INDEX (name)
WHERE topic = :topic AND `key` = :key ORDER BY line DESC LIMIT :most

-- name: time
SELECT {there}

-- name: identity
-- Which server this is, by what every user may read; then what a driver has to leave as it is.
SELECT @@hostname, @@port, @@datadir, x'00ff', 4611686018427387904

-- name: keep_transaction
-- The last statement of a transaction of a handler's: by it, a commit whose answer was lost is known to be done.
INSERT INTO {caller} (name, number, seen, now, micros) VALUES (:me, :number, :there DIV 1000, 0, 0)
ON DUPLICATE KEY UPDATE number = VALUES(number), seen = VALUES(seen)

-- name: has_migrations
SELECT COUNT(*) FROM information_schema.tables WHERE table_schema = :schema AND table_name = :table

-- name: migrations
SELECT number, checksum FROM {migration} ORDER BY number

-- name: doctor
-- What `bide doctor` asks of the server.
SELECT VERSION(), @@innodb_flush_log_at_trx_commit, @@log_bin, @@sync_binlog, @@binlog_format

-- name: oldest_transaction
-- How many seconds old it is. Needs PROCESS.
SELECT COALESCE(MAX(TIMESTAMPDIFF(SECOND, trx_started, NOW())), 0) FROM information_schema.innodb_trx
