"""no loss, no trace: `complete(tx)` makes the handler's writes and the end of its task one thing, kill -9 included."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from functools import partial
from pathlib import Path
from random import Random

import pytest

import workq
from faults.nodes import ENVIRONMENT, Journal, Node
from support import SOON, Database, eventually

WORKER = Path(__file__).with_name("ledger_worker.py")
NODES = 3


class Crew:
    """Processes on one database. Whoever is killed is replaced."""

    def __init__(self, database: Database, folder: Path, ledger: str, flags: tuple[str, ...]) -> None:
        self._database = database
        self._folder = folder
        self._command = [sys.executable, str(WORKER), database.url, str(folder / "journal"), ledger, *flags]
        if database.schema is not None:
            self._command.append(f"--schema={database.schema}")
        self._all: list[Node] = []
        self.living: list[Node] = []
        self.journal = Journal(folder / "journal")

    def begin(self) -> None:
        """One more."""
        output = self._folder / f"output-{len(self._all)}"
        environment = ENVIRONMENT | {"PYTHONPATH": f"{ENVIRONMENT['PYTHONPATH']}:{WORKER.parents[1]}"}
        with output.open("wb") as file:
            process = subprocess.Popen(self._command, env=environment, stdin=subprocess.PIPE, stdout=file, stderr=file)
        node = Node(process, output)
        self._all.append(node)
        self.living.append(node)

    def replace(self, node: Node) -> None:
        """kill -9, and a new one."""
        node.kill()
        self.living.remove(node)
        self.begin()

    def printed(self) -> str:
        """What all of them had to say."""
        return "".join(path.read_text() for path in sorted(self._folder.glob("output-*")))

    def remove(self) -> None:
        for node in self._all:
            node.remove()


async def tell_the_story(
    database: Database, folder: Path, seed: int, number: int, kills: int, *flags: str
) -> tuple[list[int], list[int], Crew]:
    """Have tasks run by processes that are killed. Returns the ids of the tasks, and those in the ledger."""
    random = Random(seed)
    ledger = database.table.replace("workq", "ledger")
    async with database.open() as db:
        queue = workq.Queue(db)
        await queue.migrate()
        await database.rows(f"create table {ledger} (task bigint not null, amount integer not null)")
        ids = await queue.enqueue_many(None, [workq.NewTask("pay", amount) for amount in range(number)])
        crew = Crew(database, folder, ledger, flags)
        try:
            for _ in range(NODES):
                crew.begin()
            await crew.journal.until("ready", NODES)
            for kill in range(kills):
                # Spread over the whole of the work, at any moment of it.
                booked = partial(has_booked, database, ledger, kill * number // (kills + 1) + 1)
                await eventually(booked, timeout=3 * SOON)
                await asyncio.sleep(random.uniform(0, 0.05))
                crew.replace(random.choice(crew.living))
            await eventually(lambda: nothing_to_run(database), timeout=3 * SOON + number / 10)
        finally:
            crew.remove()
        tasks = await database.rows(f"select task from {ledger} order by task")
        return [id for id in ids if id is not None], [task for (task,) in tasks], crew


async def nothing_to_run(database: Database) -> bool:
    return await database.rows("select 1 from {table} where failed_at is null limit 1") == []


async def has_booked(database: Database, ledger: str, number: int) -> bool:
    ((found,),) = await database.rows(f"select count(*) from {ledger}")
    return found >= number


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("number", "kills"), [(150, 6), pytest.param(1000, 40, marks=pytest.mark.slow)], ids=["150", "1000"]
)
async def test_a_ledger_written_by_killed_workers_has_one_row_for_each_task(
    database: Database, tmp_path: Path, number: int, kills: int
) -> None:
    """F09, no loss, no trace, fence: exactly as many rows as tasks, one for each, and no task is left."""
    ids, ledger, crew = await tell_the_story(database, tmp_path, number, number, kills)
    assert ledger == ids, crew.printed()
    assert await database.rows("select id, error from {table}") == [], crew.printed()
    # The kills did hit runs under way, which were begun again.
    assert sum(crew.journal.times("start").values()) > number


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_without_complete_the_same_story_books_some_tasks_twice(database: Database, tmp_path: Path) -> None:
    """no loss: at least once is all that a separate end can promise, and the story above can tell the difference."""
    ids, ledger, crew = await tell_the_story(database, tmp_path, 2, 300, 40, "--apart")
    assert set(ledger) == set(ids), crew.printed()
    assert len(ledger) > len(ids)
