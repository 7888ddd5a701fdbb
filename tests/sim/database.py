"""The database of a simulation: workq's real SQLite statements, called inline, and every change written down.

Two kinds. "machine": SQLite as it is: one writer, and everybody has the machine's clock. "server": the same statements
with PostgreSQL's manners: its own clock, row locks that claims, beats and finishes skip, claims and beats that a crash
of the server undoes, and a statement that may be carried out after its client has given it up.

Triggers note each change of a row in a table of their own, in the same transaction: the truth that the promises are
judged by.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import fields
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple

from workq.dialect import Rows, Statement, Statements, UniqueViolation, names, sqlite
from workq_aiosqlite._bind import EPOCH, bound, read
from workq_aiosqlite._connection import BUSY, Visited

Kind = Literal["machine", "server"]

START = datetime(2026, 1, 1, tzinfo=EPOCH.tzinfo)
SECOND = 1_000_000
UNFLUSHED = 0.6
"""Seconds for which PostgreSQL may leave an asynchronous commit unwritten."""
COLUMNS = (
    "id, queue, name, key, scheduled, priority, run_at, attempt, lost, version, locked_by, locked_until, failed_at, "
    "finished_at, created_at, node, payload, headers, error"
)
WATCHED = (
    "id",
    "name",
    "key",
    "scheduled",
    "version",
    "locked_by",
    "locked_until",
    "failed_at",
    "lost",
    "run_at",
    "payload",
)


class WriterBusy(Exception):
    """Somebody's transaction holds what the statement needs. Nothing was done."""


class Side(NamedTuple):
    """A row as it was before or after a change."""

    id: int
    name: str
    key: str | None
    scheduled: bool
    version: int
    locked_by: int | None
    locked_until: int | None
    failed_at: int | None
    lost: int
    run_at: int
    payload: str


class Change(NamedTuple):
    """One change of one row. `call` is the number of the statement that made it, 0 for a crash of the server."""

    call: int
    at: float
    """Seconds of the simulation."""
    now: int
    """Microseconds, by the clock that decides leases."""
    old: Side | None
    new: Side | None


AUDIT = f"""
create table audit (seq integer primary key, call, at, now,
  {", ".join(f"old_{column}" for column in WATCHED)}, {", ".join(f"new_{column}" for column in WATCHED)})
"""
TRIGGERS = tuple(
    f"""
create trigger audit_{event} after {event} on workq when sim_watching() begin
  insert into audit (call, at, now, {", ".join(f"{side}_{column}" for side in sides for column in WATCHED)})
  values (sim_call(), sim_at(), sim_now(), {", ".join(f"{side}.{column}" for side in sides for column in WATCHED)});
end
"""
    for event, sides in (("insert", ("new",)), ("update", ("old", "new")), ("delete", ("old",)))
)


def statements_of(without: Callable[[Statements], Statements] = lambda sql: sql) -> Statements:
    """workq's own, unless a fault is planted in them."""
    return without(sqlite(names("main", "workq")))


def template(folder: Path) -> Path:
    """An empty table, made once and copied for each story."""
    path = folder / "template.db"
    if not path.exists():
        sql = sqlite(names("main", "workq"))
        conn = sqlite3.connect(path, isolation_level=None)
        conn.execute("pragma journal_mode = wal")
        conn.execute(sql.make_version_table)
        for step in sql.migrations:
            for text in step:
                conn.execute(text)
        conn.execute(sql.write_version.text, {"version": len(sql.migrations), "works_from": None}).fetchall()
        conn.execute(AUDIT)
        for text in TRIGGERS:
            conn.execute(text)
        conn.close()
    return path


