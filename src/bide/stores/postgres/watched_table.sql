-- A watched table. {table}, {id} and {due} are quoted names, {where} and {changes} the program's own SQL.
-- {now} is the server's time when this statement arrived, {cutoff} the same in the form of the due column. Both are
-- stable, so that an index can serve a comparison with them, and neither is ever ahead of the clock. {any}: the row
-- has a due time, or one that is not due yet. {skip} excludes ids, and rows without one.

-- name: head
-- {shown} is the due time, limited to the years that the driver can read
SELECT (extract(epoch FROM {now}) * 1000000)::bigint AS micros, first.* FROM (SELECT 1) AS one LEFT JOIN (
    SELECT {shown} AS seen, {id} FROM {table} WHERE {any} AND ({where}){skip} ORDER BY {due} LIMIT 1
) AS first ON true

-- name: explained
-- the scan that `head` and `take` share
EXPLAIN (FORMAT JSON) SELECT {due} FROM {table} WHERE {due} > {cutoff} AND ({where}) ORDER BY {due} LIMIT 1

-- name: take
-- skips rows that others have locked; a reference to a row (a foreign key) does not lock it in this sense
SELECT {id}, {shown}{columns} FROM {table} WHERE {due} <= {cutoff} AND ({where}){skip}
ORDER BY {due} LIMIT {limit} FOR NO KEY UPDATE SKIP LOCKED

-- name: take_these
SELECT {id}, {shown}{columns} FROM {table} WHERE {found} AND {due} <= {cutoff} AND ({where})
FOR NO KEY UPDATE SKIP LOCKED

-- name: change
-- repeats the condition, since a trigger may have changed the row; the answer says which rows are still due
UPDATE {table} SET {changes} WHERE {found} AND {due} <= {cutoff} AND ({where})
RETURNING {id}, ({due} <= {cutoff} AND ({where})) IS TRUE

-- name: clock
SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint

-- name: columns
-- -1: the type without a length; NULL would give "character" for char(36), which means char(1)
SELECT attname, format_type(atttypid, -1) FROM pg_attribute
WHERE attrelid = to_regclass($1) AND attnum > 0 AND NOT attisdropped

-- name: kind
-- whether the table is a view, and whether an index makes the columns of the id, or some of them, unique
SELECT relkind IN ('v', 'm'), EXISTS (
    SELECT FROM pg_index WHERE indrelid = pg_class.oid AND indisunique AND indisvalid AND indpred IS NULL
    AND indexprs IS NULL AND (
        SELECT array_agg(attname::text) FROM pg_attribute
        WHERE attrelid = indrelid AND attnum = ANY ((indkey::int2[])[0:indnkeyatts - 1])
    ) <@ $2::text[]
) FROM pg_class WHERE oid = to_regclass($1)
