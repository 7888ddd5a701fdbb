"""A story: from a seed to nodes, tasks and troubles, played in virtual time, until everything is done or must be."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import workq
from sim.applications import TROUBLE, Applications
from sim.database import Change, statements_of
from sim.handlers import Odd, handlers
from sim.loop import Stuck, VirtualLoop, stacks
from sim.promises import History, broken_promises, takeovers
from sim.wire import Fate, begun
from sim.world import Node, Outage, World
from workq._executor import StoppedEarly
from workq.dialect import Statements

SCHEDULES = ("a", "b")
DRAINED = 150.0
"""Seconds after the last trouble in which everything must be done."""
NAMES = ("work", "flaky", "timed", "keyed", "tick")
OURS = ("workq executor", "workq claims", "workq finishes", "workq beats", "workq listen", "workq task")
"""Tasks that an executor has in the loop."""


@dataclass
class Result:
    """What came of a story."""

    seed: int
    kind: str
    title: str
    violations: list[tuple[str, str]]
    tasks: int
    runs: int
    statements: int
    seconds: float
    takeovers: list[float]
    stops: list[float]
    outages: int


def play(
    seed: int,
    folder: Path,
    *,
    plant: Callable[[Statements], Statements] = lambda sql: sql,
    watch: Callable[[Story, Node, str, Any, Fate], None] | None = None,
    keep: Callable[[Story], None] | None = None,
) -> Result:
    """Play the story of a seed. Nothing in it depends on anything else."""
    state = random.getstate()
    random.seed(seed)
    noise = Noise()
    logger = logging.getLogger("workq")
    before = logger.level, logger.propagate
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    logger.addHandler(noise)
    loop = VirtualLoop()
    story = Story(seed, loop, folder, plant)
    story.watch = watch
    try:
        world = story.world
        loop.set_exception_handler(lambda loop, context: unhandled(world, context))
        noise.world = world
        try:
            loop.run_until_complete(loop.create_task(story.told(), context=world.context.copy()))
        except Stuck as stuck:
            world.broken("no loss", str(stuck))
        history = History(world)
        history.play()
        if keep is not None:
            story.changes = history.changes
            keep(story)
        return story.result(broken_promises(world, history), history)
    finally:
        logger.removeHandler(noise)
        logger.setLevel(before[0])
        logger.propagate = before[1]
        random.setstate(state)
        story.world.database.close()
        loop.close()


def unhandled(world: World, context: dict[str, Any]) -> None:
    """Nothing of workq's may end in the loop's handler of last resort."""
    error = context.get("exception")
    if not isinstance(error, Odd):
        world.broken("isolation", f"unhandled in the loop: {context.get('message')}: {error!r}")


class Noise(logging.Handler):
    """An error of workq's own is a broken promise."""

    world: World | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if self.world is not None and "error of workq's own" in record.getMessage():
            error = record.exc_info[1] if record.exc_info else None
            self.world.broken("isolation", f"{record.getMessage()}: {error!r}")


