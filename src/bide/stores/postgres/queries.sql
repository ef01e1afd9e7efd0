-- All statements, with the reasons for their form. {task} and the like are tables; {record} stands for the columns of a
-- Record in its order, followed by `row`. States: 0 waiting, 1 leased, 2 done, 3 cancelled, 4 dead.
--
-- A writing statement begins with two parts. {clock} is the time: $1, or the server's if that is null. It also raises
-- the counter of tokens to the clock, unless another call is doing so. {gate} returns one row if call $3 of caller $2
-- is new, and none if it was done before; a null $2 (a transaction that is not ours) always passes. The gate locks the
-- caller's row, so that a call sent again waits for the end of the first sending. These and other parts are named
-- `part_...`.
--
-- The planner may have no statistics (the table was just filled), or those of an almost empty table, which autovacuum
-- finds between two bursts. So big tables are only accessed through LATERAL with a LIMIT, by position (ctid) for rows
-- that were locked, or by names joined to an array: our connections allow only nested loops over indexes (`connection`),
-- and `= ANY (ARRAY[topic])` leaves no order for which to read the whole primary key. `topic COLLATE "POSIX"`, the same
-- order of bytes, fits only the indexes by time and by group, plain `topic` only the primary key.

-- name: part_millis
(extract(epoch FROM clock_timestamp()) * 1000)::bigint

