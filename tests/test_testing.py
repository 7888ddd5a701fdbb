"""`workq.testing` and the pytest plugin: what applications test with."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import tomllib
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import asyncpg
import pytest

import workq
import workq.testing
from support import SOON, PostgresDatabase, SQLiteDatabase

ROOT = Path(workq.__file__).parents[1]


@workq.handler("double")
async def double(task: workq.Task[int]) -> None:
    DOUBLED.append(task.payload * 2)


@workq.handler("fails")
async def fails(task: workq.Task[str]) -> None:
    raise LookupError(f"no {task.payload}")


@workq.handler("retries", retry=workq.linear(delay=3600))
async def retries(task: workq.Task[str]) -> None:
    raise LookupError(f"no {task.payload}")


DOUBLED: list[int] = []


async def run(queue: workq.Queue, handler: workq.Handler[Any, Any], payload: object) -> int:
    """Run one task to its end, or to its next retry."""
    id = await queue.enqueue(None, handler, payload)
    assert id is not None
    async with workq.Executor(queue, [handler], poll_interval=0.1):
        await queue.wait(timeout=SOON)
    return id


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files are made during the test."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def files(folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*")]


async def test_a_queue_is_ready_and_leaves_nothing_behind(temporary: Path) -> None:
    """As the docstring shows it: in an SQLite file that is removed."""
    DOUBLED.clear()
    async with workq.testing.queue() as queue, workq.Executor(queue, [double]):
        assert any(name.endswith(".db") for name in files(temporary))
        await queue.enqueue(None, double, 21)
        await queue.wait(timeout=SOON)
    assert DOUBLED == [42]
    assert files(temporary) == []


async def test_two_queues_know_nothing_of_each_other() -> None:
    async with workq.testing.queue() as one, workq.testing.queue() as other:
        await one.enqueue(None, double, 1)
        assert len(await one.find()) == 1
        assert await other.find() == []


async def test_a_queue_takes_transactions_like_any_other(tmp_path: Path) -> None:
    """By a url, the application's own connections reach the same file; it stays."""
    url = f"sqlite:///{tmp_path / 'app.db'}"
    for expected in (1, 2):
        async with workq.testing.queue(url) as queue:
            await queue.enqueue(None, "kept")
            assert len(await queue.find()) == expected


async def test_on_postgresql_it_has_a_schema_of_its_own_that_is_removed(postgres: PostgresDatabase) -> None:
    before = await tables(postgres)
    async with workq.testing.queue(postgres.url) as one, workq.testing.queue(postgres.url) as other:
        DOUBLED.clear()
        await run(one, double, 21)
        await one.enqueue(None, "left over")
        assert await other.find() == []
        made = await tables(postgres) - before
        schemas = {schema for schema, _ in made}
        assert len(schemas) == 2
        assert "public" not in schemas
    assert DOUBLED == [42]
    assert await tables(postgres) == before


async def tables(postgres: PostgresDatabase) -> set[tuple[str, str]]:
    """All tables and empty schemas of the database."""
    rows = await postgres.rows(
        "select n.nspname::text, coalesce(c.relname, '')::text from pg_namespace n "
        "left join pg_class c on c.relnamespace = n.oid where n.nspname !~ '^pg_|^information_schema$'"
    )
    return {(schema, table) for schema, table in rows}


@pytest.mark.parametrize("end", ["the body raised", "a task failed"])
async def test_the_schema_is_removed_however_the_test_ended(end: str, postgres: PostgresDatabase) -> None:
    before = await tables(postgres)

    async def test() -> None:
        async with workq.testing.queue(postgres.url) as queue:
            await run(queue, fails, "luck")
            if end == "the body raised":
                raise KeyError("of the body")

    with pytest.raises(KeyError if end == "the body raised" else AssertionError):
        await test()
    assert await tables(postgres) == before


@pytest.mark.parametrize("end", ["the body raised", "a task failed"])
async def test_the_file_is_removed_however_the_test_ended(end: str, temporary: Path) -> None:
    async def test() -> None:
        async with workq.testing.queue() as queue:
            await run(queue, fails, "luck")
            if end == "the body raised":
                raise KeyError("of the body")

    with pytest.raises(KeyError if end == "the body raised" else AssertionError):
        await test()
    assert files(temporary) == []


