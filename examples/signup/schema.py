"""The application's tables, and the queue's beside them. Run it once before the processes: python -m signup.schema"""

import asyncio
import os

from sqlalchemy import Boolean, Column, Integer, MetaData, String, Table, Uuid
from sqlalchemy.ext.asyncio import create_async_engine

import workq

metadata = MetaData()

users = Table(
    "users",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("email", String, nullable=False, unique=True),
)
charges = Table(
    "charges",
    metadata,
    Column("order_id", Integer, primary_key=True, autoincrement=False),
    Column("cents", Integer, nullable=False),
)
logins = Table(
    "logins",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("expired", Boolean, nullable=False),
)


async def create(database_url: str) -> None:
    """Make the tables that are missing."""
    engine = create_async_engine(database_url)
    try:
        async with engine.begin() as conn:
            await conn.run_sync(metadata.create_all)
        async with workq.connect(database_url) as db:
            await workq.Queue(db).migrate()
    finally:
        await engine.dispose()


if __name__ == "__main__":
    asyncio.run(create(os.environ["DATABASE_URL"]))