class Story:
    """The world of a seed, and what happens in it."""

    def __init__(self, seed: int, loop: VirtualLoop, folder: Path, plant: Callable[[Statements], Statements]) -> None:
        self.seed = seed
        self.draw = draw = random.Random(seed)
        kind: Any = draw.choice(("machine", "server"))
        self.world = world = World(loop, folder, kind, statements_of(plant), seed)
        self.single = draw.random() < 0.35
        """One trouble only, in calm weather: then the bounds of time are checked."""
        self.length = draw.uniform(4, 14)
        self.applications = Applications(world, draw, calm=self.single)
        self._names = 0
        self.producer = world.node("producer", self._skew())
        self.troubles = self._troubles()
        self.title = ", ".join(name for _, name in self.troubles) or "nothing"
        world.database.crashes = any(name == "server crash" for _, name in self.troubles)
        self.storm = 0.0 if self.single else draw.choice((0.0, 0.5, 1.0, 2.0))
        world.weather = self.weather
        self.watch: Callable[[Story, Node, str, Any, Fate], None] | None = None
        self.changes: list[Change] = []
        """For those who want to print them."""
        self.stopped: list[asyncio.Task[None]] = []
        self.jobs: list[asyncio.Task[Any]] = []

    def _skew(self) -> float:
        return self.draw.choice((0.0, 600.0, -600.0)) if self.world.database.kind == "server" else 0.0

    def _troubles(self) -> list[tuple[float, str]]:
        """When something happens, and what."""
        draw = self.draw
        names = ["crash", "freeze", "freeze", "stop", "hold", "cancel", "another"]
        names += ["step"] if self.world.database.kind == "machine" else ["outage", "server crash"]
        number = 1 if self.single else draw.randint(0, 6)
        return sorted((draw.uniform(0.5, self.length), draw.choice(names)) for _ in range(number))

    def weather(self, node: Node, name: str, params: Any) -> Fate:
        """What becomes of a statement."""
        fate = self.fate(name, params)
        if self.watch is not None:
            self.watch(self, node, name, params, fate)
        return fate

    def fate(self, name: str, params: Any) -> Fate:
        draw, there, back = self.world.draw, self.world.draw.uniform(0, 0.005), self.world.draw.uniform(0, 0.005)
        if not self.storm or self.world.loop.time() > self.length:
            return Fate(there, back)
        chance = draw.random() / self.storm
        several = len(params.get("leases", params.get("endings", ()))) > 1
        if chance < 0.004 and several and name in ("succeed", "settle"):
            return Fate(there, back, failed=True)
        if chance < 0.02:
            return Fate(there, draw.uniform(0.05, 2)) if draw.random() < 0.5 else Fate(draw.uniform(0.05, 2), back)
        if self.world.database.kind == "machine" or chance > 0.06:
            return Fate(there, back)
        if chance < 0.03:
            return Fate(there, back, refused=True)
        if chance < 0.04:
            return Fate(there, back, broken=True)
        if chance < 0.052:
            return Fate(there, back, unanswered=True)
        if chance < 0.057:
            return Fate(draw.uniform(0, 12), back, swallowed=True)
        return Fate(there, back, dropped=True)

    # What the story is made of

    async def told(self) -> None:
        """Begin, let it happen, calm down, and see that everything comes to its end."""
        try:
            await self.happens()
        finally:
            await self.swept()

    async def happens(self) -> None:
        world, loop = self.world, self.world.loop
        for _ in range(self.draw.randint(1, 3)):
            await self.begin()
        ordered: list[tuple[float, Callable[[], Coroutine[Any, Any, Any]]]] = []
        ordered += [(at, lambda name=name: self.trouble(name)) for at, name in self.troubles]  # type: ignore[misc]
        ordered += [(self.draw.uniform(0, self.length), self.demand) for _ in range(self.draw.randint(4, 30))]
        for at, happen in sorted(ordered, key=lambda pair: pair[0]):
            await asyncio.sleep(max(at - loop.time(), 0))
            self.jobs.append(loop.create_task(happen()))
        await asyncio.sleep(max(self.length - loop.time(), 0))
        await asyncio.wait(self.jobs, timeout=60)
        for job in self.jobs:
            if job.done() and not job.cancelled() and job.exception() is not None:
                raise job.exception()  # type: ignore[misc]
        last = await self.begin(names=NAMES, schedules=SCHEDULES, workers=16)
        await self.drained(last)
        for node in world.nodes:
            if node.executor is not None and not node.dead and node.stopped is None:
                self.stopped.append(loop.create_task(self.stop(node, 5)))
        if self.stopped:
            await asyncio.wait(self.stopped, timeout=30)

    async def begin(
        self, names: tuple[str, ...] | None = None, schedules: tuple[str, ...] | None = None, workers: int = 0
    ) -> Node:
        """One more process with an executor."""
        draw, world = self.draw, self.world
        self._names += 1
        node = world.node(f"node{self._names}", self._skew())
        node.lease = draw.choice((1.0, 2.0, 3.0, 5.0))
        node.poll = draw.choice((0.2, 0.5, 1.0))
        node.workers = workers or (16 if self.single else draw.choice((1, 2, 4, 16)))
        node.names = names or tuple(name for name in NAMES if self.single or draw.random() < 0.9) or NAMES
        keys = schedules if schedules is not None else draw.choice(((), SCHEDULES, SCHEDULES[:1]))
        if "tick" not in node.names:
            keys = ()
        served = handlers(self.applications, node)
        ahead = draw.random() < 0.7

        node.schedules = keys

        def made() -> workq.Executor:
            node.made = world.loop.time()
            schedules = [
                workq.Schedule(served["tick"], workq.every(seconds=1.0), {"count": 0}, key=key) for key in keys
            ]
            return workq.Executor(
                node.queue,
                [handler for name, handler in served.items() if name in node.names],
                queue_name="",
                workers=node.workers,
                lease=node.lease,
                poll_interval=node.poll,
                claim_ahead=ahead,
                schedules=schedules,
            )

        async def start() -> None:
            while node.stopped is None:
                node.executor = made()
                try:
                    await node.executor.start()
                except (OSError, TimeoutError):  # the database is gone: a supervisor would start it again
                    await asyncio.sleep(0.5)
                except StoppedEarly:
                    return
                else:
                    world.schedules |= set(keys)
                    node.began = world.loop.time()
                    return

        starting = node.spawn(start())
        if names is not None:
            await starting
        else:
            await asyncio.wait([starting], timeout=1)
            self.jobs.append(starting)
        return node

    async def stop(self, node: Node, patience: float) -> None:
        """End an executor in order, and then its process."""
        loop = self.world.loop

        async def stop() -> None:
            assert node.executor is not None
            node.stopped = at = loop.time()
            await node.executor.stop(patience)
            self.world.stops.append((node, at, patience, loop.time() - at))
            await asyncio.sleep(0.5)
            left = [task.get_name() for task in node.process.tasks if task.get_name().startswith(OURS)]
            left = [name for name in left if not name.startswith("workq task") or not self.stubborn(name)]
            if left:
                self.world.broken("clean stop", f"{node} left {', '.join(sorted(left))} in the loop")

        task = node.spawn(stop())
        await asyncio.wait([task], timeout=patience + 40)

    def stubborn(self, name: str) -> bool:
        """Does this handler ignore that it is cancelled?"""
        id = int(name.split()[2])
        return any(run.claim[0] == id and run.ended is None for run in self.world.runs)

    async def drained(self, last: Node) -> None:
        """Everything that is due comes to its end once nothing goes wrong any more."""
        world, loop = self.world, self.world.loop
        until = loop.time() + DRAINED
        while left := world.database.rows("failed_at is null and not scheduled"):
            if loop.time() > until:
                world.broken("no loss", f"{DRAINED:g} s after the last trouble there are left: {left[:3]}")
                return
            await asyncio.sleep(0.25)

        async def wait() -> None:
            try:
                await last.queue.wait(*(name for name in NAMES if name != "tick"), timeout=30)
            except TimeoutError as error:
                world.broken("no loss", f"wait() did not return although all is done: {error}")

        await last.spawn(wait())

    async def swept(self) -> None:
        """What runs yet is in a dead process, or would not be cancelled."""
        world = self.world
        for node in world.nodes:
            if node.process.frozen:
                node.thaw()
            if not node.dead:
                node.spawn(node.wire.close())
        await asyncio.sleep(1)
        for _ in range(3):
            # In the order they were made: all_tasks() is a set, whose order is another one in each process.
            made = [*self.jobs, *self.stopped, *(task for node in world.nodes for task in node.process.tasks)]
            left = [task for task in made if not task.done()]
            for task in left:
                task.cancel()
            if not left:
                break
            await asyncio.wait(left, timeout=60)
        if len(asyncio.all_tasks()) == 1:
            return
        world.broken("clean stop", f"tasks that do not end:\n{stacks(world.loop)}")

    async def demand(self) -> None:
        """Somebody wants something."""
        draw, world = self.draw, self.world
        living = [node for node in world.nodes if not node.dead and not node.process.frozen and node.stopped is None]
        node = draw.choice([self.producer, self.producer, *living])
        what = draw.choice(
            ("one", "one", "one", "many", "burst", "booked", "rolled back", "keyed", "soon", "cancelled")
            + (() if self.single else ("delete", "repair", "reschedule", "disable"))
        )
        task = node.spawn(self.applications.do(node, what))
        if what == "cancelled":
            for _ in range(draw.randint(0, 12)):
                await asyncio.sleep(0)
            task.cancel()
        await asyncio.wait([task], timeout=30)
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            raise error

    # What goes wrong

    async def trouble(self, name: str) -> None:
        """One trouble, for as long as it lasts."""
        draw, world = self.draw, self.world
        working = [
            node
            for node in world.nodes
            if node.executor is not None and not node.dead and not node.process.frozen and node.stopped is None
        ]
        match name:
            case "another":
                await self.begin()
            case "crash" if working:
                draw.choice(working).die()
                if draw.random() < 0.7 or len(working) == 1:
                    await self.begin()
            case "freeze" if working:
                node = draw.choice(working)
                node.freeze()
                await asyncio.sleep(node.lease * draw.choice((0.3, 0.9, 1.1, 2.5)))
                node.thaw()
            case "stop" if working:
                await self.stop(draw.choice(working), draw.choice((0.0, 0.05, 0.5, 3.0)))
                await self.begin()
            case "hold":
                self.jobs.append(self.producer.spawn(self.hold(draw.choice((0.05, 0.5, 3.0, 8.0)))))
            case "cancel" if working:
                node = draw.choice(working)
                for _ in range(draw.randint(0, 40)):
                    await asyncio.sleep(0)
                await self.stop(node, 0)
                await self.begin()
            case "step":
                world.database.offset += draw.choice((-1, 1)) * draw.choice((0.2, 2.0, 20.0))
                world.steps.append(world.loop.time())
            case "outage":
                await self.outage(draw.choice(("refuses", "swallows", "mute")), draw.choice((0.2, 1.0, 5.0, 12.0)))
            case "server crash":
                world.crash_server()
                await self.outage("refuses", draw.choice((0.1, 0.5, 3.0)))
            case _:
                pass

    async def outage(self, kind: Outage, seconds: float) -> None:
        world = self.world
        if world.outage is not None:
            return
        since, world.outage = world.loop.time(), kind
        for node in world.nodes:
            node.trouble()
        await asyncio.sleep(seconds)
        world.outage = None
        for node in world.nodes:
            node.trouble()
        world.outages.append((kind, since, world.loop.time()))

    async def hold(self, seconds: float) -> None:
        """A transaction that stays open, and has a task's row, or SQLite's writer."""
        try:
            async with begun(self.world, self.producer) as tx:
                sent = await self.applications.enqueue_in(self.producer, tx)
                id = self.applications.some_id()
                if id is not None:
                    self.world.deleted.add(id)
                    await self.producer.queue.delete(tx, id)
                await asyncio.sleep(seconds)
                await self.applications.end(tx, [sent], commit=self.draw.random() < 0.5)
        except TROUBLE:
            pass

    def result(self, violations: list[tuple[str, str]], history: History) -> Result:
        world = self.world
        return Result(
            seed=self.seed,
            kind=world.database.kind,
            title=self.title,
            violations=violations,
            tasks=len(world.sent),
            runs=len(world.runs),
            statements=len(world.calls),
            seconds=world.loop.time(),
            takeovers=[seconds for _, seconds, _ in takeovers(world, history)],
            stops=[max(seconds - patience, 0) for _, _, patience, seconds in world.stops],
            outages=len(world.outages),
        )
