"""What a database is called in the records."""

from __future__ import annotations

import sqlite3

from support import Database, SQLiteDatabase


async def name_of(database: Database) -> str:
    """Kind and version, as in "PostgreSQL 15.18"."""
    if isinstance(database, SQLiteDatabase):
        return f"SQLite {sqlite3.sqlite_version}"
    ((version,),) = await database.rows("select split_part(current_setting('server_version'), ' ', 1)")
    return f"PostgreSQL {version}"