@pytest.mark.timeout(30)
@pytest.mark.parametrize("touched", ["enqueued", "read"])
async def test_a_transaction_left_open_ends_the_test_with_the_remedy(touched: str, postgres: PostgresDatabase) -> None:
    """DROP SCHEMA would wait for it without limit, and the test with it."""

    async def test() -> None:
        async with workq.testing.queue(postgres.url) as queue:
            if touched == "enqueued":
                await queue.enqueue(caller.tx, double, 1)
            else:
                assert await queue.get(1, tx=caller.tx) is None

    async with postgres.caller() as caller:
        with pytest.raises(RuntimeError, match="transaction") as raised:
            await test()
    text = str(raised.value)
    assert "commit or roll back" in text
    (left,) = re.findall(r"workq_test_\w+", text)
    await postgres.rows(f"drop schema {left} cascade")


@pytest.mark.timeout(30)
@pytest.mark.parametrize("end", ["the body raised", "a task failed"])
async def test_a_transaction_left_open_does_not_hide_how_the_test_ended(
    end: str, postgres: PostgresDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with workq.testing.queue(postgres.url) as queue:
            await run(queue, fails, "luck")
            await queue.enqueue(caller.tx, double, 1)
            if end == "the body raised":
                raise KeyError("of the body")

    async with postgres.caller() as caller:
        with pytest.raises(KeyError if end == "the body raised" else AssertionError):
            await test()
    (line,) = [record for record in caplog.records if "commit or roll back" in record.getMessage()]
    assert line.levelno == logging.WARNING
    (left,) = re.findall(r"workq_test_\w+", line.getMessage())
    await postgres.rows(f"drop schema {left} cascade")


@pytest.mark.timeout(30)
async def test_on_sqlite_a_transaction_left_open_is_in_nobodys_way(sqlite: SQLiteDatabase) -> None:
    async with AsyncExitStack() as afterwards, workq.testing.queue(sqlite.url) as queue:
        caller = await afterwards.enter_async_context(sqlite.caller())
        await queue.enqueue(caller.tx, double, 1)


async def test_the_schema_is_removed_though_the_test_is_cancelled(postgres: PostgresDatabase) -> None:
    """A scope that was cancelled refuses every await in it, also those of the clean-up."""
    before = await tables(postgres)
    with anyio.CancelScope() as scope:
        async with workq.testing.queue(postgres.url):
            scope.cancel()
            await anyio.sleep(SOON)
    assert await tables(postgres) == before


@pytest.fixture(params=["temporary", "sqlite url", "postgresql url"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    """What `workq.testing.queue` is given."""
    if request.param == "temporary":
        return None
    if request.param == "sqlite url":
        return f"sqlite:///{tmp_path / 'test.db'}"
    return request.getfixturevalue("servers").url("wheel")


async def test_a_task_that_failed_fails_the_test_and_is_named(url: str | None) -> None:
    async def test() -> None:
        async with workq.testing.queue(url) as queue:
            await run(queue, fails, "luck")
            await run(queue, fails, "money")

    with pytest.raises(AssertionError) as raised:
        await test()
    text = str(raised.value)
    assert text.startswith("2 task(s) failed")
    for word in ("task 1 'fails'", "LookupError: no luck", "task 2 'fails'", "LookupError: no money", "in fails"):
        assert word in text


async def test_however_many_failed_the_number_is_right(url: str | None) -> None:
    async def test() -> None:
        async with workq.testing.queue(url) as queue, workq.Executor(queue, [fails], poll_interval=0.1):
            await queue.enqueue_many(None, [workq.NewTask(fails, str(number)) for number in range(30)])
            await queue.wait(timeout=SOON)

    with pytest.raises(AssertionError, match="^30 "):
        await test()


async def test_failed_tasks_may_be_allowed(url: str | None) -> None:
    async with workq.testing.queue(url, allow_failed=True) as queue:
        await run(queue, fails, "luck")
        assert len(await queue.find(state="failed")) == 1


async def test_what_the_body_raises_is_not_hidden_by_the_tasks_that_failed(url: str | None) -> None:
    error = KeyError("of the body")

    async def test() -> None:
        async with workq.testing.queue(url) as queue:
            await run(queue, fails, "luck")
            raise error

    with pytest.raises(KeyError) as raised:
        await test()
    assert raised.value is error


@pytest.mark.parametrize("how", ["deleted", "retried", "between retries", "waiting"])
async def test_what_is_no_failure_any_more_or_not_yet_passes(how: str, url: str | None) -> None:
    async with workq.testing.queue(url) as queue:
        if how == "waiting":
            await queue.enqueue(None, fails, "luck")
        elif how == "between retries":
            id = await run(queue, retries, "luck")
            row = await queue.get(id)
            assert row is not None
            assert (row.state, row.attempt) == ("waiting", 1)
        else:
            id = await run(queue, fails, "luck")
            if how == "deleted":
                assert await queue.delete(None, id)
            else:
                assert await queue.retry(None, id)


@pytest.mark.parametrize("when", ["before a run", "between retries"])
async def test_a_task_that_was_disabled_has_not_failed_unasked(when: str, url: str | None) -> None:
    """Somebody asked for it: the test, or the application that it tests."""
    async with workq.testing.queue(url) as queue:
        if when == "between retries":
            id = await run(queue, retries, "luck")
        else:
            id = await queue.enqueue(None, double, 1)
            assert id is not None
        assert await queue.disable(None, id)


@pytest.mark.parametrize("outcome", [workq.Fail("disabled"), workq.Skip("disabled")])
async def test_a_handler_cannot_pass_for_disabled(outcome: workq.Result, url: str | None) -> None:
    @workq.handler("pretends")
    async def pretends(task: workq.Task[str]) -> workq.Result:
        return outcome

    with pytest.raises(AssertionError, match="'pretends': disabled"):
        async with workq.testing.queue(url) as queue:
            await run(queue, pretends, "luck")


@pytest.mark.parametrize("allow_failed", [False, True])
async def test_what_the_body_raises_names_the_tasks_that_failed(allow_failed: bool, url: str | None) -> None:
    """An assertion that fails because a task did says why."""

    async def test() -> None:
        async with workq.testing.queue(url, allow_failed=allow_failed) as queue:
            await run(queue, fails, "luck")
            await run(queue, retries, "money")
            await queue.enqueue(None, double, 1, delay=3600)
            off = await queue.enqueue(None, double, 2, delay=3600)
            assert off is not None
            assert await queue.disable(None, off)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as raised:
        await test()
    (note,) = raised.value.__notes__
    assert note.splitlines() == [
        "2 task(s) failed, or will be retried:",
        "task 1 'fails': LookupError: no luck ... raise LookupError(f\"no {task.payload}\")",
        "task 2 'retries': LookupError: no money ... raise LookupError(f\"no {task.payload}\")",
    ]


async def test_what_the_body_raises_has_no_note_without_a_failed_task(url: str | None) -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        async with workq.testing.queue(url):
            raise ZeroDivisionError
    assert not hasattr(raised.value, "__notes__")


class Noteless(Exception):
    def add_note(self, note: str, /) -> None:
        raise TypeError("no notes")


async def test_an_error_that_takes_no_note_is_raised_all_the_same(url: str | None) -> None:
    async def test() -> None:
        async with workq.testing.queue(url) as queue:
            await run(queue, fails, "luck")
            raise Noteless

    with pytest.raises(Noteless):
        await test()


async def test_the_log_says_of_what_kind_an_error_was_and_not_what_it_said(caplog: pytest.LogCaptureFixture) -> None:
    """A message may quote the payload; the name of a type, whatever it holds, stays on its line."""
    odd = type("Odd\nforged line", (Exception,), {})

    @workq.handler("odd")
    async def raises_odd(task: workq.Task[str]) -> None:
        raise odd(task.payload)

    @workq.handler("given up")
    async def given_up(task: workq.Task[str]) -> workq.Result:
        return workq.Fail(f"no {task.payload}")

    with caplog.at_level(logging.INFO, "workq"):
        async with workq.testing.queue(allow_failed=True) as queue:
            for handler in (fails, retries, raises_odd, given_up):
                await run(queue, handler, "the secret")
    lines = [record.getMessage() for record in caplog.records if record.name == "workq"]
    assert "task 1 'fails' failed with LookupError (run 1) and is kept as failed" in lines
    assert "task 2 'retries' failed with LookupError (run 1) and will run again" in lines
    assert "task 4 'given up' failed (run 1) and is kept as failed" in lines
    assert all("\n" not in line and "secret" not in line for line in lines)


def test_it_takes_the_options_that_a_queue_takes() -> None:
    given = inspect.signature(workq.testing.queue, eval_str=True).parameters
    wanted = inspect.signature(workq.Queue, eval_str=True).parameters
    options = {name: (one.default, one.annotation) for name, one in wanted.items() if one.kind is one.KEYWORD_ONLY}
    assert {name: (given[name].default, given[name].annotation) for name in options} == options


async def test_the_options_reach_the_queue(url: str | None) -> None:
    events: list[str] = []

    @workq.handler("traced")
    async def traced(task: workq.Task[str]) -> workq.Result:
        return workq.Fail(f"{task.payload} in {task.headers['trace']}")

    async with workq.testing.queue(
        url,
        allow_failed=True,
        on_event=[lambda event: events.append(event.kind)],
        headers=lambda: {"trace": "abc"},
        redact=lambda text: text.replace("secret", "---"),
        max_payload=20,
    ) as queue:
        row = await queue.get(await run(queue, traced, "secret"))
        assert row is not None
        assert row.error == "--- in abc"
        assert events == ["enqueued", "started", "failed"]
        with pytest.raises(workq.PayloadError):
            await queue.enqueue(None, traced, "x" * 20)


async def test_a_server_that_is_there_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """WORKQ_TEST_POSTGRES_DSN, word for word; nothing is started, and nothing is connected to."""
    monkeypatch.setenv("WORKQ_TEST_POSTGRES_DSN", "postgresql://somebody@nowhere.invalid:1/test")
    monkeypatch.setattr(workq.testing, "launch", lambda: pytest.fail("a server was started"))
    async with workq.testing.postgres() as url:
        assert url == "postgresql://somebody@nowhere.invalid:1/test"


def python(program: str) -> str:
    """What a program prints, in a process of its own."""
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "WORKQ_TEST_POSTGRES_DSN"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_tests_of_one_process_share_one_server_also_when_they_ask_at_once() -> None:
    urls = python(
        """
        import asyncio, workq.testing

        async def url():
            async with workq.testing.postgres() as url:
                return url

        async def main():
            return await asyncio.gather(url(), url(), url()) + [await url()]

        print(*asyncio.run(main()))
        """
    ).split()
    assert len(urls) == 4
    assert len(set(urls)) == 1


def test_a_server_that_was_started_here_ends_with_the_process() -> None:
    url, id = python(
        """
        import asyncio, workq, workq.testing

        async def main():
            async with workq.testing.postgres() as url, workq.testing.queue(url) as queue:
                print(url, await queue.enqueue(None, "note"))

        asyncio.run(main())
        """
    ).split()
    assert id == "1"
    with pytest.raises(ConnectionError):
        asyncio.run(asyncpg.connect(url, timeout=5))


@dataclass
class Ended:
    """How a run of pytest ended."""

    code: int
    output: str

    def outcomes(self) -> dict[str, int]:
        last = self.output.strip().splitlines()[-1]
        return {word.rstrip("s"): int(number) for number, word in re.findall(r"(\d+) (passed|failed|errors?)", last)}


def pytest_on(folder: Path, source: str, *options: str, scope: str | None = "function", **env: str) -> Ended:
    """Run pytest with the plugin on one file of tests; scope: of the loops of fixtures, None without pytest-asyncio."""
    (folder / "test_app.py").write_text(textwrap.dedent(source))
    setting = "" if scope is None else f"asyncio_default_fixture_loop_scope = {scope}\n"
    (folder / "pytest.ini").write_text(f"[pytest]\n{setting}")
    given = ["-q", "-W", "error", "-p", "no:cacheprovider", "-p", "workq_pytest", *options]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *given],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=90,
    )
    return Ended(ended.returncode, ended.stdout)


SCOPES = ["function", "module", "session"]


@pytest.mark.parametrize("scope", SCOPES)
def test_the_fixtures_fit_tests_whose_loop_is_of_any_scope(scope: str, tmp_path: Path) -> None:
    """In the body of a test, and in a fixture of the test's own; two tests each, so that a loop is met again."""
    ended = pytest_on(
        tmp_path,
        f"""
        import asyncio
        import pytest
        import pytest_asyncio
        import workq

        pytestmark = pytest.mark.asyncio(loop_scope="{scope}")
        loops = []

        @workq.handler("note")
        async def note(task: workq.Task[int]) -> None:
            assert task.payload != 13

        @pytest_asyncio.fixture(loop_scope="{scope}")
        async def queue(workq_queue):
            async with workq_queue() as queue, workq.Executor(queue, [note]):
                yield queue

        @pytest.mark.parametrize("number", [1, 2])
        async def test_in_the_body(workq_queue, number):
            loops.append(asyncio.get_running_loop())
            async with workq_queue() as queue, workq.Executor(queue, [note]):
                await queue.enqueue(None, note, number)
                await queue.wait(timeout=10)
                assert await queue.find() == []

        @pytest.mark.parametrize("number", [1, 2])
        async def test_in_a_fixture(queue, number):
            loops.append(asyncio.get_running_loop())
            assert await queue.enqueue(None, note, number) == 1
            await queue.wait(timeout=10)

        async def test_the_loops():
            assert len(set(map(id, loops))) == (4 if "{scope}" == "function" else 1)
        """,
        scope=scope,
    )
    assert ended.outcomes() == {"passed": 5}, ended.output


@pytest.mark.parametrize("scope", SCOPES)
def test_a_fixture_of_any_scope_may_use_them(scope: str, tmp_path: Path, postgres: PostgresDatabase) -> None:
    """One server for the session and one queue for a module, say: what lives as long as the loop."""
    ended = pytest_on(
        tmp_path,
        f"""
        import pytest
        import pytest_asyncio
        import workq

        pytestmark = pytest.mark.asyncio(loop_scope="{scope}")

        @workq.handler("note")
        async def note(task: workq.Task[int]) -> None: ...

        @pytest_asyncio.fixture(scope="{scope}", loop_scope="{scope}")
        async def url(workq_postgres):
            async with workq_postgres() as url:
                yield url

        @pytest_asyncio.fixture(scope="{scope}", loop_scope="{scope}")
        async def queue(url, workq_queue):
            async with workq_queue(url) as queue, workq.Executor(queue, [note]):
                yield queue

        @pytest.mark.parametrize("number", [1, 2])
        async def test_it(queue, number):
            assert await queue.enqueue(None, note, number) == (1 if "{scope}" == "function" else number)
            await queue.wait(timeout=10)
        """,
        scope=scope,
        WORKQ_TEST_POSTGRES_DSN=postgres.url,
    )
    assert ended.outcomes() == {"passed": 2}, ended.output


def test_a_failed_task_fails_the_test_that_had_it_and_no_other(tmp_path: Path) -> None:
    ended = pytest_on(
        tmp_path,
        """
        import pytest
        import pytest_asyncio
        import workq

        pytestmark = pytest.mark.asyncio

        @workq.handler("note")
        async def note(task: workq.Task[int]) -> None:
            if task.payload == 13:
                raise LookupError("thirteen is missing")

        @pytest_asyncio.fixture
        async def queue(workq_queue):
            async with workq_queue() as queue, workq.Executor(queue, [note]):
                yield queue

        @pytest.mark.parametrize("number", [12, 13, 14])
        async def test_in_the_body(workq_queue, number):
            async with workq_queue() as queue, workq.Executor(queue, [note]):
                await queue.enqueue(None, note, number)
                await queue.wait(timeout=10)

        @pytest.mark.parametrize("number", [12, 13, 14])
        async def test_in_a_fixture(queue, number):
            await queue.enqueue(None, note, number)
            await queue.wait(timeout=10)

        async def test_expected(workq_queue):
            async with workq_queue(allow_failed=True) as queue, workq.Executor(queue, [note]):
                await queue.enqueue(None, note, 13)
                await queue.wait(timeout=10)
        """,
    )
    assert ended.outcomes() == {"failed": 1, "passed": 6, "error": 1}, ended.output
    assert ended.output.count("LookupError: thirteen is missing") >= 2
    assert re.search(r"FAILED test_app.py::test_in_the_body\[13\]", ended.output)
    assert re.search(r"ERROR test_app.py::test_in_a_fixture\[13\]", ended.output)


def test_the_plugin_imports_nothing_of_workq_until_a_test_asks(tmp_path: Path) -> None:
    """It is loaded in every run of everybody who has workq installed."""
    ended = pytest_on(
        tmp_path,
        """
        import asyncio
        import sys

        NAMES = ("workq", "workq_asyncpg", "workq_aiosqlite", "asyncpg", "aiosqlite", "sqlalchemy")

        def loaded():
            return sorted(name for name in sys.modules if name.partition(".")[0] in NAMES)

        def test_nothing_of_it_is_loaded():
            assert "workq_pytest" in sys.modules
            assert loaded() == []

        def test_it_is_loaded_when_it_is_used(workq_queue):
            async def use():
                async with workq_queue() as queue:
                    assert await queue.enqueue(None, "note") == 1

            asyncio.run(use())
            assert "workq.testing" in loaded()
        """,
        *("-p", "no:asyncio", "-p", "no:anyio"),
        scope=None,
    )
    assert ended.outcomes() == {"passed": 2}, ended.output


def test_the_fixtures_are_explained(tmp_path: Path) -> None:
    """`pytest --fixtures` is where people look."""
    ended = pytest_on(tmp_path, "def test_nothing(): ...", "--fixtures")
    for name in ("workq_queue", "workq_postgres"):
        assert re.search(rf"^{name}\b.*\n    .*workq\.testing", ended.output, re.MULTILINE), ended.output


def test_the_plugin_is_announced_and_shipped() -> None:
    """By the entry point that pytest looks for, and in the wheel."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["pytest11"] == {"workq_pytest": "workq_pytest"}
    assert "workq_pytest" in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
