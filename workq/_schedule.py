"""Schedules: from the last finish to the next run. `every`, `cron`, or any function of yours."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, TypeAlias, overload
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from workq._checks import check_aware, check_key
from workq._cron import Cron
from workq._outcome import LONGEST
from workq._spec import Handler, P, require_handler

When: TypeAlias = Callable[[datetime], datetime]


def every(*, seconds: float = 0, minutes: float = 0, hours: float = 0, days: float = 0) -> When:
    """The next run comes this long after the last one ended: elapsed time, whatever clocks are changed to.

    Raises ValueError unless the sum is positive and at most 100 years.
    """
    total = seconds + minutes * 60 + hours * 3600 + days * 86400
    if not 0 < total <= LONGEST:  # also refuses NaN
        raise ValueError(f"every() needs a positive time of at most 100 years, not {total!r} seconds")
    pause = timedelta(seconds=total)
    if not pause:
        raise ValueError(f"every() counts in microseconds; {total!r} seconds is less than one")

    def when(last: datetime) -> datetime:
        return last + pause

    return when


def cron(expression: str, /, *, tz: str = "UTC") -> When:
    """The next time that matches a cron expression, by the wall clock of time zone `tz`. Extra: `workq[cron]`.

    Five fields, or six with seconds first, or @hourly, @daily, @weekly, @monthly, @yearly. When clocks change, a fixed
    hour runs once: one that is skipped in spring runs when the gap ends, one that is repeated in autumn runs the first
    time; an hour with a wildcard runs as often as it comes. (As Debian's cron does.)

    Raises ValueError for an expression that never matches, or an unknown time zone.
    """
    try:
        zone = ZoneInfo(tz)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(f"unknown time zone {tz!r}; use a name such as 'Europe/Berlin' (or install tzdata)") from None
    return Cron(expression, zone).after


class Schedule:
    """A recurring task: one row per (queue, name, key), however many nodes register it. (W: Schedule; Q: TickerSpec.)

    Its first run is `when(now)` at the first registration ever; restarts do not move it. After a successful run the
    next is `when(finish)`, and the payload is stored as the handler left it. New code takes effect after the next run.

    Raises TypeError for what is no handler and for a `when` that cannot be called, PayloadError for a payload that the
    handler does not take or that cannot be stored, and ValueError for a key that cannot be stored.
    """

    __slots__ = ("handler", "key", "payload", "when")

    @overload
    def __init__(self, handler: Handler[None, Any], when: When, /, *, key: str = "") -> None: ...
    @overload
    def __init__(self, handler: Handler[P, Any], when: When, payload: P, /, *, key: str = "") -> None: ...
    def __init__(self, handler: Handler[Any, Any], when: When, payload: object = None, /, *, key: str = "") -> None:
        require_handler(handler)
        if not callable(when):
            raise TypeError(f"when must be every(...), cron(...) or a function from datetime to datetime, not {when!r}")
        check_key(key)
        try:
            codec = handler.codec()
        except TypeError:
            pass  # its annotation may name what is defined further down; the executor asks again
        else:
            codec.dumps(payload)
        self.handler: Handler[Any, Any] = handler
        self.when: When = when
        self.payload: object = payload
        self.key: str = key

    def __repr__(self) -> str:
        return f"<Schedule {self.handler.name!r} key={self.key!r}>"


SOONEST = timedelta(milliseconds=1)


def next_run(when: When, last: datetime) -> datetime:
    """The run after one that ended at `last`: never at or before it. Raises ValueError for what is no time."""
    following = when(last)
    if not isinstance(following, datetime):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"the schedule returned {following!r:.80} instead of a datetime")
    following = check_aware("what the schedule returned", following)
    if following > last + timedelta(seconds=LONGEST):
        raise ValueError(f"the schedule returned {following}, more than 100 years from now")
    return max(following, last + SOONEST)
