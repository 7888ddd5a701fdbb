"""What a statement is, and the list of those that a database must have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, cast

from workq._names import Names


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement: its text, how to bind it, how to read it."""

    text: str
    args: tuple[str | tuple[str, int], ...] = ()
    """The parameters in the order of $1, $2, ... (PostgreSQL; SQLite's are bound by name).

    `("leases", 3)`: a list of rows with three columns, which becomes three arrays.
    """
    instants: tuple[int, ...] = ()
    """Positions of the result columns that are points in time (SQLite stores microseconds)."""
    writes: bool = True
    waits: bool = False
    """It may meet a row or a key that somebody's open transaction holds, and wait for that to end."""
    page: str = ""
    """SQLite, on a connection of ours: run before `text` in the same transaction. Each of its rows is a JSON list of
    rows, which are the result; `text` gets their first columns as `:ids`."""
    savepoint: bool = False
    """A unique violation is an expected answer: it must leave the caller's transaction usable."""

    def positional(self, params: Mapping[str, Any]) -> list[object]:
        """The parameters as $1, $2, ..."""
        values: list[object] = []
        for arg in self.args:
            if isinstance(arg, str):
                values.append(params[arg])
            else:
                name, width = arg
                values.extend(zip(*params[name], strict=True) if params[name] else [[] for _ in range(width)])
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class Statements:
    """The statements of one database, with the table's names filled in. Instants come back as aware datetimes."""

    names: Names
    migrations: tuple[tuple[str, ...], ...]
    """One tuple of statements per version, the first makes version 1."""
    schema_exists: Statement | None
    make_schema: str | None
    make_version_table: str
    table_exists: Statement
    read_version: Statement
    write_version: Statement

    now: Statement
    insert_one: Statement
    insert_alike: Statement
    insert: Statement
    insert_keyed: Statement
    insert_schedules: Statement

    claim: Statement
    extend: Statement
    succeed: Statement
    settle: Statement
    look: Statement
    complete: Statement
    complete_schedule: Statement

    retry: Statement
    retry_all: Statement
    reschedule: Statement
    disable: Statement
    delete: Statement
    get: Statement
    find: Statement
    find_failed: Statement
    left: Statement
    ring: Statement | None


def filled(names: Names, texts: Mapping[str, object]) -> Statements:
    """Take each statement from the module's constant of the same name, and put the table's names in."""

    def fill(part: object) -> object:
        if isinstance(part, Statement):
            return replace(part, text=names.fill(part.text).strip(), page=names.fill(part.page).strip())
        if isinstance(part, str):
            return names.fill(part).strip()
        if isinstance(part, tuple):
            return tuple(fill(item) for item in cast(tuple[object, ...], part))
        return part

    found: dict[str, Any] = {
        field.name: fill(texts[field.name.upper()]) for field in fields(Statements) if field.name != "names"
    }
    return Statements(names=names, **found)
