"""workq on PostgreSQL through asyncpg: bind, run, return rows."""

from workq_asyncpg._hosts import Hosts
from workq_asyncpg._postgres import Postgres

__all__ = ["Hosts", "Postgres"]
