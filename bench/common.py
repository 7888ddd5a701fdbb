"""What every benchmark stands on: a durable server, a file on disk, the machine's description, a table of figures.

Each benchmark is one command, `python bench/<name>.py`, for both databases; `--json` prints one object for machines.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import platform
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import asyncpg

import workq
from workq.testing._server import launch

T = TypeVar("T")
Kind = Literal["postgres", "sqlite"]
KINDS: tuple[Kind, ...] = ("postgres", "sqlite")


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options that all benchmarks have; a benchmark adds its own."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--database", choices=KINDS, help="only this one (default: both)")
    return parser


def kinds(options: argparse.Namespace) -> Sequence[Kind]:
    """The databases that were asked for."""
    return KINDS if options.database is None else (options.database,)


@contextmanager
def address(kind: Kind) -> Generator[str]:
    """The URL of an empty database: a file on disk, or a server of our own whose commits are durable.

    The server has PostgreSQL's default settings (fsync and synchronous_commit are on). `WORKQ_BENCH_POSTGRES_DSN`
    names a running one instead.
    """
    if kind == "sqlite":
        with tempfile.TemporaryDirectory(prefix="workq-bench-") as folder:
            yield f"sqlite:///{Path(folder, 'bench.db')}"
    elif given := os.environ.get("WORKQ_BENCH_POSTGRES_DSN"):
        yield given
    else:
        server = launch(durable=True)
        try:
            yield server.url
        finally:
            server.remove()


@asynccontextmanager
async def empty_queue(url: str, **options: Any) -> AsyncGenerator[workq.Queue]:
    """A queue on a table made anew. `options` are those of `workq.connect`."""
    async with workq.connect(url, **options) as db:
        queue = workq.Queue(db)
        await queue.migrate()
        yield queue


def run(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """asyncio.run, on uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main())
    return uvloop.run(main())


def machine(url: str | None = None) -> dict[str, str]:
    """The machine and the versions that belong beside every figure."""

    def version(package: str) -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return "not installed"

    facts = {
        "processor": processor(),
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        **{package: version(package) for package in ("asyncpg", "aiosqlite", "uvloop")},
    }
    if url is not None and url.startswith("postgres"):
        facts["postgres"] = asyncio.run(server_version(url))
    return facts


def processor() -> str:
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


async def server_version(url: str) -> str:
    conn = await asyncpg.connect(url)
    try:
        return str(await conn.fetchval("show server_version")).split()[0]
    finally:
        await conn.close()


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table, as the README shows it. Integers get their thousands set off."""
    cells = [list(columns), *([show(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]

    def line(row: Sequence[str]) -> str:
        first, *others = zip(row, widths, strict=True)
        return f"| {first[0]:<{first[1]}} | " + " | ".join(f"{text:>{width}}" for text, width in others) + " |"

    rule = f"|{'-' * (widths[0] + 2)}|" + "|".join("-" * (width + 1) + ":" for width in widths[1:]) + "|"
    return "\n".join([f"{title}", "", line(cells[0]), rule, *(line(row) for row in cells[1:])])


def show(cell: object) -> str:
    match cell:
        case int():
            return f"{cell:,}"
        case float():
            return f"{cell:,.0f}" if cell >= 100 else f"{cell:.2f}"
        case None:
            return "-"
        case _:
            return str(cell)


def child(script: Path, *args: str) -> subprocess.Popen[bytes]:
    """Another process that runs one of our scripts with the same Python."""
    return subprocess.Popen([sys.executable, str(script), *args])


def print_result(options: argparse.Namespace, result: dict[Any, dict[str, Any]], text: str) -> None:
    """Either one JSON object, by database, or the text for people, with the machine below it."""
    if options.json:
        print(json.dumps(result, indent=2))
        return
    print(text)
    facts: dict[str, str] = {}
    for of_a_database in result.values():
        facts |= of_a_database["machine"]
    print("\n" + ", ".join(f"{name} {value}" for name, value in facts.items()))
