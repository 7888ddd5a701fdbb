"""`Deadline`: short while the database is quick, so that a dead connection is noticed soon."""

from __future__ import annotations

import pytest

from workq._clock import Clock
from workq._deadline import LONGEST, SHORT, Deadline
from workq.dialect import Interrupted


class Moved(Clock):
    def __init__(self) -> None:
        self.time = 0.0

    def monotonic(self) -> float:
        return self.time


async def test_a_statement_without_an_answer_gives_the_next_one_more_time() -> None:
    """back again: and an answer gives the usual again, three times what it took at least."""
    clock = Moved()
    deadline = Deadline(clock)

    async def silent(seconds: float) -> None:
        raise Interrupted("too slow") from TimeoutError()

    async def broken(seconds: float) -> None:
        raise Interrupted("broken") from OSError()

    async def takes(seconds: float) -> None:
        clock.time += seconds / 2

    async def quick(seconds: float) -> None: ...

    with pytest.raises(Interrupted):
        await deadline.meet(broken)
    assert deadline.seconds == SHORT
    for expected in (2 * SHORT, LONGEST, LONGEST):
        with pytest.raises(Interrupted):
            await deadline.meet(silent)
        assert deadline.seconds == expected
    await deadline.meet(takes)
    assert deadline.seconds == LONGEST
    await deadline.meet(quick)
    assert deadline.seconds == SHORT
