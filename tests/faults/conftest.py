"""Databases that a test may break, and processes that it may kill."""

from __future__ import annotations

import itertools
from collections.abc import Generator
from pathlib import Path

import pytest

from faults.nodes import Nodes, nodes_on
from support import Database, PostgresDatabase
from workq.testing._server import Server

_numbers = itertools.count(1)


@pytest.fixture
def mortal(server: Server) -> PostgresDatabase:
    """A schema of its own on the server that may be broken."""
    return PostgresDatabase(server.url, f"t{next(_numbers)}")


@pytest.fixture
def nodes(database: Database, tmp_path: Path) -> Generator[Nodes]:
    """Processes on the test's database."""
    with nodes_on(database, tmp_path) as nodes:
        yield nodes
