"""isolation: whatever kind of exception comes out of a handler, it ends in readable words and in no other task."""

from __future__ import annotations

import asyncio
import concurrent.futures
import decimal
import errno
import inspect
import json
import logging
import subprocess
import threading
import warnings
import zoneinfo
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import anyio
import asyncpg
import msgspec
import pydantic
import pytest

import workq
from support import SOON, Database, Events, Runs, hooked
from workq._describe import MAX_MESSAGE, MAX_TRACEBACK
from workq.dialect import Busy, Interrupted

SECRET = "hunter2"
MOST = MAX_MESSAGE + MAX_TRACEBACK + 1024
"""Bytes of a whole error: message, traceback, and the type's name."""


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Leaving(Exception):
    def __str__(self) -> str:
        raise SystemExit("leaving while being asked")


class Number(Exception):
    def __str__(self) -> str:
        return 7  # pyright: ignore[reportReturnType]


class Shy:
    def __repr__(self) -> str:
        raise RuntimeError("not to be shown")


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("held a lock")
        self.lock = threading.Lock()
        self.generator = (n for n in range(3))

    def __reduce__(self) -> NoReturn:
        raise TypeError("cannot be pickled")


class Nameless(type):
    def __getattribute__(cls, name: str) -> Any:
        if name in ("__name__", "__qualname__", "__module__"):
            raise RuntimeError("no name")
        return super().__getattribute__(name)

    def __repr__(cls) -> str:
        raise RuntimeError("no name")


class Anonymous(Exception, metaclass=Nameless):
    pass


class Forged(type):
    def __getattribute__(cls, name: str) -> Any:
        if name in ("__name__", "__qualname__"):
            return "Forged\0\ud800" + "!" * 1_000_000
        return super().__getattribute__(name)


class Boastful(Exception, metaclass=Forged):
    pass


class Homeless(Exception):
    pass


Homeless.__module__ = None  # pyright: ignore[reportAttributeAccessIssue]


class Closed(Exception):
    """Shows nothing of itself, its causes and its traceback included."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"{name} is closed")


class Posing(Exception):
    """Breaks whoever asks `isinstance`, Python's own traceback module included."""

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError("no class")


class Refusing(Exception):
    def _refuse(self, *args: object) -> Any:
        raise RuntimeError("an operator was asked")

    __eq__ = __hash__ = __bool__ = __len__ = __iter__ = _refuse  # pyright: ignore[reportAssignmentType]


class Account(pydantic.BaseModel):
    pin: int


class Letter(msgspec.Struct):
    to: str


def secret() -> dict[str, str]:
    """Put together here, so that no line of a traceback shows it."""
    return {"pin": "".join(reversed("2retnuh"))}


def raiser(make: Callable[[], BaseException]) -> Callable[[], None]:
    def raise_it() -> None:
        raise make()

    return raise_it


def with_notes(*notes: str) -> Exception:
    error = ValueError("noted")
    for note in notes:
        error.add_note(note)
    return error


def with_odd_notes() -> Exception:
    error = ValueError("noted")
    error.__notes__ = Shy()  # pyright: ignore[reportAttributeAccessIssue]
    return error


def cyclic_causes() -> Exception:
    one, other = ValueError("one"), KeyError("other")
    one.__cause__, other.__cause__ = other, one
    return one


def cyclic_contexts() -> Exception:
    one, other, third = ValueError("one"), KeyError("other"), TypeError("third")
    one.__context__, other.__context__, third.__context__ = other, third, other
    return one


def endless_causes() -> Exception:
    error = ValueError("cause 0")
    for number in range(1, 10_000):
        following = ValueError(f"cause {number}")
        following.__cause__ = error
        error = following
    return error


def deep_group() -> Exception:
    group: Exception = ValueError("in the middle")
    for level in range(500):
        group = ExceptionGroup[Exception](f"level {level}", [group])
    return group


def wide_group() -> BaseException:
    inner = BaseExceptionGroup("inner", [asyncio.CancelledError("cut"), SystemExit(4), Unspeakable()])
    return BaseExceptionGroup("outer", [inner, *(KeyError(n) for n in range(1000))])


def recurse() -> None:
    def deeper(depth: int) -> int:
        return deeper(depth + 1) + 1

    deeper(0)


def warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.warn("old words", DeprecationWarning, stacklevel=1)


def assert_objects() -> None:
    assert {"a": object()} == object(), ("not the same", object())


def divide() -> None:
    print(decimal.Decimal(0) / decimal.Decimal(0))


def misspell() -> None:
    compile("def (:\n", "odd\nfile", "exec")


def raise_no_exception() -> None:
    raise cast(Any, 7)


