"""fence, no loss: nodes and applications take their steps in every order, on PostgreSQL, at every isolation level.

The gate plays all orders of four steps and a sample of those of six; the slow set all of five, and of six at READ
COMMITTED. All of six at every level, an hour or so: WORKQ_PERMUTATIONS=all pytest tests/permutations -m slow -k six
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice, zip_longest
from math import comb

import asyncpg
import pytest

from conftest import Servers
from permutations.orders import CHANGES, ENDS, OWN, Order, orders
from permutations.play import LEVELS, Mistake, stage
from records import record

SEED = 5
PARTS = 8
"""Of the longest enumeration, so that it can be shared by several processes."""


def test_the_orders_are_all_there_are() -> None:
    """Counted by hand: claims and begins of one participant, before anything else is possible."""
    assert list(orders(1, 1)) == [((0, "claim"),)]
    assert set(orders(2, 2)) == {((0, "claim"), (1, "claim")), ((0, "begin"), (1, "claim"))}
    assert set(orders(2, 2, snapshots=False)) == {((0, "claim"), (1, "claim"))}
    assert {what for _, what in {order[1] for order in orders(1, 2) if order[0][1] == "begin"}} == {
        "claim",
        *CHANGES[:2],
    }
    assert sum(1 for _ in orders(1, 2)) == 7


@pytest.mark.parametrize(("participants", "length"), [(1, 5), (2, 5), (3, 5)])
def test_the_orders_are_well_formed_and_each_comes_once(participants: int, length: int) -> None:
    seen = list(orders(participants, length))
    assert len(set(seen)) == len(seen)
    for order in seen:
        assert len(order) == length
        assert [who for at, (who, _) in enumerate(order) if who not in {w for w, _ in order[:at]}] == [
            *range(participants)
        ]
        for who in range(participants):
            own = [what for other, what in order if other == who]
            tx = [what for what in own if what not in OWN]
            for what, following in zip_longest(tx, tx[1:]):
                allowed = CHANGES if what == "begin" else ENDS if what in CHANGES else ("begin",)
                assert following is None or following in allowed
            if any(what in ("beat", "finish", "fail", "complete") for what in own):
                assert "claim" in own


def test_every_way_to_shuffle_two_programs_is_among_the_orders() -> None:
    """But for a begin that might as well come later: what stands between it and its change commits something."""
    programs = ["claim", "beat", "finish"], ["begin", "delete", "commit"]
    found = [
        order
        for order in orders(2, 6)
        if sorted([what for who, what in order if who == at] for at in (0, 1)) == sorted(programs)
    ]
    assert len(found) == comb(6, 3)
    assert sum(1 for order in orders(2, 6, snapshots=False) if order in found) == comb(5, 2)


async def played(
    servers: Servers,
    story: str,
    chosen: Iterable[Order],
    participants: int,
    level: str,
    default: str,
    mistake: Mistake | None = None,
) -> None:
    schema = f"permutations_{os.getpid()}_{random.getrandbits(32)}"
    url = servers.url("machine")
    began, cpu = time.monotonic(), time.process_time()
    async with stage(url, schema, participants, level, default, mistake) as here:
        deadlocks = "select deadlocks from pg_stat_database where datname = current_database()"
        before = await here.watch.fetchval(deadlocks)
        for order in chosen:
            for failed in (False, True):
                await here.play(order, failed=failed)
        await here.watch.execute("select pg_stat_clear_snapshot()")
        tally, version = here.tally, await here.watch.fetchval("show server_version")
        assert await here.watch.fetchval(deadlocks) == before
    conn = await asyncpg.connect(url)
    await conn.execute(f"drop schema {schema} cascade")
    await conn.close()
    took = time.monotonic() - began
    print(f"{story}, {level} (loops {default}): {tally}, {took:.1f} s, {time.process_time() - cpu:.1f} s of CPU here")
    assert "DeadlockDetectedError" not in tally.swallowed
    if default == level == "read committed":
        assert (tally.swallowed, tally.refused) == (Counter(), Counter())
    record(
        "permutations",
        f"PostgreSQL {version.partition(' ')[0]}",
        f"{story}, {level} (workq's loops: {default})",
        tasks=2 * tally.played,
        took=took,
        runs=tally.played,
        seed=SEED,
        violations={"fence": 0, "no loss": 0, "one holder": 0},
    )


def all_orders(participants: int, length: int, level: str) -> Iterator[Order]:
    return orders(participants, length, snapshots=level != "read committed")


def sample(participants: int, length: int, level: str, number: int) -> list[Order]:
    return random.Random(SEED).sample(list(all_orders(participants, length, level)), number)


MISTAKES: Mapping[str, Mistake] = {
    "success by id": ("succeed", "using (id, version, locked_by)", "using (id)"),
    "failure by id": ("settle", "using (id, version, locked_by)", "using (id)"),
    "a beat by id": (
        "extend",
        "join {table} w using (id, version, locked_by)\n      where",
        "join {table} w using (id)\n      where",
    ),
    "a beat that waits": ("extend", "for update of w skip locked", "for update of w"),
    "a success that waits": ("succeed", "for update of w skip locked", "for update of w"),
    "a claim that waits": ("claim", "for update of w skip locked", "for update of w"),
    "a claim of what is held": ("claim", "and w.locked_until < statement_timestamp()", ""),
    "complete by id": (
        "complete",
        "where id = $1 and version = $2 and locked_by = $3",
        "where id = $1 and $2::bigint > 0 and $3::bigint > 0",
    ),
    "a retry of what has not failed": ("retry", "and t.failed_at is not null", ""),
}


@pytest.mark.parametrize("mistake", MISTAKES)
async def test_each_mistake_in_a_statement_is_found(mistake: str, servers: Servers) -> None:
    """The orders can fail: those of four steps find a fence that is too weak, and a loop that waits for a row."""
    chosen = all_orders(2, 4, LEVELS[0])
    with pytest.raises(AssertionError) as found:
        await played(servers, mistake, chosen, 2, LEVELS[0], LEVELS[0], MISTAKES[mistake])
    print(f"{mistake}: {found.value}")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("level", LEVELS)
async def test_no_order_of_four_steps_deceives_the_fence(level: str, servers: Servers) -> None:
    """F09, F13, F26, fence: every answer is the expected one, no loop waits for a lock, and none sees a deadlock."""
    for participants in (2, 3):
        story = f"{participants} participants, 4 steps"
        await played(servers, story, all_orders(participants, 4, level), participants, level, level)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("level", LEVELS)
async def test_no_order_of_six_steps_in_a_sample_deceives_the_fence(level: str, servers: Servers) -> None:
    for participants in (2, 3):
        story = f"{participants} participants, a sample of 6 steps"
        await played(servers, story, sample(participants, 6, level, 150), participants, level, "read committed")


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("default", LEVELS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("participants", [2, 3])
async def test_no_order_of_five_steps_deceives_the_fence(
    participants: int, level: str, default: str, servers: Servers
) -> None:
    """F09, F13, F26, fence: the applications' transactions and workq's loops at different levels, too."""
    chosen = all_orders(participants, 5, level)
    await played(servers, f"{participants} participants, 5 steps", chosen, participants, level, default)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("participants", [2, 3])
async def test_no_order_of_six_steps_deceives_the_fence(
    participants: int, level: str, part: int, servers: Servers
) -> None:
    if level != "read committed" and os.environ.get("WORKQ_PERMUTATIONS") != "all":
        pytest.skip("only with WORKQ_PERMUTATIONS=all")
    chosen = islice(all_orders(participants, 6, level), part, None, PARTS)
    story = f"{participants} participants, 6 steps, part {part + 1} of {PARTS}"
    await played(servers, story, chosen, participants, level, level)
