"""All orders in which a few participants may take a few steps: a pure generator, without a database.

A participant is a node and its application: on a connection of workq's it claims, beats and ends what it claimed last;
on its own it begins, retries, deletes or completes the task, and commits or rolls back, again and again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

OWN = ("claim", "beat", "finish", "fail")
"""Statements of workq's own loops, each a transaction by itself."""
CHANGES = ("retry", "delete", "complete")
"""What an application does inside its transaction."""
ENDS = ("commit", "rollback")

Step: TypeAlias = tuple[int, str]
"""Whose, and what."""
Order: TypeAlias = tuple[Step, ...]


class Standing(NamedTuple):
    """Of one participant, as far as the order alone tells."""

    claimed: bool = False
    tx: str = ""
    """"", "begin", or the change made in it."""


def orders(participants: int, length: int, *, snapshots: bool = True) -> Iterator[Order]:
    """All orders of exactly so many steps in which every participant takes one.

    Left out is what another one of them shows as well: participants that change names; a transaction that changes
    nothing, or more than once (there is one row to change); and a begin that might as well come later.
    `snapshots`: a begin takes one, so what is committed between it and its change matters.
    """
    for order in _extended((), (Standing(),) * participants, length, snapshots):
        if len({who for who, _ in order}) == participants and order[-1][1] != "begin":
            yield order


def _extended(order: Order, standings: tuple[Standing, ...], more: int, snapshots: bool) -> Iterator[Order]:
    if more == 0:
        yield order
        return
    seen = max((who for who, _ in order), default=-1)
    for who in range(min(seen + 2, len(standings))):
        for what in possible(standings[who]):
            if order and not comes_after(order[-1], (who, what), snapshots=snapshots):
                continue
            after = (*standings[:who], then(standings[who], what), *standings[who + 1 :])
            yield from _extended((*order, (who, what)), after, more - 1, snapshots)


def comes_after(before: Step, step: Step, *, snapshots: bool) -> bool:
    """False for a step that might as well come before the begin which it follows."""
    (beginner, begin), (who, what) = before, step
    if begin != "begin" or (who == beginner and what in CHANGES):
        return True
    commits = what in OWN or what == "commit"
    return snapshots and (commits or (what == "begin" and who > beginner))


def possible(standing: Standing) -> Iterator[str]:
    """What a participant may do next."""
    yield "claim"
    if standing.claimed:
        yield from ("beat", "finish", "fail")
    match standing.tx:
        case "":
            yield "begin"
        case "begin":
            yield from ("retry", "delete")
            if standing.claimed:
                yield "complete"
        case _:
            yield from ENDS


def then(standing: Standing, what: str) -> Standing:
    """And how it stands after that."""
    if what == "claim":
        return standing._replace(claimed=True)
    if what == "begin" or what in CHANGES:
        return standing._replace(tx=what)
    return standing._replace(tx="") if what in ENDS else standing
