"""The examples run by themselves, say what they should, and nothing on stderr."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from support import Database, PostgresDatabase

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"

QUICKSTART = """\
1. An order and its mail are stored in one transaction.
   Ann's order is committed, and with it her mail.
   Bob's order is rolled back (the card was declined), and with it his mail.
   Orders in the database: ['Ann']. Mails to send: ['ann@example.org'].
2. An executor runs what is due.
   [send-mail] to ann@example.org: thank you for your order
   Tasks left in the table: 0.
3. A task that fails is kept with its error, until somebody repairs it.
   Failed: send-mail to cleo@example.org
   Error:  ConnectionError: the mail server is down
   The mail server is up again. The task is retried.
   [send-mail] to cleo@example.org: your parcel is on its way
   Tasks left in the table: 0.
4. A schedule runs again and again.
   [count-stock] run 1
   [count-stock] run 2
   [count-stock] run 3
   Tasks left in the table: 1, count-stock, waiting for its next run.
"""


def run(example: str, *arguments: str) -> list[str]:
    """The lines an example prints. It must end well, and be quiet on stderr, warnings included."""
    environment = {name: value for name, value in os.environ.items() if name != "DATABASE_URL"}
    ended = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / example, *arguments],
        env=environment | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.stderr == ""
    assert ended.returncode == 0
    return ended.stdout.splitlines()


def test_the_quickstart_needs_nothing_and_is_quick() -> None:
    began = time.monotonic()
    database, *story = run("quickstart.py")
    assert time.monotonic() - began < 10
    assert database.startswith("The database: SQLite, ")
    assert story == QUICKSTART.splitlines()


def test_the_quickstart_tells_the_same_story_on_every_database(database: Database) -> None:
    _, *story = run("quickstart.py", database.url)
    assert story == QUICKSTART.splitlines()


def test_a_queue_on_a_database_url(database: Database) -> None:
    assert run("queue_by_url.py", database.url) == [
        "event: enqueued greet",
        "event: started greet",
        "hello, Ann",
        "event: completed greet",
        "event: enqueued count-words",
        "event: started count-words",
        "A short book: 3 words",
        "event: completed count-words",
        "event: enqueued greet",
        "still to do: greet Bob",
    ]


def test_separate_worker_pools_for_orders_and_mails(database: Database) -> None:
    orders, mails = run("two_queues.py", database.url)
    at_once = re.fullmatch(r"20 orders by 8 workers: (\d) side by side at most", orders)
    assert at_once is not None
    assert 1 < int(at_once[1]) <= 8
    assert mails == "10 mails by 1 worker: 1 side by side at most"


def test_the_applications_own_pool_and_transactions(postgres: PostgresDatabase) -> None:
    lines = run("own_pool.py", postgres.url)
    assert sorted(lines) == [
        "confirmed: order 1 of Ann",
        "confirmed: order 2 of Bob",
        "gift sent: order 1 of Ann",
        "orders in the table: 2",
        "rolled back (unknown customer): the order of Mallory",
        "tasks in the table: 0",
        "without a gift (no gifts left): order 2 of Bob",
    ]


def test_a_fastapi_application(postgres: PostgresDatabase) -> None:
    # Whether the task or the client is quicker is open: the transaction was committed before the response.
    assert sorted(run("fastapi_app.py", postgres.url)) == [
        "200 {'phase': 'running', 'database': True, 'running': 0, 'held': 0}",
        "201 ann@example.org",
        "201 bob@example.org",
        "409 {'detail': 'there is such a user already'}",
        "503 stopped",
        "welcome, ann@example.org",
        "welcome, bob@example.org",
    ]


def test_an_aiohttp_application(postgres: PostgresDatabase) -> None:
    assert sorted(run("aiohttp_app.py", postgres.url)) == [
        "200 {'phase': 'running', 'database': True, 'running': 0, 'held': 0}",
        "201 cat.png",
        "201 dog.png",
        "409 cat.png is there already",
        "resized cat.png",
        "resized dog.png",
    ]


def test_an_example_that_is_given_no_server_brings_its_own() -> None:
    assert "tasks in the table: 0" in run("own_pool.py")


async def test_the_examples_leave_nothing_on_the_server(postgres: PostgresDatabase) -> None:
    everything = """
        select 'database', datname::text from pg_database
        union all select 'schema', nspname::text from pg_namespace where nspname !~ '^pg_(toast_)?temp_'
        union all select 'table', oid::regclass::text from pg_class where relnamespace = 'public'::regnamespace
    """
    before = set(await postgres.rows(everything))
    for example in ("quickstart.py", "queue_by_url.py", "own_pool.py"):
        run(example, postgres.url)
    assert set(await postgres.rows(everything)) == before


def test_the_test_file_to_copy_passes_wherever_it_is_copied_to(tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "test_signup.py", tmp_path)
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-o", "asyncio_default_fixture_loop_scope=function", "-W", "error"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stdout
    assert "5 passed" in ended.stdout
