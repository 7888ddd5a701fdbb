"""Runs a handler once and says how it ended. Nothing here writes to the table."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias, cast

from workq._describe import as_group
from workq._ending import Raised
from workq._errors import PayloadError
from workq._held import Held
from workq._outcome import Done, Fail, Later, Outcome, Result, Skip
from workq._spec import Handler
from workq._store import parse_headers
from workq._task import CURRENT, Completer, Task, task_of
from workq._threads import Threads

logger = logging.getLogger("workq")

DONE = Done()

Next: TypeAlias = Callable[[], Awaitable[Result]]
Middleware: TypeAlias = Callable[[Task[Any], Next], Awaitable[Result]]


async def run_once(
    held: Held, middleware: Sequence[Middleware], threads: Threads, complete: Completer
) -> tuple[Outcome | None, str | PayloadError | None]:
    """Decode the payload and call the handler. Returns the outcome, and the payload to store.

    The outcome is None if workq itself ended the run (by stop, or because the lease was lost).
    """
    handler, claimed = held.handler, held.claimed
    try:
        payload = handler.codec().loads(claimed.payload)
    except BaseException as error:
        # Whatever the policy: a payload that does not decode today does not decode tomorrow.
        return Fail(error), None
    task = task_of(claimed, payload, parse_headers(claimed.headers), complete, held)
    CURRENT.set(task)
    alarm = None
    if handler.timeout is not None:
        alarm = asyncio.get_running_loop().call_later(handler.timeout, held.cancel, "timeout")
    try:
        if handler.is_async and not middleware:
            result: object = await handler.function(task)
        else:
            result = await wrapped(handler, task, middleware, threads)()
        outcome = outcome_of(handler, result)
    except BaseException as error:
        # Only a cancellation that workq asked for is one; any other error is the handler's, of whatever kind.
        outcome = cast(Outcome, error) if issubclass(type(error), Outcome) else raised(error)
    finally:
        if alarm is not None:
            alarm.cancel()
    if held.cancelled == "timeout":
        return Raised(TimeoutError(f"the handler did not end within its timeout of {handler.timeout:g} s")), None
    if held.cancelled is not None and isinstance(outcome, Raised):
        return None, None
    if (claimed.scheduled and isinstance(outcome, Done | Skip)) or isinstance(outcome, Later):
        return outcome, encoded(handler, task)
    return outcome, None


def encoded(handler: Handler[Any, Any], task: Task[Any]) -> str | PayloadError:
    """The payload as the handler left it."""
    try:
        return handler.codec().dumps(task.payload)
    except PayloadError as error:
        return error
    except BaseException as error:
        return PayloadError(f"the payload that the handler left cannot be stored: {error!r:.500}")


def wrapped(handler: Handler[Any, Any], task: Task[Any], middleware: Sequence[Middleware], threads: Threads) -> Next:
    """The handler with the middleware round it, the first outermost."""

    async def innermost() -> Result:
        result: Result
        if handler.is_async:
            result = await handler.function(task)
            return result
        returned, error = await threads.run(handler.function, task)
        if error is not None:
            raise error
        result = await returned if inspect.isawaitable(returned) else returned
        return result

    following: Next = innermost
    for layer in reversed(middleware):
        following = _layer(layer, task, following)
    return following


def _layer(layer: Middleware, task: Task[Any], following: Next) -> Next:
    async def call() -> Result:
        return await layer(task, following)

    return call


def outcome_of(handler: Handler[Any, Any], result: object) -> Outcome:
    """What a handler's return value means."""
    if result is None:
        return DONE
    if isinstance(result, Outcome):
        return result
    if not handler.warned:
        handler.warned = True
        logger.warning(
            "the handler %r returned a %s, which counts as success: return None, or workq.Done(), Retry, Fail, "
            "Skip or Later",
            handler.name,
            type(result).__name__,
        )
    return Done()


def raised(error: BaseException) -> Outcome:
    """What an exception means: an error, unless it is a group that holds one outcome and nothing else."""
    group = as_group(error)
    if group is not None:
        outcomes, others = group.split(Outcome)
        if outcomes is not None and others is None:
            leaves = list(_leaves(outcomes))
            if len(leaves) == 1 and isinstance(leaves[0], Outcome):
                return leaves[0]
    return Raised(error)


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for member in cast("Sequence[BaseException]", group.exceptions):
        nested = as_group(member)
        found += [member] if nested is None else _leaves(nested)
    return found
