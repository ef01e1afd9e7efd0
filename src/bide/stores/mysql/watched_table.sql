-- A watched table. {table}, {id} and {due} are quoted names, {where} and {changes} the program's own SQL.
-- {now} is the time of this statement (UTC, as all our sessions), {cutoff} the same in the form of the due column.
-- {any}: the row has a due time, or one that is not due yet. {skip} excludes ids, and rows without one. {index} forces
-- the suitable index: on a table whose statistics are old, or that was empty a moment ago, the server would otherwise
-- scan the whole table. %s stands for values.

-- name: head
SELECT CAST(UNIX_TIMESTAMP({now}) * 1000000 AS UNSIGNED), first.* FROM (SELECT 1) AS one LEFT JOIN (
    SELECT {due}, {id} FROM {table}{index} WHERE {any} AND ({where}){skip} ORDER BY {due} LIMIT 1
) AS first ON TRUE

-- name: explained
EXPLAIN SELECT {id} FROM {table}{index} WHERE {due} > {cutoff} AND ({where}) ORDER BY {due} LIMIT 1

-- name: take
SELECT {id}, {due}{columns} FROM {table}{index} WHERE {due} <= {cutoff} AND ({where}){skip}
ORDER BY {due} LIMIT {limit} FOR UPDATE SKIP LOCKED

-- name: candidates
-- without an index that leads to the due rows they are sorted, and a locking statement would lock all sorted rows
SELECT {id} FROM {table} WHERE {due} <= {cutoff} AND ({where}){skip} ORDER BY {due} LIMIT {limit}

-- name: take_these
SELECT {id}, {due}{columns} FROM {table}{by_id} WHERE {found} AND {due} <= {cutoff} AND ({where})
FOR UPDATE SKIP LOCKED

-- name: change
-- forces the index of the ids: a scan of a small table would wait for rows that others have locked
UPDATE {table}{by_id} SET {changes} WHERE {found} AND {due} <= {cutoff} AND ({where})

-- name: still_due
-- UPDATE returns no rows here, so a query finds the rows that are still due after the changes
SELECT {id} FROM {table} WHERE {found} AND {due} <= {cutoff} AND ({where})

-- name: clock
SELECT CAST(UNIX_TIMESTAMP(UTC_TIMESTAMP(6)) * 1000000 AS UNSIGNED)

-- name: columns
SELECT column_name, data_type FROM information_schema.columns
WHERE table_schema = coalesce(%s, database()) AND table_name = %s ORDER BY ordinal_position

-- name: kind
SELECT table_type LIKE '%%VIEW%%', table_schema FROM information_schema.tables
WHERE table_schema = coalesce(%s, database()) AND table_name = %s

-- name: indexes
SELECT index_name, column_name, non_unique FROM information_schema.statistics
WHERE table_schema = coalesce(%s, database()) AND table_name = %s ORDER BY index_name, seq_in_index
