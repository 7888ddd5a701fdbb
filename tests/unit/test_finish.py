"""Writing the ends of runs: in parts that a server with a timeout takes, and of one task one at a time."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, cast

import workq
from workq._clock import Clock
from workq._ending import SUCCESS
from workq._finish import Entry, Finisher
from workq._held import Held
from workq._task import Claimed, Lease
from workq.dialect import NotNow


@workq.handler("note")
async def note(task: workq.Task[Any]) -> None: ...


class Slow:
    """A table that takes no more than so many rows before its timeout."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.rows: set[int] = set()

    async def succeed(self, connection: object, leases: list[Lease], urgency: object) -> set[int]:
        if len(leases) > self.most:
            raise NotNow("canceling statement due to statement timeout")
        ids = {lease.id for lease in leases}
        self.rows |= ids
        return ids


def entry(id: int, version: int = 1) -> Entry:
    now, lease = datetime(2026, 1, 1, tzinfo=UTC), Lease(id, version, 1)
    return Entry(
        Held(Claimed(lease, "", "note", None, False, 0, now, 0, 0, "null", None, now), lease, note, 0, 30), SUCCESS, 0
    )


async def test_finishes_that_are_too_many_for_a_timeout_of_the_servers_get_through() -> None:
    """back again: the same page again and again would never be written, and claims would stop."""
    table, written = Slow(70), list[Entry]()
    finisher = Finisher(
        cast(Any, table),
        cast(Any, None),
        Clock(),
        2000,
        lambda some: written.extend(one for one, _ in some),
        lambda one: None,
    )
    for id in range(900):
        finisher.put(entry(id))
    refused = 0
    while len(written) < 900:
        try:
            await finisher.once()
        except NotNow:
            refused += 1
        assert refused < 100
    assert table.rows == set(range(900))


class Table:
    """Rows by id, as versions."""

    def __init__(self, rows: dict[int, int]) -> None:
        self.rows = rows

    async def succeed(self, connection: object, leases: list[Lease], urgency: object) -> set[int]:
        ids = {lease.id for lease in leases if self.rows.get(lease.id) == lease.version}
        for id in ids:
            del self.rows[id]
        return ids

    async def look(self, connection: object, ids: list[int], urgency: object) -> dict[int, Lease]:
        return {id: Lease(id, self.rows[id], 1) for id in ids if id in self.rows}


async def test_of_two_runs_of_one_task_only_the_last_is_told_as_completed() -> None:
    """fence: the first one could not be written before its lease was over, and this process claimed the task again."""
    written, lost = list[int](), list[int]()
    finisher = Finisher(
        cast(Any, Table({7: 3, 8: 1})),
        cast(Any, None),
        Clock(),
        2000,
        lambda some: written.extend(one.held.lease.version for one, _ in some),
        lambda one: lost.append(one.held.lease.version),
    )
    for end in (entry(7, 1), entry(7, 3), entry(8, 1)):
        finisher.put(end)
    await finisher.once()
    await finisher.once()
    assert sorted(written) == [1, 3]
    assert lost == [1]
