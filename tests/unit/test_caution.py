"""`Caution`: after a stall everybody's beats may be late, so an expired lease says nothing for a while."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from workq._caution import IMPATIENT, Caution

LEASE = 30.0
BEAT = LEASE / 3
POLL = 1.0
LONGEST = BEAT + POLL + 0.25
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def wall(monotonic: float, off: float = 0) -> datetime:
    """The wall clock at a monotonic time, `off` seconds wrong."""
    return NOON + timedelta(seconds=monotonic + off)


def fresh() -> Caution:
    return Caution(LEASE, POLL, 0.0, wall(0))


def claim(caution: Caution, sent: float, took: float = 0.01) -> bool:
    """What the claimer does at `sent`. Returns whether it took expired leases over."""
    caution.before_claim(sent, wall(sent))
    takeover = caution.may_take_over(sent)
    caution.claimed(sent, sent + took, wall(sent), takeover=takeover)
    return takeover


def after_the_pause() -> Caution:
    """One that stalled, and whose pause ends at 20 + BEAT."""
    caution = fresh()
    assert not claim(caution, 20, took=0)
    return caution


def test_without_a_stall_every_claim_may_take_over() -> None:
    caution = fresh()
    for second in range(1, 200, 5):
        assert not caution.stalled(second, wall(second))
        assert claim(caution, second)


def test_a_beat_is_a_look_too() -> None:
    caution = fresh()
    for second in range(0, 200, 10):
        caution.looked(second, wall(second))
    assert not caution.stalled(190 + LONGEST, wall(190 + LONGEST))
    assert caution.may_take_over(190 + LONGEST)


@pytest.mark.parametrize(("at", "off"), [(1, 600), (1, -600), (LONGEST + 1, 0)])
def test_a_stall_that_a_beat_saw_is_one_for_the_next_claim(at: float, off: float) -> None:
    """F47: after it the clocks agree again and the last look is fresh, but the beats of others may be late."""
    caution = fresh()
    caution.looked(at, wall(at, off))
    assert caution.stalled(at + 0.1, wall(at + 0.1, off))
    assert not caution.may_take_over(at + 0.1)
    caution.claimed(at + 0.1, at + 0.2, wall(at + 0.1, off), takeover=False)
    assert not caution.may_take_over(at + 0.1 + BEAT)
    assert caution.may_take_over(at + 0.3 + BEAT)


def test_beats_that_always_have_to_wait_put_no_takeover_off_for_ever() -> None:
    """takeover: SQLite's writer is busy all the time, with a beat in every pause."""
    caution, at, takeovers = fresh(), 0.0, 0
    while at < 40 * BEAT:
        at += 1
        if at % 9 == 0:
            caution.beat_waited(at - 1)  # and the claim before this one had to wait for as long
            caution.looked(at, wall(at))
        takeovers += claim(caution, at)
    assert takeovers >= 390


def test_beats_that_wait_between_two_claims_put_takeovers_off_for_a_lease_and_no_longer() -> None:
    caution, first = fresh(), 0.0
    for second in range(1, 100):
        if claim(caution, second) and not first and second > 1:
            first = second
        caution.beat_waited(second + 0.5)
        caution.looked(second + 0.6, wall(second + 0.6))
    assert LEASE < first < LEASE + 2 * BEAT


def test_a_beat_that_had_to_wait_while_claims_rest_is_a_stall() -> None:
    """one holder: all workers are busy, and only the beat sees that others could not beat."""
    caution = fresh()
    assert claim(caution, 1)
    caution.beat_waited(4)
    caution.looked(5, wall(5))
    assert not claim(caution, 5.1)
    assert not claim(caution, 5 + BEAT)
    assert claim(caution, 5.2 + BEAT)


def test_a_gap_longer_than_a_beat_and_a_poll_is_a_stall() -> None:
    assert not fresh().stalled(LONGEST, wall(LONGEST))
    assert fresh().stalled(LONGEST + 0.001, wall(LONGEST + 0.001))


