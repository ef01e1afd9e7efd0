-- A watched table. {table}, {id} and {due} are quoted names, {where} and {changes} the program's own SQL,
-- {due_millis} is when a row is due, {come} and {ahead} whether that has come, and {skip} leaves out ids, before the
-- times are read. `BEGIN IMMEDIATE` keeps others from writing between `take` and `change`, so no row needs a lock of its
-- own.

-- name: head
-- the first of the index that can be read as a time
SELECT {id}, {due_millis} FROM {table} WHERE ({where}) AND {due} IS NOT NULL{skip} AND {due_millis} IS NOT NULL
ORDER BY {due} LIMIT 1

-- name: head_beyond
SELECT {id}, {due_millis} FROM {table} WHERE ({where}){skip} AND {ahead} ORDER BY {due} LIMIT 1

-- name: take
SELECT {id}, {due_millis}{columns} FROM {table} WHERE ({where}){skip} AND {come} ORDER BY {due} LIMIT {limit}

-- name: take_these
SELECT {id}, {due_millis}{columns} FROM {table} WHERE ({where}) AND {found} AND {come}

-- name: change
-- the condition again, though no other connection can have written meanwhile: a trigger of the table's may have
UPDATE {table} SET {changes} WHERE {found} AND ({where}) AND {come}
RETURNING {id}, ({where}) AND {come}
