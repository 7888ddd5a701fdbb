"""The one clock of the core: everything that waits or asks for the time does it here (or in the dialect)."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime


class Clock:
    """The machine's clock and the loop's. A simulator brings its own."""

    def now(self) -> datetime:
        """The wall clock, aware, in UTC. It may jump; only SQLite's statements and events take it."""
        return datetime.fromtimestamp(time.time(), UTC)

    def monotonic(self) -> float:
        """Seconds that never go back, for durations."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Let others run for so long."""
        await asyncio.sleep(seconds)
