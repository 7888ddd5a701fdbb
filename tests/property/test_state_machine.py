"""The whole of the semantics: any sequence of operations leaves the table as a small model says, after every step.

Two executors' stages are called one pass at a time, so that leases end, rows change hands and operators interfere at
any moment between a claim and the end of its run.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from random import Random, SystemRandom
from typing import Any, TypeAlias, cast

import pytest

import workq
from property import model
from support import Database, PostgresDatabase, SQLiteDatabase
from workq._caution import Caution
from workq._held import Holding
from workq._life import Life
from workq._place import PATIENT
from workq._task import Lease
from workq.dialect import Connection, Dialect, Statement, Statements, Urgency

Plant: TypeAlias = Callable[[Statements], Statements]

SLACK = 25.0
"""Seconds that one sequence of steps may take: the model's time stands still meanwhile."""
GONE = 10**12
URGENCY = Urgency(timeout=10)
RESULTS: dict[model.Outcome, Callable[[], workq.Result]] = {
    "done": lambda: None,
    "retry": lambda: workq.Retry("not yet"),
    "retry after": lambda: workq.Retry(after=600),
    "fail": lambda: workq.Fail(LookupError("no")),
    "skip": workq.Skip,
    "later": lambda: workq.Later(600),
}
POLICIES: dict[str, workq.RetryPolicy | None] = {
    "plain": None,
    "again": workq.linear(retries=2, delay=300),
    "tick": None,
    "tock": workq.linear(retries=1, delay=300),
}


class Gate:
    """A handler that waits to be told how to end."""

    def __init__(self, task: workq.Task[int]) -> None:
        self.id = task.id
        self._task = task
        self._told: asyncio.Future[tuple[model.Outcome, int]] = asyncio.get_running_loop().create_future()
        job: asyncio.Task[Any] | None = asyncio.current_task()
        assert job is not None
        self.job = job

    async def passed(self) -> workq.Result:
        outcome, self._task.payload = await self._told
        if outcome == "boom":
            raise ValueError("boom")
        return RESULTS[outcome]()

    async def tell(self, outcome: model.Outcome, payload: int) -> None:
        self._told.set_result((outcome, payload))
        await asyncio.wait([self.job])


class Node:
    """The stages of one executor, each called by the test."""

    def __init__(self, queue: workq.Queue, schedules: tuple[tuple[str, str], ...], lines: list[Connection]) -> None:
        self._opened: list[Gate] = []

        async def handle(task: workq.Task[int]) -> workq.Result:
            gate = Gate(task)
            self._opened.append(gate)
            return await gate.passed()

        handlers = {name: workq.handler(name, retry=policy)(handle) for name, policy in POLICIES.items()}
        executor = workq.Executor(
            queue,
            handlers.values(),
            schedules=[
                workq.Schedule(handlers[name], workq.every(seconds=model.PERIOD), 0, key=key) for name, key in schedules
            ],
            lease=model.LEASE,
            max_lost=model.MAX_LOST,
        )
        # So short that every claim looks at everything.
        settings = replace(executor._settings, poll_interval=1e-9)  # pyright: ignore[reportPrivateUsage]
        claim, finish, beat = lines
        caution = Caution(model.LEASE, 1e-9, queue.hub.clock.monotonic(), queue.hub.clock.now())
        self._life = Life(settings, queue.hub, Holding(), claim=claim, finish=finish, beat=beat, caution=caution)
        self._life._claimer._suspects_every = 0  # pyright: ignore[reportPrivateUsage]

    async def claim(self, late: bool) -> Gate | None:
        """Claim with one free place. The gate of the run that began."""
        before, life = len(self._opened), self._life
        page = await life._claimer.once(1)  # pyright: ignore[reportPrivateUsage]
        now = time.monotonic()
        life.workers.take(page.tasks, now, now, late=late)
        await self._written()
        return self._opened[-1] if len(self._opened) > before else None

    async def end(self, gate: Gate, outcome: model.Outcome, payload: int) -> None:
        """Let a handler end, and write that."""
        await gate.tell(outcome, payload)
        await self._written()

    async def beat(self) -> None:
        """One beat; handlers of lost tasks end."""
        await self._life._heartbeat.once()  # pyright: ignore[reportPrivateUsage]
        cancelled = [gate.job for gate in self._opened if gate.job.cancelling()]
        if cancelled:
            await asyncio.wait(cancelled)

    async def _written(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)  # a run that was just taken begins
        await self._life._finisher.once()  # pyright: ignore[reportPrivateUsage]

    async def leave(self) -> None:
        """Abandon everything."""
        for gate in self._opened:
            gate.job.cancel()
        if self._opened:
            await asyncio.wait([gate.job for gate in self._opened])


