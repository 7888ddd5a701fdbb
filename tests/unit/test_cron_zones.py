"""`cron` by the wall clocks of the world: at every change of clocks from 2020 to 2035 the next run is the right one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from random import Random
from zoneinfo import ZoneInfo, available_timezones

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workq
from workq._schedule import next_run

FIRST, LAST = datetime(2020, 1, 1, tzinfo=UTC), datetime(2036, 1, 1, tzinfo=UTC)
MINUTE, DAY = timedelta(minutes=1), timedelta(days=1)
FARTHEST_SHIFT = timedelta(hours=3)

# Half an hour (Lord Howe), two hours (Troll), twice a year round Ramadan (Casablanca, El_Aaiun), at midnight (Beirut,
# Santiago, Cairo), at the end of the day (Nuuk), on other days of the week (Gaza), winter as the exception (Dublin),
# quarters of hours (Chatham), changes that came and went (Sao_Paulo, Tehran, Asuncion, Fort_Nelson, Almaty).
ODD = (
    "Australia/Lord_Howe", "Antarctica/Troll", "Africa/Casablanca", "Africa/El_Aaiun", "Asia/Beirut",
    "America/Santiago", "Africa/Cairo", "America/Nuuk", "Asia/Gaza", "Europe/Dublin", "Pacific/Chatham",
    "America/Sao_Paulo", "Asia/Tehran", "America/Asuncion", "America/Fort_Nelson", "Asia/Almaty",
    "Europe/Berlin", "America/New_York", "Pacific/Easter", "Atlantic/Azores", "Asia/Kathmandu", "UTC",
)  # fmt: skip
EVERY = sorted(available_timezones())
SAMPLE = sorted({*ODD, *Random(48).sample(EVERY, 30)} & set(EVERY))
zones = pytest.mark.parametrize("names", [SAMPLE, pytest.param(EVERY, marks=pytest.mark.slow)], ids=["some", "every"])


@dataclass(frozen=True)
class Fixed:
    """At certain times of certain days: what the clocks skip runs when the gap ends, what they repeat runs once."""

    hours: tuple[int, ...]
    minutes: tuple[int, ...]
    weekday: int | None = None
    """1 for Monday to 7; None: daily."""

    def __str__(self) -> str:
        hours, minutes = (",".join(map(str, field)) for field in (self.hours, self.minutes))
        return f"{minutes} {hours} * * {'*' if self.weekday is None else self.weekday % 7}"

    @property
    def longest(self) -> timedelta:
        return (DAY if self.weekday is None else 7 * DAY) + FARTHEST_SHIFT

    def after(self, last: datetime, zone: ZoneInfo) -> datetime:
        """The next run, found by going through days."""
        today = last.astimezone(zone).date() - DAY
        moments = (
            moment_of(datetime.combine(today + n * DAY, time(hour, minute)), zone)
            for n in range(10)
            if self.weekday in (None, (today + n * DAY).isoweekday())
            for hour in self.hours
            for minute in self.minutes
        )
        return min(moment for moment in moments if moment > last)


@dataclass(frozen=True)
class Every:
    """In every hour, as often as it comes."""

    minutes: str
    at: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.minutes} * * * *"

    @property
    def longest(self) -> timedelta:
        return timedelta(hours=1) + FARTHEST_SHIFT

    def after(self, last: datetime, zone: ZoneInfo) -> datetime:
        """The next run, found by going through minutes."""
        moment = last.replace(second=0, microsecond=0) + MINUTE
        while moment.astimezone(zone).minute not in self.at:
            moment += MINUTE
        return moment


def moment_of(wall: datetime, zone: ZoneInfo) -> datetime:
    """When a wall clock shows this, the first time; where it never does, the end of the gap."""
    moment = wall.replace(tzinfo=zone).astimezone(UTC)
    if moment.astimezone(zone).replace(tzinfo=None) == wall:
        return moment
    # fold=0 reads a skipped time by the offset before the gap, fold=1 by the one after it.
    low, high = sorted(wall.replace(tzinfo=zone, fold=fold).astimezone(UTC) for fold in (0, 1))
    return change_between(low, high, zone)


def offset(moment: datetime, zone: ZoneInfo) -> timedelta:
    found = moment.astimezone(zone).utcoffset()
    assert found is not None
    return found


def change_between(low: datetime, high: datetime, zone: ZoneInfo) -> datetime:
    """The first instant of the new offset."""
    before = offset(low, zone)
    while high - low > timedelta(seconds=1):
        middle = low + (high - low) / 2
        low, high = (middle, high) if offset(middle, zone) == before else (low, middle)
    return high.replace(microsecond=0)


@functools.cache
def changes_of(name: str) -> tuple[datetime, ...]:
    """Every change of one zone's clocks from 2020 to 2035."""
    zone, week = ZoneInfo(name), timedelta(days=7)
    weeks = [FIRST + n * week for n in range((LAST - FIRST) // week)]
    return tuple(
        change_between(low, high, zone)
        for low, high in zip(weeks, weeks[1:], strict=False)
        if offset(low, zone) != offset(high, zone)
    )


def amid(change: datetime, zone: ZoneInfo, random: Random) -> datetime:
    """By the wall clock: some minute of what is skipped, or of what comes twice."""
    before, after = offset(change - MINUTE, zone), offset(change, zone)
    wall = change.replace(tzinfo=None) + min(before, after) + random.random() * abs(after - before)
    return wall.replace(second=0, microsecond=0)


def fixed_round(wall: datetime, random: Random) -> Iterator[Fixed]:
    """Patterns that meet this minute, and one that comes near it."""
    yield Fixed((wall.hour,), (wall.minute,))
    yield Fixed((wall.hour,), (wall.minute,), weekday=wall.isoweekday())
    yield Fixed(tuple(sorted({wall.hour, (wall.hour + 1) % 24})), tuple(sorted({0, wall.minute})))
    yield Fixed((random.randrange(24),), (random.randrange(60),))


def hourly_round(wall: datetime, random: Random) -> Iterator[Every]:
    """Patterns of every hour."""
    yield Every("*/15", (0, 15, 30, 45))
    yield Every(str(wall.minute), (wall.minute,))
    few = tuple(sorted(random.sample(range(60), 4)))
    yield Every(",".join(map(str, few)), few)


def wrong(pattern: Fixed | Every, last: datetime, name: str) -> str | None:
    """What is wrong with the run after `last`; None: nothing."""
    zone = ZoneInfo(name)
    found, wanted = workq.cron(str(pattern), tz=name)(last), pattern.after(last, zone)
    if found.tzinfo is not UTC or not last < found <= last + pattern.longest or found != wanted:
        return (
            f"{name} {pattern}: after {last.astimezone(zone)} comes {wanted.astimezone(zone)}, "
            f"not {found.astimezone(zone)}"
        )
    return None


@zones
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("patterns_round", [fixed_round, hourly_round])
def test_at_every_change_of_clocks_the_next_run_is_the_next_moment_that_fits(
    names: list[str], patterns_round: Callable[[datetime, Random], Iterator[Fixed | Every]]
) -> None:
    """F48: aware, in the future, no later than its pattern allows, whenever the last run ended."""
    changing, mistakes = 0, list[str]()
    for name in names:
        random, zone = Random(name), ZoneInfo(name)
        changing += changes_of(name) != ()
        for change in changes_of(name):
            for pattern in patterns_round(amid(change, zone, random), random):
                for near in (timedelta(hours=3), timedelta(hours=3), timedelta(days=2)):
                    found = wrong(pattern, change + near * random.uniform(-1, 1), name)
                    mistakes += [] if found is None else [found]
    assert changing > len(names) / 4
    assert len(mistakes) == 0, mistakes[:5]


@st.composite
def moments(draw: st.DrawFn) -> tuple[str, datetime]:
    """A zone, and an instant within hours of a change of its clocks, or anywhere."""
    name = draw(st.sampled_from(EVERY))
    known = changes_of(name)
    if known and draw(st.booleans()):
        last = draw(st.sampled_from(known)) + draw(st.timedeltas(-DAY, DAY))
    else:
        last = FIRST + draw(st.timedeltas(timedelta(0), LAST - FIRST - 30 * DAY))
    return name, last


minutes = st.sets(st.integers(0, 59), min_size=1, max_size=3).map(sorted).map(tuple)
fixed = st.builds(
    Fixed,
    st.sets(st.integers(0, 23), min_size=1, max_size=3).map(sorted).map(tuple),
    minutes,
    st.none() | st.integers(1, 7),
)
in_every_hour = minutes.map(lambda at: Every(",".join(map(str, at)), at))


@settings(deadline=None, max_examples=400)
@given(moments(), fixed | in_every_hour)
def test_in_any_zone_at_any_time_the_next_run_is_the_next_moment_that_fits(
    at: tuple[str, datetime], pattern: Fixed | Every
) -> None:
    """F48."""
    name, last = at
    assert wrong(pattern, last, name) is None


@pytest.mark.parametrize(
    ("name", "last", "pattern"),
    [
        pytest.param("Europe/Berlin", "2025-10-26T01:10Z", Fixed((2,), (30,)), id="in the repeated hour"),
        pytest.param("Europe/Berlin", "2025-03-30T00:59Z", Fixed((2,), (30,)), id="before a skipped hour"),
        pytest.param("Europe/Berlin", "2025-03-30T01:00Z", Fixed((2,), (30,)), id="after a skipped hour"),
        pytest.param("Australia/Lord_Howe", "2020-04-04T14:54Z", Every("32", (32,)), id="a repeated half hour"),
        pytest.param("Antarctica/Troll", "2025-03-30T00:59Z", Fixed((1,), (30,)), id="two skipped hours"),
        pytest.param("Africa/Cairo", "2024-04-25T21:59Z", Fixed((0,), (0, 30)), id="a skipped midnight"),
        pytest.param("Africa/Cairo", "2024-10-31T21:12Z", Fixed((23,), (15,)), id="a repeated end of the day"),
    ],
)
def test_a_known_trap_is_passed(name: str, last: str, pattern: Fixed | Every) -> None:
    """F48."""
    assert wrong(pattern, datetime.fromisoformat(last), name) is None


@zones
@pytest.mark.timeout(1200)
def test_a_fixed_time_runs_once_a_day_however_long_the_runs_take(names: list[str]) -> None:
    """F48: over every change of clocks, a run that ends in the repeated hour does not start another."""
    for name in names:
        random, zone = Random(name), ZoneInfo(name)
        for change in changes_of(name):
            wall = amid(change, zone, random)
            pattern = Fixed((wall.hour,), (wall.minute,))
            when, last = workq.cron(str(pattern), tz=name), change - 3 * DAY
            days: list[date] = []
            while (run := next_run(when, last)) < change + 3 * DAY:
                # What a gap skipped belongs to its own day, even if the gap ends on the next one.
                late = run == change and moment_of(wall, zone) == change
                days.append(wall.date() if late else run.astimezone(zone).date())
                last = run + timedelta(hours=random.uniform(0, 2.5))
            assert days == [days[0] + n * DAY for n in range(len(days))], (name, str(pattern), days)
            assert len(days) >= 5


@zones
def test_six_fields_keep_the_rule_of_fixed_hours(names: list[str]) -> None:
    """F48: second 0 written out is the same pattern."""
    for name in names:
        random, zone = Random(name), ZoneInfo(name)
        for change in changes_of(name):
            wall = amid(change, zone, random)
            pattern = Fixed((wall.hour,), (wall.minute,))
            five, six = workq.cron(str(pattern), tz=name), workq.cron(f"0 {pattern}", tz=name)
            for hours in (-30, -3, -0.5):
                last = change + timedelta(hours=hours)
                assert six(last) == five(last), (name, str(pattern), last)
