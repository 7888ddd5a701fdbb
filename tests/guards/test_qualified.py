"""F52: every name in every statement for PostgreSQL leads to one object, whatever the search_path is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
from pglast import parse_sql, visitors
from pglast.error import Error as ParseError

import workq
from support import PostgresDatabase
from workq.dialect import Statement, names, postgres

ROOT = Path(workq.__file__).parents[1]
SPEAK_TO_POSTGRES = ("workq_asyncpg", "workq/testing")
SENDS = ("execute", "executemany", "fetch", "fetchrow", "fetchval", "Statement")


class Found(NamedTuple):
    """The names that one text mentions."""

    tables: list[tuple[str | None, str]]
    """Schema and name, without the CTEs of the text."""
    functions: set[tuple[str, ...]]
    types: set[tuple[str, ...]]
    operators: set[tuple[str, ...]]


class Finder(visitors.Visitor):  # type: ignore[misc]
    """Looks at every node of a syntax tree."""

    def __init__(self) -> None:
        self.ctes: set[str] = set()
        self.found = Found([], set(), set(), set())

    def visit_CommonTableExpr(self, ancestors: Any, node: Any) -> None:
        self.ctes.add(node.ctename)

    def visit_LockingClause(self, ancestors: Any, node: Any) -> Any:
        return visitors.Skip  # `for update of w` names an alias

    def visit_RangeVar(self, ancestors: Any, node: Any) -> None:
        self.found.tables.append((node.schemaname, node.relname))

    def visit_FuncCall(self, ancestors: Any, node: Any) -> None:
        self.found.functions.add(tuple(part.sval for part in node.funcname))

    def visit_TypeName(self, ancestors: Any, node: Any) -> None:
        self.found.types.add(tuple(part.sval for part in node.names))

    def visit_A_Expr(self, ancestors: Any, node: Any) -> None:
        if not node.name[-1].sval.isupper():  # BETWEEN is grammar
            self.found.operators.add(tuple(part.sval for part in node.name))


def names_in(text: str) -> Found:
    """What a text mentions."""
    finder = Finder()
    finder(parse_sql(text))
    tables = [table for table in finder.found.tables if table[0] is not None or table[1] not in finder.ctes]
    return finder.found._replace(tables=tables)


def constants(value: object, name: str) -> Iterator[tuple[str, str]]:
    """The texts of a statement, of a list of them, of whatever holds them."""
    match value:
        case str():
            yield name, value
        case Statement():
            yield from ((name, text) for text in (value.page, value.text) if text)
        case tuple():
            for place, item in enumerate(cast("tuple[object, ...]", value)):
                yield from constants(item, f"{name} {place}")
        case _:
            pass


def literals() -> Iterator[tuple[str, str]]:
    """The texts that the adapter and `workq.testing` send beside these; a hole is filled by a name."""
    for folder in SPEAK_TO_POSTGRES:
        for path in sorted((ROOT / folder).glob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Call) or not node.args:
                    continue
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                text = text_of(node.args[0]) if called in SENDS else None
                if text is not None:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", text


def text_of(node: ast.expr) -> str | None:
    """A string, or an f-string with something in its holes."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "hole" for part in node.values)
    return None


SQL = postgres(names("some schema", "some table"))
TEXTS = dict(
    [
        (f"{name} ({number})", text)
        for field in SQL.__dataclass_fields__
        if field != "names"
        for number, (name, text) in enumerate(constants(getattr(SQL, field), field))
    ]
    + list(literals())
)


def test_all_texts_are_here() -> None:
    """Or what follows would pass by looking at nothing."""
    assert len([name for name in TEXTS if "migrations" in name]) == 6
    assert len([name for name in TEXTS if name.startswith("workq_asyncpg")]) >= 6
    assert len([name for name in TEXTS if name.startswith("workq/testing")]) >= 1
    assert len(TEXTS) > 38


@pytest.mark.parametrize("name", TEXTS)
def test_every_table_is_named_with_its_schema(name: str) -> None:
    found = names_in(TEXTS[name])
    assert {schema for schema, _ in found.tables} <= {"some schema"}, found.tables
    assert {table for _, table in found.tables} <= {"some table", "some table_version"}, found.tables


async def test_all_functions_types_and_operators_are_postgresqls_own(postgres: PostgresDatabase) -> None:
    """Those are found first, unless a search_path says otherwise by name."""
    queries = {
        "functions": "select proname::text from pg_proc",
        "types": "select typname::text from pg_type",
        "operators": "select oprname::text from pg_operator",
    }
    for kind, query in queries.items():
        column = {"functions": "pronamespace", "types": "typnamespace", "operators": "oprnamespace"}[kind]
        own = {row[0] for row in await postgres.rows(f"{query} where {column} = 'pg_catalog'::regnamespace")}
        for name, text in TEXTS.items():
            for qualified in getattr(names_in(text), kind):
                assert qualified[0] == "pg_catalog" or len(qualified) == 1, (name, qualified)
                assert qualified[-1] in own, (name, qualified)


def test_the_schema_as_sql_to_paste_is_qualified_too() -> None:
    statements = [SQL.make_schema, SQL.make_version_table, *(text for step in SQL.migrations for text in step)]
    text = ";\n".join(str(statement) for statement in statements)
    assert {schema for schema, _ in names_in(text).tables} == {"some schema"}


@pytest.mark.parametrize(
    "text", ["select 1 from workq", "delete from only workq", "with w as (select 1) select * from x"]
)
def test_this_test_can_fail(text: str) -> None:
    assert [schema for schema, _ in names_in(text).tables] == [None]


def test_what_is_no_sql_is_noticed() -> None:
    with pytest.raises(ParseError):
        names_in("selekt 1")