-- name: part_told
SELECT coalesce($1::bigint * 1000, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS micros

-- name: part_clock
clock AS MATERIALIZED (
    SELECT micros / 1000 AS now, micros, CASE WHEN last_value < micros THEN
        CASE WHEN pg_try_advisory_xact_lock({lock}) THEN
            CASE WHEN (SELECT last_value FROM {token}) < micros THEN setval('{token}', micros) END END END AS raised
    FROM {token}, ({told}) AS told
)

-- name: part_joined_clock
-- For a caller's transaction, which may be long: releases the lock on the counter at once.
clock AS MATERIALIZED (
    SELECT micros / 1000 AS now, micros, CASE WHEN last_value < micros AND pg_try_advisory_lock({lock}) THEN
        CASE WHEN coalesce(
            CASE WHEN (SELECT last_value FROM {token}) < micros THEN setval('{token}', micros) END, micros
        ) > 0 THEN CASE WHEN pg_advisory_unlock({lock}) THEN micros END END END AS raised
    FROM {token}, ({told}) AS told
)

-- name: part_gate
gate AS MATERIALIZED (
    SELECT 1 AS opened FROM (VALUES (1)) AS one (one) LEFT JOIN LATERAL (
        SELECT number FROM {caller} WHERE name = $2::text AND number < $3::bigint FOR UPDATE
    ) AS mine ON true
    WHERE $2::text IS NULL OR mine.number IS NOT NULL
)

-- name: part_answer
-- Keeps the answer in case the connection breaks now: the tokens of the written tasks, and also their names unless all
-- requested tasks were written. $5: the requested keys.
answer AS MATERIALIZED (
    SELECT array_agg(token) AS tokens, CASE WHEN count(*) < cardinality($5) THEN array_agg(topic) END AS topics,
        CASE WHEN count(*) < cardinality($5) THEN array_agg(key) END AS keys
    FROM written
),
kept AS (
    UPDATE {caller} AS c
    SET number = $3, seen = clock.now, now = clock.now, tokens = answer.tokens, topics = answer.topics,
        keys = answer.keys, answer = NULL
    FROM gate, clock, answer WHERE c.name = $2
)

-- name: part_new_token
greatest(nextval('{token}'), clock.micros, clock.raised)

-- name: part_heads
-- The earliest wake time and the earliest expiry in a topic that wants no tasks, see `lease`.
(SELECT at FROM {task} WHERE topic COLLATE "POSIX" = want.topic AND state = 0 AND at >= want.floor
    ORDER BY at LIMIT 1) AS wake,
CASE WHEN thorough THEN coalesce(
    (SELECT at FROM {task} WHERE topic COLLATE "POSIX" = want.topic AND state = 1 AND at >= want.bound
        AND at <= clock.now + want.soon ORDER BY at LIMIT 1),
    (SELECT at FROM {task} WHERE topic COLLATE "POSIX" = want.topic AND state = 1 AND at >= want.ending
        ORDER BY at LIMIT 1)
) END AS ends

-- name: insert_tasks
-- Leaves existing tasks unchanged; the answer says which tasks were inserted. As `insert_tasks_all_new` it fails if a
-- task exists, which is a sixth faster. $4..: one array per column, empty if all values are null; arrays of topic, due,
-- relative and options have one element if all values are equal. $13: the messages. Several `unnest` in a select list
-- advance together, row by row; in FROM, each would first be materialized.
-- `keys` is null if all were new: the tokens are in the order of the arrays. The clock is read for each row, because a
-- key may have lived and ended, with a token of that time, while the rows before it were written.
WITH {clock}, {gate},
written AS (
    INSERT INTO {task} (
        topic, key, state, at, due_at, token, planned_at, attempt, failures, losses, created_at, deadline, id,
        group_name, options, payload
    )
    SELECT topic, key, 0, greatest(due_at, now), due_at, greatest(
            {new_token}, CASE WHEN $1::bigint IS NULL THEN (date_part('epoch', clock_timestamp()) * 1000000)::bigint END
        ), 0, 0, 0, 0, now, deadline, id, group_name, options, payload
    FROM gate, clock, LATERAL (
        SELECT coalesce(topic, ($4::text[])[1]) AS topic, key, deadline, id, group_name,
            coalesce(options, ($11::bytea[])[1]) AS options, payload, least(greatest(
                coalesce(due, ($6::bigint[])[1]) + CASE WHEN coalesce(relative, ($7::boolean[])[1]) THEN now ELSE 0 END, 0
            ), 253402300799999) AS due_at
        FROM (
            SELECT unnest($4::text[]) AS topic, unnest($5::text[]) AS key, unnest($6::bigint[]) AS due,
                unnest($7::boolean[]) AS relative, unnest($8::bigint[]) AS deadline, unnest($9::text[]) AS id,
                unnest($10::text[]) AS group_name, unnest($11::bytea[]) AS options, unnest($12::bytea[]) AS payload
        ) AS given
    ) AS new
    {taken}
),
{answer}
SELECT now, micros, tokens, topics, keys, (SELECT count(pg_notify('{channel}', said)) FROM unnest($13::text[]) AS said)
FROM gate, clock, answer

-- name: move_tasks
-- Does the moves that apply: the task is waiting, has the required token, and is not moved past its deadline. The
-- others are missing in the answer, and are decided under locks. Only the row version that was found is updated, since
-- `was` comes from it; so a row that another transaction is changing is left out too. $4..: one array per column, with
-- one element if all topics or relatives are equal, empty if all if_tokens or deadlines are null. $10: the messages.
-- The kept answer has whole records, since the task may be gone when the answer is read back.
WITH {clock}, {gate},
moved AS (
    UPDATE {task} AS t SET
        due_at = m.due_at, at = greatest(m.due_at, clock.now), deadline = m.deadline,
        token = greatest({new_token}, t.token + 1)
    FROM gate, clock, (
        SELECT n.place, old.spot, old.was, coalesce(n.deadline, old.deadline) AS deadline, least(greatest(
            CASE WHEN coalesce(n.relative, ($7::boolean[])[1]) THEN n.due + clock.now ELSE n.due END, 0
        ), 253402300799999) AS due_at
        FROM clock, unnest($4::text[], $5::text[], $6::bigint[], $7::boolean[], $8::bigint[], $9::bigint[])
            WITH ORDINALITY AS n (topic, key, due, relative, if_token, deadline, place)
        CROSS JOIN LATERAL (
            SELECT ctid AS spot, at AS was, deadline FROM {task}
            WHERE topic = coalesce(n.topic, ($4::text[])[1]) AND key = n.key AND state + 0 = 0
                AND token = coalesce(n.if_token, token)
            LIMIT 1
        ) AS old
    ) AS m
    WHERE t.ctid = m.spot AND greatest(m.due_at, clock.now) <= coalesce(m.deadline, 253402300799999)
    RETURNING m.place, m.was, {record:t}
),
kept AS (
    UPDATE {caller} AS c
    SET number = $3, seen = clock.now, now = clock.now, tokens = NULL, topics = NULL, keys = NULL, answer = (
        SELECT convert_to(json_agg(json_build_array(place, was, {record_as_text}))::text, 'UTF8') FROM moved
    )
    FROM gate, clock WHERE c.name = $2
)
SELECT now, micros, (SELECT count(pg_notify('{channel}', said)) FROM unnest($10::text[]) AS said), moved.*
FROM gate CROSS JOIN clock LEFT JOIN moved ON true

-- name: lock_tasks
-- Locks the existing tasks of these names, in the given order, and returns each with a new token for the decision, and
-- its position, which stays while it is locked. Returns one row for every name, so that the clock is always included.
-- As `lock_tasks_past` it skips tasks that others have locked (`held`), for a batch that met a locked task. A task that
-- is released in between also counts as held: it is tried again.
WITH {clock}, {gate}
SELECT clock.now, clock.micros, greatest({new_token}, t.token + 1) AS new_token, {record:t}, t.spot,
    '{past}' <> '' AND t.topic IS NULL AND (
        SELECT true FROM {task} WHERE topic = n.topic AND key = n.key LIMIT 1
    ) IS NOT NULL AS held
FROM gate, clock, unnest($4::text[], $5::text[]) WITH ORDINALITY AS n (topic, key, place)
LEFT JOIN LATERAL (
    SELECT {record}, ctid::text AS spot FROM {task} WHERE topic = n.topic AND key = n.key LIMIT 1 FOR UPDATE{past}
) AS t ON true

-- name: write_tasks
-- Writes the decisions about locked rows, each at its position: whole records, moves (which change few columns) and
-- deletions. The last such statement of a call also keeps the answer, in case the connection breaks now.
WITH put AS (
    UPDATE {task} AS t SET
        id = p.id, group_name = p.group_name, state = p.state, due_at = p.due_at, at = p.at,
        planned_at = p.planned_at, attempt = p.attempt, failures = p.failures, losses = p.losses, token = p.token,
        holder = p.holder, payload = p.payload, options = p.options, deadline = p.deadline, error = p.error,
        created_at = p.created_at, woke_at = p.woke_at, keep_until = p.keep_until
    FROM unnest(
        $1::text[], $2::text[], $3::text[], $4::smallint[], $5::bigint[], $6::bigint[], $7::bigint[], $8::integer[],
        $9::integer[], $10::integer[], $11::bigint[], $12::text[], $13::bytea[], $14::bytea[], $15::bigint[],
        $16::text[], $17::bigint[], $18::bigint[], $19::bigint[]
    ) AS p (
        spot, id, group_name, state, due_at, at, planned_at, attempt, failures, losses, token, holder, payload, options,
        deadline, error, created_at, woke_at, keep_until
    )
    WHERE t.ctid = p.spot::tid
),
moved AS (
    UPDATE {task} AS t SET due_at = m.due_at, at = m.at, token = m.token, deadline = m.deadline
    FROM unnest($20::text[], $21::bigint[], $22::bigint[], $23::bigint[], $24::bigint[])
        AS m (spot, due_at, at, token, deadline)
    WHERE t.ctid = m.spot::tid
),
forgotten AS (
    DELETE FROM {task} AS t USING unnest($25::text[]) AS spot WHERE t.ctid = spot::tid
),
kept AS (
    UPDATE {caller} SET
        number = $27, seen = $28, now = $28, tokens = NULL, topics = NULL, keys = NULL, answer = $29::bytea
    WHERE name = $26::text AND $27::bigint IS NOT NULL
)
SELECT count(pg_notify('{channel}', said)) FROM unnest($30::text[]) AS said

-- name: lease
-- Waiting and lost tasks (whose lease has expired) each have an index that is already in order. Takes the oldest of
-- both, up to the number that each topic wants. LIMIT {most} serves the planner: for a limit that it cannot see it
-- assumes a tenth of all rows, and then sorts the table. Rows are locked one by one as the outer limit fetches them, so
-- no more than wanted.
-- $8: where the scan of each topic begins. $9: whether it also searches for expired leases, see `sql.leasing`. That
-- search begins at $10. The search for the next expiry covers the time from now to $12 later, and then begins at $11,
-- see `postgres.leasing`.
-- The commit of a lease does not wait for the disk. A crash of the server may lose the newest leases; their tasks then
-- wait again, as if the holder had died. Tokens still rise, since they are never below the clock.
-- `heads`, in the first row alone: for each topic that wanted more than it got, the earliest wake time or expiry of a new
-- lease; for each topic that wants none, the earliest wake time; and for both the earliest expiry of others' leases.
-- `skipped`: another transaction has locked a due task in a topic that wanted more; or a task was changed after this
-- statement began and before it was locked, so that this statement cannot see the version that it would have to update.
WITH {clock}, {gate},
want AS MATERIALIZED (
    SELECT want.*, $9::boolean AS thorough, $12::bigint AS soon
    FROM unnest($4::text[], $5::integer[], $8::bigint[], $10::bigint[], $11::bigint[])
        AS want (topic, most, floor, bound, ending)
),
waiting AS MATERIALIZED (
    SELECT due.place, due.at, want.topic, want.most FROM gate, clock, want CROSS JOIN LATERAL (
        SELECT place, at FROM (
            SELECT ctid AS place, at FROM {task}
            WHERE topic COLLATE "POSIX" = want.topic AND state = 0 AND at >= want.floor AND at <= clock.now
            ORDER BY at LIMIT {most} FOR NO KEY UPDATE SKIP LOCKED
        ) AS first LIMIT want.most
    ) AS due WHERE want.most > 0
),
lost AS MATERIALIZED (
    SELECT due.place, due.at, want.topic, want.most FROM gate, clock, want CROSS JOIN LATERAL (
        SELECT place, at FROM (
            SELECT ctid AS place, at FROM {task}
            WHERE topic COLLATE "POSIX" = want.topic AND state = 1 AND at >= want.bound AND at <= clock.now
            ORDER BY at LIMIT {most} FOR NO KEY UPDATE SKIP LOCKED
        ) AS first LIMIT want.most
    ) AS due WHERE want.most > 0 AND want.thorough
),
taken AS MATERIALIZED (
    SELECT place, topic FROM (
        SELECT place, topic, most, row_number() OVER (PARTITION BY topic ORDER BY at) AS number
        FROM (SELECT * FROM waiting UNION ALL SELECT * FROM lost) AS due
    ) AS ordered WHERE number <= most
),
fence AS MATERIALIZED (SELECT {new_token} AS token FROM gate, clock),
leased AS (
    UPDATE {task} AS t SET
        state = 1, at = clock.now + $6, woke_at = t.at, attempt = t.attempt + 1, holder = $7,
        planned_at = CASE WHEN t.state = 1 THEN t.planned_at ELSE t.at END,
        losses = t.losses + CASE WHEN t.state = 1 THEN 1 ELSE 0 END,
        token = greatest(fence.token, t.token + 1)
    FROM clock, fence WHERE t.ctid = ANY (ARRAY(SELECT place FROM taken))
    RETURNING {record:t}
),
heads AS MATERIALIZED (
    SELECT want.topic, least(
        (SELECT at FROM {task} WHERE topic COLLATE "POSIX" = want.topic AND state = 0 AND at > clock.now
            ORDER BY at LIMIT 1),
        CASE WHEN got.waiting + got.lost > 0 THEN clock.now + $6 END
    ) AS wake, CASE WHEN thorough THEN coalesce(
        (SELECT at FROM {task} WHERE topic COLLATE "POSIX" = want.topic AND state = 1 AND at > clock.now
            AND at <= clock.now + want.soon ORDER BY at LIMIT 1),
        (SELECT at FROM {task} WHERE topic COLLATE "POSIX" = want.topic AND state = 1 AND at > clock.now
            AND at >= want.ending ORDER BY at LIMIT 1)
    ) END AS ends, EXISTS (
        SELECT FROM {task} WHERE topic COLLATE "POSIX" = want.topic AND state = 0
            AND at >= want.floor AND at <= clock.now ORDER BY at
        OFFSET got.waiting LIMIT 1
    ) OR (thorough AND EXISTS (
        SELECT FROM {task} WHERE topic COLLATE "POSIX" = want.topic AND state = 1
            AND at >= want.bound AND at <= clock.now ORDER BY at
        OFFSET got.lost LIMIT 1
    )) AS skipped
    FROM gate, clock, want, LATERAL (
        SELECT (SELECT count(*) FROM waiting WHERE topic = want.topic) AS waiting,
            (SELECT count(*) FROM lost WHERE topic = want.topic) AS lost
    ) AS got
    WHERE want.most > 0 AND (SELECT count(*) FROM taken WHERE topic = want.topic) < want.most
    UNION ALL
    SELECT want.topic, {heads}, false FROM gate, clock, want WHERE want.most <= 0
),
quick AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true)),
kept AS (
    UPDATE {caller} AS c
    SET number = $3, seen = clock.now, now = clock.now, tokens = ARRAY[fence.token],
        topics = ARRAY(SELECT DISTINCT topic FROM taken), keys = NULL, answer = NULL
    FROM gate, clock, fence WHERE c.name = $2
)
SELECT clock.now, clock.micros, CASE WHEN row_number() OVER () = 1 THEN (
        SELECT array_agg((topic, wake, ends)) FROM heads WHERE wake IS NOT NULL OR ends IS NOT NULL
    ) END AS heads,
    (SELECT coalesce(bool_or(skipped), false) FROM heads)
        OR (SELECT count(*) FROM leased) < (SELECT count(*) FROM taken) AS skipped,
    leased.*
