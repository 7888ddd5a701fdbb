"""How a run ends: values that a handler returns (its own transaction commits) or raises (it rolls back)."""

from __future__ import annotations

from typing import TypeAlias


class Outcome(Exception):
    """Base class of the results a handler can return or raise. (Q: "Result Actions".)

    One raised inside a TaskGroup arrives in an ExceptionGroup: a group that holds exactly one outcome is that outcome.
    """


class Done(Outcome):
    """The run succeeded; the same as returning None. A one-shot task is deleted, a schedule moves on."""

    def __init__(self) -> None:
        super().__init__()


class Retry(Outcome):
    """The run failed; try again as the handler's policy says, or `linear()` where it has none.

    `after` (seconds) says when, the policy still says whether.
    """

    def __init__(self, error: BaseException | str | None = None, *, after: float | None = None) -> None:
        super().__init__(*(() if error is None else (error,)))
        self.error: BaseException | str | None = error
        self.after: float | None = None if after is None else seconds("after", after)


class Fail(Outcome):
    """The run failed and is never retried; the row is kept until `retry` or `delete`."""

    def __init__(self, error: BaseException | str) -> None:
        super().__init__(error)
        self.error: BaseException | str = error


class Skip(Outcome):
    """For schedules: this run came to nothing, go on at the next time, payload saved. One-shot: the same as Fail."""

    def __init__(self, error: BaseException | str | None = None) -> None:
        super().__init__(*(() if error is None else (error,)))
        self.error: BaseException | str | None = error


class Later(Outcome):
    """Run again after `delay` seconds, without spending an attempt; the payload is saved as it is now."""

    def __init__(self, delay: float) -> None:
        super().__init__(delay)
        self.delay: float = seconds("delay", delay)


Result: TypeAlias = Done | Retry | Fail | Skip | Later | None

LONGEST = 100 * 366 * 86400.0
"""Seconds: no delay reaches further, so that no date overflows."""


def seconds(what: str, value: object) -> float:
    """Check a duration given by a user. Raises ValueError or TypeError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{what} must be a number of seconds, not {value!r:.60}")
    if value != value or value < 0:  # NaN is not itself
        raise ValueError(f"{what} must be a number of seconds from 0 on, not {value!r:.60}")
    if value > LONGEST:
        raise ValueError(f"{what} is {value!r:.60} seconds; at most 100 years ({LONGEST:.0f}) can be stored")
    return float(value)
