"""What this executor holds: every claimed task, from the claim until its end is written."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, TypeAlias

from workq._spec import Handler
from workq._task import Claimed, Lease

Why: TypeAlias = Literal["timeout", "stop", "lost"]


@dataclass(eq=False, slots=True)
class Held:
    """One claimed task."""

    claimed: Claimed
    lease: Lease
    """As claimed, or as renewed by a later claim of our own."""
    handler: Handler[Any, Any]
    received: float
    """When the claim's reply came, on the monotonic clock."""
    alive_until: float
    """When its lease runs out unless a beat extends it, on the monotonic clock."""
    job: asyncio.Task[None] | None = None
    begun: bool = False
    """The job has made its first step."""
    ended: bool = False
    """The handler has ended (or never started); only the write is left."""
    cancelled: Why | None = None
    """Why workq asked the handler to end."""
    lost: bool = False
    completing: bool = False
    """`complete(tx)` succeeded: the open transaction is the lease."""
    wants_completion: bool = False
    """`complete(tx)` was called, with whatever result: returning normally is no longer a success by itself."""
    committed: bool = False
    """The transaction of `complete(tx)` most likely was: its handler returned normally, or a beat within the lease no
    longer found the row."""
    refused: Exception | None = None
    """What the last call of `complete(tx)` raised."""
    moves_to: tuple[datetime, str] | None = None
    """What `complete(tx)` writes for a schedule: its next run and payload, as of the first call."""

    @property
    def running(self) -> bool:
        """Takes up a worker's place."""
        return self.job is not None and not self.job.done()

    def cancel(self, why: Why) -> None:
        """Ask the handler to end. A thread cannot be asked."""
        if self.job is None or self.ended:
            return
        if self.cancelled is None:
            self.cancelled = why
        if self.handler.is_async and self.begun:
            self.job.cancel()  # a job that has not begun sees by itself that it is not to run


class Holding:
    """All that is held, by id and version."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], Held] = {}
        self.recovered: int = 0
        """How many of them a vanished process held before."""
        self.empty: asyncio.Event = asyncio.Event()
        self.empty.set()

    def __iter__(self) -> Iterator[Held]:
        return iter(tuple(self._held.values()))

    def __len__(self) -> int:
        return len(self._held)

    def add(self, held: Held) -> None:
        """Begin to hold."""
        before = self._held.get(held.lease[:2])  # a lost one, perhaps, whose handler has not ended yet
        if before is not None:
            self.remove(before)
        self._held[held.lease[:2]] = held
        self.recovered += held.claimed.lost > 0
        self.empty.clear()

    def remove(self, held: Held) -> None:
        """Its end is written, or it is no longer ours."""
        if self._held.get(held.lease[:2]) is held:
            del self._held[held.lease[:2]]
            self.recovered -= held.claimed.lost > 0
        if not self._held:
            self.empty.set()

    def renew(self, lease: Lease, alive_until: float) -> bool:
        """Is this a claim of a task that runs here? Then its lease is the new one.

        One version on: the lease had run out. The same version: a crash of the server undid the claim that began it.
        """
        for version in (lease.version - 1, lease.version):
            held = self._held.get((lease.id, version))
            if held is not None and not held.lost:
                del self._held[lease.id, version]
                held.lease = lease
                held.alive_until = alive_until
                self._held[lease[:2]] = held
                return True
        return False

    def has(self, held: Held) -> bool:
        """Still held, under the lease it has now."""
        return self._held.get(held.lease[:2]) is held
