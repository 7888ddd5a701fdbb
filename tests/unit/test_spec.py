"""What can be said of a task, a handler, a schedule and an executor, and what is refused before anything runs."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import pytest

import workq
import workq_aiosqlite
from workq._codec import Codec

NOTE = workq.Spec("note", str)
HOURLY = workq.every(hours=1)


@dataclass
class Email:
    to: str


@pytest.fixture
def db(tmp_path: Path) -> workq.Dialect:
    """Never opened: what is tested here does no I/O."""
    return workq_aiosqlite.SQLite(tmp_path / "never.db")


@pytest.fixture
def queue(db: workq.Dialect) -> workq.Queue:
    return workq.Queue(db)


@workq.handler("cleanup")
async def cleanup(task: workq.Task) -> None: ...


@workq.handler("mail", queue="mail")
async def mail(task: workq.Task[Email]) -> None: ...


def anything(value: object) -> Any:
    """A value whose type the checker is not to see, since it is the wrong one."""
    return value


def test_a_spec_says_what_a_producer_needs() -> None:
    spec = workq.Spec("send", Email, queue="mail", priority=-5, key=lambda email: email.to)
    assert (spec.name, spec.queue, spec.priority) == ("send", "mail", -5)
    assert spec.key_of(Email("a@b")) == "a@b"
    assert "send" in repr(spec)
    assert "mail" in repr(spec)


@pytest.mark.parametrize("name", ["", "a\nb", "a\0b", "\x1b[31m", "x" * 201, "a\u2028b", "\ud800"])
def test_a_name_that_cannot_be_stored_or_would_forge_a_log_line_is_refused(name: str) -> None:
    """F42, F62."""
    with pytest.raises(ValueError, match="name"):
        workq.Spec(name)
    with pytest.raises(ValueError, match="name"):
        workq.handler(name)


@pytest.mark.parametrize("queue", ["a\nb", "a\0b", "x" * 201])
def test_a_queue_that_cannot_be_stored_is_refused(queue: str) -> None:
    with pytest.raises(ValueError, match="queue"):
        workq.Spec("note", queue=queue)
    with pytest.raises(ValueError, match="queue"):
        workq.handler("note", queue=queue)


@pytest.mark.parametrize("name", [None, 5, b"note", cleanup])
def test_a_name_is_a_str(name: object) -> None:
    with pytest.raises(TypeError, match="name"):
        workq.Spec(anything(name))


@pytest.mark.parametrize("priority", [-101, 101, 2**40])
def test_a_priority_out_of_range_is_refused(priority: int) -> None:
    with pytest.raises(ValueError, match="-100.*100"):
        workq.Spec("note", priority=priority)


@pytest.mark.parametrize("priority", [1.5, True, "high"])
def test_a_priority_is_an_int(priority: object) -> None:
    with pytest.raises(TypeError, match="priority"):
        workq.Spec("note", priority=anything(priority))


def test_a_key_function_is_a_function() -> None:
    with pytest.raises(TypeError, match="key"):
        workq.Spec("note", str, key=anything("to"))


async def an_async_def(task: workq.Task[str]) -> None: ...
def a_plain_def(task: workq.Task[str]) -> None: ...


class Service:
    async def method(self, task: workq.Task[str]) -> None: ...
    def plain_method(self, task: workq.Task[str]) -> None: ...

    @classmethod
    async def class_method(cls, task: workq.Task[str]) -> None: ...

    @staticmethod
    async def static_method(task: workq.Task[str]) -> None: ...


class Callee:
    async def __call__(self, task: workq.Task[str]) -> None: ...


class PlainCallee:
    def __call__(self, task: workq.Task[str]) -> None: ...


async def with_options(mailer: object, task: workq.Task[str], *, retries: int = 3) -> None: ...
def plain_with_options(mailer: object, task: workq.Task[str], *, retries: int = 3) -> None: ...


def decorated(function: Callable[[workq.Task[str]], Awaitable[None]]) -> Callable[[workq.Task[str]], Awaitable[None]]:
    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> None:
        await function(*args, **kwargs)

    return call


def thinly(function: Callable[[workq.Task[str]], Awaitable[None]]) -> Callable[[workq.Task[str]], Awaitable[None]]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Awaitable[None]:
        return function(*args, **kwargs)

    return call


ON_THE_LOOP: dict[str, Any] = {
    "async def": an_async_def,
    "bound method": Service().method,
    "class method": Service.class_method,
    "static method": Service.static_method,
    "callable object": Callee(),
    "partial": functools.partial(with_options, None),
    "partial of a partial": functools.partial(functools.partial(with_options, None), retries=4),
    "partial of a callable object": functools.partial(Callee()),
    "decorated": decorated(an_async_def),
    "plain wrapper with functools.wraps": thinly(an_async_def),
}
IN_A_THREAD: dict[str, Any] = {
    "plain def": a_plain_def,
    "bound plain method": Service().plain_method,
    "plain callable object": PlainCallee(),
    "partial of a plain def": functools.partial(plain_with_options, None),
}


@pytest.mark.parametrize("function", ON_THE_LOOP.values(), ids=ON_THE_LOOP.keys())
def test_what_is_async_underneath_runs_on_the_loop_and_may_have_a_timeout(function: Any) -> None:
    assert workq.handler("note", timeout=5)(function).is_async


@pytest.mark.parametrize("function", IN_A_THREAD.values(), ids=IN_A_THREAD.keys())
def test_a_plain_def_runs_in_a_thread_and_refuses_a_timeout(function: Any) -> None:
    assert not workq.handler("note")(function).is_async
    with pytest.raises(TypeError, match="plain def.*timeout"):
        workq.handler("note", timeout=5)(function)


@pytest.mark.parametrize("function", [*ON_THE_LOOP.values(), *IN_A_THREAD.values()])
def test_the_payload_type_is_read_through_every_wrapper(function: Any) -> None:
    codec: Codec[Any] = workq.handler("note")(function).codec()
    assert codec.dumps("text") == '"text"'
    with pytest.raises(workq.PayloadError):
        codec.dumps(5)


def test_a_handler_is_a_spec_and_calls_the_plain_function() -> None:
    seen: list[str] = []

    @workq.handler(workq.Spec("note", str, queue="mail", priority=3))
    def note(task: workq.Task[str]) -> None:
        seen.append(task.payload)

    assert (note.name, note.queue, note.priority) == ("note", "mail", 3)
    note(workq.Task("hello"))
    assert seen == ["hello"]


def no_parameters() -> None: ...
async def two_parameters(task: workq.Task[str], other: int) -> None: ...
async def keyword_only(*, task: workq.Task[str]) -> None: ...
async def async_generator(task: workq.Task[str]) -> Any:
    yield


def generator(task: workq.Task[str]) -> Any:
    yield


@pytest.mark.parametrize(
    "function", [no_parameters, two_parameters, keyword_only, with_options, Service.method, Callee]
)
def test_a_function_that_does_not_take_exactly_the_task_is_refused_with_the_remedy(function: Any) -> None:
    with pytest.raises(TypeError, match="takes the task and nothing else"):
        workq.handler("note")(function)


@pytest.mark.parametrize("function", [async_generator, generator, functools.partial(async_generator)])
def test_a_generator_is_refused(function: Any) -> None:
    with pytest.raises(TypeError, match="generator"):
        workq.handler("note")(function)


@pytest.mark.parametrize("function", ["note", None, 5, an_async_def(workq.Task("x")).close()])
def test_what_cannot_be_called_is_refused(function: object) -> None:
    with pytest.raises(TypeError, match="a function that takes a task"):
        workq.handler("note")(anything(function))


def test_a_handler_is_not_made_a_handler_twice() -> None:
    with pytest.raises(TypeError, match="a handler already"):
        workq.handler("again")(anything(cleanup))


@pytest.mark.parametrize("option", [{"queue": "mail"}, {"priority": 5}, {"queue": ""}, {"priority": 0}], ids=str)
def test_queue_and_priority_belong_to_the_spec(option: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="belong to the Spec"):
        cast(Any, workq.handler)(NOTE, **option)


async def an_async_policy(failed: int, error: BaseException) -> float: ...
def a_policy_of_one(failed: int) -> float: ...


@pytest.mark.parametrize(
    "retry",
    [3, "linear", True, workq.linear, workq.exponential, an_async_policy, a_policy_of_one],
    ids=["int", "str", "bool", "linear not called", "exponential not called", "async def", "of one argument"],
)
def test_a_policy_is_a_function_of_the_failed_runs_and_the_error(retry: object) -> None:
    with pytest.raises(TypeError, match="retry must be"):
        workq.handler("note", retry=anything(retry))


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_a_timeout_is_a_positive_number(timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout"):
        workq.handler("note", timeout=timeout)


@pytest.mark.parametrize("timeout", ["5", True])
def test_a_timeout_is_a_number(timeout: object) -> None:
    with pytest.raises(TypeError, match="timeout"):
        workq.handler("note", timeout=anything(timeout))


@pytest.mark.parametrize("annotation", [int, Email, "Nowhere", "workq.Task[Nowhere]"], ids=str)
def test_an_annotation_that_is_no_task_is_an_error_when_the_executor_is_made(
    annotation: object, queue: workq.Queue
) -> None:
    async def note(task: Any) -> None: ...

    note.__annotations__["task"] = annotation
    made = workq.handler("note")(note)
    with pytest.raises(TypeError):
        workq.Executor(queue, [made])


def test_a_payload_type_that_nothing_can_encode_is_an_error_when_the_executor_is_made(queue: workq.Queue) -> None:
    class Opaque:
        def __init__(self, socket: object) -> None: ...

    @workq.handler(workq.Spec("note", Opaque))
    async def note(task: workq.Task[Opaque]) -> None: ...

    with pytest.raises(TypeError, match="Opaque"):
        workq.Executor(queue, [note])


def test_a_local_type_in_an_annotation_is_found(queue: workq.Queue) -> None:
    @dataclass
    class Local:
        x: int

    @workq.handler("local")
    async def local(task: Annotated[workq.Task[Local], "a note"]) -> None:
        assert Local

    workq.Executor(queue, [local])
    assert local.codec().dumps(Local(1)) == '{"x":1}'


def test_a_name_that_the_enclosing_function_binds_later_is_no_hindrance(queue: workq.Queue) -> None:
    """A handler may speak of the executor that is made with it."""

    @workq.handler("last")
    async def last(task: workq.Task[int]) -> None:
        await executor.stop()

    executor = workq.Executor(queue, [last])
    assert last.codec().dumps(5) == "5"


def test_a_schedule_takes_a_handler_and_a_function() -> None:
    schedule = workq.Schedule(mail, HOURLY, Email("a@b"), key="a")
    assert (schedule.handler, schedule.payload, schedule.key) == (mail, Email("a@b"), "a")
    assert workq.Schedule(cleanup, HOURLY).key == ""


@pytest.mark.parametrize("handler", [an_async_def, "cleanup", None])
def test_a_schedule_needs_a_handler(handler: object) -> None:
    with pytest.raises(TypeError, match="no handler"):
        workq.Schedule(anything(handler), HOURLY)


def test_a_spec_without_a_function_cannot_be_scheduled() -> None:
    with pytest.raises(TypeError, match="has no function"):
        workq.Schedule(anything(NOTE), HOURLY, "x")


@pytest.mark.parametrize("when", [3600, "@hourly", None])
def test_a_schedule_needs_a_function(when: object) -> None:
    with pytest.raises(TypeError, match="every"):
        workq.Schedule(cleanup, anything(when))


@pytest.mark.parametrize(("key", "kind"), [("a\0b", ValueError), ("x" * 1001, ValueError), (5, TypeError)])
def test_a_schedules_key_can_be_stored(key: object, kind: type[Exception]) -> None:
    """F42."""
    with pytest.raises(kind, match="key"):
        workq.Schedule(cleanup, HOURLY, key=anything(key))


@pytest.mark.parametrize("payload", ["a@b", None, Email(anything(5)), Email("\ud800")], ids=repr)
def test_a_schedules_payload_is_one_that_its_handler_takes_and_can_be_stored(payload: object) -> None:
    with pytest.raises(workq.PayloadError):
        workq.Schedule(mail, HOURLY, anything(payload))
    with pytest.raises(workq.PayloadError, match="takes no payload"):
        workq.Schedule(cleanup, HOURLY, anything(Email("a@b")))


def test_a_payload_whose_type_is_not_defined_yet_is_checked_when_the_executor_is_made(queue: workq.Queue) -> None:
    @workq.handler("later")
    async def later(task: workq.Task[Defined]) -> None:
        assert Defined

    schedules = [workq.Schedule(later, HOURLY, anything("something else"))]

    @dataclass
    class Defined:
        x: int

    with pytest.raises(workq.PayloadError):
        workq.Executor(queue, [later], schedules=schedules)


def test_a_schedules_payload_is_no_larger_than_the_queue_takes(db: workq.Dialect) -> None:
    with pytest.raises(workq.PayloadError, match="max_payload"):
        workq.Executor(
            workq.Queue(db, max_payload=10), [mail], schedules=[workq.Schedule(mail, HOURLY, Email("a@example.org"))]
        )


def test_making_one_does_no_io_and_needs_no_loop(queue: workq.Queue, tmp_path: Path) -> None:
    executor = workq.Executor(queue, [cleanup], schedules=[workq.Schedule(cleanup, HOURLY)])
    assert list(tmp_path.iterdir()) == []
    assert "new" in repr(executor)
    assert not executor.health().ok


def test_the_first_argument_is_the_queue() -> None:
    with pytest.raises(TypeError, match=r"workq\.Queue"):
        workq.Executor(anything("postgresql://"), [cleanup])


def test_handlers_of_different_queues_are_refused_with_the_remedy(queue: workq.Queue) -> None:
    with pytest.raises(ValueError, match=r"''.*'mail'.*queue_name"):
        workq.Executor(queue, [cleanup, mail])


def test_queue_name_takes_any_handlers(queue: workq.Queue) -> None:
    assert "'all'" in repr(workq.Executor(queue, [cleanup, mail], queue_name="all"))
    assert "''" in repr(workq.Executor(queue, [cleanup, mail], queue_name=""))


def test_without_queue_name_it_is_the_handlers(queue: workq.Queue) -> None:
    assert "'mail'" in repr(workq.Executor(queue, [mail]))


@pytest.mark.parametrize(("name", "kind"), [("a\0b", ValueError), ("a\nb", ValueError), (5, TypeError)])
def test_a_queue_name_can_be_stored(name: object, kind: type[Exception], queue: workq.Queue) -> None:
    with pytest.raises(kind, match="queue_name"):
        workq.Executor(queue, [cleanup], queue_name=anything(name))


@pytest.mark.parametrize(
    ("handlers", "kind", "says"),
    [
        ([], ValueError, "at least one handler"),
        ([cleanup, cleanup], ValueError, "two handlers have the name 'cleanup'"),
        (cleanup, TypeError, "a list of handlers"),
        ([an_async_def], TypeError, "decorate the function"),
        ([NOTE], TypeError, "has no function"),
        (["cleanup"], TypeError, "no handler"),
    ],
    ids=["none", "twins", "bare", "plain function", "spec", "name"],
)
def test_an_executor_takes_handlers(handlers: object, kind: type[Exception], says: str, queue: workq.Queue) -> None:
    with pytest.raises(kind, match=says):
        workq.Executor(queue, anything(handlers))


CLEANUP_HOURLY = workq.Schedule(cleanup, HOURLY)


@workq.handler("cleanup")
async def other_cleanup(task: workq.Task) -> None: ...


@pytest.mark.parametrize(
    ("schedules", "kind", "says"),
    [
        ([CLEANUP_HOURLY, CLEANUP_HOURLY], ValueError, "different keys"),
        (CLEANUP_HOURLY, TypeError, "a list of schedules"),
        ([cleanup], TypeError, "Schedule"),
        ([workq.Schedule(mail, HOURLY, Email("a@b"))], ValueError, "'mail' needs its handler"),
        ([workq.Schedule(other_cleanup, HOURLY)], ValueError, "'cleanup' needs its handler"),
    ],
    ids=["twins", "bare", "handler", "not served", "another of that name"],
)
def test_an_executor_takes_schedules_of_its_own_handlers(
    schedules: object, kind: type[Exception], says: str, queue: workq.Queue
) -> None:
    with pytest.raises(kind, match=says):
        workq.Executor(queue, [cleanup], schedules=anything(schedules))


def test_schedules_of_one_handler_differ_by_key(queue: workq.Queue) -> None:
    workq.Executor(queue, [cleanup], schedules=[workq.Schedule(cleanup, HOURLY, key=key) for key in ("", "a", "b")])


async def a_middleware(task: workq.Task[Any], call_next: workq.Next) -> workq.Result: ...


@pytest.mark.parametrize(
    ("setting", "value", "kind"),
    [
        ("workers", 0, ValueError),
        ("workers", -1, ValueError),
        ("workers", 1.5, TypeError),
        ("workers", True, TypeError),
        ("max_lost", -1, ValueError),
        ("max_lost", None, TypeError),
        ("poll_interval", 0, ValueError),
        ("poll_interval", -1, ValueError),
        ("poll_interval", float("nan"), ValueError),
        ("poll_interval", "1", TypeError),
        ("lease", 0, ValueError),
        ("lease", 0.05, ValueError),
        ("lease", float("inf"), ValueError),
        ("stop_timeout", -1, ValueError),
        ("stop_timeout", None, TypeError),
        ("middleware", ["not a function"], TypeError),
        ("middleware", a_middleware, TypeError),
        ("middleware", None, TypeError),
        ("claim_ahead", "no", TypeError),
        ("claim_ahead", 1, TypeError),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_setting_that_cannot_work_is_refused_and_named(
    setting: str, value: object, kind: type[Exception], queue: workq.Queue
) -> None:
    """F10: what would break the beats is refused at construction."""
    with pytest.raises(kind, match=setting):
        cast(Any, workq.Executor)(queue, [cleanup], **{setting: value})


def test_the_smallest_settings_are_taken(queue: workq.Queue) -> None:
    workq.Executor(queue, [cleanup], workers=1, poll_interval=0.001, lease=0.1, max_lost=0, stop_timeout=0)


async def an_async_hook(event: workq.Event) -> None: ...


@pytest.mark.parametrize(
    "hook",
    [an_async_hook, functools.partial(an_async_hook), "print", None],
    ids=["async def", "partial", "a text", "nothing"],
)
def test_a_hook_is_a_plain_function(hook: object, db: workq.Dialect) -> None:
    with pytest.raises(TypeError, match="hook"):
        workq.Queue(db, on_event=[anything(hook)])


@pytest.mark.parametrize("hooks", [print, None, 5], ids=repr)
def test_hooks_are_a_list(hooks: object, db: workq.Dialect) -> None:
    with pytest.raises(TypeError, match=r"on_event=\[function\]"):
        workq.Queue(db, on_event=anything(hooks))


async def an_async_text(text: str = "") -> Any: ...


@pytest.mark.parametrize(
    ("setting", "value", "kind"),
    [
        ("headers", {"trace": "7"}, TypeError),
        ("headers", an_async_text, TypeError),
        ("redact", "x", TypeError),
        ("redact", an_async_text, TypeError),
        ("max_payload", -1, ValueError),
        ("max_payload", 0, ValueError),
        ("max_payload", "x", TypeError),
        ("max_payload", 1e6, TypeError),
    ],
    ids=["a dict", "async def", "a text", "async def for texts", "negative", "nothing", "no number", "no int"],
)
def test_a_setting_of_a_queue_that_cannot_work_is_refused_and_named(
    setting: str, value: object, kind: type[Exception], db: workq.Dialect
) -> None:
    with pytest.raises(kind, match=setting):
        cast(Any, workq.Queue)(db, **{setting: value})


class AsyncHook:
    async def __call__(self, event: workq.Event) -> None: ...


def test_a_callable_object_whose_call_is_async_is_refused_as_a_hook(db: workq.Dialect) -> None:
    """Its coroutine would never be awaited: nothing would happen, and nobody would be told."""
    with pytest.raises(TypeError, match="hook"):
        workq.Queue(db, on_event=[anything(AsyncHook())])


@pytest.mark.parametrize("after", [-1, float("nan")])
def test_a_retry_in_the_past_is_refused(after: float) -> None:
    with pytest.raises(ValueError, match="after"):
        workq.Retry("hm", after=after)


@pytest.mark.parametrize("delay", [-1, float("nan"), float("inf")])
def test_a_later_that_cannot_be_stored_is_refused(delay: float) -> None:
    """F45."""
    with pytest.raises(ValueError, match="delay"):
        workq.Later(delay)
