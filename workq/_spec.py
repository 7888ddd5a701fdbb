"""What a task is (Spec, all a producer needs) and what runs it (Handler, what an executor needs)."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Awaitable, Callable
from typing import Any, Generic, Protocol, TypeAlias, overload

from typing_extensions import TypeVar

from workq._checks import check_name, check_priority, positive
from workq._codec import CheckedCodec, Codec, codec_for
from workq._outcome import Result
from workq._retry import RetryPolicy
from workq._task import Task

P = TypeVar("P", default=Any)
R = TypeVar("R", bound="Result | Awaitable[Result]", default=Any)


class Spec(Generic[P]):
    """A kind of task: its name, payload type, queue, priority and key. All a producer needs. (Q: JobSpec.)

    `Spec("cleanup")` takes no payload. `key` makes tasks unique: while a task with that key lives, another enqueue of
    it returns None. `codec` replaces the encoding that is chosen by the payload's type.

    Raises ValueError or TypeError for names and priorities that cannot be stored.
    """

    __slots__ = ("_codec", "_key", "_kind", "_name", "_priority", "_queue")

    @overload
    def __init__(self: Spec[None], name: str, /, *, queue: str = "", priority: int = 0) -> None: ...
    @overload
    def __init__(
        self,
        name: str,
        payload: type[P],
        /,
        *,
        queue: str = "",
        priority: int = 0,
        key: Callable[[P], str | None] | None = None,
        codec: Codec[P] | None = None,
    ) -> None: ...
    def __init__(
        self,
        name: str,
        payload: Any = None,
        /,
        *,
        queue: str = "",
        priority: int = 0,
        key: Callable[[Any], str | None] | None = None,
        codec: Codec[Any] | None = None,
    ) -> None:
        self._name = check_name("name", name)
        self._queue = check_name("queue", queue, empty=True)
        self._priority = check_priority(priority)
        if key is not None and not callable(key):
            raise TypeError(f"key must be a function from the payload to a str or None, not {key!r:.80}")
        self._kind: Any = payload
        self._key = key
        self._codec: Codec[P] | None = None if codec is None else CheckedCodec(name, codec)

    @property
    def name(self) -> str:
        """The name that routes a task to its handlers."""
        return self._name

    @property
    def queue(self) -> str:
        """The queue it is put in unless `enqueue(queue=...)` says otherwise."""
        return self._queue

    @property
    def priority(self) -> int:
        """-100 (first) to 100 (last)."""
        return self._priority

    def codec(self) -> Codec[P]:
        """How payloads become JSON text; chosen at first use. Raises TypeError for a type nothing here can encode."""
        if self._codec is None:
            self._codec = codec_for(self._payload_type())
        return self._codec

    def key_of(self, payload: P) -> str | None:
        """The key of a task with this payload."""
        return None if self._key is None else self._key(payload)

    def _payload_type(self) -> Any:
        return self._kind

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name!r} queue={self._queue!r}>"


class Handler(Spec[P], Generic[P, R]):
    """A Spec with the function that runs it and its policy. Made by `handler`; calling it calls the plain function."""

    __slots__ = ("function", "is_async", "retry", "timeout", "warned")

    def __init__(
        self, spec: Spec[P], function: Callable[[Task[P]], R], retry: RetryPolicy | None, timeout: float | None
    ) -> None:
        self._name, self._queue, self._priority = spec.name, spec.queue, spec.priority
        self._kind, self._key, self._codec = spec._kind, spec._key, spec._codec
        self.function: Callable[[Task[P]], R] = function
        self.is_async: bool = runs_on_the_loop(function)
        self.retry: RetryPolicy | None = retry
        self.timeout: float | None = timeout
        self.warned: bool = False

    def __call__(self, task: Task[P], /) -> R:
        """Call the plain function."""
        return self.function(task)

    def _payload_type(self) -> Any:
        return payload_type(self.function) if self._kind is _BY_ANNOTATION else self._kind


class _Named(Protocol):
    def __call__(self, function: Callable[[Task[P]], R], /) -> Handler[P, R]: ...


class _Specified(Protocol[P]):
    def __call__(self, function: Callable[[Task[P]], R], /) -> Handler[P, R]: ...


class _ByAnnotation:
    """Stands for "the type in the function's Task[...]"."""


_BY_ANNOTATION = _ByAnnotation()


@overload
def handler(
    name: str,
    /,
    *,
    queue: str = "",
    priority: int = 0,
    retry: RetryPolicy | None = None,
    timeout: float | None = None,
) -> _Named: ...
@overload
def handler(spec: Spec[P], /, *, retry: RetryPolicy | None = None, timeout: float | None = None) -> _Specified[P]: ...
def handler(
    spec: Spec[Any] | str,
    /,
    *,
    queue: str | None = None,
    priority: int | None = None,
    retry: RetryPolicy | None = None,
    timeout: float | None = None,
) -> Any:
    """Make a function the handler of a kind of task. (W: Register.)

    Takes functions, bound methods, closures and callable objects, `async def` or plain `def` (run in a thread). The
    short form by name reads the payload's type from the function's `Task[...]`.

    retry: when a failed run is repeated, `linear(...)`, `exponential(...)` or any function; None: never by itself.
    timeout: seconds after which an `async def` is cancelled, which counts as a failed run.

    Raises TypeError for a function that does not take exactly the task, and for a timeout on a plain `def`, whose
    thread cannot be cancelled.
    """
    if isinstance(spec, Spec):
        if queue is not None or priority is not None:
            raise TypeError("queue and priority belong to the Spec: Spec(name, Type, queue=..., priority=...)")
        kind = spec
    else:
        named: Any = _BY_ANNOTATION
        kind = Spec[Any](spec, named, queue=queue or "", priority=priority or 0)
    if retry is not None:
        check_policy(retry)
    limit = None if timeout is None else positive("timeout", timeout)

    def decorate(function: Callable[[Task[Any]], Any], /) -> Handler[Any, Any]:
        check_function(function)
        made = Handler[Any, Any](kind, function, retry, limit)
        if limit is not None and not made.is_async:
            raise TypeError(
                f"the handler {made.name!r} is a plain def, whose thread cannot be cancelled: give no timeout, "
                "or make it an async def"
            )
        return made

    return decorate


def require_handler(given: object) -> Handler[Any, Any]:
    """Raise TypeError, naming the remedy, unless this is a Handler."""
    if isinstance(given, Handler):
        return given  # pyright: ignore[reportUnknownVariableType]
    if isinstance(given, Spec):
        raise TypeError(f"{given!r} has no function: decorate one with @workq.handler({given.name!r}) or the spec")
    raise TypeError(f"{given!r:.80} is no handler: decorate the function with @workq.handler(name)")


Target: TypeAlias = Spec[Any] | str


def name_of(target: Target) -> str:
    """The name of a Spec, of a Handler, or as given."""
    return target.name if isinstance(target, Spec) else check_name("name", target)


def check_function(function: object) -> None:
    """Raise TypeError unless this can be called with a task and nothing else."""
    if isinstance(function, Spec):
        raise TypeError(f"{function!r} is a handler already; decorate the plain function")
    if not callable(function):
        raise TypeError(f"a handler is a function that takes a task, not {function!r:.80}")
    inner = _innermost(function)
    if inspect.isasyncgenfunction(inner) or inspect.isgeneratorfunction(inner):
        raise TypeError(f"{function!r:.80} is a generator; a handler is a function that ends by returning")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # written in C: the call will tell
    try:
        signature.bind(object())
    except TypeError:
        raise TypeError(
            f"a handler takes the task and nothing else, but {function!r:.80} is {signature}. Give it what it needs "
            "by a closure, functools.partial, or a bound method: handler(name)(service.send)"
        ) from None


def check_policy(policy: object) -> None:
    """Raise TypeError unless this can be called as a retry policy."""
    remedy = "linear(...), exponential(...) or a plain function of the failed runs so far and the error"
    if not callable(policy) or runs_on_the_loop(policy):
        raise TypeError(f"retry must be {remedy}, not {policy!r:.80}")
    try:
        signature = inspect.signature(policy)
    except (TypeError, ValueError):
        return  # written in C: the call will tell
    try:
        signature.bind(1, Exception())
    except TypeError:
        raise TypeError(f"retry must be {remedy}, but {policy!r:.80} is {signature}. Was it to be called?") from None


def payload_type(function: Callable[..., Any]) -> Any:
    """The X of a function's `Task[X]`; None for a bare `Task`, Any where nothing is said.

    Raises TypeError if the annotation cannot be resolved.
    """
    inner = _innermost(function)
    # The outer signature has lost what a partial or a bound method has filled in already.
    parameters = inspect.signature(function).parameters.values()
    annotation: Any = next((one.annotation for one in parameters), inspect.Parameter.empty)
    if annotation is inspect.Parameter.empty or annotation is Any:
        return Any
    if isinstance(annotation, str):
        annotation = _resolve(annotation, inner)
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    if annotation is Any or annotation is object:
        return Any
    if annotation is Task:
        return None
    if typing.get_origin(annotation) is Task:
        (kind,) = typing.get_args(annotation)
        if isinstance(kind, str | typing.ForwardRef):
            kind = _resolve(kind if isinstance(kind, str) else kind.__forward_arg__, inner)
        return Any if isinstance(kind, typing.TypeVar) else kind
    raise TypeError(f"{function!r:.80} takes {annotation!r:.80}; a handler takes workq.Task or workq.Task[Type]")


def _resolve(text: str, function: Any) -> Any:
    names = _enclosing(function)
    holder = type("holder", (), {"__annotations__": {"task": text}})
    try:
        scope = getattr(function, "__globals__", {})
        return typing.get_type_hints(holder, globalns=scope, localns=names, include_extras=True)["task"]
    except Exception as error:
        raise TypeError(
            f"the annotation {text!r:.80} of {function!r:.80} cannot be resolved ({error}): give the type with "
            "handler(Spec(name, Type)) instead of handler(name)"
        ) from None


def _enclosing(function: Any) -> dict[str, Any]:
    """The variables of the enclosing function that this one uses, as far as they are bound by now."""
    names: dict[str, Any] = {}
    if not inspect.isfunction(function):
        return names
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            names[name] = cell.cell_contents
        except ValueError:  # still empty
            continue
    return names


def _innermost(function: Any) -> Any:
    """The function below partials, bound methods, wrappers and callable objects."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func  # pyright: ignore[reportUnknownVariableType,reportUnknownMemberType]
        elif inspect.ismethod(function):
            function = function.__func__
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        elif not inspect.isroutine(function) and not inspect.isclass(function):
            function = type(function).__call__
        else:
            return function


def runs_on_the_loop(function: Callable[..., Any]) -> bool:
    """An `async def`, however wrapped. (iscoroutinefunction alone sees through neither wrappers nor objects.)"""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(_innermost(function))
