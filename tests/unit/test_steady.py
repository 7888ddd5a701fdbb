"""A loop that attempts again and again: what it says of itself."""

from __future__ import annotations

from workq._clock import Clock
from workq._steady import Steady
from workq.dialect import NotNow


async def test_a_loop_that_has_nothing_to_attempt_fails_no_more() -> None:
    """F18: what failed before the workers were all busy says nothing of the database now."""
    steady = Steady("claims", Clock())

    async def fail() -> None:
        raise NotNow("for a moment")

    await steady.attempt(fail)
    assert steady.failing
    assert steady.fails_for(-1)
    steady.rests()
    assert not steady.failing
    assert not steady.fails_for(-1)
