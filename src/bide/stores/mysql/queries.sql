-- All statements, with the reasons for their form. {task} and the like are tables; {record} and {due} stand for
-- columns, see `queries`. States: 0 waiting, 1 leased, 2 done, 3 cancelled, 4 dead. :name is a value. Leased tasks stay
-- among the due ones in the index (`ended = 0`), so a scan for waiting tasks reads past them.
--
-- Several statements go to the server as one packet. The server stops at the first failure, which makes calls
-- conditional: unless call :number of caller :me is new, `gate` fails (a subquery with two rows), and the COMMIT after
-- it is not reached. :these and :held are conditions on `row`, see `queries.these` and `queries.held`.
-- All big tables are accessed with FORCE INDEX: the statistics of a newly filled table would mislead the optimizer.

-- name: read_clock
-- :there is the server's clock in microseconds, or else the caller's.
SET @bide_micros = :there

-- name: tell_clock
SET @bide_now = @bide_micros DIV 1000

-- name: first_token
-- The first token for new lives: above all earlier tokens, even if the clock was set back. Not a SET with a subquery,
-- which would lock the rows that it reads.
SELECT GREATEST(@bide_micros, MAX(micros) + 1) INTO @bide_token FROM {caller}

-- name: raise_floor
-- For the caller's clock, which may jump: all tokens come from one row, so such calls run one at a time.
UPDATE {caller} SET micros = LAST_INSERT_ID(GREATEST(micros, :now * 1000 - 1) + 1 + :most) WHERE name = ''

-- name: take_floor
SET @bide_micros = LAST_INSERT_ID() - :most, @bide_now = :now, @bide_token = LAST_INSERT_ID() - :most

-- name: clock
SELECT @bide_now, @bide_micros

-- name: select_clock
-- The same in one statement, if no other statement needs the time.
SELECT :there DIV 1000, :there

-- name: pass_gate
-- Locks the caller's row, so that a call sent again waits for the end of the first one.
UPDATE {caller} SET
    number = :number, seen = @bide_now, now = @bide_now, micros = GREATEST(micros, :micros), answer = :answer
WHERE name = :me AND number < :number

-- name: gate
SET @bide_open = IF(ROW_COUNT() = 1, 1, (SELECT 1 UNION ALL SELECT 2))

-- name: all_of_them
-- Fails (a number that is too large) unless the statement before it affected :count rows.
SET @bide_open = 18446744073709551615 + (ROW_COUNT() <> :count)

-- name: clock_and_token
SELECT @bide_now, @bide_micros, @bide_token

-- name: insert_tasks
-- All or nothing: if one key is taken, none is inserted. The clock is read for each row (by :rows, or by the default of
-- `token`), since a key may have lived and ended, with a token of that time, while the rows before it were written.
-- Parsing a value costs time, so :columns has only the necessary columns.
INSERT INTO {task} (:columns) VALUES :rows RETURNING token

-- name: first_row
-- The rows of one INSERT have consecutive numbers, in its order.
SET @bide_row = LAST_INSERT_ID()

-- name: inserted_tokens
-- For MySQL, which has no RETURNING.
SELECT token FROM {task} FORCE INDEX (PRIMARY)
WHERE `row` >= @bide_row AND `row` < @bide_row + :count * @@auto_increment_increment ORDER BY `row`

-- name: lock_tasks
-- Locks the existing tasks of these names, in the order of the index.
SELECT {record} FROM {task} FORCE INDEX (name) WHERE topic = :topic AND `key` IN (:keys) FOR UPDATE

-- name: probe
-- Fails immediately if another transaction has locked the task, or is inserting it.
SELECT 1 FROM {task} FORCE INDEX (name) WHERE topic = :topic AND `key` = :key FOR UPDATE NOWAIT

