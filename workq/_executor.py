"""The executor: one pool of workers on one queue, with a start and an end."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any, Self

import anyio

from workq._caution import IMPATIENT, Caution
from workq._checks import count, functions, positive
from workq._health import Contact, Health, Phase, Success
from workq._held import Holding
from workq._hub import Local
from workq._life import Life
from workq._migrate import check_schema
from workq._place import PATIENT
from workq._queue import Queue
from workq._run import Middleware
from workq._schedule import Schedule, next_run
from workq._settings import Settings, by_key, by_name, queue_of
from workq._shared import plainly
from workq._spec import Handler
from workq.dialect import Busy, Connection, Interrupted, Unreachable, Urgency

logger = logging.getLogger("workq")

SHORTLY = Urgency(timeout=10, lock_wait=IMPATIENT)


class StoppedEarly(RuntimeError):
    """`start` did not come to its end, because `stop` was called meanwhile."""


class Executor:
    """Runs the tasks of one queue with a pool of workers. (W: New, Start, Stop; Q: Worker.)

    queue_name: its queue; None: the one that all its handlers name.
    workers: how many tasks run at once here.
    schedules: recurring tasks; each needs its handler among `handlers`.
    middleware: `async def mw(task, call_next)` round every handler, the first outermost.
    poll_interval: seconds between looks for due tasks when nothing wakes it; also bounds the delay of a takeover.
    lease: seconds after which the tasks of a vanished process may be taken over; extended by a beat every lease / 3.
    max_lost: a task whose process vanished more often than this is failed instead of being started again.
    stop_timeout: seconds that `stop()` gives running handlers, unless it says otherwise.
    claim_ahead: may claim a little more than it has free places for while handlers are fast.

    Several may run in a process. Making one does no I/O. Raises ValueError or TypeError for settings that cannot work.
    """

    def __init__(
        self,
        queue: Queue,
        handlers: Iterable[Handler[Any, Any]],
        /,
        *,
        workers: int = 16,
        queue_name: str | None = None,
        schedules: Iterable[Schedule] = (),
        middleware: Sequence[Middleware] = (),
        poll_interval: float = 1,
        lease: float = 30,
        max_lost: int = 5,
        stop_timeout: float = 30,
        claim_ahead: bool = True,
    ) -> None:
        if not isinstance(queue, Queue):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"the first argument is the workq.Queue, not {type(queue).__name__}")
        served = by_name(handlers)
        for handler in served.values():
            handler.codec()  # an annotation or a type that cannot work is an error now, not at the first task
        layers = functions("middleware", middleware)
        for layer in layers:
            if not callable(layer):
                raise TypeError(f"middleware is `async def mw(task, call_next)`, not {layer!r:.80}")
        if not isinstance(claim_ahead, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"claim_ahead is True or False, not {claim_ahead!r:.80}")
        self._settings = Settings(
            queue=queue_of(served.values(), queue_name),
            handlers=served,
            schedules=by_key(schedules, served),
            middleware=layers,
            workers=count("workers", workers, least=1),
            poll_interval=positive("poll_interval", poll_interval, least=0.001),
            lease=positive("lease", lease, least=0.1),
            max_lost=count("max_lost", max_lost, least=0),
            stop_timeout=positive("stop_timeout", stop_timeout, zero=True),
            claim_ahead=claim_ahead,
            context=contextvars.copy_context(),
        )
        self._hub = queue.hub
        for schedule in self._settings.schedules.values():
            self._payload(schedule)  # one that cannot be stored is an error now, not at the start
        self._holding = Holding()
        self._contact = Contact(queue.hub.clock)
        self._supervisor: asyncio.Task[None] | None = None
        self._life: Life | None = None

    def __repr__(self) -> str:
        state = "new" if self._supervisor is None else "ended" if self._supervisor.done() else "running"
        return f"<Executor queue={self._settings.queue!r} {state}, {len(self._holding)} tasks held>"

    async def start(self) -> None:
        """Begin to run tasks. Returns when every schedule has its row and the loops run.

        Raises SchemaError if the table is missing, too old or too new, RuntimeError if the pool is too small or this
        executor was started before, and whatever the database or a schedule function raises. Then nothing is left
        behind.
        """
        if self._supervisor is not None:
            raise RuntimeError("an Executor has one life: make a new one to start again")
        loop = asyncio.get_running_loop()
        started: asyncio.Future[None] = loop.create_future()
        name = f"workq executor {self._settings.queue!r}"
        self._supervisor = supervisor = loop.create_task(self._supervise(started), name=name)

        def ended(_: object) -> None:
            if not started.done():  # it was cancelled once more, while it cleaned up
                started.set_exception(StoppedEarly("the executor was stopped before it had started"))
                started.exception()

        supervisor.add_done_callback(ended)
        try:
            await asyncio.shield(started)
        except BaseException:
            if self._life is None:
                supervisor.cancel()
                await asyncio.wait([supervisor], timeout=2)
            else:
                await self.stop(0)  # it had started already: what it claimed is handed back
            if started.done() and not started.cancelled():
                started.exception()  # a cancelled caller does not ask for it
            raise

    async def stop(self, timeout: float | None = None) -> None:
        """Claim nothing more, wait for running tasks, then end. Returns within `timeout` + 1 s, whatever happens.

        timeout: seconds for running handlers; None: `stop_timeout`. Then they are cancelled. The tasks of those that
        end are handed back at once; one that will not end keeps its lease until that runs out, and is named in the
        log. May be called again, with less patience, and from any task.
        """
        patience = self._settings.stop_timeout if timeout is None else positive("timeout", timeout, zero=True)
        supervisor = self._supervisor
        if supervisor is None or supervisor.done():
            return
        if self._life is None:
            supervisor.cancel()  # still starting
        else:
            self._life.stop(patience)
        await asyncio.wait([supervisor], timeout=patience + 0.95)
        if not supervisor.done():
            logger.error("%r did not end in time and was abandoned", self)
            supervisor.cancel()

    async def run(self) -> None:
        """Start, and run until cancelled or stopped. A second cancellation is `stop(0)`. Raises what `start` raises."""
        await self.start()
        assert self._supervisor is not None
        try:
            await asyncio.shield(self._supervisor)
        except asyncio.CancelledError:
            await self._stop_twice()
            raise

    async def _stop_twice(self) -> None:
        # An anyio scope that is cancelled (a Starlette stream whose client left, say) cancels every await inside it;
        # the shield keeps that out. A cancellation of the task itself passes, and means: hurry.
        with anyio.CancelScope(shield=True):
            try:
                await self.stop()
            except asyncio.CancelledError:
                await self.stop(0)
                raise

    async def __aenter__(self) -> Self:
        """Start."""
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Stop."""
        await self._stop_twice()

    def health(self) -> Health:
        """How the loops are doing, for a readiness probe; no I/O. See `Health`."""
        life, contact, phase = self._life, self._contact, self._phase()
        loops = () if life is None else (life.claiming, life.beating, life.finishing)
        claimed, beat, finished = (loop.succeeded for loop in loops) if loops else (Success(self._hub.clock),) * 3
        return Health(
            ok=life is not None and phase == "running" and not life.overdue(),
            phase=phase,
            running=0 if life is None else len(life.workers.jobs),
            held=len(self._holding),
            reachable=contact.reachable,
            answered_at=contact.answered.at,
            answered_ago=contact.answered.ago,
            claimed_at=claimed.at,
            claimed_ago=claimed.ago,
            beat_at=beat.at,
            beat_ago=beat.ago,
            finished_at=finished.at,
            finished_ago=finished.ago,
        )

    def _phase(self) -> Phase:
        if self._supervisor is None:
            return "new"
        if self._supervisor.done():
            return "stopped"
        if self._life is None:
            return "starting"
        return "stopping" if self._life.stopping else "running"

    async def _supervise(self, started: asyncio.Future[None]) -> None:
        """Everything between start and stop is inside this one task, so that they may be called from any other."""
        async with AsyncExitStack() as stack:
            try:
                life = await self._begin(stack)
            except (Interrupted, Unreachable, Busy) as error:
                await stack.aclose()
                started.set_exception(plainly(error))
                return
            except BaseException as error:
                await stack.aclose()
                if isinstance(error, asyncio.CancelledError):
                    error = StoppedEarly("the executor was stopped before it had started")
                if not started.done():
                    started.set_exception(error)
                return
            self._life = life
            started.set_result(None)
            try:
                await life.live()
            except Exception:
                logger.exception("%r ended by an error of workq's own", self)
                raise

    async def _begin(self, stack: AsyncExitStack) -> Life:
        dialect, settings = self._hub.dialect, self._settings
        local = Local(
            queue=settings.queue,
            names=frozenset(settings.handlers),
            schedules=tuple((settings.queue, name, key) for name, key in settings.schedules),
            holding=self._holding,
            ring=self._ring,
        )
        name = f"executor of queue {settings.queue!r}"
        watched = self._contact.watched
        claim, finish = (watched(dialect.connection(f"{name}, {purpose}")) for purpose in ("claim", "finish"))
        beat = watched(dialect.connection(f"{name}, beat", first=True))

        async def leave() -> None:
            # Side by side: a server that says nothing costs each its whole patience.
            await asyncio.gather(claim.close(), finish.close(), beat.close(), self._hub.detach(local))

        self._hub.attach(local)
        stack.push_async_callback(leave)
        stack.callback(dialect.reserve(3))
        store, clock = self._hub.store, self._hub.clock
        caution = Caution(settings.lease, settings.poll_interval, clock.monotonic(), clock.now())
        await check_schema(dialect, claim)
        try:
            # The first statement on a new connection takes many round trips: too many for a beat of a short lease.
            await store.extend(beat, [], timedelta(seconds=settings.lease), SHORTLY)
            await store.succeed(finish, [], SHORTLY)
        except Busy:
            caution.waited(clock.monotonic())  # somebody has SQLite's writer, and the beats of others may be late
        if schedules := await self._first_rows(claim):
            try:
                await store.insert_schedules(claim, schedules, SHORTLY)
            except Busy:
                caution.waited(clock.monotonic())
                await store.insert_schedules(claim, schedules, PATIENT)
        return Life(settings, self._hub, self._holding, claim=claim, finish=finish, beat=beat, caution=caution)

    async def _first_rows(self, connection: Connection) -> list[tuple[object, ...]]:
        schedules = self._settings.schedules
        if not schedules:
            return []
        now = await self._hub.store.now(connection)
        return [
            (
                self._settings.queue,
                name,
                key,
                self._payload(schedule),
                schedule.handler.priority,
                next_run(schedule.when, now),
            )
            for (name, key), schedule in schedules.items()
        ]

    def _payload(self, schedule: Schedule) -> str:
        return self._hub.checked(schedule.handler.codec().dumps(schedule.payload))

    def _ring(self) -> None:
        if self._life is not None:
            self._life.rung.set()
