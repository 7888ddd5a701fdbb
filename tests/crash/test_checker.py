"""The checker finds each broken promise in a journal that shows it, and nothing in one that does not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from crash.checker import Findings, Row, Settings, check
from crash.journal import Line, Pen, Reader

PRODUCER, NODE, OTHER = 1, 2, 3
TICKS = Row(99, "None", "tick", False, True)
SETTINGS = Settings(lease=1.5, poll=0.2, stop=1.0, interval=0.5)


def line(what: str, at: float, pid: int = NODE, note: str = "-", token: str = "a", id: int = 7) -> Line:
    return Line(what, at, pid, token, id, note)


def enqueued(at: float, token: str = "a", id: int = 7) -> list[Line]:
    return [line("sent", at, PRODUCER, token=token, id=0), line("acked", at + 0.01, PRODUCER, token=token, id=id)]


def claimed(at: float, pid: int = NODE, id: int = 7) -> Line:
    return line("claimed", at, pid, f"{at + 0.01}", token="-", id=id)


def begun(
    at: float, pid: int = NODE, name: str = "fast", token: str = "a", id: int = 7, attempt: int = 1
) -> list[Line]:
    return [claimed(at, pid, id), line("start", at + 0.02, pid, f"{attempt} {name}", token, id)]


def ended(at: float, pid: int = NODE, token: str = "a", id: int = 7) -> list[Line]:
    return [line("end", at, pid, token=token, id=id), line("completed", at + 0.01, pid, "1", "-", id)]


WHOLE = [*enqueued(1), *begun(2), *ended(3)]


def found(lines: Sequence[Line], rows: Sequence[Row] = (), ledger: Sequence[str] = ()) -> Findings:
    return check(lines, [*rows, TICKS], ledger, SETTINGS)


def broken(lines: Sequence[Line], rows: Sequence[Row] = (), ledger: Sequence[str] = ()) -> list[str]:
    """The promises that were broken."""
    return [promise for promise, texts in found(lines, rows, ledger).violations.items() if texts]


def row(name: str = "fast", *, failed: bool = False, token: str = "a", id: int = 7) -> Row:
    return Row(id, token, name, failed, False)


def test_a_task_that_was_stored_run_and_completed_is_as_it_should_be() -> None:
    assert found(WHOLE).broken == []


def test_a_task_that_failed_as_it_had_to_is_no_loss() -> None:
    lines = [*enqueued(1), *begun(2, name="broken"), line("raised", 3), line("failed", 3.1, note="1")]
    assert broken(lines, [row("broken", failed=True)]) == []


def test_an_acknowledged_task_that_is_nowhere_is_a_loss() -> None:
    assert broken(enqueued(1)) == ["no loss"]
    assert broken([*enqueued(1), *begun(2)]) == ["no loss"]
    assert broken([*enqueued(1), *begun(2), line("killed", 3)]) == ["no loss"]


def test_one_that_nobody_acknowledged_may_be_lost() -> None:
    assert broken([line("sent", 1, PRODUCER)]) == []


def test_one_that_is_still_waiting_when_all_should_be_done_is_a_loss() -> None:
    assert broken(enqueued(1), [row()]) == ["no loss"]


def test_one_that_a_caller_deleted_is_no_loss() -> None:
    assert broken([*enqueued(1), line("deleting", 2, PRODUCER), line("deleted", 2.1, PRODUCER)]) == []


def test_the_end_of_a_run_counts_without_its_event_only_where_that_could_get_lost() -> None:
    quiet = [*enqueued(1), *begun(2), line("end", 3)]
    assert broken(quiet) == ["no loss"]
    assert broken([*quiet, line("killed", 3.01)]) == []
    assert broken([*quiet, line("down", 3.01), line("up", 5)]) == []
    assert broken([*quiet, line("disturbed", 3.01)]) == []


def test_a_completion_in_a_transaction_counts_by_what_that_wrote() -> None:
    paid = [*enqueued(1), *begun(2, name="pay"), *ended(3)]
    assert broken(paid, ledger=["a"]) == []
    assert broken(paid) == ["no loss"]
    assert broken([*enqueued(1), *begun(2, name="pay"), line("killed", 3)], ledger=["a"]) == []


def test_a_transaction_that_was_not_committed_leaves_no_trace() -> None:
    rolled_back = [line("open", 1, PRODUCER)]
    assert broken(rolled_back) == []
    assert broken([*rolled_back, *begun(2), *ended(3)]) == ["no trace"]
    assert broken(rolled_back, [row("broken", failed=True)]) == ["no trace"]
    assert broken([*rolled_back, line("sent", 1.1, PRODUCER), *begun(2), *ended(3)]) == []


def test_a_task_that_nobody_heard_of_or_that_was_refused_leaves_no_trace() -> None:
    assert broken([*begun(2), *ended(3)]) == ["no trace"]
    assert broken([line("sent", 1, PRODUCER), line("refused", 1.1, PRODUCER), *begun(2), *ended(3)]) == ["no trace"]


def test_what_was_deleted_does_not_come_back() -> None:
    lines = [*enqueued(1), line("deleting", 2, PRODUCER), line("deleted", 2.1, PRODUCER)]
    assert broken(lines, [row("broken", failed=True)]) == ["no trace"]


def test_a_second_completion_breaks_the_fence() -> None:
    assert broken([*WHOLE, *begun(5, OTHER), *ended(6, OTHER)]) == ["fence"]


def test_after_a_crash_of_the_server_a_lost_claim_may_end_unsurely() -> None:
    crash = [line("crashing", 2.5), line("down", 2.5), line("up", 2.8)]
    assert broken([*enqueued(1), *begun(2), *crash, *begun(2.81, OTHER), *ended(3, OTHER), *ended(3.1)]) == []
    early = [line("crashing", 0.1), line("down", 0.1), line("up", 0.2)]
    assert "fence" in broken([*early, *WHOLE, *begun(5, OTHER), *ended(6, OTHER)])


def test_two_rows_in_the_ledger_break_the_fence_and_so_does_one_whose_task_is_there() -> None:
    paid = [*enqueued(1), *begun(2, name="pay"), *ended(3)]
    assert broken(paid, ledger=["a", "a"]) == ["fence"]
    assert broken([*enqueued(1), *begun(2, name="pay")], [row("pay")], ["a"]) == ["no loss", "fence"]


def test_one_attempt_that_failed_twice_breaks_the_fence() -> None:
    lines = [*enqueued(1), *begun(2, name="flaky"), line("raised", 3), line("failed", 3.1, note="1")]
    again = [*begun(4, name="flaky", attempt=2), *ended(5)]
    assert broken([*lines, *again]) == []
    assert broken([*lines, line("failed", 3.9, OTHER, "1"), *again]) == ["fence"]


def test_a_second_start_while_the_lease_is_alive_breaks_one_holder() -> None:
    assert broken([*enqueued(1), *begun(2), *begun(3, OTHER), *ended(3.1, OTHER)]) == ["one holder"]
    assert broken([*enqueued(1), *begun(2), *begun(3.6, OTHER), *ended(3.7, OTHER)]) == []


def test_a_beat_makes_the_lease_longer() -> None:
    beaten = [*enqueued(1), *begun(2), line("beat", 3, note="3.01"), *begun(3.6, OTHER), *ended(3.7, OTHER)]
    assert broken(beaten) == ["one holder"]


def test_the_lease_of_a_killed_process_counts_too() -> None:
    lines = [*enqueued(1), *begun(2), line("killed", 2.5), *begun(2.6, OTHER), *ended(3, OTHER)]
    assert broken(lines) == ["one holder"]


def test_a_second_start_after_the_first_has_ended_is_a_retry() -> None:
    lines = [*enqueued(1), *begun(2, name="flaky"), line("raised", 2.1), *begun(2.4, OTHER), *ended(3, OTHER)]
    assert broken(lines) == []


def test_leases_of_the_moment_before_a_crash_of_the_server_are_not_counted_on() -> None:
    crash = [line("crashing", 2.5), line("down", 2.5), line("up", 2.8)]
    assert broken([*enqueued(1), *begun(2), *crash, *begun(3, OTHER), *ended(3.1, OTHER)]) == []
    sooner = [*enqueued(0.5), *begun(1.8), *crash, *begun(3, OTHER), *ended(3.1, OTHER)]
    assert broken(sooner) == ["one holder"]


def test_takeovers_are_measured_from_the_death_and_one_that_comes_too_late_is_told() -> None:
    dead = [*enqueued(1), line("ready", 1, OTHER, token="-", id=0), *begun(2), line("killed", 2.5)]
    findings = found([*dead, *begun(4, OTHER), *ended(5, OTHER)])
    assert findings.times["takeover"] == [pytest.approx(1.52)]
    assert findings.broken == []
    assert broken([*dead, *begun(6, OTHER), *ended(7, OTHER)]) == ["takeover"]


def test_a_takeover_may_come_later_by_what_claims_waited_and_a_beat_interval_each() -> None:
    dead = [*enqueued(1), line("ready", 1, OTHER, token="-", id=0), *begun(2), line("killed", 2.5)]
    late = [*begun(6, OTHER), *ended(7, OTHER)]
    assert broken([*dead, line("waited", 5, OTHER, "0.3"), *late]) == []
    assert broken([*dead, line("waited", 2, OTHER, "0.3"), *late]) == ["takeover"]


def test_a_takeover_begins_when_somebody_is_there() -> None:
    alone = [*enqueued(1), *begun(2), line("killed", 2.5), line("ready", 5, OTHER, token="-", id=0)]
    assert found([*alone, *begun(6, OTHER), *ended(7, OTHER)]).times["takeover"] == [pytest.approx(1.02)]


def test_a_lease_that_was_handed_back_is_over() -> None:
    back = [*enqueued(1), *begun(2), claimed(4), line("released", 4.1), *begun(4.2, OTHER), *ended(5, OTHER)]
    assert broken(back) == []
    assert broken([*enqueued(1), *begun(2), claimed(4), *begun(4.2, OTHER), *ended(5, OTHER)]) == ["one holder"]


def test_what_was_claimed_and_not_begun_is_taken_over_too() -> None:
    heir = line("ready", 1, OTHER, token="-", id=0)
    findings = found([*enqueued(1), heir, claimed(2), line("killed", 2.5), *begun(4, OTHER), *ended(5, OTHER)])
    assert findings.times["takeover"] == [pytest.approx(1.52)]


def test_what_had_ended_or_whose_heir_died_or_stood_still_is_no_takeover() -> None:
    ended_before = [
        *enqueued(1),
        *begun(2),
        line("end", 2.4),
        line("killed", 2.5),
        *begun(9, OTHER),
        *ended(9.1, OTHER),
    ]
    assert found(ended_before).times["takeover"] == []
    heir = [*enqueued(1), *begun(2), line("killed", 2.5), claimed(4, OTHER)]
    third = line("ready", 1, 4, token="-", id=0)
    dead_heir = [*heir, third, line("killed", 4.1, OTHER), *begun(6, 4), *ended(6.1, 4)]
    assert found(dead_heir).times["takeover"] == [pytest.approx(1.92)]
    frozen_heir = [*heir, line("frozen", 4.005, OTHER), line("thawed", 9, OTHER)]
    assert found([*frozen_heir, line("start", 9.1, OTHER, "1 fast"), *ended(9.2, OTHER)]).times["takeover"] == []


def test_a_stop_that_takes_too_long_or_ends_badly_is_told() -> None:
    asked = [*WHOLE, line("terminated", 3.9), line("stopping", 4)]
    stopped = [*asked, line("stopped", 4.5)]
    assert found([*stopped, line("exited", 5, note="0")]).times["clean stop"] == [0.5]
    assert broken([*stopped, line("exited", 5, note="0")]) == []
    assert broken([*stopped, line("exited", 25, note="0")]) == ["clean stop"]
    assert broken([*stopped, line("exited", 5, note="1")]) == ["clean stop"]
    assert broken([*asked, line("stopped", 6.1), line("exited", 6.2, note="0")]) == ["clean stop"]
    assert broken(asked) == ["clean stop"]


def test_work_that_does_not_resume_in_time_is_told() -> None:
    assert found([line("down", 0), line("up", 2), *WHOLE]).times["back again"] == [pytest.approx(1.01)]
    late = [*enqueued(1), line("down", 1.5), line("up", 1.6), *begun(7), *ended(8)]
    assert broken(late) == ["back again"]
    idle = [line("down", 0), line("up", 0.1), *enqueued(7), *begun(7.1), *ended(8)]
    assert found(idle).times["back again"] == [pytest.approx(1)]
    again = [*enqueued(1), line("down", 1), line("up", 2), line("down", 2.7), line("up", 7.5), *begun(8), *ended(8.5)]
    assert found(again).times["back again"] == [pytest.approx(1.01)]
    stayed = [*enqueued(1), line("down", 1), line("up", 2), line("down", 7.2), line("up", 7.5), *begun(8), *ended(8.5)]
    assert broken(stayed) == ["back again"]


@pytest.mark.parametrize("rows", [[], [TICKS, TICKS]])
def test_a_schedule_without_its_row_or_with_two_is_told(rows: list[Row]) -> None:
    assert check(WHOLE, rows, [], SETTINGS).violations["one schedule"] != []


def ticked(at: float, pid: int) -> list[Line]:
    return [*begun(at, pid, "tick", "tick", 99), *ended(at + 0.1, pid, "tick", 99)]


def test_a_tick_that_comes_before_its_time_is_told() -> None:
    assert broken([*ticked(1, NODE), *ticked(1.6, OTHER)]) == []
    assert broken([*ticked(1, NODE), *ticked(1.4, OTHER)]) == ["one schedule"]


def test_a_tick_after_one_that_was_refused_may_come_at_any_time() -> None:
    refused = [*begun(1, NODE, "tick", "tick", 99), line("end", 1.1, token="tick", id=99), line("lost", 1.2, id=99)]
    assert broken([*refused, *ticked(1.3, OTHER)]) == []


def test_another_payload_under_an_id_is_told() -> None:
    lines = [*enqueued(1), line("sent", 1, PRODUCER, token="b"), *begun(2, token="b"), *ended(3, token="b")]
    assert "same value" in broken(lines)


def test_a_task_that_failed_without_raising_is_told() -> None:
    assert broken(enqueued(1), [row("fast", failed=True)]) == ["isolation"]


async def test_the_journal_is_read_as_it_was_written(tmp_path: Path) -> None:
    pen, other = Pen(tmp_path), Pen(tmp_path, pid=OTHER)
    at = pen.note("acked", "a", 7)
    other.note("killed", pid=NODE, at=at - 1)
    await pen.sure()
    journal = Reader(tmp_path)
    killed, acked = journal.lines()
    assert killed == ("killed", pytest.approx(at - 1, abs=1e-5), NODE, "-", 0, "-")
    assert acked[0] == "acked"
    assert acked[3:] == ("a", 7, "-")
    pen.note("end", "a", 7, note="two words")
    assert journal.lines()[-1].note == "two words"