-- name: put_tasks
-- Writes the decisions about locked rows, all at once. All of them exist, so none is inserted. Leaves columns that a
-- transition cannot change (payload, options, group) as they are.
INSERT INTO {task} (
    `row`, topic, `key`, id, state, ended, due_at, at, planned_at, attempt, failures, losses, token, holder, deadline,
    error, created_at, wake_at, keep_until, options, payload, group_name
) VALUES :rows
ON DUPLICATE KEY UPDATE
    id = VALUES(id), state = VALUES(state), ended = VALUES(ended), due_at = VALUES(due_at), at = VALUES(at),
    planned_at = VALUES(planned_at), attempt = VALUES(attempt), failures = VALUES(failures), losses = VALUES(losses),
    token = VALUES(token), holder = VALUES(holder), deadline = VALUES(deadline), error = VALUES(error),
    created_at = VALUES(created_at), wake_at = VALUES(wake_at), keep_until = VALUES(keep_until)

-- name: replace_tasks
-- The same, continued: new lives have their own payload and group.
,
    options = VALUES(options), payload = VALUES(payload), group_name = VALUES(group_name)

-- name: join_groups
-- Or notes that members have ended, or live again.
INSERT INTO {grouped} (`row`, group_name, topic, `key`, ended) VALUES :rows
ON DUPLICATE KEY UPDATE ended = VALUES(ended)

-- name: leave_groups
DELETE {grouped} FROM {grouped} FORCE INDEX (PRIMARY) WHERE `row` IN (:rows) AND topic > ''

-- name: keep_tasks
INSERT INTO {kept} (until, `row`) VALUES :rows ON DUPLICATE KEY UPDATE until = VALUES(until)

-- name: forget_tasks
-- The multi-table form, since the plain one takes no index hint: it would scan the whole of a small table, and wait for
-- rows that others have locked. The server only follows the hint if a column outside the index is used: hence
-- `state >= 0`, which is always true.
DELETE {task} FROM {task} FORCE INDEX (PRIMARY) WHERE :these AND state >= 0

-- name: take_waiting
-- Skips tasks that others have locked. The scan begins at :floor, see `sql.leasing`, after row :row of that instant. It
-- reads past leased tasks too, and keeps them locked until the commit, like every row that it reads through a secondary
-- index; a settlement of such a task waits for that. So a lease itself never waits.
SELECT {due} FROM {task} FORCE INDEX (due)
WHERE topic = :topic AND ended = 0 AND state = 0
    AND ((at = :floor AND `row` > :row) OR (at > :floor AND at <= @bide_now))
ORDER BY at, `row` LIMIT :most FOR UPDATE SKIP LOCKED

-- name: lease_tasks
-- Changes no indexed column. Assignments are evaluated in this order, and each sees the results of those before it.
UPDATE {task} FORCE INDEX (PRIMARY) SET
    losses = losses + (state = 1), planned_at = IF(state = 1, planned_at, at), attempt = attempt + 1,
    holder = :holder, token = GREATEST(token + 1, :micros), state = 1, wake_at = :until
WHERE :these

-- name: insert_batches
INSERT INTO {lease} (topic, until, `row`, token, caller, tasks) VALUES :rows

-- name: delete_batches
-- In this form, and with a column outside the index, for the same reasons as `forget_tasks`.
DELETE {lease} FROM {lease} FORCE INDEX (PRIMARY) WHERE :leases AND tasks > ''

-- name: expired_leases
-- Expired batches, which may have lost tasks. The scan begins at :floor, as in `leased_head`: see `mysql.leasing`.
SELECT until, `row`, token, caller, tasks FROM {lease} FORCE INDEX (PRIMARY)
WHERE topic = :topic AND until >= :floor AND until <= @bide_now
ORDER BY until LIMIT :most FOR UPDATE SKIP LOCKED

-- name: still_leased
-- The tasks that are still leased, including those that another transaction has locked.
SELECT wake_at, `row`, token, at FROM {task} FORCE INDEX (PRIMARY) WHERE :held AND state = 1

-- name: take_lost
-- The tasks whose lease has expired. All are locked before they are sorted: at most the work of one worker.
SELECT {record} FROM {task} FORCE INDEX (PRIMARY)
WHERE :held AND state = 1 AND wake_at <= @bide_now
ORDER BY wake_at LIMIT :most FOR UPDATE SKIP LOCKED

