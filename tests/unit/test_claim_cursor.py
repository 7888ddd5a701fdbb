"""Where the next claim starts: `next_cursor`, a decision without a database."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from workq._claim import START, next_cursor
from workq._task import Claimed, Lease

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def claimed(id: int, second: int, name: str = "mail", priority: int = 0) -> Claimed:
    """A row of a page that was due `second` seconds after noon."""
    return Claimed(
        lease=Lease(id, 1, 99),
        queue="",
        name=name,
        key=None,
        scheduled=False,
        priority=priority,
        run_at=NOON + timedelta(seconds=second),
        attempt=0,
        lost=0,
        payload="null",
        headers=None,
        claimed_at=NOON,
    )


def at(second: int, id: int) -> tuple[datetime, int]:
    return NOON + timedelta(seconds=second), id


def test_a_full_page_goes_on_after_its_last_row() -> None:
    page = [claimed(1, 0), claimed(2, 1), claimed(3, 2)]
    assert next_cursor(START, page, 3) == {("mail", 0): at(2, 3)}


def test_a_short_page_starts_again_from_the_beginning() -> None:
    before = {("mail", 0): at(5, 5)}
    assert next_cursor(before, [claimed(6, 6)], 2) is START
    assert next_cursor(before, [], 1) is START


def test_the_end_of_a_page_is_its_maximum_whatever_its_order() -> None:
    page = [claimed(id, second) for id, second in [(7, 2), (9, 0), (8, 2), (1, 1)]]
    for _ in range(24):
        random.shuffle(page)
        assert next_cursor(START, page, 4) == {("mail", 0): at(2, 8)}


def test_the_id_decides_between_rows_of_one_instant() -> None:
    assert next_cursor(START, [claimed(10, 0), claimed(9, 0)], 2) == {("mail", 0): at(0, 10)}


def test_each_name_and_each_priority_has_a_place_of_its_own() -> None:
    page = [claimed(1, 9), claimed(2, 3, priority=-1), claimed(3, 5, name="sms"), claimed(4, 6, name="sms")]
    assert next_cursor(START, page, 4) == {
        ("mail", 0): at(9, 1),
        ("mail", -1): at(3, 2),
        ("sms", 0): at(6, 4),
    }


def test_a_lane_that_the_page_did_not_touch_keeps_its_place() -> None:
    before = {("mail", 0): at(1, 1), ("sms", 0): at(7, 7)}
    assert next_cursor(before, [claimed(2, 2)], 1) == {("mail", 0): at(2, 2), ("sms", 0): at(7, 7)}


def test_a_lane_never_moves_back() -> None:
    before = {("mail", 0): at(5, 50)}
    assert next_cursor(before, [claimed(4, 4)], 1) == before
    assert next_cursor(before, [claimed(49, 5)], 1) == before


def test_the_cursor_that_was_given_is_left_as_it_was() -> None:
    before = {("mail", 0): at(1, 1)}
    next_cursor(before, [claimed(2, 2)], 1)
    assert before == {("mail", 0): at(1, 1)}
    assert START == {}


ROWS = st.tuples(st.sampled_from(["a", "b"]), st.integers(-1, 1), st.integers(0, 5))


@given(rows=st.lists(ROWS, min_size=1, max_size=40), size=st.integers(1, 7))
def test_pages_one_after_the_other_see_every_row_of_a_lane_once(rows: list[tuple[str, int, int]], size: int) -> None:
    """Nothing is skipped: a page takes each lane's rows in order, and the next page goes on behind them."""
    table = [claimed(id, second, name, priority) for id, (name, priority, second) in enumerate(rows, 1)]
    cursor, taken = START, list[int]()
    while True:
        behind = [
            row
            for row in table
            if (row.name, row.priority) not in cursor or (row.run_at, row.lease.id) > cursor[row.name, row.priority]
        ]
        behind.sort(key=lambda row: (row.priority, row.run_at, row.lease.id))
        page = behind[:size]
        taken += [row.lease.id for row in page]
        random.shuffle(page)
        cursor = next_cursor(cursor, page, size)
        if cursor is START:
            break
    assert sorted(taken) == list(range(1, len(rows) + 1))