def test_a_wall_clock_that_parts_from_the_monotonic_one_is_a_stall() -> None:
    for off in (BEAT + 0.1, -BEAT - 0.1, 600, -600):
        assert fresh().stalled(1, wall(1, off))
    for off in (BEAT - 0.1, 0.1 - BEAT):
        assert not fresh().stalled(1, wall(1, off))


def test_a_stall_stays_one_until_a_claim_has_succeeded() -> None:
    caution = fresh()
    assert caution.stalled(100, wall(100))
    caution.looked(100, wall(100))  # the beat that must come first
    assert caution.stalled(100, wall(100))
    assert not caution.may_take_over(100)
    caution.claimed(100, 100, wall(100), takeover=False)
    assert not caution.stalled(100, wall(100))


def test_after_a_stall_nothing_is_taken_over_for_one_beat() -> None:
    caution = fresh()
    assert not claim(caution, 100, took=0.5)
    for second in (101, 104, 108, 110.4):
        assert not claim(caution, second)
    assert claim(caution, 110.5)


def test_the_pause_is_counted_from_the_reply_of_the_first_claim() -> None:
    caution = fresh()
    assert not claim(caution, 100, took=3)
    assert not caution.may_take_over(103 + BEAT - 0.001)
    assert caution.may_take_over(103 + BEAT)


def test_one_stall_makes_one_pause() -> None:
    caution = fresh()
    assert not claim(caution, 100, took=0)
    later = [second for second in range(101, 140) if not claim(caution, second)]
    assert later == list(range(101, 110))


def test_a_second_stall_makes_a_second_pause() -> None:
    caution = fresh()
    assert not claim(caution, 100, took=0)
    assert not claim(caution, 200, took=0)
    assert not caution.may_take_over(200 + BEAT - 0.001)
    assert caution.may_take_over(200 + BEAT)


def test_waiting_for_the_writer_counts_as_a_stall() -> None:
    caution = fresh()
    assert caution.may_take_over(1)
    caution.waited(0)
    assert caution.stalled(1, wall(1))
    assert not caution.may_take_over(1)


def test_a_claim_in_the_pause_that_waited_a_whole_beat_begins_the_pause_anew() -> None:
    caution = after_the_pause()
    assert not claim(caution, 21, took=BEAT)
    assert not caution.may_take_over(20 + BEAT)
    assert not caution.may_take_over(21 + 2 * BEAT - 0.001)
    assert caution.may_take_over(21 + 2 * BEAT)


def test_a_short_wait_in_the_pause_does_not_prolong_it() -> None:
    caution = after_the_pause()
    assert not claim(caution, 21, took=BEAT - 0.1)
    assert caution.may_take_over(20 + BEAT)


def test_a_takeover_waits_only_briefly_for_the_writer() -> None:
    assert fresh().patience(takeover=True) == IMPATIENT


def test_a_file_that_is_always_busy_sees_a_takeover_in_the_end() -> None:
    """After the pause one claim may wait as long as a beat; without that patience none would ever get through."""
    caution = after_the_pause()
    assert caution.patience(takeover=True) == IMPATIENT
    assert caution.may_take_over(20 + BEAT)
    assert caution.patience(takeover=True) == BEAT
    caution.claimed(20 + BEAT, 20 + BEAT, wall(20 + BEAT), takeover=True)
    assert caution.patience(takeover=True) == IMPATIENT


def test_patience_is_never_below_what_an_ordinary_takeover_has() -> None:
    caution = Caution(0.1, 0.05, 0.0, wall(0))
    assert not claim(caution, 20, took=0)
    assert caution.may_take_over(21)
    assert caution.patience(takeover=True) == IMPATIENT


def test_no_claim_waits_so_long_that_what_it_brings_is_hardly_leased() -> None:
    assert fresh().patience(takeover=False) == 1
    assert Caution(0.75, POLL, 0.0, wall(0)).patience(takeover=False) == 0.25


def test_an_older_look_that_is_told_late_changes_nothing() -> None:
    """A claim may be sent before a beat and answered after it. Only the younger look counts, on both clocks."""
    caution = Caution(3, 1, 0.0, wall(0))
    caution.looked(1, wall(1))
    caution.looked(3, wall(3))
    caution.looked(2, wall(2))
    assert not caution.stalled(5.2, wall(5.2))
