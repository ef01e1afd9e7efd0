-- A watched table. {table}, {id} and {due} are quoted names, {where} and {changes} the program's own SQL,
-- {now} the server's time as this statement came in, {cutoff} the same as the due column has it. Both are stable, so
-- that an index can be asked for what is before them, and neither is ever ahead of the clock. {skip} leaves out ids.

-- name: head
-- {shown} is the time within the years that the driver can read
SELECT (extract(epoch FROM {now}) * 1000000)::bigint AS micros, first.* FROM (SELECT 1) AS one LEFT JOIN (
    SELECT {shown} AS seen, {id} FROM {table} WHERE {due} IS NOT NULL AND ({where}){skip} ORDER BY {due} LIMIT 1
) AS first ON true

-- name: head_beyond
SELECT (extract(epoch FROM {now}) * 1000000)::bigint AS micros, first.* FROM (SELECT 1) AS one LEFT JOIN (
    SELECT {shown} AS seen, {id} FROM {table} WHERE {due} > {cutoff} AND ({where}){skip} ORDER BY {due} LIMIT 1
) AS first ON true

-- name: explained
-- what both of the above and `take` come down to
EXPLAIN (FORMAT JSON) SELECT {due} FROM {table} WHERE {due} > {cutoff} AND ({where}) ORDER BY {due} LIMIT 1

-- name: take
-- what others hold is passed over, not waited for; a reference to a row (a foreign key) does not hold it
SELECT {id}, {shown}{columns} FROM {table} WHERE {due} <= {cutoff} AND ({where}){skip}
ORDER BY {due} LIMIT {limit} FOR NO KEY UPDATE SKIP LOCKED

-- name: take_these
SELECT {id}, {shown}{columns} FROM {table} WHERE {found} AND {due} <= {cutoff} AND ({where})
FOR NO KEY UPDATE SKIP LOCKED

-- name: change
-- the condition again: a trigger may have changed the row, and the answer tells what the changes leave due
UPDATE {table} SET {changes} WHERE {found} AND {due} <= {cutoff} AND ({where})
RETURNING {id}, ({due} <= {cutoff} AND ({where})) IS TRUE

-- name: clock
SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint

-- name: columns
-- -1: as a type without a length; NULL would say "character" of char(36), which is char(1)
SELECT attname, format_type(atttypid, -1) FROM pg_attribute
WHERE attrelid = to_regclass($1) AND attnum > 0 AND NOT attisdropped

-- name: kind
-- whether it is a view, and whether an index makes sure that the columns of the id, or some of them, are unique
SELECT relkind IN ('v', 'm'), EXISTS (
    SELECT FROM pg_index WHERE indrelid = pg_class.oid AND indisunique AND indisvalid AND indpred IS NULL
    AND indexprs IS NULL AND (
        SELECT array_agg(attname::text) FROM pg_attribute
        WHERE attrelid = indrelid AND attnum = ANY ((indkey::int2[])[0:indnkeyatts - 1])
    ) <@ $2::text[]
) FROM pg_class WHERE oid = to_regclass($1)
