"""What can be read off the code without running it: what it imports, where its SQL is, what that SQL says."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import workq
from workq.dialect import Statement, Statements, names, postgres, sqlite

ROOT = Path(workq.__file__).parents[1]
PACKAGES = ("workq", "workq_asyncpg", "workq_aiosqlite")
STAGES = ("_claim", "_run", "_finish", "_heartbeat", "_schedule")

POSTGRES = postgres(names("some schema", "some table"))
SQLITE = sqlite(names("main", "some table"))


def modules() -> dict[str, ast.Module]:
    """Every module of the packages, by its path."""
    return {
        str(path.relative_to(ROOT)): ast.parse(path.read_text())
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }


MODULES = modules()


def imports(module: ast.Module) -> set[str]:
    """The modules that it imports, at whatever place."""
    found: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where things come from"
            found |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def statements(sql: Statements) -> dict[str, Statement]:
    """Those with parameters, by name."""
    return {field.name: value for field in fields(sql) if isinstance(value := getattr(sql, field.name), Statement)}


def code_of(text: str) -> str:
    """A statement without its comments."""
    return re.sub(r"--.*", "", text)


def imported_by(code: str) -> set[str]:
    """The top-level packages that are loaded after some code ran, in a fresh interpreter."""
    report = "import json, sys; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    printed = subprocess.check_output([sys.executable, "-I", "-c", f"{SEE_ROOT}\n{code}\n{report}"])
    return set(json.loads(printed))


SEE_ROOT = f"import sys; sys.path.insert(0, {str(ROOT)!r})"
DRIVERS = {"asyncpg", "aiosqlite", "workq_asyncpg", "workq_aiosqlite"}
OPTIONAL = DRIVERS | {"sqlalchemy", "msgspec", "pydantic", "cronsim", "pytest", "opentelemetry"}


def test_the_core_imports_no_driver_and_no_optional_package() -> None:
    assert imported_by("import workq") & OPTIONAL == set()


def test_an_adapter_imports_its_own_driver_and_no_other() -> None:
    assert imported_by("import workq_asyncpg") & OPTIONAL == {"asyncpg", "workq_asyncpg"}
    assert imported_by("import workq_aiosqlite") & OPTIONAL == {"aiosqlite", "workq_aiosqlite"}


def test_connect_imports_the_driver_of_its_url_and_no_other() -> None:
    opened = "import asyncio, workq\nasyncio.run(workq.connect('sqlite:////nowhere/at/all.db').__aenter__())"
    tried = f"try:\n    exec({opened!r})\nexcept Exception as error:\n    pass"
    assert imported_by(tried) & {"asyncpg", "aiosqlite"} == {"aiosqlite"}


@pytest.mark.parametrize("stage", STAGES)
def test_stages_do_not_import_each_other(stage: str) -> None:
    others = {f"workq.{other}" for other in STAGES if other != stage}
    assert imports(MODULES[f"workq/{stage}.py"]) & others == set()


def test_adapters_know_only_the_seam() -> None:
    """They know no task and no lease."""
    for path, module in MODULES.items():
        if not path.startswith("workq/"):
            core = {name for name in imports(module) if name.split(".")[0] == "workq"} - {"workq"}
            assert {name for name in core if name.split(".")[1] not in ("dialect", "sqlalchemy")} == set(), path


def test_every_package_says_that_it_is_typed() -> None:
    assert [package for package in PACKAGES if not (ROOT / package / "py.typed").is_file()] == []


SPEAKS_SQL = re.compile(
    r"\b(insert\s+into|delete\s+from|update\s+\S+\s+set|select\s+.+\s+from|create\s+(table|index|schema)|"
    r"alter\s+table|drop\s+table)\b",
    re.IGNORECASE | re.DOTALL,
)


def texts(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Its strings that are no docstrings, with the fixed parts of f-strings."""
    docstrings = {id(node.value) for node in ast.walk(module) if isinstance(node, ast.Expr)}
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


def test_sql_is_in_one_place() -> None:
    """F53: nobody else has a text into which something could be pasted."""
    found = [
        f"{path}:{line}"
        for path, module in MODULES.items()
        if not path.startswith("workq/_sql/")
        for line, text in texts(module)
        if SPEAKS_SQL.search(text)
    ]
    # What schema_sql() adds for people to paste: the version, after the constants.
    assert [place for place in found if not place.startswith("workq/_migrate.py")] == []


def test_sql_is_never_put_together() -> None:
    """F53: in its own place it is constants, without f-strings, `%`, `+` or `.format`."""
    for path, module in MODULES.items():
        if not path.startswith("workq/_sql/"):
            continue
        for node in ast.walk(module):
            assert not isinstance(node, ast.JoinedStr), f"{path}:{node.lineno}"
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mod):
                sides = (node.left, node.right)
                constants = [side for side in sides if isinstance(side, ast.Constant) and isinstance(side.value, str)]
                assert constants == [], f"{path}:{node.lineno}"
            if isinstance(node, ast.Attribute):
                assert node.attr not in ("format", "format_map", "join"), f"{path}:{node.lineno}"


