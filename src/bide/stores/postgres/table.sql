-- A table of somebody's own. {table}, {id} and {due} are quoted names, {where} and {changes} the program's own SQL,
-- {now} the server's time as this statement came in, {cutoff} the same as the due column has it. Both are stable, so
-- that an index can be asked for what is before them, and neither is ever ahead of the clock. {skip} leaves out ids.

-- name: head
SELECT (extract(epoch FROM {now}) * 1000000)::bigint AS micros, (
    SELECT {due} FROM {table} WHERE {due} IS NOT NULL AND ({where}){skip} ORDER BY {due} LIMIT 1
) AS due

-- name: head_beyond
SELECT (extract(epoch FROM {now}) * 1000000)::bigint AS micros, (
    SELECT {due} FROM {table} WHERE {due} > {cutoff} AND ({where}){skip} ORDER BY {due} LIMIT 1
) AS due

-- name: explained
-- what both of the above and `take` come down to
EXPLAIN (FORMAT JSON) SELECT {due} FROM {table} WHERE {due} > {cutoff} AND ({where}) ORDER BY {due} LIMIT 1

-- name: take
-- what others hold is passed over, not waited for; whoever only refers to a row (a foreign key) does not hold it
SELECT {id}, {due}{columns} FROM {table} WHERE {due} <= {cutoff} AND ({where}){skip}
ORDER BY {due} LIMIT {limit} FOR NO KEY UPDATE SKIP LOCKED

-- name: change
-- the condition again: a trigger may have changed the row, and the answer tells what the changes leave due
UPDATE {table} SET {changes} WHERE {id} = ANY ({ids}) AND {due} <= {cutoff} AND ({where})
RETURNING {id}, ({due} <= {cutoff} AND ({where})) IS TRUE

-- name: clock
SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint

-- name: columns
SELECT attname, format_type(atttypid, NULL), format_type(atttypid, atttypmod) FROM pg_attribute
WHERE attrelid = to_regclass($1) AND attnum > 0 AND NOT attisdropped