SERVED: tuple[tuple[tuple[str, str], ...], ...] = (
    (("tick", ""), ("tock", "")),
    (("tick", ""), ("tick", "x"), ("tock", "")),
)
"""The schedules of each node: one of them is served by the second only."""


class Planted:
    """A database with statements of the test's own."""

    def __init__(self, db: Dialect, sql: Statements) -> None:
        self._db = db
        self.sql = sql

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)


class World:
    """A database with its table, and the executors on it."""

    def __init__(self, database: Database, db: Dialect) -> None:
        self.database = database
        self.told = Counter[tuple[str, int]]()
        self.queue = workq.Queue(db, on_event=[self._tell])
        self.nodes: list[Node] = []
        self._lines = [[db.connection("test") for _ in range(3)] for _ in SERVED]
        self._own = db.connection("test")

    def _tell(self, event: workq.Event) -> None:
        self.told[event.kind, event.id] += 1

    async def begin(self) -> None:
        """An empty table, and executors that know nothing."""
        await self._change("delete from {table}")
        self.told.clear()
        self.nodes = [self._node(number) for number in range(len(SERVED))]

    async def end(self) -> None:
        """Nothing is left in the loop."""
        for node in self.nodes:
            await node.leave()

    async def close(self) -> None:
        for connection in [self._own, *(line for lines in self._lines for line in lines)]:
            await connection.close()

    def _node(self, number: int) -> Node:
        return Node(self.queue, SERVED[number], self._lines[number])

    async def replace(self, number: int) -> None:
        """A new executor that knows nothing, in the place of one that is gone."""
        await self.nodes[number].leave()
        self.nodes[number] = self._node(number)

    async def register(self, schedules: tuple[tuple[str, str], ...]) -> None:
        """What `start` does for its schedules."""
        store = self.queue.hub.store
        due = await store.now(self._own) + timedelta(seconds=model.PERIOD)
        await store.insert_schedules(self._own, [("", name, key, "0", 0, due) for name, key in schedules], PATIENT)

    async def let_pass(self, seconds: int) -> None:
        """Let time pass for all tasks at once."""
        step = f"interval '{seconds} s'" if isinstance(self.database, PostgresDatabase) else str(seconds * 10**6)
        await self._change(f"update {{table}} set run_at = run_at - {step}, locked_until = locked_until - {step}")

    async def _change(self, sql: str) -> None:
        await self._own.fetch(Statement(sql.replace("{table}", self.database.table)), {}, URGENCY)

    async def expire(self, id: int) -> None:
        """Let one lease run out, whoever has it."""
        store = self.queue.hub.store
        lease: Lease = (await store.look(self._own, [id], URGENCY))[id]
        assert await store.extend(self._own, [lease], timedelta(seconds=-1), URGENCY)


@asynccontextmanager
async def world_on(database: Database, plant: Plant = lambda statements: statements) -> AsyncGenerator[World]:
    """A world in a database; `plant` changes its statements."""
    async with database.open() as db:
        world = World(database, cast(Dialect, Planted(db, plant(db.sql))))
        await world.queue.migrate()
        yield world
        await world.close()


@dataclass(frozen=True)
class Item:
    """A task to enqueue."""

    name: str
    key: str | None
    priority: int
    delay: int
    payload: int

    @property
    def options(self) -> workq.Options:
        options: workq.Options = {"priority": self.priority, "delay": self.delay}
        if self.key is not None:
            options["key"] = self.key
        return options


