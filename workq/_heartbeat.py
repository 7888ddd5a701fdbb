"""Keeps held leases alive, and notices those that are lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta

from workq._caution import IMPATIENT, Caution
from workq._clock import Clock
from workq._held import Held, Holding
from workq._store import Store
from workq._task import Lease
from workq.dialect import Busy, Connection, Urgency


class Heartbeat:
    """One beat extends every lease with one statement."""

    def __init__(
        self,
        store: Store,
        connection: Connection,
        clock: Clock,
        holding: Holding,
        caution: Caution,
        lease: float,
        lost: Callable[[Held], None],
    ) -> None:
        self._store = store
        self._connection = connection
        self._clock = clock
        self._holding = holding
        self._caution = caution
        self._lease = timedelta(seconds=lease)
        self._urgency = Urgency(timeout=min(lease / 3, 5))
        self._brief = Urgency(timeout=self._urgency.timeout, lock_wait=min(IMPATIENT, self._urgency.timeout))
        self._lost = lost
        self._turn = asyncio.Lock()

    async def once(self) -> None:
        """Extend the leases of everything held; report those that are no longer ours."""
        async with self._turn:  # the claimer beats too, after a stall, and the connection is one
            await self._beat()

    async def _beat(self) -> None:
        # Also those in complete(tx): while its transaction is open, which is their lease, the statement skips them; one
        # that rolled back leaves a lease that must not run out.
        asked = [(held, held.lease) for held in self._holding if not held.lost]
        sent, wall = self._clock.monotonic(), self._clock.now()
        if not asked:
            return
        alive = await self._extended([lease for _, lease in asked])
        self._caution.looked(sent, wall)
        for held, lease in asked:
            extended = alive.get(lease[:2])
            # In complete(tx) the open transaction, which keeps the row locked, is the lease.
            if extended or (extended is False and held.completing and sent < held.alive_until):
                held.alive_until = sent + self._lease.total_seconds()
            if lease[:2] in alive or held.lease is not lease or held.ended:
                continue  # an ended one may have been written meanwhile
            if held.completing:
                held.committed = held.committed or self._clock.monotonic() < held.alive_until
                continue
            if self._holding.has(held):
                self._lost(held)

    async def _extended(self, leases: list[Lease]) -> dict[tuple[int, int], bool]:
        since = self._clock.monotonic()
        try:
            return await self._store.extend(self._connection, leases, self._lease, self._brief)
        except Busy:
            # Whoever had SQLite's writer for so long kept others from beating, too. An executor whose workers are all
            # busy sees that by its beats alone.
            self._caution.beat_waited(since)
            return await self._store.extend(self._connection, leases, self._lease, self._urgency)
