"""How much to claim ahead: the rule, told of ends and times."""

from __future__ import annotations

import itertools

import pytest

from workq._ahead import HORIZON, MOST, MOST_TEXT, PENALTIES, Ask, Pace, ask


def paced(workers: int, *, ended: int, seconds: float, times: int = 20, size: int = 10) -> Pace:
    """After so many measures of the same kind."""
    pace = Pace(workers, enabled=True)
    for turn in range(times):
        pace.page(turn * seconds, [size] * 10, full=True, ended=turn * ended)
        pace.measure((turn + 1) * seconds, (turn + 1) * ended)
    return pace


@pytest.mark.parametrize("workers", [1, 4, 16, 64])
def test_quick_handlers_get_what_they_use_within_the_horizon(workers: int) -> None:
    assert paced(workers, ended=100, seconds=0.01).target == pytest.approx(100 / 0.01 * HORIZON, abs=1)


def test_there_is_a_bound() -> None:
    assert paced(1, ended=10_000, seconds=0.01).target == MOST


@pytest.mark.parametrize("size", [1 << 20, 100_000])
def test_large_payloads_are_claimed_ahead_only_as_far_as_memory_allows(size: int) -> None:
    assert paced(1, ended=10_000, seconds=0.01, size=size).target == MOST_TEXT // size


@pytest.mark.parametrize(("workers", "ended", "seconds"), [(4, 4, 1), (16, 16, 0.1), (64, 1, 0.06), (1, 0, 5)])
def test_slow_handlers_get_none(workers: int, ended: int, seconds: float) -> None:
    """A worker that comes to less than one more task within the horizon."""
    assert paced(workers, ended=ended, seconds=seconds).target == 0


def test_it_grows_step_by_step() -> None:
    steps = [paced(1, ended=1_000, seconds=0.01, times=times).target for times in range(1, 6)]
    assert steps == [8, 32, 128, 512, 1000]


def test_nothing_is_concluded_before_every_place_has_turned_over() -> None:
    """The first of sixteen to end says nothing of the others."""
    assert paced(16, ended=1, seconds=0.001, times=1).target == 0


def test_without_claim_ahead_there_is_none() -> None:
    pace = Pace(1, enabled=False)
    pace.page(0, [1], full=True, ended=0)
    pace.measure(0.01, 1_000)
    assert pace.target == 0


def test_after_a_hand_back_there_is_none_for_a_while_and_for_longer_if_it_happens_again() -> None:
    pace, now, pauses = paced(1, ended=1_000, seconds=0.01), 1.0, list[float]()
    for _ in range(12):
        pace.handed_back(now)
        since = now
        while pace.target == 0:
            pace.page(now, [1], full=True, ended=int(now * 100_000))
            now += 0.01
            pace.measure(now, int(now * 100_000))
        pauses.append(now - since)
    assert PENALTIES[0] <= pauses[0] < 0.1
    assert PENALTIES[1] <= pauses[-1] < PENALTIES[1] + 0.1
    assert all(later > earlier - 0.02 for earlier, later in itertools.pairwise(pauses))


@pytest.mark.parametrize(
    ("free", "waiting", "target", "look", "expected"),
    [
        (4, 0, 0, False, Ask(4, ahead=False)),
        (0, 0, 0, False, None),
        (0, 0, 100, False, Ask(100, ahead=True)),
        (2, 50, 100, False, Ask(52, ahead=True)),
        (0, 51, 100, False, None),
        (0, 0, 100, True, None),
        (3, 0, 100, True, Ask(3, ahead=False)),
        (3, 1, 100, True, None),
    ],
    ids=[
        "slow handlers: the free places",
        "no place is free",
        "quick handlers: the target as well",
        "half of it is used",
        "enough is at hand",
        "everything is to be looked at, once what waits is used up",
        "everything is looked at for the free places",
        "not yet used up",
    ],
)
def test_what_the_next_claim_asks_for(free: int, waiting: int, target: int, look: bool, expected: Ask | None) -> None:
    assert ask(free, waiting, target, look=look) == expected
