"""The README tells the truth: its code runs, its commands are those that CI runs, its map names every file."""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import re
import subprocess
import sys
import types
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiosqlite
import asyncpg
import pytest
import pytest_asyncio

from support import PostgresDatabase

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"

ANY_URL = "postgresql://user:password@host/name"


class Block(NamedTuple):
    language: str
    text: str
    line: int
    """Of its first line of code."""
    runs: bool


def blocks() -> list[Block]:
    """The code blocks of the README, in order."""
    text = README.read_text()
    found: list[Block] = []
    for match in re.finditer(r"^(<!-- not run -->\n+)?```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, match.start(3)) + 1
        found.append(Block(match[2], match[3], line, runs=match[1] is None))
    return found


def is_program(block: Block) -> bool:
    """Does it bring its own event loop?"""
    return "asyncio.run(" in block.text


async def run(block: Block, names: dict[str, Any]) -> None:
    """Run a block that may `await` at its top level. Tracebacks show the README's lines."""
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    code = compile("\n" * (block.line - 1) + block.text, str(README), "exec", flags, dont_inherit=True)
    result = eval(code, names)  # noqa: S307
    if inspect.isawaitable(result):
        await result


@pytest_asyncio.fixture
async def url(postgres: PostgresDatabase) -> AsyncGenerator[str]:
    """A database of its own on the server, with the application's tables in it."""
    name = f"readme_{postgres.schema}"
    await postgres.rows(f"create database {name}")
    url = urlsplit(postgres.url)._replace(path=f"/{name}").geturl()
    conn = await asyncpg.connect(url)
    await conn.execute("create table users (email text); create table records (id int)")
    await conn.close()
    yield url
    await postgres.rows(f"drop database {name} with (force)")


async def test_the_code_runs_from_top_to_bottom(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with aiosqlite.connect("app.db") as conn:
        await conn.execute("create table users (email text)")
    module = types.ModuleType("readme")
    monkeypatch.setitem(sys.modules, "readme", module)

    ran = 0
    for block in blocks():
        if block.language == "python" and block.runs and not is_program(block):
            await run(block._replace(text=block.text.replace(ANY_URL, url)), vars(module))
            ran += 1
    assert ran > 10

    # What waits for the commit of a handler, or for a mail server, is there; the rest of it ran.
    rows = await module.queue.find()
    assert [(row.name, row.payload["to"]) for row in rows] == [
        ("send-mail", "ann@example.org"),
        ("send-mail", "bob@example.org"),
    ]
    worker = asyncio.create_task(module.worker())
    await module.queue.wait(timeout=10)
    worker.cancel()
    await asyncio.wait([worker])
    await module.pool.close()


def test_the_first_program_prints_what_the_readme_says(tmp_path: Path) -> None:
    found = blocks()
    programs = [place for place, block in enumerate(found) if block.language == "python" and is_program(block)]
    assert programs
    for place in programs:
        ended = subprocess.run(
            [sys.executable, "-W", "error", "-c", found[place].text],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert ended.stderr == ""
        assert found[place + 1].language == "text"
        assert ended.stdout == found[place + 1].text


def test_ci_runs_the_readmes_test_command() -> None:
    (command,) = [block.text for block in blocks() if block.language == "sh" and "pytest" in block.text]
    make, install, test = command.strip().split(" && ")
    script = (ROOT / ".ci" / "run").read_text().replace('"', "")
    for step in (make, install, test):
        program, arguments = step.replace('"', "").split(" ", 1)
        assert f"{arguments.removesuffix(' .venv')} " in script.replace("\n", " "), step
        assert program.removeprefix(".venv/") in script, step


def test_the_map_names_every_file_and_no_other() -> None:
    _, _, map_of_the_code = README.read_text().partition("## Map of the code")
    named = set(re.findall(r"`(\w+/[\w./]*)`", map_of_the_code))
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "workq").rglob("*.py")}
    missing = {
        module
        for module in modules
        if module not in named and not module.endswith("_sql/__init__.py") and f"{Path(module).parent}/" not in named
    }
    assert missing == set()
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_every_link_leads_somewhere() -> None:
    text = README.read_text()
    headings = {
        re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert target.removeprefix("#") in headings if target.startswith("#") else (ROOT / target).exists(), target
