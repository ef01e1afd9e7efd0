"""Tasks in a SQLite file: durable, shared by several processes, and together with your own tables if you like."""

from bide.stores.sqlite.store import SqliteStore as SqliteStore
