"""Where an operation runs: on a connection of workq's own, or inside the caller's transaction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from workq._deadline import Deadline
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
    deadline: Deadline | None = None
    """For what is small and must not hang on a dead connection for long: an INSERT."""

    async def fetch(self, statement: Statement, params: Params) -> Rows:
        """Run one statement."""
        urgency = BRIEF if statement.waits else PATIENT
        if self.deadline is None:
            return await self.connection.fetch(statement, params, urgency)
        # SQLite's writer is waited for as long as ever: no connection is dead there.
        lock_wait = urgency.timeout if urgency.lock_wait is None else urgency.lock_wait
        return await self.deadline.meet(
            lambda seconds: self.connection.fetch(statement, params, Urgency(timeout=seconds, lock_wait=lock_wait))
        )


@dataclass(frozen=True, slots=True)
class Callers:
    """The caller's connection, whose transaction is the caller's to end."""

    dialect: Dialect
    tx: Transaction

    async def fetch(self, statement: Statement, params: Params) -> Rows:
        """Run one statement."""
        return await self.dialect.fetch(statement, params, self.tx)
