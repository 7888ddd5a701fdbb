"""Servers that a test may break, and processes that it may kill."""

from __future__ import annotations

import itertools
from collections.abc import Generator
from pathlib import Path

import pytest

from faults.nodes import Nodes, nodes_on
from support import Database, PostgresDatabase
from workq.testing._server import Server, ServerMissing, launch

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def breakable_server() -> Generator[Server]:
    """A PostgreSQL server of one's own. What is committed survives a crash of its processes."""
    try:
        server = launch(options={"synchronous_commit": "on"})
    except ServerMissing as missing:
        pytest.skip(str(missing))
    yield server
    server.remove()


@pytest.fixture
def server(breakable_server: Server) -> Server:
    """The same, running."""
    breakable_server.start()
    return breakable_server


@pytest.fixture
def mortal(server: Server) -> PostgresDatabase:
    """A schema of its own on the server that may be broken."""
    return PostgresDatabase(server.url, f"t{next(_numbers)}")


@pytest.fixture
def nodes(database: Database, tmp_path: Path) -> Generator[Nodes]:
    """Processes on the test's database."""
    with nodes_on(database, tmp_path) as nodes:
        yield nodes