-- name: waiting_head
SELECT at FROM {task} FORCE INDEX (due)
WHERE topic = :topic AND ended = 0 AND state = 0 AND at >= :floor ORDER BY at LIMIT 1

-- name: leased_head
SELECT until FROM {lease} FORCE INDEX (PRIMARY) WHERE topic = :topic AND until >= :floor ORDER BY until LIMIT 1

-- name: heads
-- Both heads of each of :wanted, topics as JSON, that has one until then, from the very start of the index: here a bound
-- would make no range, but a condition on each entry.
SELECT topic,
    (SELECT at FROM {task} FORCE INDEX (due) WHERE topic = want.topic AND ended = 0 AND state = 0 ORDER BY at LIMIT 1)
        AS wake,
    (SELECT until FROM {lease} FORCE INDEX (PRIMARY) WHERE topic = want.topic ORDER BY until LIMIT 1) AS expiry
FROM JSON_TABLE(_utf8mb4 :wanted, '$[*]' COLUMNS (topic VARBINARY(200) PATH '$')) AS want
HAVING wake <= :until OR expiry <= :until

-- name: redo
SHOW GLOBAL STATUS LIKE 'Innodb_lsn_current'

-- name: leases
-- All batches of a topic; their number depends only on the tasks under way.
SELECT tasks FROM {lease} FORCE INDEX (PRIMARY) WHERE topic = :topic

-- name: insert_shortened
-- An extension may shorten a lease. Then it needs a row of `lease`, with the one task in MessagePack.
INSERT INTO {lease} (topic, until, `row`, token, caller, tasks)
SELECT topic, @bide_now + :lasts, `row`, token, :me,
    UNHEX(CONCAT('9192CF', LPAD(HEX(`row`), 16, '0'), 'CF', LPAD(HEX(token), 16, '0')))
FROM {task} FORCE INDEX (name)
WHERE topic = :topic AND `key` IN (:keys) AND (`key`, token) IN (:holds) AND state = 1
    AND wake_at > @bide_now + :lasts
ON DUPLICATE KEY UPDATE {lease}.until = {lease}.until

-- name: extend_leases
-- Idempotent, so it has no gate.
UPDATE {task} FORCE INDEX (name) SET wake_at = @bide_now + :lasts
WHERE topic = :topic AND `key` IN (:keys) AND (`key`, token) IN (:holds) AND state = 1

-- name: held
SELECT topic, `key`, token FROM {task} FORCE INDEX (name)
WHERE topic = :topic AND `key` IN (:keys) AND (`key`, token) IN (:holds) AND state = 1

-- name: settle_done
-- Plain Done without retention, for rows that are known from their lease: the condition is the token. Access by row
-- takes half the work of access by name, since tasks that are leased together lie together.
DELETE {task} FROM {task} FORCE INDEX (PRIMARY) WHERE :held AND state = 1

-- name: repeated
-- Locks the row, in order to wait for a first sending that is still under way.
SELECT number, now, micros, answer FROM {caller} WHERE name = :me FOR UPDATE

-- name: new_caller
INSERT INTO {caller} (name, number, seen, now, micros) VALUES (:me, 0, :there DIV 1000, 0, 0)
ON DUPLICATE KEY UPDATE number = number

-- name: forgotten_callers
-- Callers without a call for ten minutes: a call is only sent again within one minute.
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
-- The purgeable tasks, including those that another transaction has locked.
SELECT `row` FROM {task} FORCE INDEX (PRIMARY) WHERE :these AND keep_until <= @bide_now

-- name: forget_kept
-- All columns are in the index, so only a join makes the server look up each line separately.
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
    WHERE group_name = :group AND ended = :ended AND topic = :topic AND `key` > :key ORDER BY `key` LIMIT :most
) AS few STRAIGHT_JOIN {task} FORCE INDEX (PRIMARY) ON `row` = number ORDER BY member

