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
from sim.database import Change, statements_of
from sim.loop import Stuck, VirtualLoop, stacks
from sim.promises import History, broken_promises, takeovers
from sim.wire import Fate, begun
from sim.world import Node, Outage, Run, Sent, World
from workq._executor import StoppedEarly
from workq.dialect import Statements

SCHEDULES = ("a", "b")
DRAINED = 150.0
"""Seconds after the last trouble in which everything must be done."""
NAMES = ("work", "flaky", "timed", "keyed", "tick")
TROUBLE = (OSError, TimeoutError, workq.OutcomeUnknown, workq.LeaseLost)
"""What an application that is cut off from its database has to expect."""


OURS = ("workq executor", "workq claims", "workq finishes", "workq beats", "workq listen", "workq task")
"""Tasks that an executor has in the loop."""


class Odd(BaseException):
    """What no handler should raise."""


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
        self.slow = draw.choice((0.01, 0.1, 1.0, 1.0))
        """How long handlers take."""
        self._numbers = 0
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
        served = handlers(self, node)
        ahead = draw.random() < 0.7

        def made() -> workq.Executor:
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
        me = asyncio.current_task()
        for _ in range(3):
            left = [task for task in asyncio.all_tasks() if task is not me]
            for task in left:
                task.cancel()
            if not left:
                return
            await asyncio.wait(left, timeout=60)
        world.broken("clean stop", f"tasks that do not end:\n{stacks(world.loop)}")

    # What applications do

    def plan(self) -> dict[str, Any]:
        """The payload of a task: what its handler is to do."""
        draw = self.draw
        self._numbers += 1
        steps: list[Any] = []
        kinds = ["sleep"] * 6 + ["raise"] * 2 + ["enqueue", "book", "complete", "complete", "later", "retry", "fail"]
        if not self.single:
            kinds += ["stubborn", "odd", "cancelled", "delete", "repair", "skip"]
        for _ in range(draw.choice((0, 1, 2, 3))):
            step = draw.choice(kinds)
            if step in ("sleep", "stubborn"):
                steps.append([step, round(draw.uniform(0, 5) * self.slow * draw.choice((0.1, 1)), 4)])
            elif step in ("book", "complete"):
                held = draw.choice((0, 0, 0.2, 2.0 if not self.single else 0.05))
                steps.append([step, draw.choice(("commit", "commit", "roll back", "raise")), held])
            else:
                steps.append([step])
        return {"n": self._numbers, "do": steps, "fails": draw.choice((0, 1, 1, 5))}

    async def demand(self) -> None:
        """Somebody wants something."""
        draw, world = self.draw, self.world
        living = [node for node in world.nodes if not node.dead and not node.process.frozen and node.stopped is None]
        node = draw.choice([self.producer, self.producer, *living])
        what = draw.choice(
            ("one", "one", "one", "many", "burst", "booked", "rolled back", "keyed", "soon", "cancelled")
            + (() if self.single else ("delete", "repair", "reschedule", "disable"))
        )
        task = node.spawn(self.do(node, what))
        if what == "cancelled":
            for _ in range(draw.randint(0, 12)):
                await asyncio.sleep(0)
            task.cancel()
        await asyncio.wait([task], timeout=30)
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            raise error

    async def do(self, node: Node, what: str) -> None:
        """One wish, in a node."""
        draw = self.draw
        try:
            match what:
                case "one" | "cancelled":
                    await self.enqueue(node, delay=draw.choice((0, 0, 0.5)), priority=draw.choice((0, 0, -5, 5)))
                case "keyed":
                    await self.enqueue(node, name="keyed", key=draw.choice("xyz"))
                case "soon":
                    payload = self.plan()
                    self.world.sent[payload["n"]] = Sent(payload, "unknown")
                    node.queue.enqueue_soon(self.name(), payload)
                case "many":
                    await self.enqueue_many(node, draw.randint(2, 10))
                case "burst":
                    await asyncio.gather(*(self.enqueue(node) for _ in range(draw.randint(2, 8))))
                case "booked" | "rolled back":
                    async with begun(self.world, node) as tx:
                        sent = await self.enqueue_in(node, tx)
                        await self.end(tx, [sent], commit=what == "booked")
                case "delete":
                    await self.delete(node)
                case _:
                    await self.repair(node, what)
        except TROUBLE:
            pass

    def name(self) -> str:
        return self.draw.choice(("work", "work", "flaky", "timed"))

    async def enqueue(self, node: Node, *, name: str = "", **options: Any) -> None:
        """enqueue(None), and what is known of it afterwards."""
        payload = self.plan()
        sent = self.world.sent[payload["n"]] = Sent(payload, "unknown")
        id = await node.queue.enqueue(None, name or self.name(), payload, **options)
        sent.became, sent.id = ("refused", None) if id is None else ("stored", id)

    async def enqueue_many(self, node: Node, number: int) -> None:
        payloads = [self.plan() for _ in range(number)]
        several = [self.world.sent.setdefault(payload["n"], Sent(payload, "unknown")) for payload in payloads]
        ids = await node.queue.enqueue_many(None, [workq.NewTask(self.name(), payload) for payload in payloads])
        for sent, id in zip(several, ids, strict=True):
            sent.became, sent.id = "stored", id

    async def enqueue_in(self, node: Node, tx: Any) -> Sent:
        payload = self.plan()
        sent = self.world.sent[payload["n"]] = Sent(payload, "rolled back")
        sent.id = await node.queue.enqueue(tx, self.name(), payload)
        return sent

    async def end(self, tx: Any, several: list[Sent], *, commit: bool) -> None:
        """Commit, or leave it to be rolled back."""
        if not commit:
            return
        for sent in several:
            sent.became = "unknown"
        await tx.commit()
        for sent in several:
            sent.became = "stored"

    def some_id(self, where: str = "failed_at is null") -> int | None:
        """Of a task that is there; now and then, of one that was."""
        ids = [row[0] for row in self.world.database.rows(f"not scheduled and {where} order by id")]
        if not ids or self.draw.random() < 0.1:
            ids = [sent.id for sent in self.world.sent.values() if sent.id is not None and sent.became == "stored"]
        return self.draw.choice(ids) if ids else None

    async def delete(self, node: Node) -> None:
        id = self.some_id()
        if id is not None:
            self.world.deleted.add(id)
            await node.queue.delete(None, id)

    async def repair(self, node: Node, what: str) -> None:
        id = self.some_id("failed_at is not null" if what == "repair" else "failed_at is null")
        if id is None:
            return
        try:
            match what:
                case "reschedule":
                    await node.queue.reschedule(None, id)
                case "disable":
                    await node.queue.disable(None, id)
                case _:
                    await node.queue.retry(None, id)
        except workq.KeyTaken:
            pass

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
                sent = await self.enqueue_in(self.producer, tx)
                id = self.some_id()
                if id is not None:
                    self.world.deleted.add(id)
                    await self.producer.queue.delete(tx, id)
                await asyncio.sleep(seconds)
                await self.end(tx, [sent], commit=self.draw.random() < 0.5)
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
        )


