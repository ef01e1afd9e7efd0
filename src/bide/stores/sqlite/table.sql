-- A table of somebody's own. {table}, {id} and {due} are quoted names, {where} and {changes} the program's own SQL,
-- {due_millis} is when a row is due in milliseconds, {come} and {ahead} whether that has come, by :now and :bound, and
-- {skip} leaves out ids that are given as JSON-free parameters. `BEGIN IMMEDIATE` keeps others from writing between
-- `take` and `change`, so no row needs a lock of its own.

-- name: head
-- the first of the index that can be read as a time
SELECT {due_millis} FROM {table} WHERE ({where}) AND {due_millis} IS NOT NULL{skip} ORDER BY {due} LIMIT 1

-- name: head_beyond
SELECT {due_millis} FROM {table} WHERE ({where}) AND {ahead}{skip} ORDER BY {due} LIMIT 1

-- name: take
SELECT {id}, {due_millis}{columns} FROM {table} WHERE ({where}) AND {come}{skip} ORDER BY {due} LIMIT :limit

-- name: change
-- the condition again, though nobody can have written meanwhile: a trigger of the table's may have
UPDATE {table} SET {changes} WHERE {id} IN ({ids}) AND ({where}) AND {come}
RETURNING {id}, ({where}) AND {come}
