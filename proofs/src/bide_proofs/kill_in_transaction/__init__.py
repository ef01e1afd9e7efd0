"""Kills the processes that work in one transaction with the tasks, and checks that each effect is there exactly once.

    python -m bide_proofs.kill_in_transaction postgresql://127.0.0.1:5432/shop --orders 10000

Client processes write an order and schedule its timer by `app.using(connection)`, and then roll half of the
transactions back. Worker processes write a row for each order whose timer fires, within `task.transaction()`. One of
all these dies by SIGKILL every so often and is replaced. When nothing waits any more, the tables are compared: they are
the truth, and what the clients said *after* a commit or a rollback has to agree with it. Wrong is

- lost_order: its commit was answered, and it is not there; kept_order: it was rolled back, and is
- not_fired: an order that is there, and its timer never fired
- fired_twice: the effect is there more than once
- fired_uncommitted: the effect is there, and the order is not
- left: tasks that are still in the store
- process_ended: one that was not killed

It works in tables of its own, which it makes in the database of the URL and drops at the end.
"""