def handlers(story: Story, node: Node) -> dict[str, workq.Handler[Any, Any]]:
    """The handlers of a node: each does what its task's payload says."""
    world = story.world

    async def act(task: workq.Task[Any]) -> workq.Result:
        await world.alive(node)
        held: Any = task._run  # pyright: ignore[reportPrivateUsage]
        payload = task.payload
        run = Run(tuple(held.lease), payload["n"], task.name, node, world.loop.time(), payload, held)
        world.runs.append(run)
        try:
            result = await perform(story, node, task, run)
        except BaseException as error:
            await world.alive(node)
            run.how = type(error).__name__
            raise
        else:
            await world.alive(node)
            run.how = "done" if result is None else type(result).__name__
            return result
        finally:
            if not node.dead:
                run.ended = world.loop.time()

    async def tick(task: workq.Task[Any]) -> workq.Result:
        await world.alive(node)
        held: Any = task._run  # pyright: ignore[reportPrivateUsage]
        run = Run(tuple(held.lease), 0, task.name, node, world.loop.time(), None, held)
        world.runs.append(run)
        try:
            task.payload["count"] += 1
            await asyncio.sleep(world.draw.choice((0, 0.01, 0.3)))
            await world.alive(node)
            run.how = "done"
        finally:
            if not node.dead:
                run.ended = world.loop.time()
        return None

    return {
        "work": workq.handler("work")(act),
        "flaky": workq.handler("flaky", retry=workq.linear(retries=2, delay=0.3))(act),
        "timed": workq.handler("timed", timeout=0.8)(act),
        "keyed": workq.handler("keyed", retry=workq.linear(retries=1, delay=0.1))(act),
        "tick": workq.handler("tick", retry=workq.linear(retries=1, delay=0.2))(tick),
    }


async def perform(story: Story, node: Node, task: workq.Task[Any], run: Run) -> workq.Result:
    """The steps of one payload."""
    world = story.world
    failing = task.attempt <= task.payload["fails"]
    for kind, *args in task.payload["do"]:
        match kind:
            case "sleep":
                try:
                    await asyncio.sleep(args[0])
                except asyncio.CancelledError:
                    run.cancelled = run.cancelled or world.loop.time()
                    raise
            case "stubborn":
                await stubborn(world, args[0], run)
            case "raise" if failing:
                raise RuntimeError("by the story")
            case "odd" if failing:
                raise Odd
            case "cancelled" if failing:
                raise asyncio.CancelledError
            case "retry" if failing:
                return workq.Retry("by the story", after=0.1)
            case "later" if story.draw.random() < 0.5:
                return workq.Later(0.2)
            case "fail":
                return workq.Fail("by the story")
            case "skip":
                return workq.Skip("by the story")
            case "enqueue":
                await story.enqueue(node)
            case "book":
                async with begun(world, node) as tx:
                    sent = await story.enqueue_in(node, tx)
                    await asyncio.sleep(args[1])
                    await leave(story, tx, [sent], args[0])
            case "complete":
                await complete(story, node, task, run, *args)
            case "delete":
                await story.delete(node)
            case "repair":
                await story.repair(node, "repair")
            case _:
                pass
    return None


async def stubborn(world: World, seconds: float, run: Run) -> None:
    """Ignores that it is cancelled."""
    until = world.loop.time() + seconds
    while (left := until - world.loop.time()) > 0:
        try:
            await asyncio.sleep(left)
        except asyncio.CancelledError:
            run.cancelled = run.cancelled or world.loop.time()


async def complete(story: Story, node: Node, task: workq.Task[Any], run: Run, how: str, seconds: float) -> None:
    """The end of the task in a transaction of the handler's own, together with a new task."""
    run.completed.append("rolled back")
    async with begun(story.world, node) as tx:
        sent = await story.enqueue_in(node, tx)
        await task.complete(tx)
        await asyncio.sleep(seconds)
        if how == "commit":
            run.completed[-1] = "unknown"
        await leave(story, tx, [sent], how)
        if how == "commit":
            run.completed[-1] = "committed"


async def leave(story: Story, tx: Any, several: list[Sent], how: str) -> None:
    """Commit, roll back, or raise out of the transaction."""
    if how == "raise":
        raise RuntimeError("by the story")
    await story.end(tx, several, commit=how == "commit")
