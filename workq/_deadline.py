"""How long a loop waits for the reply to a statement."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from workq._clock import Clock
from workq.dialect import Interrupted

T = TypeVar("T")

SHORT = 4.0
"""Seconds: a connection that died without a word must not keep work from going on within 5 s."""
LONGEST = 10.0


class Deadline:
    """Short, as long as the database is quick; longer after a statement that took long or was not answered."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.seconds: float = SHORT

    async def meet(self, send: Callable[[float], Awaitable[T]]) -> T:
        """Send a statement with so many seconds. Raises what it raises."""
        sent = self._clock.monotonic()
        try:
            result = await send(self.seconds)
        except Interrupted as error:
            if isinstance(error.__cause__, TimeoutError):
                self.seconds = min(2 * self.seconds, LONGEST)
            raise
        self.seconds = min(max(SHORT, 3 * (self._clock.monotonic() - sent)), LONGEST)
        return result
