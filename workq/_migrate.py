"""Numbered, forward-only migrations, and the check that code and table fit together."""

from __future__ import annotations

from workq._errors import SchemaError
from workq._place import PATIENT
from workq.dialect import Connection, Dialect, Rows, Statement, Transaction

# What each migration writes as the oldest code that may go on beside it; None: only code of that very version.
WORKS_FROM: dict[int, int | None] = {1: None}


async def migrate(dialect: Dialect) -> None:
    """Bring the table to this code's version; every node may call it at its start. (Q: Migrate.)

    All in one transaction that excludes other migrations, so a step that fails leaves nothing.
    """
    sql = dialect.sql
    async with dialect.transaction() as tx:
        if sql.schema_exists is not None and sql.make_schema is not None:
            there = await dialect.fetch(sql.schema_exists, {"schema": dialect.sql.names.schema}, tx)
            if not there[0][0]:
                await _run(dialect, tx, sql.make_schema)
        await _run(dialect, tx, sql.make_version_table)
        found = await dialect.fetch(sql.read_version, {}, tx)
        current: int = found[0][0] if found else 0
        latest = len(sql.migrations)
        if current > latest:
            _check(found, latest, dialect)
            return
        for version in range(current + 1, latest + 1):
            for text in sql.migrations[version - 1]:
                await _run(dialect, tx, text)
            await dialect.fetch(sql.write_version, {"version": version, "works_from": WORKS_FROM[version]}, tx)


async def check_schema(dialect: Dialect, conn: Connection) -> None:
    """Raise SchemaError, naming the remedy, unless this code can work on the table as it is."""
    sql = dialect.sql
    names = dialect.sql.names
    here = {"version_table": names.version_table, "version_table_name": f"{names.bare}_version"}
    found = await conn.fetch(sql.table_exists, here, PATIENT)
    if not found[0][0]:
        raise SchemaError(
            f"there is no table {names.table} here: call `await queue.migrate()` once, "
            "or run the SQL of `queue.schema_sql()`"
        )
    _check(await conn.fetch(sql.read_version, {}, PATIENT), len(sql.migrations), dialect)


def schema_sql(dialect: Dialect) -> str:
    """The whole schema as SQL, for migration tools and for roles that may not create tables."""
    sql = dialect.sql
    latest = len(sql.migrations)
    parts = [part for part in (sql.make_schema, sql.make_version_table) if part is not None]
    parts += [text for step in sql.migrations for text in step]
    works_from = "null" if WORKS_FROM[latest] is None else str(WORKS_FROM[latest])
    parts.append(f"insert into {dialect.sql.names.version_table} (version, works_from) values ({latest}, {works_from})")
    return "\n\n".join(part.strip() + ";" for part in parts) + "\n"


async def _run(dialect: Dialect, tx: Transaction, text: str) -> None:
    await dialect.fetch(Statement(text), {}, tx)


def _check(found: Rows, latest: int, dialect: Dialect) -> None:
    table = dialect.sql.names.table
    if not found:
        raise SchemaError(f"the table {table} has no version: a migration did not end; call `await queue.migrate()`")
    version, works_from = found[0]
    if version < latest:
        raise SchemaError(
            f"the table {table} has version {version}, this workq needs {latest}: call `await queue.migrate()`"
        )
    if version > latest and (works_from is None or works_from > latest):
        raise SchemaError(
            f"the table {table} has version {version}, this workq knows only {latest}: install the newer workq here too"
        )
