"""Plays a story: begins the processes, lets it break things, waits until all is done, and checks the promises."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import workq
from crash import app
from crash.checker import Findings, Row, Settings, check
from crash.company import PATIENCE, Company, Option, company_on
from crash.journal import Line
from faults.nodes import Node
from faults.proxy import Proxy, proxy_to
from records import record
from support import eventually
from workq.testing._server import Server


@dataclass(frozen=True)
class Place:
    """Where a run has its table, and the server, if there is one, that it may break."""

    url: str
    schema: str | None = None
    server: Server | None = None


@dataclass(frozen=True)
class Plan:
    """How much of everything."""

    tasks: int = 300
    seconds: float = 4.0
    """How long the producers take: the time to break things in."""
    nodes: int = 3
    producers: int = 2
    settings: Settings = Settings()
    options: Mapping[str, Option] = field(default_factory=dict[str, Option])
    """Of both programs."""


@dataclass(frozen=True)
class Story:
    """What is done to whom."""

    name: str
    fault: Callable[[Scene], Awaitable[None]]
    on: tuple[str, ...] = ("SQLite", "PostgreSQL")
    proxied: bool = False
    pay: float = 0
    """Of all tasks, how many end in a transaction of their own, beside the usual few."""
    apart: bool = False
    """A fault of the handlers: what they write and the end of their task are not one transaction."""


@dataclass
class Scene:
    """What a story has in its hands."""

    company: Company
    story: Story
    place: Place
    random: Random
    plan: Plan
    through: str | None = None
    """The URL through the proxy, where there is one. All but one node and one producer use it."""
    proxy: Proxy | None = None
    shares: dict[int, int] = field(default_factory=dict)
    """How many tasks each producer is to make."""
    _made: int = 0

    def node(self) -> Node:
        """Begin one more node."""
        lease, poll, stop, interval, _ = self.plan.settings
        self._made += 1
        url = None if self._made == 1 else self.through
        apart = self.story.apart
        return self.company.node(url, lease=lease, poll=poll, stop=stop, interval=interval, apart=apart)

    def producer(self, name: str, tasks: int, url: str | None = None) -> Node:
        """Begin one more producer."""
        seed = self.random.getrandbits(30)
        seconds = self.plan.seconds * tasks * self.plan.producers / self.plan.tasks
        producer = self.company.producer(name, url, tasks=tasks, seconds=seconds, seed=seed, pay=self.story.pay)
        self.shares[producer.pid] = tasks
        return producer


@dataclass(frozen=True)
class Played:
    """What came of it."""

    name: str
    database: str
    seed: int
    tasks: int
    took: float
    findings: Findings
    lines: Sequence[Line]
    printed: str


async def play(story: Story, place: Place, folder: Path, seed: int, plan: Plan) -> Played:
    """One run. The story's own errors are raised; broken promises are in the findings."""
    began = time.monotonic()
    database = await version(place)
    async with workq.connect(place.url, schema=place.schema) as db:
        await workq.Queue(db).migrate()
    await app.make_ledger(place.url, place.schema)
    async with AsyncExitStack() as stack:
        company = stack.enter_context(company_on(place.url, folder, schema=place.schema, **plan.options))
        scene = Scene(company, story, place, Random(seed), plan)
        if story.proxied:
            scene.proxy, scene.through = await stack.enter_async_context(proxy_to(place.url))
        await begin(scene)
        await story.fault(scene)
        await end(scene)
        rows, ledger = await left(place)
        lines = company.journal.lines()
        printed = company.printed()
    findings = check(lines, rows, ledger, plan.settings)
    tasks = sum(line.what == "acked" for line in lines)
    played = Played(story.name, database, seed, tasks, time.monotonic() - began, findings, lines, printed)
    tell(played)
    return played


async def begin(scene: Scene) -> None:
    """Begin the nodes, and the producers as soon as those run."""
    plan = scene.plan
    await scene.company.ready(*[scene.node() for _ in range(plan.nodes)])
    await scene.company.ready(
        *[
            scene.producer(f"p{number}", -(-plan.tasks // plan.producers), scene.through if number else None)
            for number in range(plan.producers)
        ]
    )


async def end(scene: Scene) -> None:
    """Wait until all is produced and done, and let everybody end well."""
    company = scene.company
    await company.produced()
    await drain(scene)
    await company.ready(*company.nodes)
    for node in tuple(company.nodes):
        await company.terminate(node)


async def drain(scene: Scene) -> None:
    """Wait until all is done, or nothing more is: what is left then is found by the checker."""
    done, before = -1, -2
    while done > before:
        with suppress(TimeoutError):
            return await eventually(lambda: is_idle(scene.place), PATIENCE)
        before, done = done, sum(line.what == "completed" and line.id > 1 for line in scene.company.journal.lines())


async def is_idle(place: Place) -> bool:
    """Is nothing left that is going to run, beside schedules?"""
    where = f"from {app.table(place.schema, 'workq')} where failed_at is null and not scheduled"
    return await app.read(place.url, f"select 1 {where} limit 1") == []


async def left(place: Place) -> tuple[list[Row], list[str]]:
    """The table and the ledger."""
    table, ledger = app.table(place.schema, "workq"), app.table(place.schema, "ledger")
    text = "payload" if app.is_sqlite(place.url) else "payload::text"
    rows = await app.read(place.url, f"select id, {text}, name, failed_at is not null, scheduled from {table}")
    booked = await app.read(place.url, f"select token from {ledger}")
    stored = [Row(id, app.token_of(text), name, bool(failed), bool(timed)) for id, text, name, failed, timed in rows]
    return stored, [token for (token,) in booked]


async def version(place: Place) -> str:
    """The database, as the records name it."""
    if app.is_sqlite(place.url):
        return f"SQLite {sqlite3.sqlite_version}"
    ((text,),) = await app.read(place.url, "select current_setting('server_version')")
    return f"PostgreSQL {text.split()[0]}"


def tell(played: Played) -> None:
    """Append the run to the records, where there are any."""
    findings = played.findings
    record(
        "crash",
        played.database,
        played.name,
        tasks=played.tasks,
        took=played.took,
        violations={promise: len(texts) for promise, texts in findings.violations.items()},
        times={promise: seconds for promise, seconds in findings.times.items() if seconds},
        seed=played.seed,
    )
