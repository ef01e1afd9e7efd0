"""The store in PostgreSQL: tasks in the same database as your own tables, and in your own transactions."""

from bide.stores.postgres.store import PostgresStore

__all__ = ["PostgresStore"]