FROM gate CROSS JOIN clock CROSS JOIN quick LEFT JOIN leased ON true

-- name: lease_more
-- The same for one topic, in which the last lease got as many tasks as it wanted. It determines nothing else, which
-- saves a fifth of the time. The scan begins at $8.
WITH {clock}, {gate},
taken AS MATERIALIZED (
    SELECT first.place FROM gate, clock, LATERAL (
        SELECT ctid AS place FROM {task} WHERE topic COLLATE "POSIX" = $4::text AND state = 0
            AND at >= $8::bigint AND at <= clock.now
        ORDER BY at LIMIT {most} FOR NO KEY UPDATE SKIP LOCKED
    ) AS first LIMIT $5::integer
),
fence AS MATERIALIZED (SELECT {new_token} AS token FROM gate, clock),
leased AS (
    UPDATE {task} AS t SET
        state = 1, at = clock.now + $6, woke_at = t.at, attempt = t.attempt + 1, holder = $7, planned_at = t.at,
        token = greatest(fence.token, t.token + 1)
    FROM clock, fence WHERE t.ctid = ANY (ARRAY(SELECT place FROM taken))
    RETURNING {record:t}
),
quick AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true)),
kept AS (
    UPDATE {caller} AS c
    SET number = $3, seen = clock.now, now = clock.now, tokens = ARRAY[fence.token], topics = ARRAY[$4], keys = NULL,
        answer = NULL
    FROM gate, clock, fence WHERE c.name = $2
)
SELECT clock.now, clock.micros, leased.* FROM gate CROSS JOIN clock CROSS JOIN quick LEFT JOIN leased ON true

