"""Plays a story: begins the processes, lets it break things, waits until all is done, and checks the promises."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import workq
from crash import app
from crash.checker import Findings, Row, Settings, check
from crash.company import PATIENCE, Company, company_on
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
class Scene:
    """What a story has in its hands."""

    company: Company
    place: Place
    random: Random
    seconds: float
    """How long the producers take: the time to break things in."""
    urls: tuple[str, ...] = ()
    """For the nodes, one after the other; none: the place's."""


@dataclass(frozen=True)
class Plan:
    """How much of everything."""

    tasks: int = 300
    seconds: float = 5.0
    nodes: int = 3
    producers: int = 2
    settings: Settings = Settings()
    options: tuple[tuple[str, Any], ...] = ()
    """Of both programs."""


@dataclass(frozen=True)
class Played:
    """What came of it."""

    name: str
    database: str
    seed: int
    tasks: int
    took: float
    findings: Findings
    printed: str


Fault = Callable[[Scene], Awaitable[None]]


async def play(name: str, fault: Fault, place: Place, folder: Path, seed: int, plan: Plan) -> Played:
    """One run. The story's own errors are raised; broken promises are in the findings."""
    began = time.monotonic()
    database = await version(place)
    async with workq.connect(place.url, schema=place.schema) as db:
        await workq.Queue(db).migrate()
    await app.make_ledger(place.url, place.schema)
    with company_on(place.url, folder, schema=place.schema, **dict(plan.options)) as company:
        scene = Scene(company, place, Random(seed), plan.seconds)
        await begin(scene, plan)
        await fault(scene)
        await end(scene, plan)
        rows, ledger = await left(place)
        lines = company.journal.lines()
        printed = company.printed()
    findings = check(lines, rows, ledger, plan.settings)
    tasks = sum(line.what == "acked" for line in lines)
    played = Played(name, database, seed, tasks, time.monotonic() - began, findings, printed)
    tell(played)
    return played


async def begin(scene: Scene, plan: Plan) -> None:
    """Begin the nodes, and the producers as soon as those run."""
    company = scene.company
    for _ in range(plan.nodes):
        add_node(scene, plan)
    await company.ready(*company.nodes)
    for number in range(plan.producers):
        company.producer(
            f"p{number}", tasks=plan.tasks // plan.producers, seconds=plan.seconds, seed=scene.random.getrandbits(30)
        )


def add_node(scene: Scene, plan: Plan = Plan()) -> None:
    """One more, as the plan has them."""
    settings = plan.settings
    scene.company.node(lease=settings.lease, poll=settings.poll, stop=settings.stop, interval=settings.interval)


async def end(scene: Scene, plan: Plan) -> None:
    """Wait until all is produced and done, and let everybody end well."""
    company, place = scene.company, scene.place
    await company.produced()
    if not company.nodes:
        add_node(scene, plan)
    with suppress(TimeoutError):  # what is left then is found by the checker
        await eventually(lambda: is_idle(place), PATIENCE)
    await company.ready(*company.nodes)
    for node in tuple(company.nodes):
        await company.terminate(node)


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
