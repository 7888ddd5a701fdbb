"""workq on SQLite through aiosqlite: bind, run, return rows."""

from workq_aiosqlite._sqlite import SQLite

__all__ = ["SQLite"]
