"""The one clock of the core: everything that waits or asks for the time does it here (or in the dialect)."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime

# Of Linux, and of macOS: time.monotonic() stands still there while the machine sleeps, and leases do not.
_SLEEPLESS = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))


class Clock:
    """The machine's clock and the loop's. A simulator brings its own."""

    def now(self) -> datetime:
        """The wall clock, aware, in UTC. It may jump; only SQLite's statements and events take it."""
        return datetime.fromtimestamp(time.time(), UTC)

    def monotonic(self) -> float:
        """Seconds that never go back, for durations; those in which the machine slept count, too."""
        return time.monotonic() if _SLEEPLESS is None else time.clock_gettime(_SLEEPLESS)

    async def sleep(self, seconds: float) -> None:
        """Let others run for so long."""
        await asyncio.sleep(seconds)
