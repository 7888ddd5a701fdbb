"""Where an operation runs: on a connection of workq's own, or inside the caller's transaction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from workq._shared import LOCK_WAIT
from workq.dialect import Connection, Dialect, Params, Rows, Statement, Transaction, Urgency

PATIENT = Urgency(timeout=10)
BRIEF = Urgency(timeout=10, lock_wait=LOCK_WAIT)
"""For a statement that may meet a foreign lock, on a connection that others are waiting for."""


class Place(Protocol):
    """One of the two."""

    async def fetch(self, statement: Statement, params: Params) -> Rows:
        """Run one statement there and return its rows."""
        ...


@dataclass(frozen=True, slots=True)
class Ours:
    """A connection of workq's own: the statement is a transaction by itself."""

    connection: Connection

    async def fetch(self, statement: Statement, params: Params) -> Rows:
        """Run one statement."""
        return await self.connection.fetch(statement, params, BRIEF if statement.waits else PATIENT)


@dataclass(frozen=True, slots=True)
class Callers:
    """The caller's connection, whose transaction is the caller's to end."""

    dialect: Dialect
    tx: Transaction

    async def fetch(self, statement: Statement, params: Params) -> Rows:
        """Run one statement."""
        return await self.dialect.fetch(statement, params, self.tx)
