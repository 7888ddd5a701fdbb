"""`connect`: from a URL to an open database, whose connections are workq's to close."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio

from workq._checks import count
from workq._process import require_process, to_its_end
from workq._url import UNREADABLE, split_url

if TYPE_CHECKING:
    from workq.dialect import Dialect

logger = logging.getLogger("workq")

CLOSE = 1.0
"""Seconds that connections have to come back before they are cut."""
POSTGRES = ("postgresql", "postgres", "postgresql+asyncpg")
SQLITE = ("sqlite", "sqlite+aiosqlite")


def connect(
    url: str, /, *, schema: str | None = None, table: str = "workq", pool_size: int = 20, listen: bool = True
) -> AbstractAsyncContextManager[Dialect]:
    """Open a database by its URL; leaving the `async with` closes it.

    url: postgresql://user:password@host/name (extra `workq[asyncpg]`), or sqlite:///relative.db,
    sqlite:////absolute.db (extra `workq[aiosqlite]`); SQLAlchemy's forms with +asyncpg and +aiosqlite too.
    schema: PostgreSQL's schema for the table, None: public. table: its name.
    pool_size: PostgreSQL connections at most; each running executor holds 3, each queue 2.
    listen: hear of new tasks by LISTEN; False behind a pooler in transaction mode.

    Raises ValueError for a URL that cannot work, ImportError naming the extra, and what the driver raises.
    """
    if not isinstance(url, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            "connect() takes the URL as a str (of an SQLAlchemy URL: url.render_as_string(hide_password=False)), "
            f"not {type(url).__name__}"
        )
    scheme, separator, rest = url.partition("://")
    if separator and scheme in POSTGRES:
        if split_url(f"postgresql://{rest}").password == "***":
            raise ValueError(
                "the URL's password is '***', which is how SQLAlchemy prints one: "
                "use engine.url.render_as_string(hide_password=False)"
            )
        return _postgres(f"postgresql://{rest}", schema, table, count("pool_size", pool_size, least=1), listen)
    if separator and scheme in SQLITE:
        if schema is not None:
            raise ValueError("SQLite has no schemas: leave schema= out, and use table= for another name")
        return _sqlite(_path(rest), table)
    raise ValueError(
        f"workq knows postgresql:// and sqlite:/// URLs, not {scheme + '://' if separator else 'this one'} "
        "(a file: sqlite:///app.db)"
    )


def _path(rest: str) -> str:
    path, _, query = rest.partition("?")
    if query:
        raise ValueError("an SQLite URL takes no parameters: workq sets WAL, synchronous and the timeouts itself")
    if not path.startswith("/"):
        raise ValueError("an SQLite URL has three slashes and a path: sqlite:///app.db, or four: sqlite:////tmp/app.db")
    return path[1:]


@asynccontextmanager
async def _postgres(dsn: str, schema: str | None, table: str, pool_size: int, listen: bool) -> AsyncGenerator[Dialect]:
    asyncpg = _driver("asyncpg", "asyncpg")
    adapter = _driver("workq_asyncpg", "asyncpg")
    # A pooler in transaction mode knows no prepared statements of a session.
    options: dict[str, object] = {} if listen else {"statement_cache_size": 0}
    pid = os.getpid()
    hosts = adapter.Hosts(dsn)
    if hosts.several:
        options["connect"] = hosts.connect
    try:
        pool = await asyncpg.create_pool(dsn, min_size=1, max_size=pool_size, **options)
    except ValueError as error:
        if not str(error).startswith("invalid literal for int()"):
            raise
        # What asyncpg says quotes the part that is no number: a piece of the password, if that was not escaped.
        raise ValueError(f"{UNREADABLE} (its port is no number)") from None
    db = adapter.Postgres(pool, schema=schema, table=table, listen=listen)
    db.reserve(0)()  # its connections are open: from here on it belongs to this process
    try:
        yield db
    finally:
        require_process(pid)  # the sockets are the parent's to close
        with anyio.CancelScope(shield=True):
            await to_its_end(_close(db, pool))


async def _close(db: Any, pool: Any) -> None:
    try:
        await db.flush()
        async with asyncio.timeout(CLOSE):
            await pool.close()
    except TimeoutError:
        logger.warning("connect() was left while its connections were in use: was an executor not stopped?")
    finally:
        pool.terminate()


@asynccontextmanager
async def _sqlite(path: str, table: str) -> AsyncGenerator[Dialect]:
    async with _driver("workq_aiosqlite", "aiosqlite").SQLite(path, table=table) as db:
        yield db


def _driver(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in (module, extra):
            raise
        raise ImportError(f'this URL needs the package {extra}: pip install "workq[{extra}]"') from None
