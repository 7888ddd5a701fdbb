"""Rings for other processes: at most one statement every few milliseconds, however much is enqueued."""

from __future__ import annotations

import asyncio
import logging
import secrets
from functools import partial

from workq._describe import one_line
from workq._shared import Shared
from workq.dialect import Connection, Dialect, Urgency

logger = logging.getLogger("workq")

EVERY = 0.003
"""Seconds between rings of one process; 8,300 commits a second from 16 producers with it, 8,000 without any."""
BUSY = 0.012
"""Seconds between them while tasks come without a pause: who hears them is awake already."""


class Announcer:
    """Tells other processes which queues have new tasks. A ring is a hint; polling alone suffices."""

    def __init__(self, dialect: Dialect, shared: Shared) -> None:
        self._statement = dialect.sql.ring
        self._channel = dialect.sql.names.channel
        self._shared = shared
        self._sender = secrets.token_hex(4)
        self._queues: set[str] = set()
        self._job: asyncio.Task[None] | None = None

    def ring(self, queue: str) -> None:
        """Wake the executors of this queue in other processes."""
        if self._statement is None:
            return
        self._queues.add(queue)
        if self._job is None:
            self._job = asyncio.get_running_loop().create_task(self._run(), name="workq ring")

    def queue_in(self, message: str | None) -> tuple[bool, str | None]:
        """Is this ring for us, and for which queue (None: any)? Our own were rung by hand already."""
        if message is None:
            return True, None
        sender, _, queue = message.partition(" ")
        return sender != self._sender, queue

    async def _run(self) -> None:
        try:
            pause = EVERY
            while self._queues:
                messages = [f"{self._sender} {queue}" for queue in self._queues]
                self._queues.clear()
                try:
                    await self._shared.run_here(partial(self._notify, messages))
                except Exception as error:
                    logger.debug("a ring failed: %s", one_line(error))
                await asyncio.sleep(pause)
                pause = min(pause * 1.2, BUSY)
        finally:
            self._job = None

    async def _notify(self, messages: list[str], connection: Connection) -> None:
        assert self._statement is not None
        await connection.fetch(self._statement, {"channel": self._channel, "messages": messages}, Urgency(timeout=5))
