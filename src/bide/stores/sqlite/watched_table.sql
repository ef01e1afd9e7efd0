-- A watched table. {table}, {id} and {due} are quoted names, {where} and {changes} are the program's own SQL,
-- {due_millis} is a row's due time, {come} is true if it has come, {any} if the row has one, or one that has not come
-- yet, and {skip} excludes ids, and rows without one, before the times are read. `BEGIN IMMEDIATE` keeps other
-- connections from writing between `take` and `change`, so rows need no locks of their own.

-- name: head
-- the first row of the index whose value can be read as a time
SELECT {id}, {due_millis} FROM {table} WHERE ({where}){skip} AND {any} ORDER BY {due} LIMIT 1

-- name: take
SELECT {id}, {due_millis}{columns} FROM {table} WHERE ({where}){skip} AND {come} ORDER BY {due} LIMIT {limit}

-- name: take_these
SELECT {id}, {due_millis}{columns} FROM {table} WHERE ({where}) AND {found} AND {come}

-- name: change
-- the condition again: no other connection can have written meanwhile, but a trigger of the table may have
UPDATE {table} SET {changes} WHERE {found} AND ({where}) AND {come}
RETURNING {id}, ({where}) AND {come}
