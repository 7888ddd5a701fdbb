"""An event loop whose time jumps to the next timer, with nodes in it that can be frozen.

A node is whatever runs in a context where NODE names it: its callbacks and timers wait while it is frozen, as those of
a process under SIGSTOP do. Nothing runnable and no timer is a deadlock, and turns without end a livelock; both are
raised with the stacks of all tasks.
"""

from __future__ import annotations

import asyncio
import contextvars
import io
import selectors
from collections.abc import Callable
from typing import Any

TURNS = 200_000
"""So many turns in which no time passes are a livelock."""


class Stuck(BaseException):
    """The program in the loop cannot go on; the text shows where every task waits."""


class Process:
    """What the loop knows of a node."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.frozen = False
        self.held: list[asyncio.Handle] = []
        self.tasks: dict[asyncio.Task[Any], None] = {}

    def __repr__(self) -> str:
        return self.name


NODE: contextvars.ContextVar[Process | None] = contextvars.ContextVar("node", default=None)


class _Jump(selectors.DefaultSelector):
    """Never waits: tells the loop how far its time may jump."""

    jump: Callable[[float | None], None]

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.jump(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """asyncio's own loop, but for the clock."""

    def __init__(self) -> None:
        self._now = 0.0
        self._turns = 0
        selector = _Jump()
        selector.jump = self._jump
        super().__init__(selector)
        self.set_task_factory(_task)

    def time(self) -> float:
        return self._now

    def _jump(self, timeout: float | None) -> None:
        if timeout is None:
            raise Stuck(f"deadlock: nothing can run, and no timer is set\n{stacks(self)}")
        if timeout > 0:
            self._now += timeout
            self._turns = 0
            return
        self._turns += 1
        if self._turns > TURNS:
            raise Stuck(f"livelock: {TURNS} turns in which no time passed\n{stacks(self)}")

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        node = NODE.get() if context is None else context.get(NODE)
        if node is None or not node.frozen:
            return super().call_soon(callback, *args, context=context)
        handle = asyncio.Handle(callback, args, self, context)
        node.held.append(handle)
        return handle

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        node = NODE.get() if context is None else context.get(NODE)
        if node is None:
            return super().call_at(when, callback, *args, context=context)
        step: Any = self._due
        handle: Any = super().call_at(when, step, context=context)
        handle._args = (node, handle, callback, args)
        return handle

    def _due(self, node: Process, handle: Any, callback: Callable[..., object], args: Any) -> None:
        if node.frozen:
            handle._callback, handle._args = callback, args
            node.held.append(handle)
        else:
            callback(*args)

    def freeze(self, node: Process) -> None:
        """From now on nothing of the node runs."""
        node.frozen = True

    def thaw(self, node: Process) -> None:
        """All that became due meanwhile runs now; what cancels it in time still does."""
        node.frozen = False
        held, node.held = node.held, []
        self._ready: Any
        self._ready.extend(handle for handle in held if not handle.cancelled())


def _task(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
    task = asyncio.Task(coro, loop=loop, **options)
    context: contextvars.Context | None = options.get("context")
    node = NODE.get() if context is None else context.get(NODE)
    if node is not None:
        node.tasks[task] = None
        # In an empty context, or a frozen node would keep its dead tasks.
        task.add_done_callback(lambda done: node.tasks.pop(done, None), context=contextvars.Context())
    return task


def stacks(loop: asyncio.AbstractEventLoop) -> str:
    """Where every task of the loop waits."""
    out = io.StringIO()
    for task in sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name()):
        task.print_stack(limit=6, file=out)
    return out.getvalue()