def validate_hidden_behind_another() -> None:
    try:
        Account.model_validate(secret())
    except pydantic.ValidationError as error:
        raise LookupError("no such account") from error


def validate_in_a_group() -> None:
    try:
        Account.model_validate(secret())
    except pydantic.ValidationError as error:
        raise ExceptionGroup("all of them", [error]) from None


def run_a_program() -> None:
    subprocess.run(["false"], check=True)


async def time_out() -> None:
    async with asyncio.timeout(0.001):
        await asyncio.sleep(60)


async def fail_in_a_group_of_tasks() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.sleep(60))
        group.create_task(time_out())


async def wait_for_a_cancelled_future() -> None:
    future = asyncio.get_running_loop().create_future()
    future.cancel("by its owner")
    await future


async def ask_too_early() -> None:
    asyncio.get_running_loop().create_future().result()


@dataclass
class Kind:
    """How it is raised, and what its stored error must say."""

    how: Callable[[], object]
    says: tuple[str, ...]


KINDS: dict[str, Kind] = {
    "BaseException": Kind(raiser(lambda: BaseException("plain")), ("BaseException: plain",)),
    "KeyboardInterrupt": Kind(raiser(KeyboardInterrupt), ("KeyboardInterrupt",)),
    "SystemExit": Kind(raiser(lambda: SystemExit(3)), ("SystemExit: 3",)),
    "GeneratorExit": Kind(raiser(lambda: GeneratorExit("closing")), ("GeneratorExit: closing",)),
    "CancelledError with a message": Kind(
        raiser(lambda: asyncio.CancelledError("with a message")), ("CancelledError: with a message",)
    ),
    "CancelledError of a future": Kind(wait_for_a_cancelled_future, ("CancelledError", "by its owner")),
    "CancelledError of a pool": Kind(
        raiser(lambda: concurrent.futures.CancelledError("pool")), ("CancelledError: pool",)
    ),
    "cancellation of anyio": Kind(lambda: raiser(anyio.get_cancelled_exc_class())(), ("CancelledError",)),
    "StopIteration": Kind(raiser(lambda: StopIteration("over")), ("StopIteration",)),
    "StopAsyncIteration": Kind(raiser(lambda: StopAsyncIteration("over")), ("StopAsyncIteration: over",)),
    "asyncio.TimeoutError": Kind(time_out, ("TimeoutError",)),
    "asyncio.InvalidStateError": Kind(ask_too_early, ("InvalidStateError: Result is not set.",)),
    "asyncio.IncompleteReadError": Kind(
        raiser(lambda: asyncio.IncompleteReadError(b"\0", 7)), ("IncompleteReadError", "7 expected bytes")
    ),
    "group of tasks": Kind(fail_in_a_group_of_tasks, ("ExceptionGroup", "TimeoutError")),
    "OSError with odd errno": Kind(
        raiser(lambda: OSError(99_999, "odd", "/no/such\nfile")), ("OSError: [Errno 99999] odd",)
    ),
    "OSError of no number": Kind(raiser(lambda: OSError("E?", None, None)), ("OSError: [Errno E?] None",)),
    "OSError of a kind": Kind(
        raiser(lambda: OSError(errno.EPIPE, "broken")), (f"BrokenPipeError: [Errno {errno.EPIPE}] broken",)
    ),
    "UnicodeDecodeError": Kind(lambda: b"\xff\0".decode(), ("UnicodeDecodeError", "0xff")),
    "UnicodeEncodeError": Kind(lambda: "\ud800".encode(), ("UnicodeEncodeError", "\\ud800")),
    "JSONDecodeError": Kind(lambda: json.loads("{\0"), ("JSONDecodeError", "line 1 column 2")),
    "SyntaxError": Kind(misspell, ("SyntaxError",)),
    "ZoneInfoNotFoundError": Kind(lambda: zoneinfo.ZoneInfo("No/Where"), ("ZoneInfoNotFoundError", "No/Where")),
    "CalledProcessError": Kind(run_a_program, ("CalledProcessError", "exit status 1")),
    "decimal.InvalidOperation": Kind(divide, ("InvalidOperation",)),
    "pydantic ValidationError": Kind(
        lambda: Account.model_validate(secret()), ("ValidationError", "pin", "valid integer")
    ),
    "pydantic error as a cause": Kind(
        validate_hidden_behind_another, ("LookupError: no such account", "ValidationError", "valid integer")
    ),
    "pydantic error in a group": Kind(
        validate_in_a_group, ("ExceptionGroup: all of them", "ValidationError", "valid integer")
    ),
    "msgspec ValidationError": Kind(
        lambda: msgspec.json.decode(b'{"to": 7}', type=Letter), ("ValidationError: Expected `str`, got `int`",)
    ),
    "msgspec DecodeError": Kind(lambda: msgspec.json.decode(b"{"), ("DecodeError",)),
    "AssertionError with objects": Kind(assert_objects, ("AssertionError", "not the same")),
    "AssertionError with a shy object": Kind(raiser(lambda: AssertionError(Shy())), ("AssertionError", "RuntimeError")),
    "MemoryError": Kind(raiser(MemoryError), ("MemoryError",)),
    "RecursionError": Kind(recurse, ("RecursionError: maximum recursion depth exceeded", "in deeper")),
    "warning": Kind(warn, ("DeprecationWarning: old words",)),
    "no exception": Kind(raise_no_exception, ("TypeError: exceptions must derive from BaseException",)),
    "__str__ raises": Kind(raiser(Unspeakable), ("Unspeakable", "RuntimeError")),
    "__str__ leaves": Kind(raiser(Leaving), ("Leaving", "SystemExit")),
    "__str__ is no str": Kind(raiser(Number), ("Number", "TypeError")),
    "__repr__ raises": Kind(raiser(lambda: ValueError(Shy(), Shy())), ("ValueError", "RuntimeError")),
    "operators raise": Kind(raiser(lambda: Refusing("refusing")), ("Refusing: refusing",)),
    "10 MB of message": Kind(
        raiser(lambda: ValueError("begin " + "ä" * 5_000_000 + " end")), ("ValueError: begin ä", "ä end")
    ),
    "huge key": Kind(lambda: dict[str, int]()["begin" + "x" * 1_000_000 + "end"], ("KeyError: 'begin", "end'")),
    "NUL and surrogates": Kind(
        raiser(lambda: ValueError("\0 and \ud800 and \x1b[31m\r\n")), ("ValueError: \\x00 and \\ud800 and",)
    ),
    "bytes and objects": Kind(raiser(lambda: ValueError(b"\xff\0", object)), ("ValueError: (b'\\xff\\x00', <class",)),
    "nested groups": Kind(raiser(wide_group), ("BaseExceptionGroup: outer", "SystemExit: 4", "Unspeakable")),
    "a very deep group": Kind(raiser(deep_group), ("ExceptionGroup: level 499",)),
    "circle of causes": Kind(raiser(cyclic_causes), ("ValueError: one", "caused by KeyError: 'other'")),
    "circle of contexts": Kind(raiser(cyclic_contexts), ("ValueError: one", "caused by TypeError: third")),
    "endless causes": Kind(raiser(endless_causes), ("ValueError: cause 9999", "caused by ValueError: cause 9998")),
    "unpicklable": Kind(raiser(Unpicklable), ("Unpicklable: held a lock",)),
    "huge notes": Kind(raiser(lambda: with_notes(*["note " + "x" * 10_000] * 300)), ("ValueError: noted",)),
    "notes with NUL": Kind(raiser(lambda: with_notes("a\0b\ud800")), ("ValueError: noted\na\\x00b\\ud800",)),
    "odd notes": Kind(raiser(with_odd_notes), ("ValueError",)),
    "nameless metaclass": Kind(raiser(lambda: Anonymous("anonymous")), ("anonymous",)),
    "forging metaclass": Kind(raiser(lambda: Boastful("boastful")), ("Forged\\x00\\ud800!", "boastful")),
    "no module": Kind(raiser(lambda: Homeless("homeless")), ("Homeless: homeless",)),
    "an error of the driver": Kind(
        raiser(lambda: asyncpg.UniqueViolationError("taken")), ("UniqueViolationError: taken",)
    ),
    "an error of workq": Kind(raiser(lambda: workq.LeaseLost("gone")), ("LeaseLost: gone",)),
    "a broken connection": Kind(raiser(lambda: Interrupted("cut")), ("Interrupted: cut",)),
    "a busy writer": Kind(raiser(lambda: Busy("busy")), ("Busy: busy",)),
}


