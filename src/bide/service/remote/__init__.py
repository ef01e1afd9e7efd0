"""The store of bide's own clients: `calls` reads and answers their messages and keeps the answers of calls that may be
resent; `operations` carries out each row of `ports.remote`."""
