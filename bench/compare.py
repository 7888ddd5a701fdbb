"""workq beside other task queues: the same no-op tasks, the same server, the same run.

Every peer is one file in peers/, whose docstring says its settings: the fastest that its documentation knows. p tasks
at once are p places of one worker process; p producers enqueue one by one. A run is a child process on a new database.
The rounds are interleaved, so that a slow minute of the machine meets all alike; each figure is their median. A round
before them, which does not count, finds how many tasks each peer runs in `--seconds`.

Peers that are not installed here are installed, with workq beside them, into an environment made for the run
(`--environment` keeps it for the next one), and graphile-worker by npm if node is there.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import asyncpg

import common

PEERS = Path(__file__).with_name("peers")
ROOT = PEERS.parent.parent
PLACES = (1, 4, 16, 64)
FEWEST, MOST = 300, 60_000
"""Tasks of a run: below, it is over before its clock is right; above, it would take all evening to enqueue them."""
PATIENCE = 180
"""Seconds after which a run counts as hung."""


class Peer(NamedTuple):
    """A row of the tables."""

    name: str
    kind: common.Kind
    script: str
    args: Sequence[str] = ()
    modules: Sequence[str] = ()
    bounded: bool = True
    """Does it keep to p at once? Only then it is compared with workq, and its enqueueing is shown."""


PSYCOPG = ("psycopg", "psycopg_pool")
CONTENDERS = (
    Peer("workq", "postgres", "workq_.py", modules=("workq", "asyncpg")),
    Peer("pgqueuer", "postgres", "pgqueuer_.py", modules=("pgqueuer", "asyncpg")),
    Peer("pgqueuer, 1,000 at once", "postgres", "pgqueuer_.py", ("--wide",), ("pgqueuer", "asyncpg"), bounded=False),
    Peer("procrastinate", "postgres", "procrastinate_.py", modules=("procrastinate", "asyncpg", *PSYCOPG)),
    Peer("chancy", "postgres", "chancy_.py", modules=("chancy", "asyncpg", *PSYCOPG)),
    Peer("saq", "postgres", "saq_.py", modules=("saq", "asyncpg", *PSYCOPG)),
    Peer("graphile-worker (node)", "postgres", "graphile.mjs"),
    Peer("workq", "sqlite", "workq_.py", modules=("workq", "aiosqlite")),
    Peer("huey", "sqlite", "huey_.py", modules=("huey",)),
)


class Size(NamedTuple):
    singles: int
    tasks: int


class Cell(NamedTuple):
    """One peer at one number of places."""

    peer: Peer
    places: int


Answer = dict[str, Any]
"""What a script prints: version, and tasks a second for enqueue, bulk (None: it has no such call) and execute."""


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--peers", nargs="+", metavar="NAME", help="only those whose names begin like this")
    parser.add_argument("--places", nargs="+", type=int, default=PLACES, metavar="P", help="default: 1 4 16 64")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2, help="that a run executes, more or less (default: 2)")
    parser.add_argument("--environment", type=Path, metavar="FOLDER", help="install into it, or use what is there")
    options = parser.parse_args()
    begins = tuple(options.peers or [""])
    chosen = [peer for peer in CONTENDERS if peer.kind in common.kinds(options) and peer.name.startswith(begins)]

    with ExitStack() as stack:
        folder = Path(
            options.environment or stack.enter_context(tempfile.TemporaryDirectory(prefix="workq-bench-"))
        ).resolve()
        programs = install(chosen, folder)
        cells = [Cell(peer, places) for peer in chosen if peer.script in programs for places in options.places]
        servers: dict[common.Kind, str] = {
            kind: stack.enter_context(common.address(kind)) for kind in common.kinds(options)
        }
        bench = Bench(programs, servers)

        sizes = {cell: bench.size(cell, options.seconds) for cell in cells}
        answers: dict[Cell, list[Answer]] = {cell: [] for cell in cells}
        for number in range(options.rounds):
            note(f"round {number + 1} of {options.rounds}")
            for cell in cells:
                answers[cell] += [] if (size := sizes[cell]) is None else bench.run(cell, size)

        python = next((program[0] for script, program in programs.items() if script.endswith(".py")), sys.executable)
        result: dict[str, Any] = {
            "machine": common.machine(servers.get("postgres")) | drivers(python),
            "versions": {
                cell.peer.name: answers[cell][0]["version"] for cell in cells if cell.peer.bounded and answers[cell]
            },
            "rounds": options.rounds,
            "databases": {
                kind: figures([cell for cell in cells if cell.peer.kind == kind], answers, sizes) for kind in servers
            },
        }
    print(json.dumps(result, indent=2) if options.json else text(result))


# -- the environment


def install(chosen: Sequence[Peer], folder: Path) -> dict[str, Sequence[str]]:
    """The start of each script's command line. What cannot be installed is left out, with a note."""
    python = sys.executable
    if any(importlib.util.find_spec(module) is None for peer in chosen for module in peer.modules):
        note("installing the peers")
        python = str(folder / "venv" / "bin" / "python")
        if not Path(python).exists():
            subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
            what = ["-r", PEERS / "requirements.txt", "-e", f"{ROOT}[asyncpg,aiosqlite]"]
            quiet = ["--quiet", "--quiet", "--disable-pip-version-check"]
            subprocess.run([python, "-m", "pip", "install", *quiet, *what], check=True)
    programs: dict[str, Sequence[str]] = {
        peer.script: (python, str(PEERS / peer.script)) for peer in chosen if peer.script.endswith(".py")
    }
    if any(peer.script == "graphile.mjs" for peer in chosen):
        if (node := shutil.which("node")) is not None and npm("graphile-worker", folder / "node"):
            programs["graphile.mjs"] = (node, str(PEERS / "graphile.mjs"), str(folder / "node"))
        else:
            note("no node, or npm cannot install: without graphile-worker")
    return programs