class Database:
    """One file, and what is open on it."""

    def __init__(self, folder: Path, kind: Kind, sql: Statements, clock: Callable[[], float]) -> None:
        self.kind = kind
        self.sql = sql
        self.path = folder / "story.db"
        for leftover in folder.glob("story.db*"):
            leftover.unlink()
        shutil.copy(template(folder), self.path)
        self._clock = clock
        self._names = {id(getattr(sql, field.name)): field.name for field in fields(sql)}
        self._watching = True
        self._call = 0
        self.offset = 0.0
        """Seconds by which the deciding clock has been set since the start."""
        self.locks: dict[int, object] = {}
        """A server's row locks: which transaction holds which row."""
        self.crashes = False
        """Keep what a crash of the server needs."""
        self._unflushed: list[tuple[float, list[Any]]] = []
        self._conn = self.open()

    def open(self) -> sqlite3.Connection:
        """A connection of its own, with the settings of the real one, except that nothing need survive a power cut."""
        conn = sqlite3.connect(self.path, isolation_level=None, timeout=0, factory=Visited)
        conn.execute("pragma synchronous = off")
        for name, value in (
            ("sim_call", lambda: self._call),
            ("sim_at", self._clock),
            ("sim_now", self.micros),
            ("sim_watching", lambda: self._watching),
        ):
            conn.create_function(name, 0, value)
        return conn

    def close(self) -> None:
        self._conn.close()

    def name_of(self, statement: Statement) -> str:
        return self._names[id(statement)]

    def now(self) -> datetime:
        """The clock that decides: the server's, or the machine's."""
        return START + timedelta(seconds=self._clock() + self.offset)

    def micros(self) -> int:
        return (self.now() - EPOCH) // timedelta(microseconds=1)

    @property
    def written(self) -> int:
        """Rises with every row that workq's own statements change."""
        return self._conn.total_changes

    def run(self, call: int, statement: Statement, params: Mapping[str, Any]) -> Rows:
        """Carry out one statement of workq's own. Raises WriterBusy, UniqueViolation, or sqlite3's errors."""
        name = self.name_of(statement)
        if self.kind == "machine":
            return self._execute(self._conn, call, statement, params)
        params = {**params, "now": self.now()}
        if self.crashes:
            self._keep(name)
        if not self.locks:
            return self._execute(self._conn, call, statement, params)
        if name in ("retry", "reschedule", "disable", "delete") and params["id"] in self.locks:
            raise WriterBusy
        if name == "claim":
            with self._hidden():
                return self._execute(self._conn, call, statement, params)
        if name in ("extend", "succeed", "settle"):
            return self._skipping(name, call, statement, params)
        return self._execute(self._conn, call, statement, params)

    def run_in(self, conn: sqlite3.Connection, call: int, statement: Statement, params: Mapping[str, Any]) -> Rows:
        """One statement in a transaction of the application's."""
        if self.kind == "server":
            params = {**params, "now": self.now()}
        return self._execute(conn, call, statement, params)

    def tried(self, statement: Statement, params: Mapping[str, Any]) -> Rows:
        """What a statement would return now. Nothing is done."""
        self._watching = False
        self._conn.execute("begin immediate")
        try:
            return self._execute(self._conn, 0, statement, {**params, "now": self.now()})
        finally:
            self._conn.execute("rollback")
            self._watching = True

    def reserved(self, statement: Statement, params: Mapping[str, Any]) -> tuple[Rows, list[Any]]:
        """Run an INSERT, and take its rows out again, ids used up: for a transaction that inserts them when it ends."""
        self._watching = False
        try:
            rows = self._execute(self._conn, 0, statement, {**params, "now": self.now()})
            select, delete = f"select {COLUMNS} from workq where id = ?", "delete from workq where id = ?"
            made = [self._conn.execute(select, (row[0],)).fetchone() for row in rows]
            self._conn.executemany(delete, [(row[0],) for row in rows])
            return rows, made
        finally:
            self._watching = True

    def put(self, call: int, rows: list[Any]) -> None:
        """Insert rows that were reserved."""
        self._call = call
        self._flushed()
        marks = ", ".join("?" * len(COLUMNS.split(",")))
        for row in rows:
            self._conn.execute(f"insert into workq ({COLUMNS}) values ({marks})", row)

    def crash(self, choose: Callable[[int], int]) -> None:
        """The server dies: the last asynchronous commits, from one of them on, are undone."""
        self.locks.clear()
        recent = [rows for at, rows in self._unflushed if at >= self._clock() - UNFLUSHED]
        self._unflushed.clear()
        kept = choose(len(recent) + 1)
        if kept == len(recent):
            return
        now = {row[0]: row for row in self._dump()}
        then = {row[0]: row for row in recent[kept]}
        for id in now.keys() & then.keys():
            if now[id] != then[id]:
                self._call = 0
                assignments = ", ".join(f"{column} = ?" for column in COLUMNS.split(", "))
                self._conn.execute(f"update workq set {assignments} where id = ?", (*then[id], id))

    def changes(self) -> list[Change]:
        """All of them, in order."""
        found: list[Change] = []
        width = len(WATCHED)
        for _, call, at, now, *sides in self._conn.execute("select * from audit order by seq"):
            old, new = sides[:width], sides[width:]
            found.append(
                Change(
                    call,
                    at,
                    now,
                    None if old[0] is None else Side(*old),
                    None if new[0] is None else Side(*new),
                )
            )
        return found

    def rows(self, where: str = "true", *args: object) -> list[Any]:
        """Rows as they stand: (id, name, scheduled, run_at, failed_at, locked_until, lost, payload, key)."""
        return self._conn.execute(
            f"select id, name, scheduled, run_at, failed_at, locked_until, lost, payload, key from workq where {where}",
            args,
        ).fetchall()

    def _execute(self, conn: sqlite3.Connection, call: int, statement: Statement, params: Mapping[str, Any]) -> Rows:
        self._call = call
        try:
            sent: Any = statement if statement.page else statement.text
            return read(statement, conn.execute(sent, bound(params)).fetchall())
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF in BUSY:
                raise WriterBusy from None
            raise
        except sqlite3.IntegrityError:
            if statement.savepoint:
                raise UniqueViolation from None
            raise

    def _skipping(self, name: str, call: int, statement: Statement, params: Mapping[str, Any]) -> Rows:
        column = "endings" if name == "settle" else "leases"
        free = [lease for lease in params[column] if lease[0] not in self.locks]
        rows = list(self._execute(self._conn, call, statement, {**params, column: free}))
        if name == "extend":
            for id, version, token in params[column]:
                if (
                    id in self.locks
                    and self._conn.execute(
                        "select 1 from workq where id = ? and version = ? and locked_by = ?", (id, version, token)
                    ).fetchall()
                ):
                    rows.append((id, version, 0))
        return rows

    def _hidden(self) -> Any:
        return _Hidden(self, self._conn, tuple(self.locks))

    def _keep(self, name: str) -> None:
        if name in ("claim", "extend"):
            self._unflushed.append((self._clock(), self._dump()))
        elif name not in ("look", "left", "get", "find", "find_failed", "now", "read_version", "table_exists"):
            self._flushed()

    def _flushed(self) -> None:
        self._unflushed.clear()

    def _dump(self) -> list[Any]:
        return self._conn.execute(f"select {COLUMNS} from workq").fetchall()


class _Hidden:
    """Rows that a claim does not see, as it skips locked ones."""

    def __init__(self, database: Any, conn: sqlite3.Connection, ids: tuple[int, ...]) -> None:
        self._database = database
        self._conn = conn
        self._ids = ids
        self._hidden: list[int] = []

    def __enter__(self) -> None:
        self._database._watching = False
        for id in self._ids:
            if self._conn.execute(
                "update workq set failed_at = -1 where id = ? and failed_at is null returning id", (id,)
            ).fetchall():
                self._hidden.append(id)
        self._database._watching = True

    def __exit__(self, *exc_info: object) -> None:
        self._database._watching = False
        for id in self._hidden:
            self._conn.execute("update workq set failed_at = null where id = ?", (id,))
        self._database._watching = True
