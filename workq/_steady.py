"""No error ends a loop: one pass is attempted, its failure logged, and the next one comes after a pause."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import TypeVar

from workq._backoff import growing
from workq._clock import Clock
from workq._describe import one_line
from workq.dialect import Interrupted, Unreachable, WriterBusy

logger = logging.getLogger("workq")

T = TypeVar("T")


class Steady:
    """The attempts of one loop, and when it last succeeded."""

    def __init__(self, name: str, clock: Clock, *, longest: float = 2) -> None:
        self.name = name
        self.succeeded_at: datetime | None = None
        self._clock = clock
        self._longest = longest
        self._pauses = growing(0.05, longest)
        self.failing = False

    async def attempt(self, once: Callable[[], Awaitable[T]]) -> tuple[T | None, float]:
        """Run one pass. Returns its result, and the pause before the next: 0 unless it failed."""
        try:
            result = await once()
        except Exception as error:
            return None, self._failed(error)
        if self.failing:
            logger.info("%s: working again", self.name)
            self.failing = False
            self._pauses = growing(0.05, self._longest)
        self.succeeded_at = self._clock.now()
        return result, 0

    def _failed(self, error: Exception) -> float:
        pause = next(self._pauses)
        expected = isinstance(error, Interrupted | Unreachable | WriterBusy)
        cause = error.__cause__ if expected and error.__cause__ is not None else error
        text = f"{error}: {one_line(cause)}" if cause is not error else one_line(error)
        if self.failing:
            logger.debug("%s failed again, next try in %.2g s: %s", self.name, pause, text)
        else:
            logger.warning("%s failed, will go on trying: %s", self.name, text, exc_info=None if expected else error)
        self.failing = True
        return pause
