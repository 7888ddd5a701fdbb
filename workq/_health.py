"""What a readiness probe is told, and whether the database answers."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeAlias

from workq._clock import Clock
from workq.dialect import Connection, Interrupted, Params, Rows, Statement, Unreachable, Urgency

Phase: TypeAlias = Literal["new", "starting", "running", "stopping", "stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """How an executor is doing. For a readiness probe, `ok` is the answer, and the rest says why.

    `..._at` is when, by this machine's clock. `..._ago` is the same as seconds before the call, by a clock that never
    jumps. None: it has not happened yet.
    """

    ok: bool
    """Running, and no loop fails for longer than it may: 10 s for claims and for writes of finished tasks, one lease
    for heartbeats."""
    phase: Phase
    """`starting` and `stopping` last as long as `start()` and `stop()`. One whose start failed is `stopped`."""
    running: int
    """Handlers that run now."""
    held: int
    """Leases held: tasks that were claimed, and whose end is not yet written."""
    reachable: bool | None
    """Was the last statement of the executor's loops answered? (None: none was sent yet.) An error of the database is
    an answer. A network that swallows everything shows after 4 s, or up to 10 where statements take long. No statement
    is sent for this: the next one comes within `poll_interval` if a worker is free, and within a third of the lease if
    tasks are held."""
    answered_at: datetime | None
    """The last answer to one of these."""
    answered_ago: float | None
    claimed_at: datetime | None
    """The last successful claim, whether or not it found a task. While all workers are busy, none is tried."""
    claimed_ago: float | None
    beat_at: datetime | None
    """The last successful heartbeat. With nothing held there is nothing to send, and that is a success."""
    beat_ago: float | None
    finished_at: datetime | None
    """The last successful write of finished tasks."""
    finished_ago: float | None


class Success:
    """When something last succeeded, by both clocks."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._monotonic: float | None = None
        self.at: datetime | None = None
        """By the wall clock."""

    def now(self) -> None:
        """It has just succeeded."""
        self.at, self._monotonic = self._clock.now(), self._clock.monotonic()

    @property
    def ago(self) -> float | None:
        """Seconds since then."""
        return None if self._monotonic is None else self._clock.monotonic() - self._monotonic


class Contact:
    """Does the database answer the statements of one executor?"""

    def __init__(self, clock: Clock) -> None:
        self.reachable: bool | None = None
        self.answered = Success(clock)

    def watched(self, connection: Connection) -> Connection:
        """The same connection, its answers noted here."""
        return _Watched(connection, self)


class _Watched:
    def __init__(self, connection: Connection, contact: Contact) -> None:
        self._connection = connection
        self._contact = contact

    async def fetch(self, statement: Statement, params: Params, urgency: Urgency) -> Rows:
        contact = self._contact
        try:
            rows = await self._connection.fetch(statement, params, urgency)
        except Exception as error:
            contact.reachable = error.answered if isinstance(error, Unreachable) else not isinstance(error, Interrupted)
            if contact.reachable:
                contact.answered.now()
            raise
        contact.reachable = True
        contact.answered.now()
        return rows

    async def close(self) -> None:
        await self._connection.close()