-- name: leased_then
-- The tasks of a lease whose answer was lost, as far as they are still held. All have the same expiry, and the same
-- token, or a higher one if a task's previous token was above the clock.
SELECT {record} FROM {task}
WHERE topic COLLATE "POSIX" = ANY ($1::text[]) AND state = 1 AND at = $2 AND token >= $3 AND holder = $4

-- name: heads
-- A lease that wants no tasks: two seeks per topic, and no write. $5 .. $7 are $10 .. $12 of `lease`.
WITH clock AS MATERIALIZED (SELECT micros / 1000 AS now, micros FROM ({told}) AS told)
SELECT now, micros, (
    SELECT array_agg((topic, wake, ends)) FROM (
        SELECT topic, {heads} FROM (
            SELECT want.*, $4::boolean AS thorough, $7::bigint AS soon
            FROM unnest($2::text[], $3::bigint[], $5::bigint[], $6::bigint[]) AS want (topic, floor, bound, ending)
        ) AS want
    ) AS each WHERE wake IS NOT NULL OR ends IS NOT NULL
) AS heads
FROM clock

-- name: writers
-- The transactions that have the table of tasks locked for writing at the time `now` or just after it, see
-- `postgres.leasing`. Every user may read pg_locks, and it includes prepared transactions. Each writing statement takes
-- such a lock before it reads the clock.
SELECT (extract(epoch FROM statement_timestamp()) * 1000)::bigint AS now, ARRAY(
    SELECT DISTINCT virtualtransaction FROM pg_locks
    WHERE locktype = 'relation' AND relation = '{task}'::regclass AND mode IN ('RowShareLock', 'RowExclusiveLock')
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
) AS writers