-- name: page_at_instant
-- The tasks of one topic that are waiting, or ended in one state: those of one instant, after a row.
SELECT {record} FROM {task} FORCE INDEX (due)
WHERE topic = :topic AND ended = :state AND state = :state AND at = :instant AND `row` > :row ORDER BY `row` LIMIT :most

-- name: page_after_instant
-- Those after that instant. A separate query, since no index serves `(at, row) > (?, ?)`.
SELECT {record} FROM {task} FORCE INDEX (due)
WHERE topic = :topic AND ended = :state AND state = :state AND at > :instant AND at < :before
ORDER BY at, `row` LIMIT :most

-- name: next_topic
-- One step of a loose scan: the next topic costs one seek, however many tasks lie between.
SELECT topic FROM {task} FORCE INDEX (name) WHERE topic > :topic ORDER BY topic LIMIT 1

-- name: next_topic_of_state
SELECT topic FROM {task} FORCE INDEX (due) WHERE ended = :state AND state = :state AND topic > :topic
ORDER BY topic LIMIT 1

-- name: next_topic_leased
SELECT topic FROM {lease} FORCE INDEX (PRIMARY) WHERE topic > :topic ORDER BY topic LIMIT 1

-- name: next_topic_of_group
SELECT topic FROM {grouped} FORCE INDEX (name) WHERE group_name = :group AND ended = :ended AND topic > :topic
ORDER BY topic LIMIT 1

-- name: count_first
-- The first :most tasks after a topic, by topic, state and :interval; the last topic may have more. No loose scan here
-- can be relied on without good statistics.
SELECT topic, state, :interval AS part, COUNT(*) FROM (
    SELECT topic, state, at FROM {task} FORCE INDEX (name) WHERE topic > :topic ORDER BY topic, `key` LIMIT :most
) AS few GROUP BY topic, state, part

-- name: count
-- The living tasks (0), or those that ended in one state. Counting stops at the limit, so that a tally costs no more
-- with ten million tasks.
SELECT COUNT(*) FROM (
    SELECT 1 FROM {task} FORCE INDEX (due)
    WHERE topic = :topic AND ended = :ended AND at >= :low AND at < :high LIMIT :most
) AS few

-- name: announce
INSERT INTO {worker} (holder, topics, until) VALUES (:holder, :topics, :until)
ON DUPLICATE KEY UPDATE topics = VALUES(topics), until = VALUES(until)

-- name: leave
DELETE FROM {worker} WHERE holder = :holder

-- name: workers
-- The table has one row per worker, so an index is not worthwhile.
SELECT holder, topics, until FROM {worker}

-- name: forget_workers
DELETE FROM {worker} WHERE holder IN (:holders) AND until <= :now

-- name: insert_events
INSERT INTO {event} (at, topic, `key`, id, kind, attempt, who, what, was, wake_at) VALUES :rows

-- name: event_span
-- The first and the last line: one seek to each end of the table.
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
-- Identifies the server, by facts that every user may read; then values that a driver must not alter; and whether
-- lists are cut off.
SELECT @@hostname, @@port, @@datadir, x'00ff', 4611686018427387904, @@sql_select_limit < 4611686018427387904

-- name: keep_transaction
-- The last statement of a handler's transaction: it shows after a lost answer whether the commit was done.
INSERT INTO {caller} (name, number, seen, now, micros) VALUES (:me, :number, :there DIV 1000, 0, 0)
ON DUPLICATE KEY UPDATE number = VALUES(number), seen = VALUES(seen)

-- name: has_migrations
SELECT COUNT(*) FROM information_schema.tables WHERE table_schema = :schema AND table_name = :table

-- name: migrations
SELECT number, checksum FROM {migration} ORDER BY number

-- name: doctor
-- The facts for `bide doctor`.
SELECT VERSION(), @@innodb_flush_log_at_trx_commit, @@log_bin, @@sync_binlog, @@binlog_format

-- name: oldest_transaction
-- The age of the oldest transaction, in seconds. Needs PROCESS.
SELECT COALESCE(MAX(TIMESTAMPDIFF(SECOND, trx_started, NOW())), 0) FROM information_schema.innodb_trx