PATTERNS: dict[str | None, Callable[[model.Row], bool]] = {
    None: lambda row: True,
    "%BOOM%": lambda row: "boom" in (row.error or ""),
    "disabled": lambda row: row.error == "disabled",
    "%parked%": lambda row: "parked" in (row.error or ""),
}
NAMES = ("plain", "plain", "again", "tick", "foreign")


def some_item(random: Random) -> Item:
    return Item(
        name=random.choice(NAMES),
        key=random.choice((None, None, "k", "l")),
        priority=random.choice((0, 0, -1, 1)),
        delay=random.choice((0, 0, 0, 300)),
        payload=random.randrange(10),
    )


def some_node(random: Random) -> int:
    return random.randrange(len(SERVED))


def some_delay(random: Random) -> int | None:
    return random.choice((None, 0, 300))


ARGUMENTS: dict[str, Callable[[Random], dict[str, Any]]] = {
    "enqueue": lambda random: {"item": some_item(random)},
    "enqueue_many": lambda random: {"batch": [some_item(random) for _ in range(random.randrange(2, 5))]},
    "register": lambda random: {"number": some_node(random)},
    "claim": lambda random: {"number": some_node(random), "late": random.random() < 0.2},
    "interfere": lambda random: {
        "number": some_node(random),
        "who": random.choice(("node", "node", "disable", "reschedule", "delete")),
    },
    "vanish": lambda random: {"number": some_node(random)},
    "die": lambda random: {"number": some_node(random)},
    "finish": lambda random: {
        "which": random.randrange(20),
        "stale": random.random() < 0.5,
        "outcome": random.choice(("done", "done", "done", *model.ERRORS, "later")),
        "payload": random.randrange(10, 100),
    },
    "beat": lambda random: {"number": some_node(random)},
    "expire": lambda random: {"which": random.randrange(20)},
    "let_pass": lambda random: {"seconds": random.choice((100, 300, 900))},
    "retry": lambda random: {
        "which": random.randrange(20),
        "delay": some_delay(random),
        "payload": random.choice((None, 100 + random.randrange(100))),
    },
    "retry_all": lambda random: {
        "name": random.choice((*[None] * 5, *NAMES)),
        "pattern": random.choice((*[None] * 4, *PATTERNS)),
        "limit": random.choice((1, 1, 2, 3)),
    },
    "reschedule": lambda random: {"which": random.randrange(20), "delay": some_delay(random)},
    "disable": lambda random: {"which": random.randrange(20)},
    "delete": lambda random: {"which": random.randrange(20)},
}
MOODS: dict[str, dict[str, int]] = {
    "a good day": {"enqueue": 4, "claim": 8, "finish": 8, "let_pass": 3},
    "crashes": {"vanish": 20, "claim": 6, "finish": 3, "beat": 2, "expire": 3, "let_pass": 3},
    "slow handlers": {"interfere": 10, "finish": 15, "expire": 5, "beat": 1, "disable": 2, "let_pass": 2},
    "operators": {"claim": 4, "finish": 4, "expire": 3, "retry": 2, "retry_all": 4, "disable": 10, "reschedule": 3},
}
"""How much more often than once in a while each operation comes."""


@dataclass(frozen=True)
class Step:
    """One operation, said without regard to what there is."""

    name: str
    arguments: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.arguments.items())})"


def story_of(seed: int, length: int) -> list[Step]:
    """Operations by chance, in one of the moods."""
    random = Random(seed)
    mood = MOODS[list(MOODS)[seed % len(MOODS)]]
    names = random.choices(list(ARGUMENTS), [1 + mood.get(name, 0) for name in ARGUMENTS], k=length)
    return [Step(name, ARGUMENTS[name](random)) for name in names]


