"""Writing the ends of runs: whatever a database does with one of them, the others are written, and all told once."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, cast

import workq
from workq import _finish
from workq._clock import Clock
from workq._ending import SUCCESS
from workq._finish import Entry, Finisher
from workq._held import Held
from workq._task import Claimed, Lease
from workq.dialect import Interrupted, NotNow, Urgency


@workq.handler("note")
async def note(task: workq.Task[Any]) -> None: ...


class Later(Clock):
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.time = 0.0

    def monotonic(self) -> float:
        return self.time


class Table:
    """Rows by id, as versions; `trouble` raises what a statement meets, before or after it is carried out."""

    def __init__(self, rows: dict[int, int]) -> None:
        self.rows = rows
        self.failed: dict[int, str | None] = {}
        self.before: Callable[[list[int]], None] = lambda ids: None
        self.after: Callable[[list[int]], None] = lambda ids: None

    async def succeed(self, connection: object, leases: list[Lease], urgency: Urgency) -> set[int]:
        self.before([lease.id for lease in leases])
        ids = {lease.id for lease in leases if self.rows.get(lease.id) == lease.version}
        for id in ids:
            del self.rows[id]
        self.after([lease.id for lease in leases])
        return ids

    async def settle(
        self, connection: object, endings: list[tuple[Lease, Any]], urgency: Urgency
    ) -> dict[int, datetime]:
        self.failed |= {lease.id: settled.error for lease, settled in endings}
        return dict.fromkeys(self.failed, datetime(2026, 1, 1, tzinfo=UTC))

    async def look(self, connection: object, ids: list[int], urgency: Urgency) -> dict[int, Lease]:
        return {id: Lease(id, self.rows[id], 1) for id in ids if id in self.rows}


class Desk:
    """A finisher over a table, and what it told of each run, as (id, version)."""

    def __init__(self, table: Table, redact: Callable[[str], str] = str) -> None:
        self.clock = Later()
        self.written: list[tuple[int, int]] = []
        self.lost: list[tuple[int, int]] = []
        self.finisher = Finisher(
            cast(Any, table),
            cast(Any, None),
            self.clock,
            2000,
            lambda some: self.written.extend(entry.held.lease[:2] for entry, _ in some),
            lambda entry: self.lost.append(entry.held.lease[:2]),
            redact,
        )

    def put(self, *ids: int, version: int = 1) -> None:
        """These have ended well."""
        for id in ids:
            now, lease = datetime(2026, 1, 1, tzinfo=UTC), Lease(id, version, 1)
            claimed = Claimed(lease, "", "note", None, False, 0, now, 0, 0, "null", None, now)
            self.finisher.put(Entry(Held(claimed, lease, note, 0, 1000), SUCCESS, 0))

    async def attempt(self) -> Exception | None:
        """One pass, a moment after the last one."""
        self.clock.time += 0.05
        try:
            await self.finisher.once()
        except Exception as error:
            return error
        return None

    async def attempts(self, number: int) -> None:
        """So many, whatever they raise."""
        for _ in range(number):
            await self.attempt()


def refuse(ids: list[int]) -> None:
    raise RuntimeError("permission denied for a secret")


async def test_finishes_that_are_too_many_for_a_timeout_of_the_servers_get_through() -> None:
    """back again: the same page again and again would never be written, and claims would stop."""
    table = Table(dict.fromkeys(range(900), 1))

    def slow(ids: list[int]) -> None:
        if len(ids) > 70:
            raise NotNow("canceling statement due to statement timeout")

    table.before = slow
    desk = Desk(table)
    desk.put(*range(900))
    await desk.attempts(100)
    assert table.rows == {}
    assert len(desk.written) == 900


async def test_one_that_is_always_too_much_holds_up_nobody() -> None:
    """isolation: the first of many."""
    table = Table(dict.fromkeys(range(51), 1))

    def full(ids: list[int]) -> None:
        if 0 in ids:
            raise NotNow("database or disk is full")

    table.before = full
    desk = Desk(table)
    desk.put(*range(51))
    await desk.attempts(40)
    assert sorted(desk.written) == [(id, 1) for id in range(1, 51)]
    table.before = lambda ids: None
    await desk.attempts(40)
    assert desk.written[-1] == (0, 1)


async def test_of_two_runs_of_one_task_only_the_last_is_told_as_completed() -> None:
    """fence: the first one could not be written before its lease was over, and this process claimed the task again."""
    desk = Desk(Table({7: 3, 8: 1}))
    desk.put(7)
    desk.put(7, version=3)
    desk.put(8)
    for _ in range(2):
        assert await desk.attempt() is None
    assert sorted(desk.written) == [(7, 3), (8, 1)]
    assert desk.lost == [(7, 1)]


async def test_a_passing_refusal_makes_no_failure_of_a_success() -> None:
    """A privilege that was revoked for a moment, say: a DELETE has no content that could be at fault."""
    table = Table({1: 1, 2: 1})
    table.before = refuse
    desk = Desk(table)
    desk.put(1, 2)
    await desk.attempts(50)
    table.before = lambda ids: None
    await desk.attempts(40)
    assert sorted(desk.written) == [(1, 1), (2, 1)]
    assert table.failed == {}


async def test_one_that_is_refused_for_good_fails_with_that_and_its_reason_is_redacted() -> None:
    """F61, isolation."""
    table = Table({1: 1})
    table.before = refuse
    desk = Desk(table, lambda text: text.replace("secret", "***"))
    desk.put(1)
    await desk.attempts(round(_finish.DELETE_REFUSED / 0.05) + 60)
    assert table.failed == {
        1: "the end of the run could not be stored: RuntimeError: permission denied for a ***",
    }
    assert desk.written == [(1, 1)]


async def test_a_delete_whose_reply_was_lost_is_told_as_completed_also_when_it_was_sent_alone() -> None:
    """fence: the page was refused, and so each of it is sent by itself."""
    table = Table({1: 1, 2: 1})
    desk = Desk(table)

    def together(ids: list[int]) -> None:
        if len(ids) > 1:
            raise RuntimeError("refused")

    def lose(ids: list[int]) -> None:
        table.after = lambda ids: None
        raise Interrupted("the connection broke")

    table.before, table.after = together, lose
    desk.put(1, 2)
    await desk.attempts(20)
    assert sorted(desk.written) == [(1, 1), (2, 1)]
    assert desk.lost == []