-- name: extend_leases
-- Idempotent, so it has no gate. Here and below, `+ 0` keeps the planner from reading all of the index of leased tasks.
WITH {clock}
UPDATE {task} AS t SET at = clock.now + $2
FROM clock, unnest($3::text[], $4::text[], $5::bigint[]) AS l (topic, key, token)
WHERE t.topic = ANY (ARRAY[l.topic]) AND t.key = l.key AND t.token = l.token AND t.state + 0 = 1
RETURNING clock.micros, t.topic, t.key, t.token

-- name: extend_leases_past
-- The same, but skips tasks that others have locked; `held` marks those whose lease is still ours, as far as this
-- statement can see. It takes two steps, since an UPDATE waits for locks; so it is used only if there is one.
WITH {clock},
asked AS MATERIALIZED (SELECT * FROM unnest($3::text[], $4::text[], $5::bigint[]) AS l (topic, key, token)),
free AS MATERIALIZED (
    SELECT found.place, l.topic, l.key FROM asked AS l CROSS JOIN LATERAL (
        SELECT ctid AS place FROM {task}
        WHERE topic = l.topic AND key = l.key AND token = l.token AND state + 0 = 1 LIMIT 1 FOR UPDATE SKIP LOCKED
    ) AS found
),
extended AS (
    UPDATE {task} AS t SET at = clock.now + $2 FROM clock WHERE t.ctid = ANY (ARRAY(SELECT place FROM free))
    RETURNING t.topic, t.key, t.token
)
SELECT clock.micros, topic, key, token, false AS held FROM clock, extended
UNION ALL
SELECT clock.micros, l.topic, l.key, l.token, true FROM clock, asked AS l
WHERE (
    SELECT true FROM {task} WHERE topic = l.topic AND key = l.key AND token = l.token AND state + 0 = 1 LIMIT 1
) AND NOT EXISTS (SELECT FROM free WHERE free.topic = l.topic AND free.key = l.key)

