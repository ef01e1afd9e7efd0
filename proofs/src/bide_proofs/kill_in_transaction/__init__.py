"""Kill processes that share a transaction with their tasks, and check that each effect exists exactly once.

    python -m bide_proofs.kill_in_transaction postgresql://127.0.0.1:5432/shop --orders 10000

Client processes write an order and schedule its timer by `app.using(connection)`, and then roll half of the
transactions back. Worker processes write a row for each order whose timer fires, within `task.transaction()`. From time
to time one of these processes is killed by SIGKILL and replaced. When no task waits any more, the tables are compared:
they are the truth, and the clients' reports *after* a commit or a rollback must agree with them. Failures are

- lost_order: an order whose commit was answered does not exist; kept_order: one that was rolled back exists
- not_fired: the order exists, and its timer never fired
- fired_twice: the effect exists more than once
- fired_uncommitted: the effect exists, and the order does not
- left: tasks that are still in the store
- process_ended: a process ended that was not killed

It works in its own tables, which it creates in the database of the URL and drops at the end.
"""