def test_no_hole_is_left_in_a_statement() -> None:
    """F52, F53: every name is filled in, quoted and qualified."""
    for sql, schema in ((POSTGRES, "some schema"), (SQLITE, "main")):
        for name, statement in statements(sql).items():
            text = statement.page + statement.text
            assert re.search(r"\{\w+(:\w+)?\}", text) is None, name
            rest = re.sub(f'"{schema}"."some table(_version)?"', "", text)
            assert "some table" not in rest, name


@pytest.mark.parametrize("name", statements(SQLITE))
def test_every_statement_for_sqlite_begins_with_a_verb(name: str) -> None:
    """One that begins with WITH opens no implicit transaction in Python's sqlite3, and survives a rollback."""
    first = code_of(statements(SQLITE)[name].text).split()[0].lower()
    assert first in ("insert", "update", "delete", "select")
    assert statements(SQLITE)[name].writes == (first != "select")


@pytest.mark.parametrize("name", statements(SQLITE))
def test_no_statement_for_sqlite_needs_a_newer_one_than_3_35(name: str) -> None:
    """`->` and `->>` came with 3.38, RIGHT and FULL JOIN with 3.39, `is distinct from` with 3.39."""
    text = code_of(statements(SQLITE)[name].page + statements(SQLITE)[name].text).lower()
    for newer in ("->", "right join", "full join", "is distinct from", "is not distinct from", "unixepoch", "iif("):
        assert newer not in text


HOLDERS = ("extend", "succeed", "settle", "complete", "complete_schedule")


def fenced(text: str) -> bool:
    """Does it compare all three, wherever it looks for its rows?"""
    if "using (id, version, locked_by)" in text:
        return True
    return all(re.search(rf"\b{column} = (:|\$|json_extract)", text) for column in ("id", "version", "locked_by"))


@pytest.mark.parametrize("name", HOLDERS)
def test_every_write_by_a_holder_names_id_version_and_token(name: str) -> None:
    """F09: fence."""
    for sql in (POSTGRES, SQLITE):
        text = code_of(statements(sql)[name].text)
        assert fenced(text), text


def test_every_statement_is_a_holders_a_claim_or_an_operators() -> None:
    """A new one has to be put on the list above, or on this one."""
    schema = {"schema_exists", "table_exists", "read_version", "write_version"}
    producers = {"insert_one", "insert_alike", "insert", "insert_keyed", "insert_schedules", "ring"}
    operators = {"retry", "retry_all", "reschedule", "disable", "delete", "get", "find", "find_failed", "left"}
    others = schema | producers | operators | {"now", "claim", "look"}
    assert set(statements(POSTGRES)) == others | set(HOLDERS)
    assert set(statements(SQLITE)) == (others | set(HOLDERS)) - {"schema_exists", "ring"}


@pytest.mark.parametrize("name", ["retry", "retry_all", "reschedule", "disable"])
def test_what_a_person_changes_takes_the_token_away(name: str) -> None:
    """So that a holder from before a crash of the server cannot come back in."""
    for sql in (POSTGRES, SQLITE):
        text = code_of(statements(sql)[name].text)
        assert "locked_by = null" in text
        assert re.search(r"version = (t\.)?version \+ 1", text)


@pytest.mark.parametrize("name", ["claim", "extend", "succeed", "settle"])
def test_no_statement_over_several_rows_waits_for_a_row_lock(name: str) -> None:
    """F26: on PostgreSQL."""
    assert "skip locked" in code_of(statements(POSTGRES)[name].text)


@pytest.mark.parametrize("name", statements(POSTGRES))
def test_predicates_on_postgresql_do_not_use_a_volatile_clock(name: str) -> None:
    """F56: beside a million future rows, 0.04 ms become 265 ms. In SET lists it is right."""
    where = False
    for line in code_of(statements(POSTGRES)[name].text).splitlines():
        words = line.split()
        if words and words[0] in ("where", "set", "from", "select", "returning", "order", "limit"):
            where = words[0] == "where"
        if where:
            assert "clock_timestamp" not in line
        assert "now()" not in line


@pytest.mark.parametrize("name", statements(POSTGRES))
def test_no_statement_takes_whatever_columns_there_are(name: str) -> None:
    """F25: an explicit list survives a migration beside it."""
    for sql in (POSTGRES, SQLITE):
        if name in statements(sql):
            text = code_of(statements(sql)[name].page + statements(sql)[name].text)
            assert re.search(r"\bselect \*|\breturning \*|\w\.\*", text) is None


def test_no_setting_of_the_session_is_changed() -> None:
    """F20: behind a pooler in transaction mode it would be somebody else's."""
    for name, statement in statements(POSTGRES).items():
        text = code_of(statement.text).lower()
        assert re.match(r"\s*set\b", text) is None, name
        for local in re.findall(r"set_config\(([^)]*)\)", text):
            assert local.endswith(", true"), name
        assert "pg_advisory_lock" not in text, name
