"""Tables that are filled once: by one process, for all that looks at them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator

import asyncpg
import pytest
import pytest_asyncio

from plans.explain import MILLION, TABLES, File, Table, fill
from servers import SOURCES, Servers
from workq.dialect import names, postgres


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=SOURCES)
async def filled(request: pytest.FixtureRequest, servers: Servers) -> AsyncGenerator[str]:
    """The URL of a server that has every table, each in a schema of its own."""
    url = servers.url(request.param)
    conn = await asyncpg.connect(url)
    for schema, (size, statistics) in TABLES.items():
        await fill(conn, schema, size, statistics=statistics)
    yield url
    for schema in TABLES:
        await conn.execute(f"drop schema {schema} cascade")
    await conn.close()


@pytest_asyncio.fixture(params=TABLES)
async def table(request: pytest.FixtureRequest, filled: str) -> AsyncGenerator[Table]:
    """One of them; whatever a test does to it is undone."""
    conn = await asyncpg.connect(filled)
    await conn.execute("begin")
    yield Table(conn, postgres(names(request.param, "workq")), TABLES[request.param][0])
    await conn.close()


@pytest.fixture(scope="session", params=[False, True], ids=["no statistics", "analyzed"])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator[dict[int, File]]:
    """By size."""
    folder = tmp_path_factory.mktemp("plans")
    files = {size: File(folder / f"{size}.db", size, statistics=request.param) for size in (0, 1_000, MILLION)}
    yield files
    for file in files.values():
        file.conn.close()
