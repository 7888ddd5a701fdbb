"""A small model of workq: what every operation does to the table, in plain Python. It knows no database and no clock.

Time is a number of seconds that the machine lets pass; nothing else makes it go on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

LEASE = 1000
PERIOD = 900
MAX_LOST = 5
SUSPECT = 3

Name: TypeAlias = Literal["plain", "again", "tick", "tock", "foreign"]
Outcome: TypeAlias = Literal["done", "boom", "retry", "retry after", "fail", "skip", "later"]
Policy: TypeAlias = Callable[[int], int | None]
Events: TypeAlias = list[tuple[str, int]]
"""What hooks are told: kinds and ids."""


def linear(retries: int, delay: int) -> Policy:
    return lambda failed: failed * delay if failed <= retries else None


POLICIES: dict[str, Policy | None] = {"plain": None, "again": linear(2, 300), "tick": None, "tock": linear(1, 300)}
ERRORS: dict[Outcome, str] = {
    "boom": "ValueError: boom",
    "retry": "not yet",
    "retry after": "retry",
    "fail": "LookupError: no",
    "skip": "skipped",
}


@dataclass(eq=False)
class Run:
    """One run of a task, from its claim to its end. It does not know whether its row is still its own."""

    node: Node
    id: int
    lost: int
    """As it was claimed."""


@dataclass(eq=False)
class Node:
    """An executor: the schedules that it serves, and the runs that it believes to hold."""

    schedules: tuple[tuple[str, str], ...]
    runs: list[Run] = field(default_factory=list[Run])


@dataclass
class Row:
    """One task."""

    id: int
    name: str
    key: str | None
    priority: int
    payload: int
    run_at: int
    scheduled: bool = False
    attempt: int = 0
    lost: int = 0
    error: str | None = None
    """How the stored text begins."""
    failed: int | None = None
    """The how-manieth to fail; None: has not."""
    locked_until: int | None = None
    holder: Run | None = None
    order: float = 0.0
    """The exact due time in the database, which decides between rows that are due at the same second here."""


class Model:
    """The table."""

    def __init__(self) -> None:
        self.now = 0
        self.rows: dict[int, Row] = {}
        self._failures = 0

    def state(self, row: Row) -> str:
        if row.failed is not None:
            return "failed"
        return "running" if row.locked_until is not None and row.locked_until > self.now else "waiting"

    def is_taken(self, name: str, key: str | None) -> bool:
        """Does a live task have the key?"""
        return key is not None and any(
            (row.name, row.key) == (name, key) and row.failed is None and not row.scheduled
            for row in self.rows.values()
        )

    def enqueue(self, id: int, name: str, payload: int, key: str | None, priority: int, delay: int) -> Events:
        self.rows[id] = Row(id, name, key, priority, payload, self.now + delay)
        return [("enqueued", id)]

    def register(self, ids: dict[tuple[str, str], int]) -> None:
        """What `start` makes of schedules that have no row."""
        for (name, key), id in ids.items():
            self.rows[id] = Row(id, name, key, 0, 0, self.now + PERIOD, scheduled=True)

    def missing(self, node: Node) -> list[tuple[str, str]]:
        have = {(row.name, row.key) for row in self.rows.values() if row.scheduled}
        return [schedule for schedule in node.schedules if schedule not in have]

    def retry(self, id: int, delay: int | None, payload: int | None) -> tuple[bool | str, Events]:
        row = self.rows.get(id)
        if row is None or row.failed is None:
            return False, []
        if not row.scheduled and self.is_taken(row.name, row.key):
            return "taken", []
        return True, self._free(row, delay or 0, payload)

    def retry_all(self, matches: Callable[[Row], bool], limit: int) -> Events:
        """The longest failed first; of several with one key the oldest, and none whose key is taken."""
        failed = [row for row in self.rows.values() if row.failed is not None and matches(row)]
        oldest: dict[tuple[str, str | None], int] = {}
        for row in failed:
            if row.key is not None and not row.scheduled:
                oldest[row.name, row.key] = min(row.id, oldest.get((row.name, row.key), row.id))
        free = [
            row
            for row in failed
            if row.scheduled
            or row.key is None
            or (oldest[row.name, row.key] == row.id and not self.is_taken(row.name, row.key))
        ]
        free.sort(key=lambda row: row.failed or 0)
        return [event for row in free[:limit] for event in self._free(row, 0, None)]

    def _free(self, row: Row, delay: int, payload: int | None) -> Events:
        row.run_at, row.failed, row.error, row.attempt, row.lost = self.now + delay, None, None, 0, 0
        row.payload = row.payload if payload is None else payload
        row.holder = row.locked_until = None
        return [("retried", row.id)]

    def reschedule(self, id: int, delay: int | None) -> bool:
        row = self.rows.get(id)
        if row is None or self.state(row) != "waiting":
            return False
        row.run_at, row.holder, row.locked_until = self.now + (delay or 0), None, None
        return True

    def disable(self, id: int) -> bool:
        row = self.rows.get(id)
        if row is None or self.state(row) != "waiting":
            return False
        self._fail(row, "disabled")
        row.holder = None
        return True

    def delete(self, id: int) -> bool:
        return self.rows.pop(id, None) is not None

    def expire(self, id: int) -> None:
        """A lease runs out."""
        self.rows[id].locked_until = self.now

    def die(self, node: Node) -> None:
        """A process is gone; another one is in its place. Its leases go on until they run out."""
        node.runs.clear()

    def claim(self, node: Node, late: bool) -> tuple[Run | None, Events]:
        """The next task for a node with one place; `late`: it stops meanwhile and gives back what it got."""
        row = self._next(node, suspects=False)
        if row is None and not any(run.lost >= SUSPECT for run in node.runs):
            row = self._next(node, suspects=True)
        if row is None:
            return None, []
        row.lost += row.locked_until is not None
        row.locked_until = self.now + LEASE
        if row.holder is not None and row.holder in node.runs:
            return None, []  # it runs here: its lease is renewed
        row.holder = None
        if late:
            row.locked_until = None
            return None, [("released", row.id)]
        if row.lost > MAX_LOST:
            self._fail(row, "parked: ")
            return None, [("failed", row.id)]
        row.holder = Run(node, row.id, row.lost)
        node.runs.append(row.holder)
        return row.holder, [("started", row.id)]

    def _next(self, node: Node, *, suspects: bool) -> Row | None:
        eligible = [
            row
            for row in self.rows.values()
            if row.failed is None
            and row.run_at <= self.now
            and self.state(row) == "waiting"
            and row.name in POLICIES
            and (not row.scheduled or (row.name, row.key) in node.schedules)
            and (row.lost + (row.locked_until is not None) >= SUSPECT) == suspects
        ]
        return min(eligible, key=lambda row: (row.priority, row.order, row.id), default=None)

    def beat(self, node: Node) -> Events:
        """Extend what is still held; notice what is not."""
        events: Events = []
        for run in list(node.runs):
            if self.is_held(run):
                self.rows[run.id].locked_until = self.now + LEASE
            else:
                node.runs.remove(run)
                events.append(("lost", run.id))
        return events

    def is_held(self, run: Run) -> bool:
        row = self.rows.get(run.id)
        return row is not None and row.holder is run

    def finish(self, run: Run, outcome: Outcome, payload: int) -> Events:
        """A handler ended so, and left this payload."""
        run.node.runs.remove(run)
        if not self.is_held(run):
            return [("lost", run.id)]
        row = self.rows[run.id]
        row.holder, row.locked_until, row.lost = None, None, 0
        match outcome:
            case "later":
                row.run_at, row.payload = self.now + 600, payload
                return [("released", row.id)]
            case "done" | "skip" if row.scheduled:
                self._next_time(row, None)
                row.payload = payload
                return [("completed", row.id)]
            case "done":
                del self.rows[row.id]
                return [("completed", row.id)]
            case "skip" | "fail":
                self._fail(row, ERRORS[outcome])
                row.attempt += 1
            case "boom":
                self._retry(row, POLICIES[row.name], ERRORS[outcome], None)
            case "retry" | "retry after":
                policy = POLICIES[row.name] or linear(3, 30)
                self._retry(row, policy, ERRORS[outcome], 600 if outcome == "retry after" else None)
        return [("failed", row.id)]

    def _retry(self, row: Row, policy: Policy | None, error: str, after: int | None) -> None:
        delay = None if policy is None else policy(row.attempt + 1)
        if delay is not None:
            row.attempt, row.error = row.attempt + 1, error
            row.run_at = self.now + (delay if after is None else after)
        elif policy is not None and row.scheduled:
            self._next_time(row, error)
        else:
            self._fail(row, error)
            row.attempt += 1

    def _next_time(self, row: Row, error: str | None) -> None:
        row.run_at, row.attempt, row.error = self.now + PERIOD, 0, error

    def _fail(self, row: Row, error: str) -> None:
        self._failures += 1
        row.failed, row.error, row.locked_until = self._failures, error, None
