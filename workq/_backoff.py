"""Pauses between attempts: growing, capped, with jitter, so that many nodes do not come back in step."""

from __future__ import annotations

import random
from collections.abc import Iterator


def growing(first: float, cap: float) -> Iterator[float]:
    """Pauses in seconds, for ever: each about double the one before, at most `cap`, shortened by up to half."""
    pause = first
    while True:
        yield pause * random.uniform(0.5, 1)
        pause = min(pause * 2, cap)
