"""A server that has a timeout of its own: what is too much at once is written in smaller parts."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, cast

import pytest

import workq
from workq._clock import Clock
from workq._ending import SUCCESS
from workq._finish import Entry, Finisher
from workq._held import Held
from workq._steady import Steady
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


def entry(id: int) -> Entry:
    now, lease = datetime(2026, 1, 1, tzinfo=UTC), Lease(id, 1, 1)
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


async def test_a_loop_that_has_nothing_to_attempt_fails_no_more() -> None:
    """F18: what failed before the workers were all busy says nothing of the database now."""
    steady = Steady("claims", Clock())

    async def fail() -> None:
        raise NotNow("for a moment")

    await steady.attempt(fail)
    assert steady.failing
    assert steady.fails_for(-1)
    steady.rests()
    assert not steady.failing
    assert not steady.fails_for(-1)


@pytest.mark.parametrize("bad", [0, -1])
def test_a_pool_of_no_connections_is_named_as_that(bad: int) -> None:
    with pytest.raises(ValueError, match="pool_size"):
        workq.connect("postgresql://localhost/x", pool_size=bad)
