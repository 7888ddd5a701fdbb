"""fence, one holder, no loss, one schedule: of the lease protocol itself, in every state that a model of it can reach.

And the proof that such a search can fail: each mistake that is planted is found, by a story of a few steps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import pytest

from model.lease import Left, World
from model.search import Found, search
from records import record

GATE: Mapping[str, World] = {
    "nodes die and users repair": World(Left(claims=3, users=1, deaths=1)),
    "replies are lost": World(Left(claims=3, replies=1)),
    "the server crashes": World(Left(claims=3, crashes=1)),
    "a schedule": World(Left(claims=2, users=1, deaths=1, crashes=1), scheduled=True),
    "a key": World(Left(claims=2, users=2, enqueues=1), keyed=True),
    "complete(tx)": World(Left(claims=2, replies=1, deaths=1), completes=True),
    "complete(tx) of a schedule": World(Left(claims=2, crashes=1), completes=True, scheduled=True),
    "two tasks": World(Left(claims=2), tasks=2),
}
"""What may go wrong at most how often, in any order: see `Left`."""

SLOW: Mapping[str, World] = {
    "leases run out, again and again": World(Left(claims=4)),
    "everything, two claims": World(Left(claims=2, users=1, replies=1, deaths=1, crashes=1)),
    "users, again and again": World(Left(claims=3, users=2)),
    "complete(tx) and users": World(Left(claims=3, users=1), completes=True),
    "complete(tx) and the server": World(Left(claims=2, replies=1, crashes=1), completes=True),
}

ONCE = Left()
RACED = Left(replies=1)
CRASHED = Left(crashes=1)
REPAIRED = Left(users=1)

PLANTED: Mapping[tuple[str, ...], tuple[str, World]] = {
    ("fence by id",): ("fence", World(ONCE)),
    ("fence by id and version",): ("fence", World(CRASHED)),
    ("fence by id, version and node",): ("fence", World(CRASHED)),
    ("fence by id and token",): ("fence", World(RACED)),
    ("one token for all claims",): ("fence", World(CRASHED)),
    ("ids are used again", "fence by id and version"): ("fence", World(Left(users=1, enqueues=1))),
    ("reschedule without a fence",): ("fence", World(REPAIRED)),
    ("reschedule leaves the token",): ("fence", World(REPAIRED)),
    ("disable leaves the token",): ("fence", World(REPAIRED)),
    ("a gone row was always our own doing",): ("fence", World(RACED)),
    ("complete(tx) believes any change",): ("fence", World(ONCE, completes=True)),
    ("finishes do not wait for the disk",): ("fence", World(CRASHED)),
    ("claims do not look at the lease",): ("one holder", World(ONCE)),
    ("repairs do not look at the lease",): ("one holder", World(REPAIRED)),
    ("late replies are started",): ("one holder", World(ONCE)),
    ("a running task is started again",): ("one holder", World(ONCE)),
    ("no renewal at the same version",): ("one holder", World(CRASHED)),
    ("enqueues do not wait for the disk",): ("no loss", World(Left(enqueues=1, crashes=1))),
    ("no takeover",): ("no loss", World(Left(deaths=1))),
    ("a schedule's success deletes it",): ("no loss", World(ONCE, scheduled=True)),
    ("start makes a row each time",): ("one schedule", World(ONCE, scheduled=True)),
    ("retry does not look at the key",): ("key", World(Left(users=1, enqueues=1), keyed=True)),
    ("enqueue does not look at the key",): ("key", World(Left(enqueues=1), keyed=True)),
}


def searched(story: str, world: World) -> Found:
    began = time.process_time()
    found = search(world)
    took = time.process_time() - began
    print(f"{story}: {found.states} states in {took:.1f} s")
    record(
        "model",
        "none",
        f"{story}: {found.states} states",
        tasks=world.tasks,
        took=took,
        violations={
            promise: int(found.broken == promise) for promise in ("fence", "one holder", "no loss", "one schedule")
        },
    )
    assert (found.broken, found.trace) == ("", ())
    assert found.complete
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("story", GATE)
def test_no_order_of_events_breaks_a_promise(story: str) -> None:
    """F09, F13, F17, fence: every state, and from each the way to an end (no task is stuck)."""
    assert searched(story, GATE[story]).states > 10_000


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("story", SLOW)
def test_no_longer_order_of_events_breaks_a_promise(story: str) -> None:
    searched(story, SLOW[story])


@pytest.mark.parametrize("faults", PLANTED, ids="; ".join)
def test_each_mistake_in_the_protocol_is_found(faults: tuple[str, ...]) -> None:
    """The search can fail, and shows how: the steps are the shortest there are."""
    promise, world = PLANTED[faults]
    found = search(world._replace(faults=frozenset(faults)))
    print(f"{found.broken}, after {len(found.trace)} steps and {found.states} states:", *found.trace, sep="\n  ")
    assert found.broken.partition(":")[0] == promise
    assert 1 <= len(found.trace) <= 11
    assert found.states < 50_000