class Machine:
    """Does everything twice, to the model and to the table."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.model = model.Model()
        self.model_nodes = [model.Node(schedules) for schedules in SERVED]
        self.gates: dict[model.Run, Gate] = {}
        self.events = Counter[tuple[str, int]]()
        self.last_id = 0

    async def begin(self) -> None:
        """Something to begin with."""
        for name in ("plain", "again"):
            await self.enqueue(Item(name, "k", 0, 0, 0))
        await self.register(1)

    async def take(self, step: Step) -> None:
        """One operation, and a look at the table."""
        await getattr(self, step.name)(**step.arguments)
        await self.look()

    @property
    def queue(self) -> workq.Queue:
        return self.world.queue

    def row(self, which: int, *, failed: bool | None = None) -> int:
        """One of the tasks; one of those in that state, if there is any; or one that does not exist."""
        rows = [row for row in self.model.rows.values() if failed in (None, row.failed is not None)]
        ids = sorted(row.id for row in rows or self.model.rows.values())
        return [*ids, GONE][which % (len(ids) + 1)]

    def stored(self, item: Item, id: int | None) -> None:
        if self.model.is_taken(item.name, item.key):
            assert id is None
            return
        assert id is not None
        self.events.update(self.model.enqueue(id, item.name, item.payload, item.key, item.priority, item.delay))

    async def enqueue(self, item: Item) -> None:
        id = await self.queue.enqueue(None, item.name, item.payload, **item.options)
        self.stored(item, id)
        if id is not None:
            assert id > self.last_id
            self.last_id = id

    async def enqueue_many(self, batch: list[Item]) -> None:
        tasks = [workq.NewTask(item.name, item.payload, **item.options) for item in batch]
        ids = await self.queue.enqueue_many(None, tasks)
        new = [id for id in ids if id is not None]
        assert len(set(new)) == len(new)
        assert all(id > self.last_id for id in new)
        self.last_id = max([self.last_id, *new])
        for item, id in zip(batch, ids, strict=True):
            self.stored(item, id)

    async def register(self, number: int) -> None:
        missing = self.model.missing(self.model_nodes[number])
        await self.world.register(SERVED[number])
        rows = await self.queue.find(limit=1000)
        ids = {(row.name, row.key or ""): row.id for row in rows if row.scheduled}
        self.model.register({schedule: ids[schedule] for schedule in missing})
        self.last_id = max([self.last_id, *ids.values()])

    async def claim(self, number: int, late: bool) -> model.Run | None:
        run, events = self.model.claim(self.model_nodes[number], late)
        gate = await self.world.nodes[number].claim(late)
        self.events.update(events)
        assert (gate and gate.id) == (run and run.id)
        if run is not None and gate is not None:
            self.gates[run] = gate
        return run

    async def interfere(self, number: int, who: str) -> None:
        """A lease runs out while the handler runs, and somebody does something to its task."""
        run = await self.claim(number, False)
        if run is None:
            return
        await self.run_out(run.id)
        match who:
            case "disable":
                await self.disable_one(run.id)
            case "reschedule":
                await self.reschedule_one(run.id, 0)
            case "delete":
                await self.delete_one(run.id)
            case _:
                await self.claim((number + 1) % len(SERVED), False)

    async def vanish(self, number: int) -> None:
        """A claim by a process that dies, and its lease runs out."""
        run = await self.claim(number, False)
        await self.die(number)
        if run is not None:
            await self.run_out(run.id)

    async def die(self, number: int) -> None:
        """A process ends as by kill -9, and a new one takes its place."""
        node = self.model_nodes[number]
        self.model.die(node)
        await self.world.replace(number)
        self.gates = {run: gate for run, gate in self.gates.items() if run.node is not node}

    async def finish(self, which: int, stale: bool, outcome: model.Outcome, payload: int) -> None:
        """One of the handlers ends; rather one whose task is no longer its own, if there is any."""
        runs = [run for run in self.gates if not stale or not self.model.is_held(run)] or list(self.gates)
        if not runs:
            return
        run = runs[which % len(runs)]
        gate, number = self.gates.pop(run), self.model_nodes.index(run.node)
        self.events.update(self.model.finish(run, outcome, payload))
        await self.world.nodes[number].end(gate, outcome, payload)

    async def beat(self, number: int) -> None:
        node = self.model_nodes[number]
        self.events.update(self.model.beat(node))
        await self.world.nodes[number].beat()
        for run in [run for run in self.gates if run.node is node and run not in node.runs]:
            assert self.gates.pop(run).job.done()

    async def expire(self, which: int) -> None:
        running = sorted(row.id for row in self.model.rows.values() if self.model.state(row) == "running")
        if not running:
            return
        await self.run_out(running[which % len(running)])

    async def run_out(self, id: int) -> None:
        self.model.expire(id)
        await self.world.expire(id)

    async def let_pass(self, seconds: int) -> None:
        self.model.now += seconds
        await self.world.let_pass(seconds)

    async def retry(self, which: int, delay: int | None, payload: int | None) -> None:
        id = self.row(which, failed=True)
        wanted, events = self.model.retry(id, delay, payload)
        self.events.update(events)
        options: dict[str, Any] = {} if payload is None else {"payload": payload}
        if delay is not None:
            options["run_at"] = self.queue.hub.clock.now() + timedelta(seconds=delay)
        try:
            found: bool | str = await self.queue.retry(None, id, **options)
        except workq.KeyTaken:
            found = "taken"
        assert found == wanted

    async def retry_all(self, name: str | None, pattern: str | None, limit: int) -> None:
        events = self.model.retry_all(lambda row: name in (None, row.name) and PATTERNS[pattern](row), limit)
        self.events.update(events)
        freed = await self.queue.retry_all(None, target=name, error_like=pattern, limit=limit)
        assert freed == len(events)

    async def reschedule(self, which: int, delay: int | None) -> None:
        await self.reschedule_one(self.row(which), delay)

    async def reschedule_one(self, id: int, delay: int | None) -> None:
        at = None if delay is None else self.queue.hub.clock.now() + timedelta(seconds=delay)
        assert await self.queue.reschedule(None, id, run_at=at) == self.model.reschedule(id, delay)

    async def disable(self, which: int) -> None:
        await self.disable_one(self.row(which, failed=False))

    async def disable_one(self, id: int) -> None:
        assert await self.queue.disable(None, id) == self.model.disable(id)

    async def delete(self, which: int) -> None:
        await self.delete_one(self.row(which))

    async def delete_one(self, id: int) -> None:
        assert await self.queue.delete(None, id) == self.model.delete(id)

    async def look(self) -> None:
        """The table is as the model says, and hooks were told what happened."""
        rows, now = await self.queue.find(limit=1000), self.queue.hub.clock.now()
        assert [row.id for row in rows] == sorted(self.model.rows)
        for row in rows:
            wanted = self.model.rows[row.id]
            assert facts_of(row) == facts_wanted(self.model, wanted)
            assert is_near((row.run_at - now).total_seconds(), wanted.run_at - self.model.now), "run_at"
            assert (row.locked_until is None) == (wanted.locked_until is None)
            if row.locked_until is not None and wanted.locked_until is not None:
                until = (row.locked_until - now).total_seconds()
                assert is_near(until, wanted.locked_until - self.model.now), "locked_until"
            assert (row.error is None) == (wanted.error is None)
            assert (row.error or "").startswith(wanted.error or "")
            wanted.order = row.run_at.timestamp()
        assert self.world.told == self.events

    async def look_by_state(self) -> None:
        """`find` agrees with what it shows."""
        states: tuple[workq.State, ...] = ("waiting", "running", "failed")
        for state in states:
            found = [row.id for row in await self.queue.find(state=state, limit=1000)]
            assert found == sorted(row.id for row in self.model.rows.values() if self.model.state(row) == state)


def facts_of(row: workq.TaskRow) -> tuple[object, ...]:
    return (
        row.name, row.key, row.scheduled, row.priority, row.payload, row.state, row.attempt, row.lost,
        row.failed_at is not None,
    )  # fmt: skip


def facts_wanted(table: model.Model, row: model.Row) -> tuple[object, ...]:
    return (
        row.name, row.key, row.scheduled, row.priority, row.payload, table.state(row), row.attempt, row.lost,
        row.failed is not None,
    )  # fmt: skip


def is_near(seconds: float, wanted: int) -> bool:
    """The clock went on since it was written, and a lease that was made to run out did so a second ago."""
    return wanted - SLACK < seconds < wanted + 0.5


async def mistake_in(world: World, story: Sequence[Step]) -> Exception | None:
    """Play a story. Returns what went wrong."""
    await world.begin()
    machine = Machine(world)
    try:
        await machine.begin()
        for step in story:
            await machine.take(step)
        await machine.look_by_state()
    except Exception as error:
        return error
    finally:
        await world.end()
    return None


async def shortened(world: World, story: list[Step]) -> list[Step]:
    """A story that goes wrong, without the steps that do not matter."""
    for place in reversed(range(len(story))):
        shorter = story[:place] + story[place + 1 :]
        if await mistake_in(world, shorter) is not None:
            story = shorter
    return story


async def wrong_in(world: World, seeds: Iterable[int], length: int) -> int | None:
    """The first of these seeds whose story goes wrong."""
    for seed in seeds:
        if await mistake_in(world, story_of(seed, length)) is not None:
            return seed
    return None


LENGTH = 50
SEEDS = [range(first, first + 20) for first in range(0, 200, 20)]
"""200 stories, in parts that several processes can share."""


async def play(database: Database, seeds: Iterable[int]) -> None:
    """Fails with the shortest story that goes wrong, and with the seed that gives it again."""
    async with world_on(database) as world:
        seed = await wrong_in(world, seeds, LENGTH)
        if seed is not None:
            story = await shortened(world, story_of(seed, LENGTH))
            mistake = await mistake_in(world, story)
            again = f"again: WORKQ_TEST_SEED={seed} python -m pytest tests/property -k by_chance"
            raise AssertionError("\n".join([again, *map(str, story)])) from mistake


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seeds", [*SEEDS, pytest.param(range(200, 600), marks=pytest.mark.slow)], ids=str)
async def test_any_sequence_of_operations_leaves_the_table_as_the_model_says(database: Database, seeds: range) -> None:
    """F06, F09, F14, F15, F57, no loss, fence, one schedule: states, attempts, lost counts, keys, schedules, order."""
    await play(database, seeds)


@pytest.mark.timeout(3600)
async def test_a_few_more_by_chance(database: Database) -> None:
    """Others at every run."""
    given = os.environ.get("WORKQ_TEST_SEED")
    await play(database, [int(given)] if given else [SystemRandom().randrange(1000, 10**9) for _ in range(4)])


BUGS: dict[str, tuple[str, str, str]] = {
    "a takeover is not counted": ("claim", r"lost = (t\.)?lost \+ .*", r"lost = \1lost"),
    "a live lease is taken over": ("claim", r"locked_until < ", "locked_until <> "),
    "a task runs before its time": ("claim", r"[wx]\.run_at <= (statement_timestamp\(\)|:now)", "true"),
    "a disabled task keeps its holder": ("disable", r"locked_by = null, (.*), version = (t\.)?version \+ 1", r"\1"),
    "a stale holder ends a task": ("succeed", r", version, locked_by(?=\))| and w\.version = .*\[2\]'\)", ""),
    "retry leaves the attempts": ("retry", r"attempt = 0, ", ""),
    "retry_all frees one too many": ("retry_all", r"limit (\$4|:limit)", r"limit \1 + 1"),
    "a hand-back forgets how often a holder vanished": ("settle", r"lost = case when .* end", "lost = 0"),
}
"""What is wrong: the statement, and what is put in place of what in its text."""


def planted(bug: tuple[str, str, str]) -> Plant:
    """Statements with a bug."""

    def plant(statements: Statements) -> Statements:
        field, pattern, instead = bug
        statement: Statement = getattr(statements, field)
        text, times = re.subn(pattern, instead, statement.text)
        page, more = re.subn(pattern, instead, statement.page)
        assert times + more
        return replace(statements, **{field: replace(statement, text=text, page=page)})

    return plant


async def finds(database: Database, bug: tuple[str, str, str]) -> bool:
    """Does the machine find it, in few stories that are always the same?"""
    async with world_on(database, planted(bug)) as world:
        return await wrong_in(world, range(40), 40) is not None


bugs = pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS.keys())


@bugs
async def test_the_machine_finds_a_bug_that_is_planted(sqlite: SQLiteDatabase, bug: tuple[str, str, str]) -> None:
    """So that it can be trusted where it finds none."""
    assert await finds(sqlite, bug)


@bugs
@pytest.mark.slow
async def test_the_machine_finds_a_bug_that_is_planted_in_any_database(
    database: Database, bug: tuple[str, str, str]
) -> None:
    """So that it can be trusted where it finds none."""
    assert await finds(database, bug)
