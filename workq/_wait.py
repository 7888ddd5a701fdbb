"""`wait`: until nothing due is left, in the table or in the hands of this process."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Set

from workq._hub import Hub, Local
from workq._store import Left

FIRST_PAUSE = 0.002
LONGEST_PAUSE = 0.1
BREATH = 0.001
"""Seconds between two looks at least: under load something changes all the time."""


async def wait_until_done(hub: Hub, names: Set[str] | None, timeout: float | None) -> None:
    """Wait until no due task of these names (None: any) is left. Raises TimeoutError."""
    pause = FIRST_PAUSE
    try:
        async with asyncio.timeout(timeout):
            while not await done(hub, names):
                await hub.change(pause)
                await hub.clock.sleep(BREATH)
                pause = min(pause * 1.3, LONGEST_PAUSE)
    except TimeoutError:
        raise TimeoutError(f"after {timeout:g} s {await remains(hub, names)}") from None


async def done(hub: Hub, names: Set[str] | None) -> bool:
    """Is nothing left? A look at the table counts only if nothing happened here meanwhile."""
    await hub.flush()
    before = hub.changes(names)
    if any(held(local, names) for local in hub.locals):
        return False
    found = await left(hub, names, limit=1)
    for one in found:
        for local in hub.locals:
            if serves(local, one):
                local.ring()  # committed a moment ago, perhaps: no need to wait for the poll
    return not found and hub.changes(names) == before and not any(held(local, names) for local in hub.locals)


def held(local: Local, names: Set[str] | None) -> bool:
    """Does this executor hold a task of these names? One that was lost is somebody else's."""
    return any(not one.lost and (names is None or one.claimed.name in names) for one in local.holding)


def serves(local: Local, one: Left) -> bool:
    """Would this executor run the task?"""
    return local.queue == one.queue and one.name in local.names


async def left(hub: Hub, names: Set[str] | None, limit: int) -> list[Left]:
    """Some of what is left in the table."""
    schedules = [schedule for local in hub.locals for schedule in local.schedules]
    given = None if names is None else sorted(names)
    found: list[Left] = await hub.own(lambda conn: hub.store.left(conn, given, schedules, limit))
    return found


async def remains(hub: Hub, names: Set[str] | None) -> str:
    """What is left, for the error."""
    most = 1000
    try:
        async with asyncio.timeout(2):
            found = await left(hub, names, most)
    except Exception as error:
        return f"tasks are left, and the database does not say which ({type(error).__name__})"
    if not found:
        return "tasks are left in the hands of this process, whose end is not yet written or told"
    return "there are left: " + "; ".join(lines(found, hub.locals)) + (" (and more)" if len(found) == most else "")


def lines(found: Iterable[Left], locals: Iterable[Local]) -> list[str]:
    """One phrase for each kind."""
    executors = list(locals)
    total = Counter((one.queue, one.name) for one in found)
    running = Counter((one.queue, one.name) for one in found if one.running)
    phrases: list[str] = []
    for (queue, name), number in sorted(total.items()):
        here = any(serves(local, Left(queue, name, False)) for local in executors)
        phrases.append(
            f"{number} {name!r} in queue {queue!r}, {running[queue, name]} of them running, "
            + ("served by an executor here" if here else "which no executor here serves")
        )
    return phrases
