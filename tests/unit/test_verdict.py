"""What the finisher makes of an end that its statement did not write, by the row as last committed."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

import workq
from workq._ending import SUCCESS, Ending, Settled
from workq._finish import Entry, verdict
from workq._held import Held
from workq._task import Claimed, Lease

LEASE = Lease(7, 3, 99)
OURS_WRITTEN = Lease(7, 4, 99)
ANOTHER = Lease(7, 4, 11)
LATER = Lease(7, 6, 11)
FAILED = Ending("failed", Settled(failed=True, attempt=1))


@workq.handler("note")
async def note(task: workq.Task[Any]) -> None: ...


def entry(ending: Ending, *, unsure: bool = False, completing: bool = False, committed: bool = False) -> Entry:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    claimed = Claimed(LEASE, "", "note", None, False, 0, now, 0, 0, "null", None, now)
    held = Held(claimed, LEASE, note, 0.0, 30.0, completing=completing, committed=committed)
    return Entry(held, ending, None, unsure=unsure)


def test_a_row_that_is_still_ours_is_locked_by_somebodys_transaction() -> None:
    assert verdict(entry(SUCCESS), LEASE, within_lease=True) == "locked"
    assert verdict(entry(SUCCESS, completing=True), LEASE, within_lease=False) == "locked"


@pytest.mark.parametrize("row", [None, ANOTHER, LATER])
def test_without_a_lost_reply_what_changed_is_lost(row: Lease | None) -> None:
    assert verdict(entry(SUCCESS), row, within_lease=True) == "lost"
    assert verdict(entry(FAILED), row, within_lease=True) == "lost"


def test_a_lost_reply_is_told_by_the_token_or_by_the_gap() -> None:
    assert verdict(entry(FAILED, unsure=True), OURS_WRITTEN, within_lease=False) == "written"
    assert verdict(entry(FAILED, unsure=True), ANOTHER, within_lease=True) == "lost"
    assert verdict(entry(SUCCESS, unsure=True), None, within_lease=True) == "written"
    assert verdict(entry(SUCCESS, unsure=True), None, within_lease=False) == "lost"


def scheduled(ending: Ending, *, committed: bool = False) -> Entry:
    made = entry(ending, completing=True, committed=committed)
    made.held.moves_to = datetime(2026, 1, 2, tzinfo=UTC), "null"
    return made


def test_after_complete_a_row_that_is_gone_is_completed_and_one_that_is_there_is_not() -> None:
    assert verdict(entry(FAILED, completing=True), None, within_lease=True) == "completed"
    assert verdict(entry(FAILED, completing=True, committed=True), None, within_lease=False) == "completed"
    assert verdict(entry(FAILED, completing=True), LATER, within_lease=True) == "lost"


def test_after_complete_the_row_of_a_schedule_has_changed() -> None:
    assert verdict(scheduled(FAILED), LATER, within_lease=True) == "completed"
    assert verdict(scheduled(FAILED, committed=True), LATER, within_lease=False) == "completed"
    assert verdict(scheduled(FAILED, committed=True), ANOTHER, within_lease=True) == "lost"


def test_after_complete_an_error_and_the_end_of_the_lease_nothing_is_believed() -> None:
    """The commit failed, say, because the database was gone: others may have claimed, run and ended it meanwhile."""
    assert verdict(entry(FAILED, completing=True), None, within_lease=False) == "lost"
    assert verdict(scheduled(FAILED), LATER, within_lease=False) == "lost"
