"""The queue's own connection, for `None` instead of a transaction: one statement at a time, given back when idle."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from workq._backoff import growing
from workq._clock import Clock
from workq.dialect import Busy, Connection, Dialect, Interrupted, Unreachable

T = TypeVar("T")

LOCK_WAIT = 0.05
"""Seconds a statement waits for a foreign lock before it leaves the connection to others."""
PATIENCE = 15.0
"""Seconds that `None` operations wait for somebody else's transaction in all."""
IDLE = 0.2
"""Seconds without work after which the connection goes back: an application that closes its pool must not wait."""


class Shared:
    """Serialises work on one connection. A caller that is cancelled leaves its statement to end by itself."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._connection: Connection | None = None
        self._lock = asyncio.Lock()
        self._jobs: set[asyncio.Task[object]] = set()
        self._users = 0
        self._used_at = 0.0
        self._idle: asyncio.TimerHandle | None = None

    async def run(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        """Run `work` with the connection. Raises what the driver raised where nothing was sent."""
        job = asyncio.get_running_loop().create_task(self.run_here(work))
        self._jobs.add(job)
        job.add_done_callback(self._ended)
        return await asyncio.shield(job)

    async def run_here(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        """As `run`, for a task of workq's own, which nobody cancels but the end of the loop."""
        self._users += 1
        try:
            async with self._lock:
                if self._connection is None:
                    self._connection = self._dialect.connection("queue")
                return await work(self._connection)
        finally:
            self._users -= 1
            self._used_at = asyncio.get_running_loop().time()
            if self._idle is None:
                self._idle = asyncio.get_running_loop().call_later(IDLE, self._rest)

    def _ended(self, job: asyncio.Task[object]) -> None:
        self._jobs.discard(job)
        if not job.cancelled():
            job.exception()  # a cancelled caller is not there to see it

    def _rest(self) -> None:
        # One timer for many uses: making one for each costs more than asking when the last one was.
        loop = asyncio.get_running_loop()
        left = IDLE if self._users else self._used_at + IDLE - loop.time()
        self._idle = loop.call_later(left, self._rest) if left > 0.001 else None
        if self._idle is None:
            job = asyncio.ensure_future(self._close())
            self._jobs.add(job)
            job.add_done_callback(self._jobs.discard)

    async def _close(self) -> None:
        async with self._lock:
            connection, self._connection = self._connection, None
            if connection is not None:
                await connection.close()

    async def close(self) -> None:
        """Wait for what is under way and give the connection back."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        await self._close()


async def patiently(attempt: Callable[[], Awaitable[T]], clock: Clock) -> T:
    """Try again and again while somebody's transaction holds a row, a key or SQLite's writer; meanwhile others have
    the connection.

    Raises Busy after PATIENCE seconds: perhaps it is the caller's own transaction.
    """
    try:
        return await attempt()
    except Busy:
        since = clock.monotonic()
    for pause in growing(0.01, 0.25):
        await clock.sleep(pause)
        try:
            return await attempt()
        except Busy as error:
            if clock.monotonic() - since > PATIENCE:
                raise Busy(
                    f"another open transaction has held what this needs for {PATIENCE:g} s; "
                    "if it is your own, give its connection as tx, instead of None"
                ) from error.__cause__
    raise AssertionError("unreachable")


def plainly(error: Unreachable | Interrupted | Busy) -> BaseException:
    """The error a caller knows: the driver's own, unless it says nothing."""
    cause = error.__cause__
    silent = isinstance(cause, TimeoutError) and not str(cause)
    return TimeoutError(str(error)) if cause is None or silent or isinstance(error, Busy) else cause
