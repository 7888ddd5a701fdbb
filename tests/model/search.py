"""Breadth-first through everything that may happen: how many states there are, and the shortest way to a broken one."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from model.lease import FREE, Label, Left, State, World, broken, start, steps


class Found(NamedTuple):
    """What a search came to."""

    states: int
    broken: str
    """The promise, empty if none was."""
    trace: tuple[str, ...]
    """The steps up to there."""
    complete: bool
    """Every state was looked at."""


def search(world: World, *, most: int = 10_000_000) -> Found:
    """Look at every state, the nearest first, until a promise is broken; then, whether each comes to an end."""
    gc.disable()  # nothing here refers to itself, and looking for that takes a quarter of the time
    try:
        return _search(world, most)
    finally:
        gc.enable()


def _search(world: World, most: int) -> Found:
    first = start(world)
    came: dict[State, tuple[State, Label] | None] = {first: None}
    calmest: dict[State, State] = {}
    level = [first]
    while level:
        following: list[State] = []
        for state in level:
            best = len(CALM)
            for label, after, wrong in steps(world, state):
                rank = RANK.get(label[0], best)
                if rank < best:
                    best, calmest[state] = rank, after
                known = after in came
                if known and not wrong:
                    continue
                wrong = wrong or broken(after)
                if not known:
                    came[after] = state, label
                    following.append(after)
                if wrong:
                    return Found(len(came), wrong, (*_trace(came, state), _said(label)), complete=False)
        if len(came) > most:
            return Found(len(came), "", (), complete=False)
        level = following
    stuck = Calm(world, calmest).stuck(came)
    if stuck is not None:
        return Found(len(came), "no loss: a task is stuck", tuple(_trace(came, stuck)), complete=True)
    return Found(len(came), "", (), complete=True)


def _trace(came: dict[State, tuple[State, Label] | None], state: State) -> list[str]:
    trace: list[str] = []
    before = came[state]
    while before is not None:
        trace.append(_said(before[1]))
        before = came[before[0]]
    return trace[::-1]


def _said(label: Label) -> str:
    what, which = label
    return f"{what} ({which})"


CALM = (
    "commit", "a statement is lost", "reply", "finish", "finish leaves it out", "look: locked", "look: written",
    "look: completed", "look: lost", "the handler of a lost task ends", "end: done", "end: again", "claim",
    "start makes the schedule", "a lease runs out", "two leases after a claim without a reply",
)  # fmt: skip
"""What happens when nothing goes wrong any more, the first that can."""
RANK = {what: rank for rank, what in enumerate(CALM)}
ENOUGH = 100


class Calm:
    """From every state, once nothing goes wrong any more, everything comes to an end: no task is stuck."""

    def __init__(self, world: World, calmest: Mapping[State, State]) -> None:
        self._world = world
        self._calmest = calmest
        """What follows each state then, as far as the search came by it."""
        self._ends: dict[State, bool] = {}

    def stuck(self, states: Iterable[State]) -> State | None:
        """The first state from which it does not."""
        return next((state for state in states if not self._comes_to_an_end(state)), None)

    def _comes_to_an_end(self, state: State) -> bool:
        way: list[State] = []
        at: State | None = state if state.left.claims else _at_rest(state)
        while at is not None and at not in self._ends and len(way) < ENOUGH:
            way.append(at)
            if _is_end(at):
                self._ends[at] = True
                break
            at = self._next(at)
        ends = at is not None and self._ends.get(at, False)
        self._ends.update(dict.fromkeys(way, ends))
        return ends

    def _next(self, state: State) -> State | None:
        if state in self._calmest and state.left.claims:
            return self._calmest[state]
        # The search had no claims left; in the end there are as many as it takes.
        more = state._replace(left=state.left._replace(claims=1))
        calm = {RANK[label[0]]: after for label, after, _ in steps(self._world, more) if label[0] in RANK}
        return _at_rest(calm[min(calm)]) if calm else None


def _at_rest(state: State) -> State:
    """Without what no longer matters then: ghosts, above all."""
    nodes = tuple(
        node._replace(held=tuple(held._replace(alive=False, exempt=False, accepted=False) for held in node.held))
        for node in state.nodes
    )
    return state._replace(nodes=nodes, left=Left(claims=0), undone=(), owed=(), late=(), next_id=0)


def _is_end(state: State) -> bool:
    """Nobody holds anything, and nothing waits but schedules."""
    return not any(node.held for node in state.nodes) and all(
        row.failed or (row.scheduled and row.lock == FREE) for row in state.rows
    )