-- name: settle_done
-- Plain Done without retention: the condition is the token. `keys` is null if all leases were still ours. $4: the
-- topics; one element if all are equal.
WITH {clock}, {gate},
written AS (
    DELETE FROM {task} AS t USING gate, unnest($4::text[], $5::text[], $6::bigint[]) AS l (topic, key, token)
    WHERE t.topic = ANY (ARRAY[coalesce(l.topic, ($4::text[])[1])]) AND t.key = l.key
        AND t.token = l.token AND t.state + 0 = 1
    RETURNING t.topic, t.key, t.token
),
{answer}
SELECT now, micros, tokens, topics, keys FROM gate, clock, answer

-- name: settle_done_past
-- The same, but skips tasks that others have locked, see `extend_leases_past`. `held`: the places of the skipped ones.
WITH {clock}, {gate},
asked AS MATERIALIZED (
    SELECT coalesce(topic, ($4::text[])[1]) AS topic, key, token, place
    FROM unnest($4::text[], $5::text[], $6::bigint[]) WITH ORDINALITY AS l (topic, key, token, place)
),
free AS MATERIALIZED (
    SELECT found.row, l.place FROM gate, asked AS l CROSS JOIN LATERAL (
        SELECT ctid AS row FROM {task}
        WHERE topic = l.topic AND key = l.key AND token = l.token AND state + 0 = 1 LIMIT 1 FOR UPDATE SKIP LOCKED
    ) AS found
),
written AS (
    DELETE FROM {task} AS t WHERE t.ctid = ANY (ARRAY(SELECT free.row FROM free))
    RETURNING t.topic, t.key, t.token
),
{answer}
SELECT now, micros, tokens, topics, keys, (
    SELECT array_agg(l.place) FROM asked AS l WHERE (
        SELECT true FROM {task} WHERE topic = l.topic AND key = l.key AND token = l.token AND state + 0 = 1 LIMIT 1
    ) AND l.place NOT IN (SELECT free.place FROM free)
) AS held
FROM gate, clock, answer

-- name: repeated
SELECT number, now, tokens, topics, keys, answer FROM {caller} WHERE name = $1

-- name: new_caller
INSERT INTO {caller} (name, number, seen)
VALUES ($1, 0, {millis}) ON CONFLICT DO NOTHING

-- name: renew_caller
-- A new row in place of $1, which has been updated so often that it has many old versions, see `postgres.connection`.
WITH gone AS (
    DELETE FROM {caller} WHERE ctid = ANY (ARRAY(SELECT ctid FROM {caller} WHERE name = $1 FOR UPDATE SKIP LOCKED))
)
INSERT INTO {caller} (name, number, seen)
VALUES ($2, 0, {millis}) ON CONFLICT DO NOTHING

-- name: forget_callers
-- Deletes callers without a call for ten minutes: a call is only sent again within one minute.
DELETE FROM {caller} WHERE seen < {millis} - 600000 AND name <> ALL ($1)

-- name: keep_transaction
-- The last statement of a handler's transaction. Checks that this is still the transaction that was begun, and writes
-- the transaction's number, which shows after a lost answer whether it was committed.
-- From now on the transaction must end soon: if our process vanishes, the server ends it after five seconds.
INSERT INTO {caller} AS c (name, number, seen)
SELECT $1, $2, {millis}
WHERE current_setting('bide.transaction', true) = $2::bigint::text
    AND set_config('idle_in_transaction_session_timeout', '5000', true) IS NOT NULL
