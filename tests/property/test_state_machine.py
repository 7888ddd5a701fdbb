"""The whole of the semantics: any sequence of operations leaves the table as a small model says, after every step.

Two executors' stages are called one pass at a time, so that leases end, rows change hands and operators interfere at
any moment between a claim and the end of its run.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Generator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, ClassVar, TypeAlias, TypeVar, cast

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

import workq
from property import model
from support import Database, SQLiteDatabase, let_pass
from workq._held import Holding
from workq._life import Life
from workq._task import Lease
from workq.dialect import Connection, Dialect, Statement, Statements, Urgency

T = TypeVar("T")
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
        self._life = Life(settings, queue.hub, Holding(), claim=claim, finish=finish, beat=beat)

    async def claim(self, late: bool) -> Gate | None:
        """Claim with one free place. The gate of the run that began."""
        before, life = len(self._opened), self._life
        for claimed in await life._claimer.once(1):  # pyright: ignore[reportPrivateUsage]
            life.workers.take(claimed, asyncio.get_running_loop().time(), late=late)
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
    """A database with its table, for many sequences one after the other."""

    def __init__(self, database: Database, runner: asyncio.Runner) -> None:
        self.database = database
        self.run = runner.run
        self.told = Counter[tuple[str, int]]()
        self.queue: workq.Queue
        self.nodes: list[Node] = []
        self._lines: list[list[Connection]] = []
        self._own: Connection

    async def open(self, stack: AsyncExitStack, plant: Plant) -> None:
        db: Dialect = await stack.enter_async_context(self.database.open())
        self.queue = workq.Queue(cast(Dialect, Planted(db, plant(db.sql))), on_event=[self._tell])
        await self.queue.migrate()
        self._lines = [[db.connection("test") for _ in range(3)] for _ in SERVED]
        self._own = db.connection("test")

    async def close(self) -> None:
        for connection in [self._own, *(line for lines in self._lines for line in lines)]:
            await connection.close()

    def _tell(self, event: workq.Event) -> None:
        self.told[event.kind, event.id] += 1

    async def begin(self) -> None:
        """An empty table, and executors that know nothing."""
        for node in self.nodes:
            await node.leave()
        await self.database.rows("delete from {table}")
        self.told.clear()
        self.nodes = [self._node(number) for number in range(len(SERVED))]

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
        await store.insert_schedules(self._own, [("", name, key, "0", 0, due) for name, key in schedules])

    async def expire(self, id: int) -> None:
        """Let one lease run out, whoever has it."""
        store = self.queue.hub.store
        lease: Lease = (await store.look(self._own, [id], URGENCY))[id]
        assert await store.extend(self._own, [lease], timedelta(seconds=-1), URGENCY)


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
names = st.sampled_from(["plain", "plain", "again", "tick", "foreign"])
items = st.builds(
    Item,
    name=names,
    key=st.sampled_from([None, None, "k", "l"]),
    priority=st.sampled_from([0, 0, -1, 1]),
    delay=st.sampled_from([0, 0, 0, 300]),
    payload=st.integers(0, 9),
)
which = st.integers(0, 20)
node_numbers = st.integers(0, len(SERVED) - 1)
delays = st.sampled_from([None, 0, 300])
ARGUMENTS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "enqueue": {"item": items},
    "enqueue_many": {"batch": st.lists(items, min_size=2, max_size=4)},
    "register": {"number": node_numbers},
    "claim": {"number": node_numbers, "late": st.sampled_from([False, False, False, False, True])},
    "vanish": {"number": node_numbers},
    "die": {"number": node_numbers},
    "finish": {
        "which": which,
        "outcome": st.sampled_from(["done", *model.ERRORS, "later"]),
        "payload": st.integers(10, 99),
    },
    "beat": {"number": node_numbers},
    "expire": {"which": which},
    "let_pass": {"seconds": st.sampled_from([100, 300, 900])},
    "retry": {"which": which, "delay": delays, "payload": st.none() | st.integers(100, 199)},
    "retry_all": {"name": st.none() | names, "pattern": st.sampled_from(list(PATTERNS)), "limit": st.integers(1, 3)},
    "reschedule": {"which": which, "delay": delays},
    "disable": {"which": which},
    "delete": {"which": which},
}
MOODS: dict[str, dict[str, int]] = {
    "a good day": {"enqueue": 4, "claim": 8, "finish": 8, "let_pass": 3},
    "crashes": {"vanish": 20, "claim": 6, "finish": 3, "beat": 2, "expire": 3, "let_pass": 3},
    "slow handlers": {"claim": 12, "finish": 10, "expire": 10, "disable": 2, "let_pass": 2},
    "operators": {"claim": 4, "finish": 4, "expire": 3, "retry": 6, "disable": 5, "reschedule": 3, "delete": 2},
}
"""How much more often than once in a while each operation comes."""


def with_arguments(name: str) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    return st.tuples(st.just(name), st.fixed_dictionaries(ARGUMENTS[name]))


def steps_in(mood: str) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    names = [name for name in ARGUMENTS for _ in range(1 + MOODS[mood].get(name, 0))]
    return st.sampled_from(names).flatmap(with_arguments)


STEPS = {mood: steps_in(mood) for mood in MOODS}


class Machine(RuleBasedStateMachine):
    """Does everything twice, to the model and to the table."""

    world: ClassVar[World]

    def __init__(self) -> None:
        super().__init__()
        self.model = model.Model()
        self.model_nodes = [model.Node(schedules) for schedules in SERVED]
        self.gates: dict[model.Run, Gate] = {}
        self.events = Counter[tuple[str, int]]()
        self.last_id = 0
        self.mood = ""
        self.world.run(self.world.begin())
        for name in ("plain", "again"):
            self.enqueue(Item(name, "k", 0, 0, 0))
        self.register(1)

    def do(self, operation: Awaitable[T]) -> T:
        async def done() -> T:
            return await operation

        return self.world.run(done())

    @initialize(mood=st.sampled_from(list(MOODS)))
    def begin(self, mood: str) -> None:
        self.mood = mood

    # One rule for all: of many rules hypothesis would leave most out of a sequence.
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        name, arguments = data.draw(STEPS[self.mood])
        getattr(self, name)(**arguments)

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
        self.events.update(
            self.model.enqueue(id, item.name, item.payload, item.key, item.priority, item.delay)
        )

    # -- producers

    def enqueue(self, item: Item) -> None:
        id = self.do(self.queue.enqueue(None, item.name, item.payload, **item.options))
        self.stored(item, id)
        if id is not None:
            assert id > self.last_id
            self.last_id = id

    def enqueue_many(self, batch: list[Item]) -> None:
        ids = self.do(
            self.queue.enqueue_many(None, [workq.NewTask(item.name, item.payload, **item.options) for item in batch])
        )
        new = [id for id in ids if id is not None]
        assert len(set(new)) == len(new)
        assert all(id > self.last_id for id in new)
        self.last_id = max([self.last_id, *new])
        for item, id in zip(batch, ids, strict=True):
            self.stored(item, id)

    def register(self, number: int) -> None:
        missing = self.model.missing(self.model_nodes[number])
        self.do(self.world.register(SERVED[number]))
        rows = self.do(self.queue.find(limit=1000))
        ids = {(row.name, row.key or ""): row.id for row in rows if row.scheduled}
        self.model.register({schedule: ids[schedule] for schedule in missing})
        self.last_id = max([self.last_id, *ids.values()])

    # -- executors

    def claim(self, number: int, late: bool) -> model.Run | None:
        run, events = self.model.claim(self.model_nodes[number], late)
        gate = self.do(self.world.nodes[number].claim(late))
        self.events.update(events)
        assert (gate and gate.id) == (run and run.id)
        if run is not None and gate is not None:
            self.gates[run] = gate
        return run

    def vanish(self, number: int) -> None:
        """A claim by a process that dies, and its lease runs out."""
        run = self.claim(number, False)
        self.die(number)
        if run is not None:
            self.run_out(run.id)

    def die(self, number: int) -> None:
        """A process ends as by kill -9, and a new one takes its place."""
        node = self.model_nodes[number]
        self.model.die(node)
        self.do(self.world.replace(number))
        self.gates = {run: gate for run, gate in self.gates.items() if run.node is not node}

    def finish(self, which: int, outcome: model.Outcome, payload: int) -> None:
        if not self.gates:
            return
        run = list(self.gates)[which % len(self.gates)]
        gate, number = self.gates.pop(run), self.model_nodes.index(run.node)
        self.events.update(self.model.finish(run, outcome, payload))
        self.do(self.world.nodes[number].end(gate, outcome, payload))

    def beat(self, number: int) -> None:
        node = self.model_nodes[number]
        self.events.update(self.model.beat(node))
        self.do(self.world.nodes[number].beat())
        for run in [run for run in self.gates if run.node is node and run not in node.runs]:
            assert self.gates.pop(run).job.done()

    def expire(self, which: int) -> None:
        running = sorted(row.id for row in self.model.rows.values() if self.model.state(row) == "running")
        if not running:
            return
        self.run_out(running[which % len(running)])

    def run_out(self, id: int) -> None:
        self.model.expire(id)
        self.do(self.world.expire(id))

    def let_pass(self, seconds: int) -> None:
        self.model.now += seconds
        self.do(let_pass(self.world.database, seconds))

    # -- operators

    def retry(self, which: int, delay: int | None, payload: int | None) -> None:
        id = self.row(which, failed=True)
        wanted, events = self.model.retry(id, delay, payload)
        self.events.update(events)
        options: dict[str, Any] = {} if payload is None else {"payload": payload}
        if delay is not None:
            options["run_at"] = self.queue.hub.clock.now() + timedelta(seconds=delay)
        try:
            found: bool | str = self.do(self.queue.retry(None, id, **options))
        except workq.KeyTaken:
            found = "taken"
        assert found == wanted

    def retry_all(self, name: str | None, pattern: str | None, limit: int) -> None:
        events = self.model.retry_all(lambda row: name in (None, row.name) and PATTERNS[pattern](row), limit)
        self.events.update(events)
        freed = self.do(self.queue.retry_all(None, target=name, error_like=pattern, limit=limit))
        assert freed == len(events)

    def reschedule(self, which: int, delay: int | None) -> None:
        id = self.row(which)
        at = None if delay is None else self.queue.hub.clock.now() + timedelta(seconds=delay)
        assert self.do(self.queue.reschedule(None, id, run_at=at)) == self.model.reschedule(id, delay)

    def disable(self, which: int) -> None:
        id = self.row(which, failed=False)
        assert self.do(self.queue.disable(None, id)) == self.model.disable(id)

    def delete(self, which: int) -> None:
        id = self.row(which)
        assert self.do(self.queue.delete(None, id)) == self.model.delete(id)

    # -- the table

    @invariant()
    def the_table_is_as_the_model_says(self) -> None:
        rows, now = self.do(self.queue.find(limit=1000)), self.queue.hub.clock.now()
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

    @invariant()
    def hooks_are_told_what_happened(self) -> None:
        assert self.world.told == self.events

    def teardown(self) -> None:
        states: tuple[workq.State, ...] = ("waiting", "running", "failed")
        for state in states:
            found = [row.id for row in self.do(self.queue.find(state=state, limit=1000))]
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


@contextmanager
def machine_on(
    database: Database, plant: Plant = lambda statements: statements
) -> Generator[type[Machine]]:
    """The machine for one database; `plant` changes its statements."""
    with asyncio.Runner() as runner:
        world, stack = World(database, runner), AsyncExitStack()
        runner.run(world.open(stack, plant))
        try:
            yield type("MachineOnDatabase", (Machine,), {"world": world})
        finally:

            async def leave() -> None:
                for node in world.nodes:
                    await node.leave()
                await world.close()
                await stack.aclose()

            runner.run(leave())


UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("examples", "steps"), [(25, 30), pytest.param(200, 50, marks=pytest.mark.slow)], ids=["25x30", "200x50"]
)
def test_any_sequence_of_operations_leaves_the_table_as_the_model_says(
    database: Database, examples: int, steps: int
) -> None:
    """F06, F09, F14, F15, F57, no loss, fence, one schedule: states, attempts, lost counts, keys, schedules, order."""
    size = settings(UNHURRIED, max_examples=examples, stateful_step_count=steps)
    with machine_on(database) as machine:
        run_state_machine_as_test(machine, settings=size)


BUGS: dict[str, tuple[str, str, str]] = {
    "a takeover is not counted": ("claim", r"lost = (t\.)?lost \+ .*", r"lost = \1lost"),
    "a live lease is taken over": ("claim", r"locked_until < ", "locked_until <> "),
    "a task runs before its time": ("claim", r"[wx]\.run_at <= (statement_timestamp\(\)|:now)", "true"),
    "a disabled task keeps its holder": ("disable", r"locked_by = null, (.*), version = (t\.)?version \+ 1", r"\1"),
    "a stale holder ends a task": ("succeed", r", version, locked_by(?=\))| and w\.version = .*\[2\]'\)", ""),
}
RARE_BUGS: dict[str, tuple[str, str, str]] = {
    "retry leaves the attempts": ("retry", r"attempt = 0, ", ""),
    "retry_all frees the youngest": ("retry_all", r"order by f\.failed_at, f\.id", "order by f.failed_at desc"),
    "a hand-back forgets how often a holder vanished": ("settle", r"lost = case when .* end", "lost = 0"),
}
"""What is wrong: the statement, and what is put in place of what in its text."""


def planted(bug: tuple[str, str, str]) -> Plant:
    """Statements with a bug."""

    def plant(statements: Statements) -> Statements:
        field, pattern, instead = bug
        statement: Statement = getattr(statements, field)
        text, times = re.subn(pattern, instead, statement.text)
        assert times
        return replace(statements, **{field: replace(statement, text=text)})

    return plant


def finds(database: Database, bug: tuple[str, str, str]) -> bool:
    """Does the machine fail? Always by the same sequence, so that this is no matter of luck."""
    size = settings(
        UNHURRIED,
        max_examples=1000,
        stateful_step_count=50,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    with machine_on(database, planted(bug)) as machine:
        try:
            run_state_machine_as_test(machine, settings=size)
        except AssertionError:
            return True
    return False


@pytest.mark.timeout(600)
@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS.keys())
def test_the_machine_finds_a_bug_that_is_planted(sqlite: SQLiteDatabase, bug: tuple[str, str, str]) -> None:
    """So that it can be trusted where it finds none."""
    assert finds(sqlite, bug)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("bug", (BUGS | RARE_BUGS).values(), ids=(BUGS | RARE_BUGS).keys())
def test_the_machine_finds_every_bug_that_is_planted(database: Database, bug: tuple[str, str, str]) -> None:
    """So that it can be trusted where it finds none, on either database."""
    assert finds(database, bug)
