"""The seam between workq's core and a database: what an adapter provides, and nothing else.

An adapter binds parameters, runs one statement and returns its rows by position. It knows no task and no lease.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from workq._names import Names, names
from workq._process import require_process, to_its_end
from workq._sql import Statement, Statements, postgres, sqlite
from workq._url import split_url

__all__ = [
    "Connection",
    "Dialect",
    "Interrupted",
    "Names",
    "NotNow",
    "Params",
    "Row",
    "Rows",
    "Statement",
    "Statements",
    "Transaction",
    "UniqueViolation",
    "Unreachable",
    "Urgency",
    "Busy",
    "names",
    "postgres",
    "require_process",
    "split_url",
    "sqlite",
    "to_its_end",
]

Row: TypeAlias = Sequence[Any]
Rows: TypeAlias = Sequence[Row]
Params: TypeAlias = Mapping[str, object]


class Transaction(Protocol):
    """What can be given as `tx`: a connection with an open transaction.

    An asyncpg connection (or pool proxy), an aiosqlite connection. Pools, engines and synchronous sessions are
    refused at run time with an error that names the remedy.
    """

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        """Run a statement on the connection."""
        ...


class Unreachable(Exception):
    """It could not be tried, for the reason in `__cause__`: no connection could be had, say. Nothing was done."""

    answered = False
    """Did the database say so itself?"""


class NotNow(Unreachable):
    """The database answered that it cannot do it now: a timeout of its own, an operator, no memory, a full disk, a
    standby."""

    answered = True


class Interrupted(Exception):
    """The connection broke, or was given up for being too slow, after the statement was sent: it may have run."""


class Busy(Exception):
    """SQLite's single writer, or a row that somebody's transaction holds, was busy for longer than the caller was
    willing to wait. Nothing was done."""


class UniqueViolation(Exception):
    """A statement marked `savepoint` met a taken key. Nothing was done, and the transaction is usable."""


@dataclass(frozen=True, slots=True)
class Urgency:
    """How long one statement may take, in seconds."""

    timeout: float
    """From sending to the last row; past it the connection is dropped, never reused."""
    lock_wait: float | None = None
    """For SQLite's writer, or in a statement that `waits` for rows: shorter than `timeout`; then `Busy`."""


class Connection(Protocol):
    """One connection of workq's own, used by one task at a time, opened when first used and again after it broke."""

    async def fetch(self, statement: Statement, params: Params, urgency: Urgency) -> Rows:
        """Run one statement in a transaction of its own and return its rows.

        Deadlocks, serialization failures and a busy writer are retried until the timeout. A call that is
        cancelled, or too slow, gives the connection up. Raises Unreachable, Interrupted, Busy,
        UniqueViolation, or the driver's error for a statement that failed and did nothing.
        """
        ...

    async def close(self) -> None:
        """Give the connection back, at once. The next `fetch` would open it again."""
        ...


class Dialect(Protocol):
    """A database that holds a table of tasks. Making one does no I/O."""

    @property
    def sql(self) -> Statements:
        """The statements for this database and table."""
        ...

    async def fetch(self, statement: Statement, params: Params, tx: Transaction) -> Rows:
        """Run one statement on the caller's connection and return its rows.

        Raises TypeError if `tx` is not a connection of this database, and RuntimeError if a writing statement
        comes without an open transaction.
        """
        ...

    def connection(self, purpose: str, *, first: bool = False) -> Connection:
        """A connection for one loop. `first`: goes before the others that wait for the same writer (beats)."""
        ...

    def reserve(self, connections: int) -> Callable[[], None]:
        """Count on so many connections until the returned function is called.

        Raises RuntimeError, naming the size needed, if the pool is too small for all that share it.
        """
        ...

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        """A transaction of workq's own that excludes every other one made here (for migrations)."""
        ...

    def after(self, tx: Transaction, callback: Callable[[], None]) -> None:
        """Call `callback` once the caller's transaction is over. A hint: where the driver cannot tell, never."""
        ...

    async def listen(self, heard: Callable[[str | None], None]) -> None:
        """Call `heard(queue)` (None: some queue) when tasks may have come from elsewhere, until cancelled."""
        ...

    def at_close(self, flush: Callable[[], Awaitable[None]]) -> None:
        """Await `flush()` before the database is closed, if it is workq that closes it."""
        ...
