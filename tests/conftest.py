"""The databases: SQLite in a temporary file, PostgreSQL from the machine and from the wheel, a schema for each test."""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import AsyncGenerator, Generator
from functools import partial, partialmethod
from pathlib import Path
from uuid import uuid4

import asyncpg
import pytest
import pytest_asyncio

import workq
from servers import POOLED, SOURCES, Servers
from support import Database, PostgresDatabase, SQLiteDatabase

_numbers = itertools.count(1)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First what fills large tables: the first tests go to one process, the last ones to whichever is free. Then what
    takes long, so that at the end nobody waits for one process that has them all."""
    early = {"plans": 0, "crash": 1, "sim": 1, "model": 1, "faults": 1, "property": 1}
    items.sort(key=lambda item: early.get(item.path.parent.name, 2))


@pytest.fixture(scope="session", autouse=POOLED)
def without_prepared_statements() -> Generator[None]:
    """The connections that tests make themselves have the settings that a pooler needs, too."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "create_pool"):
            patch.setattr(asyncpg, name, partial(getattr(asyncpg, name), statement_cache_size=0))
        # What SQLAlchemy's manual has for pgbouncer, as arguments of the engine: it always prepares by name.
        driver = importlib.import_module("sqlalchemy.dialects.postgresql.asyncpg").AsyncAdapt_asyncpg_dbapi
        options = {"prepared_statement_cache_size": 0, "prepared_statement_name_func": lambda: f"tests-{uuid4()}"}
        patch.setattr(driver, "connect", partialmethod(driver.connect, **options))
        yield


@pytest.fixture(scope="session")
def servers() -> Generator[Servers]:
    found = Servers()
    yield found
    found.remove()


async def _postgres(url: str) -> AsyncGenerator[Database]:
    schema = f"t{os.getpid()}_{next(_numbers)}"
    yield PostgresDatabase(url, schema, pooled=POOLED)
    conn = await asyncpg.connect(url, statement_cache_size=0)
    await conn.execute(f'drop schema if exists "{schema}" cascade')
    await conn.close()


@pytest_asyncio.fixture(params=["sqlite", *SOURCES])
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[Database]:
    """Either kind of database: a test that takes this never asks which one it has."""
    if request.param == "sqlite":
        yield SQLiteDatabase(tmp_path / "test.db")
        return
    servers: Servers = request.getfixturevalue("servers")
    async for database in _postgres(servers.url(request.param)):
        yield database


@pytest_asyncio.fixture(params=SOURCES)
async def postgres(request: pytest.FixtureRequest, servers: Servers) -> AsyncGenerator[PostgresDatabase]:
    """PostgreSQL only, for what only it can do."""
    async for database in _postgres(servers.url(request.param)):
        assert isinstance(database, PostgresDatabase)
        yield database


@pytest.fixture
def sqlite(tmp_path: Path) -> SQLiteDatabase:
    """SQLite only, for what only it can do."""
    return SQLiteDatabase(tmp_path / "test.db")


@pytest_asyncio.fixture
async def queue(database: Database) -> AsyncGenerator[workq.Queue]:
    """A migrated queue without hooks."""
    async with database.open() as db:
        queue = workq.Queue(db)
        await queue.migrate()
        yield queue
