"""`bide demo`: five everyday scenarios on a SQLite file, each in its own quickened time.

Read a scenario first (`publishing`, `orders`, `reviews`, `payments`, `feeding`): each is an app like yours, with a
table, handlers, and the people who change their minds, as methods marked with the story time at which they act.
`story` is what the five have in common, `pace` their quickened time, `ledger` what survives Ctrl-C, `board` the screen.
"""
