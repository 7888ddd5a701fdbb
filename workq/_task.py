"""What a handler gets, and what `get` and `find` show: values, without a way back to the queue."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, overload

from typing_extensions import TypeVar

from workq._checks import check_headers
from workq.dialect import Transaction

TaskP = TypeVar("TaskP", default=None)
State: TypeAlias = Literal["waiting", "running", "failed"]
EMPTY: Mapping[str, str] = MappingProxyType({})


class Lease(NamedTuple):
    """The right to finish a task: every write by its holder names all three."""

    id: int
    version: int
    token: int


class Claimed(NamedTuple):
    """One row as a claim returned it, payload still text."""

    lease: Lease
    queue: str
    name: str
    key: str | None
    scheduled: bool
    priority: int
    run_at: datetime
    attempt: int
    lost: int
    payload: str
    headers: str | None
    claimed_at: datetime
    """The database's time."""


Completer: TypeAlias = "Callable[[Any, Task[Any], Transaction], Awaitable[None]]"
"""What `Task.complete` calls, with whatever it was given to remember the run by."""


class Task(Generic[TaskP]):
    """One run of a task, as its handler sees it. `Task(payload, attempt=3)` makes one for a unit test.

    For a schedule, what the handler leaves in `payload` (mutated or replaced) is stored for the next run.
    """

    __slots__ = ("_complete", "_headers", "_queue", "_run", "_run_at", "attempt", "id", "key", "name", "payload")

    payload: TaskP
    id: int
    name: str
    key: str | None
    attempt: int
    """From 1: failed runs so far + 1."""

    @overload
    def __init__(
        self: Task[None],
        /,
        *,
        id: int = 0,
        key: str | None = None,
        attempt: int = 1,
        headers: Mapping[str, str] | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self,
        payload: TaskP,
        /,
        *,
        id: int = 0,
        key: str | None = None,
        attempt: int = 1,
        headers: Mapping[str, str] | None = None,
    ) -> None: ...
    def __init__(
        self,
        payload: Any = None,
        /,
        *,
        id: int = 0,
        key: str | None = None,
        attempt: int = 1,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.payload = payload
        self.id = id
        self.name = ""
        self.key = key
        self.attempt = attempt
        self._queue = ""
        self._run_at: datetime | None = None
        self._headers = EMPTY if headers is None else MappingProxyType(check_headers(headers))
        self._complete: Completer | None = None
        self._run: object = None

    @property
    def queue(self) -> str:
        """The queue it was claimed from."""
        return self._queue

    @property
    def run_at(self) -> datetime:
        """When it was due; now, for one that was made by hand."""
        return datetime.now(UTC) if self._run_at is None else self._run_at

    @property
    def headers(self) -> Mapping[str, str]:
        """What `enqueue(headers=...)` and `Queue(headers=...)` gave it."""
        return self._headers

    async def complete(self, tx: Transaction, /) -> None:
        """End the task inside your transaction: its writes and the end of the task commit together, or not at all.

        Raises LeaseLost if the task is no longer this run's.
        """
        if self._complete is None:
            raise RuntimeError("this Task was not given out by an executor, so there is no row to complete")
        await self._complete(self._run, self, tx)

    def __repr__(self) -> str:
        return f"<Task {self.id} {self.name!r} attempt={self.attempt}>"


def task_of(claimed: Claimed, payload: Any, headers: Mapping[str, str], complete: Completer, run: object) -> Task[Any]:
    """The task for one run of a claimed row."""
    task: Task[Any] = Task.__new__(Task)
    task.payload = payload
    task.id = claimed.lease.id
    task.name = claimed.name
    task.key = claimed.key
    task.attempt = claimed.attempt + 1
    task._queue = claimed.queue  # pyright: ignore[reportPrivateUsage]
    task._run_at = claimed.run_at  # pyright: ignore[reportPrivateUsage]
    task._headers = headers  # pyright: ignore[reportPrivateUsage]
    task._complete = complete  # pyright: ignore[reportPrivateUsage]
    task._run = run  # pyright: ignore[reportPrivateUsage]
    return task


CURRENT: ContextVar[Task[Any] | None] = ContextVar("workq_current_task", default=None)


def current_task() -> Task[Any] | None:
    """The task whose handler this code runs in, or None. Follows asyncio's tasks and threads."""
    return CURRENT.get()


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRow:
    """A task as it stands in the table."""

    id: int
    queue: str
    name: str
    key: str | None
    state: State
    """Derived: failed, running (its lease is alive), or waiting."""
    scheduled: bool
    priority: int
    payload: Any
    """Parsed JSON, not decoded to the declared type."""
    headers: Mapping[str, str]
    created_at: datetime
    run_at: datetime
    attempt: int
    """Failed runs so far."""
    lost: int
    """How often its holder vanished since a run last ended."""
    node: str | None
    """host:pid of the last holder, for people."""
    locked_until: datetime | None
    failed_at: datetime | None
    finished_at: datetime | None
    """The end of the last run that did not end the task."""
    error: str | None