def npm(package: str, folder: Path) -> bool:
    """Install a package of node's. The newest release that this node can run."""
    if (folder / "node_modules" / package).exists():
        return True
    if (program := shutil.which("npm")) is None:
        return False
    folder.mkdir(parents=True, exist_ok=True)
    command = [program, "install", "--no-audit", "--no-fund", "--silent", "--prefix", folder, package]
    return subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0


def drivers(python: str) -> dict[str, str]:
    """The versions that matter in the environment of the peers."""
    code = """
import importlib.metadata, json
found = {one.metadata["name"]: one.version for one in importlib.metadata.distributions()}
print(json.dumps({name: found.get(name, "not installed") for name in ("asyncpg", "aiosqlite", "psycopg", "uvloop")}))
"""
    return json.loads(subprocess.run([python, "-c", code], check=True, capture_output=True).stdout)


# -- the runs


class Bench:
    """Runs the scripts, each on a database of its own."""

    def __init__(self, programs: Mapping[str, Sequence[str]], servers: Mapping[common.Kind, str]) -> None:
        self._programs = programs
        self._servers = servers
        self._numbers = count(1)

    def size(self, cell: Cell, seconds: float) -> Size | None:
        """How many tasks this one runs in the time; None if it does not run at all."""
        tasks = FEWEST
        while answer := self.run(cell, Size(min(tasks // 3, 1000), tasks)):
            execute, enqueue = answer[0]["execute"], answer[0]["enqueue"]
            most = MOST if answer[0]["bulk"] is not None else int(enqueue * 2 * seconds)
            # A run of less than a quarter of the time is mostly the start of the worker.
            if tasks / execute >= seconds / 4 or tasks >= most:
                wanted = max(FEWEST, min(int(execute * seconds), most))
                return Size(max(FEWEST // 3, min(int(enqueue * seconds / 2), wanted // 2)), wanted)
            tasks = min(tasks * 8, most)
        return None

    def run(self, cell: Cell, size: Size) -> list[Answer]:
        """One answer, or none if the script failed, which is noted."""
        peer = cell.peer
        with self._database(peer.kind) as url:
            command = [*self._programs[peer.script], *peer.args, url, *map(str, (cell.places, *size))]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                note(f"{peer.name}, p = {cell.places}: gave up after {PATIENCE} s")
                return []
        if done.returncode:
            note(f"{peer.name}, p = {cell.places}: {done.stderr.strip()}")
            return []
        answer: Answer = json.loads(done.stdout)
        note(f"{peer.name}, p = {cell.places}: {answer['execute']:,.0f} a second, {size.tasks:,} tasks")
        return [answer]

    @contextmanager
    def _database(self, kind: common.Kind) -> Generator[str]:
        """The URL of a new, empty database, gone afterwards."""
        if kind == "sqlite":
            with common.address(kind) as url:
                yield url
            return
        server, name = self._servers[kind], f"workq_bench_{next(self._numbers)}"
        asyncio.run(execute(server, f"drop database if exists {name} with (force)", f"create database {name}"))
        try:
            yield urlsplit(server)._replace(path=f"/{name}").geturl()
        finally:
            asyncio.run(execute(server, f"drop database if exists {name} with (force)"))


async def execute(url: str, *statements: str) -> None:
    conn = await asyncpg.connect(url)
    try:
        for statement in statements:
            await conn.execute(statement)
    finally:
        await conn.close()


def note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# -- the figures


def figures(
    cells: Sequence[Cell], answers: Mapping[Cell, Sequence[Answer]], sizes: Mapping[Cell, Size | None]
) -> dict[str, Any]:
    """The medians of one database: by what was measured, peer and places."""
    peers = list(dict.fromkeys(cell.peer for cell in cells))
    places = list(dict.fromkeys(cell.places for cell in cells))
    medians = {
        what: {
            peer.name: {p: median(answers[Cell(peer, p)], what) for p in places}
            for peer in peers
            if peer.bounded or what == "execute"
        }
        for what in ("execute", "enqueue", "bulk")
    }
    bounded = [peer.name for peer in peers if peer.bounded and peer.name != "workq"]
    return {
        **medians,
        "ratio": {
            what: {p: ratio({name: row[p] for name, row in medians[what].items()}, bounded) for p in places}
            for what in medians
        },
        "tasks": {
            peer.name: {p: size.tasks for p in places if (size := sizes[Cell(peer, p)]) is not None} for peer in peers
        },
    }


def median(answers: Sequence[Answer], what: str) -> int | None:
    rates = [answer[what] for answer in answers if answer[what] is not None]
    return round(statistics.median(rates)) if rates else None


def ratio(rates: Mapping[str, int | None], peers: Sequence[str]) -> float | None:
    """workq against the fastest of these."""
    ours, fastest = rates.get("workq"), max((rates[name] or 0 for name in peers), default=0)
    return round(ours / fastest, 2) if ours and fastest else None


TITLES = {
    "execute": "{kind}: no-op tasks executed a second by one process, p at once",
    "enqueue": "{kind}: tasks enqueued a second, one by one, by p producers at once",
    "bulk": "{kind}: tasks enqueued a second in bulk, a thousand in each call",
}


def text(result: Mapping[str, Any]) -> str:
    tables = [
        common.table(
            title.format(kind=kind),
            ["", *(f"p = {p}" for p in found["ratio"][what])],
            [
                *([name, *row.values()] for name, row in found[what].items()),
                ["workq / fastest peer", *found["ratio"][what].values()],
            ],
        )
        for kind, found in result["databases"].items()
        for what, title in TITLES.items()
    ]
    facts = [", ".join(f"{name} {version}" for name, version in result[key].items()) for key in ("versions", "machine")]
    return "\n\n".join([*tables, *facts])


if __name__ == "__main__":
    main()