ON CONFLICT (name) DO UPDATE SET number = excluded.number, seen = excluded.seen
RETURNING number

-- name: was_kept
-- Waits for the end of the transaction that has written the row, or is about to write it.
INSERT INTO {caller} AS c (name, number, seen)
VALUES ($1, 0, {millis})
ON CONFLICT (name) DO UPDATE SET seen = excluded.seen
RETURNING number

-- name: raise_tokens
-- For the caller's clock, which may jump: runs before the statement that uses the clock, and waits for the lock.
SELECT CASE WHEN (SELECT last_value FROM {token}) < $1 THEN setval('{token}', $1) END
FROM (SELECT pg_advisory_xact_lock({lock})) AS locked

-- name: purge
-- The scan begins at $3; everything before that was purged earlier.
WITH clock AS MATERIALIZED (SELECT coalesce($1::bigint, {millis}) AS now),
deleted AS (
    DELETE FROM {task} WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM {task} WHERE keep_until >= $3 AND keep_until <= (SELECT now FROM clock)
        ORDER BY keep_until LIMIT $2 FOR UPDATE SKIP LOCKED
    ))
    RETURNING keep_until
)
SELECT count(*) AS count, max(keep_until) AS last, (SELECT now FROM clock) AS now FROM deleted

-- name: tasks_by_names
SELECT n.place, {record:t} FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS n (topic, key, place)
CROSS JOIN LATERAL (SELECT {record} FROM {task} WHERE topic = n.topic AND key = n.key LIMIT 1) AS t

-- name: page_by_name
SELECT {record} FROM {task} WHERE topic = $1 AND key > $2 ORDER BY key LIMIT $3

-- name: page_by_group
-- Those that live (0), or have ended (1).
SELECT {record} FROM {task}
WHERE group_name = $1 AND (state >= 2)::integer = $2 AND topic COLLATE "POSIX" = $3 AND key COLLATE "POSIX" > $4
ORDER BY key COLLATE "POSIX" LIMIT $5

-- name: page_of_state
-- The tasks of one topic in one state by time, and by row among equal times, after a position: one seek.
SELECT {record} FROM {task}
WHERE topic COLLATE "POSIX" = $1 AND state = {state} AND (at, row) > ($2, $3) AND at < $4 ORDER BY at, row LIMIT $5

-- name: next_topic
-- One step of a loose scan: one seek, however many tasks lie between. Planned for few tasks, min(topic) would read all.
SELECT topic FROM {task} WHERE topic > $1 ORDER BY topic LIMIT 1

-- name: next_topic_of_state
SELECT topic FROM {task} WHERE state = {state} AND topic COLLATE "POSIX" > $1 ORDER BY topic COLLATE "POSIX" LIMIT 1

-- name: next_topic_of_group
SELECT topic FROM {task} WHERE group_name = $1 AND (state >= 2)::integer = $2 AND topic COLLATE "POSIX" > $3
ORDER BY topic COLLATE "POSIX" LIMIT 1

-- name: counts
-- Counts by topic and state, of the topics after one, or of the given ones. Counting stops at the limit, so that a tally
-- costs no more with ten million tasks.
WITH RECURSIVE scanned AS (
    (SELECT topic FROM {task} WHERE topic > $2 AND $4::text[] IS NULL ORDER BY topic LIMIT 1)
    UNION ALL
    SELECT (SELECT topic FROM {task} AS t WHERE t.topic > scanned.topic
        ORDER BY topic LIMIT 1) FROM scanned WHERE topic IS NOT NULL
), topics AS (SELECT topic FROM scanned WHERE topic IS NOT NULL UNION ALL SELECT unnest($4::text[]))
SELECT topic,
    (SELECT count(*) FROM (SELECT FROM {task} WHERE topic COLLATE "POSIX" = topics.topic AND state = 0 LIMIT $1) AS few),
    (SELECT count(*) FROM (SELECT FROM {task} WHERE topic COLLATE "POSIX" = topics.topic AND state = 1 LIMIT $1) AS few),
    (SELECT count(*) FROM (SELECT FROM {task} WHERE topic COLLATE "POSIX" = topics.topic AND state = 2 LIMIT $1) AS few),
    (SELECT count(*) FROM (SELECT FROM {task} WHERE topic COLLATE "POSIX" = topics.topic AND state = 3 LIMIT $1) AS few),
    (SELECT count(*) FROM (SELECT FROM {task} WHERE topic COLLATE "POSIX" = topics.topic AND state = 4 LIMIT $1) AS few)
