"""The store of bide's own clients: `calls` reads and answers their messages, `operations` does what each row of
`ports.remote` says, and `idempotency` keeps the answers of calls that may be sent again."""
