"""The store in MySQL or MariaDB: tasks in the same database as your own tables, and in your own transactions."""

from bide.stores.mysql.store import MySqlStore

__all__ = ["MySqlStore"]