FROM topics LIMIT $3

-- name: forecast
SELECT span.topic, (
    SELECT count(*) FROM (
        SELECT FROM {task} AS t WHERE t.topic COLLATE "POSIX" = span.topic AND state = 0
            AND at >= span.low AND at < span.high LIMIT $1
    ) AS few
)
FROM unnest($2::text[], $3::bigint[], $4::bigint[]) WITH ORDINALITY AS span (topic, low, high, place) ORDER BY place

-- name: announce
INSERT INTO {worker} (holder, topics, until) VALUES ($1, $2, $3)
ON CONFLICT (holder) DO UPDATE SET topics = excluded.topics, until = excluded.until

-- name: leave
DELETE FROM {worker} WHERE holder = $1

-- name: workers
-- The table has one row per worker, so an index is not worthwhile.
SELECT holder, topics, until FROM {worker}

-- name: forget_workers
-- Does not wait for a worker that is announcing itself.
DELETE FROM {worker} WHERE ctid = ANY (
    ARRAY(SELECT ctid FROM {worker} WHERE holder = ANY ($1) AND until <= $2 FOR UPDATE SKIP LOCKED)
)

-- name: insert_events
INSERT INTO {event} (at, topic, key, id, kind, attempt, who, what, was, wake_at)
SELECT * FROM unnest(
    $1::bigint[], $2::text[], $3::text[], $4::text[], $5::text[], $6::integer[], $7::text[], $8::text[], $9::bigint[],
    $10::bigint[]
)

-- name: event_span
-- The first and the last line: one seek to each end of the table.
SELECT coalesce(min(line), 0), coalesce(max(line), 0) FROM {event}

-- name: trim_events
DELETE FROM {event} WHERE line <= $1

-- name: events
SELECT at, topic, key, id, kind, attempt, who, what, was, wake_at FROM {event} ORDER BY line DESC LIMIT $1

-- name: events_by_name
SELECT at, topic, key, id, kind, attempt, who, what, was, wake_at FROM {event}
WHERE topic = $1 AND key = $2 ORDER BY line DESC LIMIT $3

-- name: time
SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint

-- name: identity
-- Identifies the server and the database, by facts that every user may read, and says whether our tables exist. Returns
-- its parameters too, as a check that the driver does not alter such values.
SELECT d.oid::bigint, (extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint,
    to_regclass('{migration}') IS NOT NULL,
    $1::text[], $2::bigint[], $3::boolean[], $4::bytea[], $5::text, $6::bytea, $7::bigint
FROM pg_database AS d WHERE d.datname = current_database()

-- name: notify
SELECT pg_notify('{channel}', $1)

-- name: has_migrations
SELECT to_regclass('{migration}') IS NOT NULL

-- name: migrations
SELECT number, checksum FROM {migration} ORDER BY number

-- name: doctor
-- The facts for `bide doctor`; $1 is the name of the table of tasks. `age`, of the oldest transaction, is null if this
-- user may not see the transactions of others.
SELECT current_setting('server_version') AS version, current_setting('server_version_num')::integer AS number,
    current_setting('fsync') AS fsync, current_setting('synchronous_commit') AS commit,
    coalesce(n_live_tup, 0) AS live, coalesce(n_dead_tup, 0) AS dead,
    CASE WHEN pg_has_role(current_user, 'pg_read_all_stats', 'USAGE') THEN (
        SELECT coalesce(max(extract(epoch FROM now() - xact_start)), 0)::bigint FROM pg_stat_activity
        WHERE backend_xmin IS NOT NULL AND pid <> pg_backend_pid()
    ) END AS age
FROM (VALUES (1)) AS one (one) LEFT JOIN pg_stat_user_tables ON relid = to_regclass($1::text)

-- name: begin_verb
-- Settings during a verb in a transaction that is not ours: the kind of plans, and the maximum wait for a lock, unless
-- the caller has set a shorter one.
SELECT set_config('bide.plans', current_setting('plan_cache_mode'), true),
    set_config('bide.patience', current_setting('lock_timeout'), true);
SET LOCAL plan_cache_mode = force_custom_plan;
SELECT set_config('lock_timeout', '10s', true)
WHERE current_setting('lock_timeout')::interval NOT BETWEEN '1 ms' AND '10 s'

-- name: end_verb
SELECT set_config('plan_cache_mode', current_setting('bide.plans'), true),
    set_config('lock_timeout', current_setting('bide.patience'), true)
