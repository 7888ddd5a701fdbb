"""The next release, made from this one: it knows one more version of the schema."""

from __future__ import annotations

import shutil
from pathlib import Path

import workq

PACKAGES = ("workq", "workq_asyncpg", "workq_aiosqlite")
STEP = """VERSION_2 = (
    "alter table {table} add column region text",
    "alter table {table} add column weight integer not null default 1",
)

MIGRATIONS = (VERSION_1, VERSION_2)
"""


def next_release(folder: Path, works_from: int | None) -> dict[str, str]:
    """Lay it down in a folder, and return the environment in which it is what programs import.

    works_from: the oldest schema version whose code may go on beside it; None: no other.
    """
    for package in PACKAGES:
        shutil.copytree(Path(workq.__file__).parents[1] / package, folder / package)
    for database in ("_postgres", "_sqlite"):
        replaced(folder / "workq" / "_sql" / f"{database}.py", "MIGRATIONS = (VERSION_1,)\n", STEP)
    replaced(folder / "workq" / "_migrate.py", "= {1: None}\n", f"= {{1: None, 2: {works_from}}}\n")
    return {"PYTHONPATH": str(folder)}


def replaced(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, f"{path} is not as it was when this was written: is there a version 2?"
    path.write_text(text.replace(old, new))
