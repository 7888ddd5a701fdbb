"""Retry policies: functions of the failed runs so far (this one included) and the error, to seconds or None."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeAlias

from workq._outcome import LONGEST, seconds

RetryPolicy: TypeAlias = Callable[[int, BaseException], float | None]

DEFAULT_RETRIES = 3


def linear(*, retries: int = DEFAULT_RETRIES, delay: float = 30) -> RetryPolicy:
    """`retries` further runs, the n-th after n x `delay` seconds. (Q: try * RetryDelay, MaxRetries, RetryDelay.)

    0 retries: none; negative: the default of 3. Raises ValueError for a negative delay.
    """
    wait, most = seconds("delay", delay), _retries(retries, DEFAULT_RETRIES)

    def policy(failed: int, error: BaseException) -> float | None:
        return None if failed > most else min(failed * wait, LONGEST)

    return policy


def exponential(
    *, retries: int = 5, delay: float = 1, factor: float = 2, cap: float = 3600, jitter: float = 0.1
) -> RetryPolicy:
    """`retries` further runs after `delay`, `delay` x `factor`, ... seconds, at most `cap`, each longer by up to
    `jitter` of itself, so that tasks that failed together do not come back together.

    0 retries: none; negative: the default of 5. Raises ValueError for nonsense.
    """
    wait, highest, most = seconds("delay", delay), seconds("cap", cap), _retries(retries, 5)
    if not 1 <= factor <= 1000:
        raise ValueError(f"factor must be from 1 to 1000, not {factor!r}")
    if not 0 <= jitter <= 1:
        raise ValueError(f"jitter must be from 0 to 1, not {jitter!r}")

    def policy(failed: int, error: BaseException) -> float | None:
        if failed > most:
            return None
        try:
            grown = wait * float(factor) ** (failed - 1)
        except OverflowError:  # a float ends at 1e308
            grown = highest if wait else 0.0
        return min(grown, highest) * (1 + jitter * random.random())

    return policy


def _retries(given: int, default: int) -> int:
    if isinstance(given, bool) or not isinstance(given, int):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"retries must be an int, not {given!r:.60}")
    return default if given < 0 else given
