"""A connection held by one loop: taken from the pool once, dropped when it hangs or breaks, taken again."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from typing import TYPE_CHECKING, Any, TypeAlias

import asyncpg

from workq.dialect import (
    Busy,
    Interrupted,
    NotNow,
    Params,
    Rows,
    Statement,
    UniqueViolation,
    Unreachable,
    Urgency,
    require_process,
)

if TYPE_CHECKING:
    from asyncpg.pool import PoolConnectionProxy

    Pool: TypeAlias = asyncpg.Pool[Any]
    Raw: TypeAlias = PoolConnectionProxy[Any]

logger = logging.getLogger("workq")

CONNECT = 2.0
"""Seconds for a new connection; more where the first one took long, so that work resumes soon after an outage."""

RELEASE = 0.25
"""Seconds for the reset with which a connection goes back to the pool."""

DID_NOTHING = (
    asyncpg.DeadlockDetectedError,
    asyncpg.SerializationError,
)
"""Errors of one statement in a transaction of its own that are worth another attempt."""

GONE = (
    asyncpg.PostgresConnectionError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.CannotConnectNowError,
    asyncpg.DatabaseDroppedError,
    asyncpg.IdleSessionTimeoutError,
    OSError,
)
"""Errors after which nothing is known about the statement, and the connection is of no use."""

POOLED = (asyncpg.DuplicatePreparedStatementError, asyncpg.InvalidSQLStatementNameError)
"""What comes of prepared statements when one session serves many clients."""

NOT_NOW = (
    asyncpg.QueryCanceledError,
    asyncpg.InsufficientResourcesError,
    asyncpg.PostgresSystemError,
)
"""A timeout of the server's, an operator, no memory, a full disk: nothing was done, whatever the statement was."""


class PostgresConnection:
    """One connection of the pool."""

    def __init__(self, pool: Pool, purpose: str) -> None:
        self._pool = pool
        self._purpose = purpose
        self._raw: Raw | None = None
        self._pid = os.getpid()
        self._connect_timeout = CONNECT
        self._connected = False
        self._busy = False

    async def fetch(self, statement: Statement, params: Params, urgency: Urgency) -> Rows:
        """Run one statement in a transaction of its own."""
        require_process(self._pid)
        await self.raw()  # the statement's time begins when it can be sent
        deadline = asyncio.get_running_loop().time() + urgency.timeout
        pauses = 0.002
        while True:
            try:
                return await self._once(statement, params, deadline, urgency.lock_wait)
            except DID_NOTHING:
                left = deadline - asyncio.get_running_loop().time()
                if left < pauses:
                    raise
                await asyncio.sleep(pauses * random.uniform(0.5, 1))
                pauses = min(pauses * 2, 0.5)

    async def _once(self, statement: Statement, params: Params, deadline: float, lock_wait: float | None) -> Rows:
        raw = await self.raw()
        loop = asyncio.get_running_loop()
        # Not a timeout round the await: cancelling asyncpg's fetch sends a cancel request over a second connection,
        # which hangs where the first one does. Ending the connection ends the fetch.
        alarm = loop.call_at(deadline, end, raw)
        self._busy = True
        try:
            if statement.waits and lock_wait is not None:
                return await self._impatiently(raw, statement, params, lock_wait)
            rows: Rows = await raw.fetch(statement.text, *statement.positional(params))
            return rows
        except asyncpg.LockNotAvailableError as error:
            raise Busy(f"{self._purpose}: somebody's transaction holds the row or key") from error
        except asyncio.CancelledError:
            end(raw)
            raise
        except asyncpg.UniqueViolationError as error:
            if statement.savepoint:
                raise UniqueViolation from error
            raise
        except asyncpg.ReadOnlySQLTransactionError as error:
            # A demoted primary: every connection of this generation leads there.
            end(raw)
            await self._pool.expire_connections()
            raise NotNow(f"{self._purpose}: the server became read-only") from error
        except POOLED as error:
            error.add_note("behind a pooler in transaction mode: workq.connect(url, listen=False), or see the README")
            raise
        except Exception as error:
            if loop.time() >= deadline and ended(raw):
                slow = TimeoutError(f"{self._purpose}: the database did not answer in time")
                raise Interrupted(str(slow)) from slow
            # Whatever a driver raises from a connection that ended under it says nothing about the statement.
            if isinstance(error, GONE) or ended(raw):
                end(raw)
                raise Interrupted(f"{self._purpose}: the connection broke or was too slow") from error
            if isinstance(error, NOT_NOW):
                raise NotNow(f"{self._purpose}: the server could not do it now") from error
            raise
        finally:
            alarm.cancel()
            self._busy = False
            if ended(raw):
                await self._give_back()

    async def _impatiently(self, raw: Raw, statement: Statement, params: Params, lock_wait: float) -> Rows:
        async with raw.transaction():
            # LOCAL, so that nothing leaks behind a pooler.
            await raw.execute(f"set local lock_timeout = {max(int(lock_wait * 1000), 1)}")
            rows: Rows = await raw.fetch(statement.text, *statement.positional(params))
            return rows

    async def raw(self) -> Raw:
        """The open connection. Raises Unreachable."""
        if self._raw is not None and not ended(self._raw):
            return self._raw
        await self._give_back()
        clock = asyncio.get_running_loop().time
        since = clock()
        try:
            async with asyncio.timeout(self._connect_timeout):
                raw = await self._pool.acquire()
        except TimeoutError as error:
            if not self._connected:
                self._connect_timeout = min(self._connect_timeout * 2, 10)
            raise Unreachable(f"{self._purpose}: no connection in time") from error
        except asyncpg.InterfaceError as error:
            raise Unreachable(f"{self._purpose}: {error}") from error
        except Exception as error:
            # Of any kind, as when no host of several is primary. Nothing was sent: it says nothing about the statement.
            raise Unreachable(f"{self._purpose}: no connection") from error
        self._connect_timeout = max(CONNECT, 3 * (clock() - since))
        self._connected = True
        self._raw = raw
        return raw

    async def _give_back(self) -> None:
        raw, self._raw = self._raw, None
        if raw is None:
            return
        try:
            async with asyncio.timeout(RELEASE * 2):
                await self._pool.release(raw, timeout=RELEASE)
        except Exception as error:
            logger.debug("%s: giving the connection back failed: %s", self._purpose, type(error).__name__)
            end(raw)

    async def close(self) -> None:
        """Give the connection back, at once: a statement under way is given up."""
        if self._busy and self._raw is not None:
            end(self._raw)
        await self._give_back()


def ended(raw: Raw) -> bool:
    """Is it of no use any more? The pool takes back at once what ends, and the proxy then only raises."""
    try:
        return raw.is_closed()
    except asyncpg.InterfaceError:
        return True


def end(raw: Raw) -> None:
    """Close it without a word to the server; whatever waits on it fails."""
    if not ended(raw):
        raw.terminate()
