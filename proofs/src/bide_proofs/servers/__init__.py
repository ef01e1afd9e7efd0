"""Private servers: started from the system's programs on free ports of this machine, never outliving their process.

Tests, `scripts/services`, the lab and the torture all start their servers here. `process` is a process with its guard,
`server` one server with its data, and each kind has a module; `services` lists the kinds that tests share, and is the
command. All calls block. Only a query to a server needs more than the standard library.
"""
