"""No error ends a loop: one pass is attempted, its failure logged, and the next one comes after a pause."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from workq._backoff import growing
from workq._clock import Clock
from workq._describe import frames_of, one_line
from workq._health import Success
from workq.dialect import Busy, Interrupted, Unreachable

logger = logging.getLogger("workq")

T = TypeVar("T")

PATIENCE = 10.0
"""Seconds of a busy SQLite writer before the log says so."""


class Steady:
    """The attempts of one loop, and when it last succeeded."""

    def __init__(self, name: str, clock: Clock, *, longest: float = 2) -> None:
        self.name = name
        self.succeeded = Success(clock)
        self._clock = clock
        self._longest = longest
        self._pauses = growing(0.05, longest)
        self.failing = False
        self._failing_since = 0.0
        self._first_began = 0.0
        self._warned = False

    async def attempt(self, once: Callable[[], Awaitable[T]]) -> tuple[T | None, float]:
        """Run one pass. Returns its result, and the pause before the next: 0 unless it failed."""
        began = self._clock.monotonic()
        try:
            result = await once()
        except Exception as error:
            return None, self._failed(error, began)
        if self.failing:
            if self._warned:
                logger.info("%s: working again", self.name)
            self._forget()
        self.succeeded.now()
        return result, 0

    def _forget(self) -> None:
        self.failing = self._warned = False
        self._pauses = growing(0.05, self._longest)

    def rests(self) -> None:
        """There is nothing to attempt: what failed before says nothing of now."""
        if self.failing:
            self._forget()

    def fails_for(self, seconds: float) -> bool:
        """Has every attempt failed that was begun in the last so many seconds?"""
        return self.failing and self._clock.monotonic() - self._first_began > seconds

    def _failed(self, error: Exception, began: float) -> float:
        pause = next(self._pauses)
        now = self._clock.monotonic()
        if not self.failing:
            self.failing, self._failing_since, self._first_began = True, now, began
        expected = isinstance(error, Interrupted | Unreachable | Busy)
        # A transaction of the application's that keeps SQLite's writer for some seconds is nobody's fault.
        quiet = self._warned or (isinstance(error, Busy) and now - self._failing_since < PATIENCE)
        self._warned = self._warned or not quiet
        cause = error.__cause__ if expected and error.__cause__ is not None else error
        logger.log(
            logging.DEBUG if quiet else logging.WARNING,
            "%s failed and is tried again: %s",
            self.name,
            one_line(error) if cause is error else f"{error}: {one_line(cause)}",
            exc_info=None if expected or quiet else frames_of(error),
        )
        return pause
