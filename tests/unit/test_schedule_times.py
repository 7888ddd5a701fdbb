"""When a schedule runs next: `every`, `cron`, and what is made of any function's answer."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo, available_timezones

import pytest
from hypothesis import given
from hypothesis import strategies as st

import workq
from workq._cron import ALIASES
from workq._schedule import next_run

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
BERLIN = "Europe/Berlin"
INSTANTS = st.integers(0, 40_000 * 86_400).map(lambda second: datetime.fromtimestamp(second, UTC))


def runs(when: workq.When, start: datetime, end: datetime) -> Iterator[datetime]:
    """Every run after `start` and up to `end`, each asked for from the one before."""
    last = start
    while (last := next_run(when, last)) <= end:
        yield last


def local(moment: datetime, tz: str = BERLIN) -> str:
    return f"{moment.astimezone(ZoneInfo(tz)):%d %H:%M %Z}"


def test_every_adds_its_units() -> None:
    assert workq.every(days=1, hours=2, minutes=3, seconds=4.5)(NOON) == NOON + timedelta(
        days=1, hours=2, minutes=3, seconds=4.5
    )


def test_every_counts_elapsed_time_whatever_clocks_are_changed_to() -> None:
    """F48: a day is 24 hours, also over a change of clocks."""
    before = datetime(2025, 3, 29, 12, tzinfo=ZoneInfo(BERLIN))
    assert next_run(workq.every(days=1), before.astimezone(UTC)) - before == timedelta(hours=24)


@pytest.mark.parametrize(
    "units",
    [
        {},
        {"seconds": 0},
        {"seconds": -1},
        {"hours": 1, "minutes": -60},
        {"seconds": float("nan")},
        {"seconds": float("inf")},
        {"seconds": 1e-7},
        {"days": 366 * 101},
    ],
    ids=str,
)
def test_every_refuses_what_is_no_positive_time_of_at_most_a_century(units: dict[str, float]) -> None:
    """F45."""
    with pytest.raises(ValueError, match="every"):
        workq.every(**units)


def test_a_next_run_is_in_utc_whatever_zone_it_was_said_in() -> None:
    """F49: results are always aware and in UTC."""
    tokyo = timezone(timedelta(hours=9))
    found = next_run(lambda last: (last + timedelta(hours=1)).astimezone(tokyo), NOON)
    assert found == NOON + timedelta(hours=1)
    assert found.tzinfo is UTC


@given(last=INSTANTS, back=st.timedeltas(timedelta(0), timedelta(days=365)))
def test_a_next_run_is_never_before_the_finish_and_a_millisecond(last: datetime, back: timedelta) -> None:
    assert next_run(lambda finish: finish - back, last) == last + timedelta(milliseconds=1)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (NOON.replace(tzinfo=None), "naive"),
        (None, "None"),
        (3600, "3600"),
        ("2026-01-02T00:00:00Z", "2026-01-02"),
        (date(2026, 1, 2), "2026"),
        (datetime(2500, 1, 1, tzinfo=UTC), "100 years"),
        (datetime.max.replace(tzinfo=timezone(timedelta(hours=-12))), "9999"),
    ],
    ids=str,
)
def test_what_is_no_time_is_refused_and_shown(answer: Any, says: str) -> None:
    """F49."""
    with pytest.raises(ValueError, match=says):
        next_run(lambda last: answer, NOON)


def test_what_the_function_raises_comes_through() -> None:
    def when(last: datetime) -> datetime:
        raise LookupError("no calendar")

    with pytest.raises(LookupError, match="no calendar"):
        next_run(when, NOON)


SPRING = (datetime(2025, 3, 29, 12, tzinfo=UTC), datetime(2025, 3, 31, 12, tzinfo=UTC))
AUTUMN = (datetime(2025, 10, 25, 12, tzinfo=UTC), datetime(2025, 10, 27, 12, tzinfo=UTC))


def test_a_fixed_hour_that_spring_skips_runs_when_the_gap_ends() -> None:
    """F48."""
    found = [local(moment) for moment in runs(workq.cron("30 2 * * *", tz=BERLIN), *SPRING)]
    assert found == ["30 03:00 CEST", "31 02:30 CEST"]


def test_a_fixed_hour_that_autumn_repeats_runs_once_the_first_time() -> None:
    """F48."""
    found = [local(moment) for moment in runs(workq.cron("30 2 * * *", tz=BERLIN), *AUTUMN)]
    assert found == ["26 02:30 CEST", "27 02:30 CET"]


def test_a_wildcard_runs_as_often_as_the_hour_comes() -> None:
    """F48."""
    found = [local(moment) for moment in runs(workq.cron("*/30 * * * *", tz=BERLIN), *AUTUMN)]
    assert [moment for moment in found if moment.startswith("26 02")] == [
        "26 02:00 CEST",
        "26 02:30 CEST",
        "26 02:00 CET",
        "26 02:30 CET",
    ]
    spring = [local(moment) for moment in runs(workq.cron("*/30 * * * *", tz=BERLIN), *SPRING)]
    at = spring.index("30 03:00 CEST")
    assert spring[at - 1] == "30 01:30 CET"


def test_two_fixed_hours_round_the_repeated_one_run_once_each() -> None:
    """F48."""
    found = [local(moment) for moment in runs(workq.cron("0 2,3 * * *", tz=BERLIN), *AUTUMN)]
    assert [moment for moment in found if moment.startswith("26")] == ["26 02:00 CEST", "26 03:00 CET"]


def test_cron_is_in_utc_unless_told_otherwise() -> None:
    assert workq.cron("30 2 * * *")(NOON) == datetime(2026, 1, 2, 2, 30, tzinfo=UTC)
    assert workq.cron("30 2 * * *")(NOON).tzinfo is UTC


def test_cron_takes_seconds_first_when_there_are_six_fields() -> None:
    assert workq.cron("*/20 * * * * *")(NOON) == NOON + timedelta(seconds=20)


@pytest.mark.parametrize("alias", ALIASES)
def test_cron_knows_the_usual_names(alias: str) -> None:
    assert workq.cron(alias)(NOON) == workq.cron(ALIASES[alias])(NOON)
    assert workq.cron(f" {alias.upper()} ")(NOON) == workq.cron(alias)(NOON)


@pytest.mark.parametrize("expression", ["", "* * * *", "61 * * * *", "0 0 30 2 *", "hourly", "@reboot", "a b c d e"])
def test_an_expression_that_never_matches_is_refused_at_once(expression: str) -> None:
    with pytest.raises(ValueError, match="cron expression"):
        workq.cron(expression)


@pytest.mark.parametrize("tz", ["Berlin", "", "/etc/passwd", "../UTC", "Europe/Berlin\0"])
def test_an_unknown_zone_is_refused_at_once(tz: str) -> None:
    with pytest.raises(ValueError, match="zone"):
        workq.cron("@daily", tz=tz)


EXPRESSIONS = st.sampled_from(["30 2 * * *", "*/7 * * * *", "0 0 29 2 *", "0 12 * * 1-5", "@monthly"])


@given(last=INSTANTS, expression=EXPRESSIONS)
def test_cron_always_moves_on(last: datetime, expression: str) -> None:
    assert workq.cron(expression, tz=BERLIN)(last) > last


class Change(NamedTuple):
    """A change of clocks: the instant, and the local hours before and after it."""

    tz: str
    at: datetime
    gained: timedelta


def offset(zone: ZoneInfo, moment: datetime) -> timedelta:
    found = moment.astimezone(zone).utcoffset()
    assert found is not None
    return found


@functools.cache
def changes() -> list[Change]:
    """Every change of clocks from 2020 to 2035, in one zone of each kind."""
    days = [datetime(2020, 1, 1, tzinfo=UTC) + timedelta(days=10 * n) for n in range(585)]
    found: list[Change] = []
    seen: set[tuple[timedelta, ...]] = set()
    for name in sorted(available_timezones()):
        zone = ZoneInfo(name)
        offsets = tuple(offset(zone, day) for day in days)
        if offsets in seen:
            continue
        seen.add(offsets)
        for low, high, before, after in zip(days, days[1:], offsets, offsets[1:], strict=False):
            if before == after:
                continue
            while high - low > timedelta(seconds=1):
                middle = low + (high - low) / 2
                if offset(zone, middle) == before:
                    low = middle
                else:
                    high = middle
            found.append(Change(name, high.replace(microsecond=0), after - before))
    return found


def amid(change: Change) -> datetime:
    """By the wall clock: the middle of what is skipped, or of what comes twice."""
    zone = ZoneInfo(change.tz)
    before, after = (offset(zone, change.at + timedelta(seconds=second)) for second in (-1, 1))
    return change.at + min(before, after) + abs(change.gained) / 2


def day_of(moment: datetime, change: Change) -> date:
    """The local day that a run belongs to: one that was skipped runs when the gap ends, which may be tomorrow."""
    late = moment == change.at and change.gained > timedelta(0)
    return amid(change).date() if late else moment.astimezone(ZoneInfo(change.tz)).date()


def test_at_every_change_of_clocks_a_fixed_time_runs_once_a_day() -> None:
    """F48: over every zone's transitions from 2020 to 2035, the skipped and the repeated hour included."""
    assert len(changes()) > 500
    for change in changes():
        wall = amid(change)
        when = workq.cron(f"{wall.minute} {wall.hour} * * *", tz=change.tz)
        around = list(runs(when, change.at - timedelta(days=2), change.at + timedelta(days=2)))
        days = [day_of(moment, change) for moment in around]
        assert days == [days[0] + timedelta(days=n) for n in range(len(days))], (change, around)
        assert len(days) >= 3


def test_at_every_change_of_clocks_a_wildcard_keeps_its_pace() -> None:
    """F48: no run skipped, none repeated, and it never stays on the repeated hour."""
    for change in changes():
        when = workq.cron("*/30 * * * *", tz=change.tz)
        found = list(runs(when, change.at - timedelta(hours=2), change.at + timedelta(hours=2)))
        steps = {later - earlier for earlier, later in zip(found, found[1:], strict=False)}
        assert steps == {timedelta(minutes=30)}, (change, found)