def missing(kind: str, error: str | None, says: tuple[str, ...]) -> str | None:
    """What is wrong with a stored error; None: nothing."""
    if error is None:
        return "no error is stored"
    if not all(words in error for words in says):
        return f"{says} is not all in {error[:500]!r}"
    if SECRET in error:
        return f"the input of {kind} is stored"
    if len(error.encode()) > MOST:
        return f"{len(error.encode())} bytes"
    return None


async def awaited(found: Awaitable[object]) -> object:
    return await found


@pytest.mark.parametrize("plain", [False, True], ids=["async def", "plain def"])
async def test_sixty_kinds_of_exception_end_in_readable_words_and_the_other_tasks_run_on(
    plain: bool, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """F07, F35, F42, F44, F61, isolation: one executor for all, beside tasks that run before, during and after."""
    events, runs, passed = Events(), Runs(), list[int]()

    async def raises(task: workq.Task[str]) -> None:
        found = KINDS[task.payload].how()
        if inspect.isawaitable(found):
            await found

    def raises_in_a_thread(task: workq.Task[str]) -> None:
        found = KINDS[task.payload].how()
        if inspect.isawaitable(found):
            asyncio.run(awaited(found))

    @workq.handler("holds")
    async def holds(task: workq.Task[int]) -> None:
        await runs.hold(task.payload)

    @workq.handler("passes by")
    async def passes(task: workq.Task[int]) -> None:
        await asyncio.sleep(0)
        passed.append(task.payload)

    raising: workq.Handler[str, Any] = workq.handler("raises")(raises_in_a_thread if plain else raises)
    async with hooked(database, events) as queue:
        executor = workq.Executor(queue, [raising, holds, passes], workers=6, poll_interval=0.05, stop_timeout=2)
        async with executor:
            await queue.enqueue_many(None, [workq.NewTask(holds, number) for number in range(3)])
            await runs.until(lambda: len(runs.running) == 3)
            ids: dict[str, int | None] = {}
            for number, kind in enumerate(KINDS):
                ids[kind] = await queue.enqueue(None, raising, kind)
                await queue.enqueue(None, passes, number)
            with suppress(TimeoutError):
                await events.until("failed", len(KINDS), timeout=2 * SOON)
            ended = {event.id for event in events if event.kind == "failed"}
            assert [kind for kind, id in ids.items() if id not in ended] == []
            await queue.wait(passes, timeout=SOON)
            assert len(runs.running) == 3
            runs.go.set()
            await queue.wait(timeout=SOON)
            await queue.enqueue(None, passes, len(KINDS))
            await queue.wait(timeout=SOON)
            assert executor.health().ok
            assert executor.health().running == 0

        rows = {row.payload: row for row in await queue.find(limit=1000)}
    assert {kind: row.id for kind, row in rows.items()} == ids
    assert {row.state for row in rows.values()} == {"failed"}
    assert {row.attempt for row in rows.values()} == {1}
    assert sorted(passed) == list(range(len(KINDS) + 1))
    wrong = {name: missing(name, rows[name].error, kind.says) for name, kind in KINDS.items()}
    assert {name: what for name, what in wrong.items() if what is not None} == {}
    failed = [event for event in events if event.kind == "failed"]
    assert sorted(event.id for event in failed) == sorted(id for id in ids.values() if id is not None)
    assert all(event.retry_at is None and event.duration is not None for event in failed)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_what_is_shown_of_a_strange_error_to_a_policy_and_a_hook_is_the_error_itself(database: Database) -> None:
    """isolation: the words are for the table, the object is for the code, and a policy decides about any of them."""
    events, seen = Events(), list[BaseException]()

    def policy(failed: int, error: BaseException) -> float | None:
        seen.append(error)
        return 0 if failed == 1 else None

    made = {"a": Unspeakable(), "b": Unpicklable(), "c": wide_group(), "d": cyclic_causes(), "e": KeyboardInterrupt()}

    @workq.handler("raises", retry=policy)
    async def raises(task: workq.Task[str]) -> None:
        raise made[task.payload]

    async with hooked(database, events) as queue:
        async with workq.Executor(queue, [raises], poll_interval=0.05):
            await queue.enqueue_many(None, [workq.NewTask(raises, name) for name in made])
            await events.until("failed", 2 * len(made))
        rows = await queue.find(state="failed")
    assert {row.payload for row in rows} == set(made)
    assert {row.attempt for row in rows} == {2}
    shown = [event.error for event in events if event.kind == "failed"]
    for error in made.values():
        assert sum(one is error for one in seen) == 2
        assert sum(one is error for one in shown) == 2


@pytest.mark.parametrize("kind", [Posing, Closed], ids=lambda kind: kind.__name__)
async def test_an_error_that_breaks_the_handling_of_errors_ends_its_run_too(
    kind: type[Exception], database: Database
) -> None:
    """F07, isolation: a run that has ended is not held for ever, with a place taken up and a lease kept alive."""
    events = Events()

    @workq.handler("raises")
    async def raises(task: workq.Task[str]) -> None:
        if task.payload == "odd":
            raise kind

    async with (
        hooked(database, events) as queue,
        workq.Executor(queue, [raises], workers=1, poll_interval=0.05, stop_timeout=2) as executor,
    ):
        id = await queue.enqueue(None, raises, "odd")
        assert id is not None
        await queue.enqueue(None, raises, "ordinary")
        await events.until("completed")
        await queue.wait(timeout=SOON)
        assert executor.health().running == 0
        row = await queue.get(id)
        assert row is not None
        assert (row.state, row.attempt) == ("failed", 1)
        assert row.error
