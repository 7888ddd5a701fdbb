"""The README's tables of promises are those of the records, and of nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from promises import LIMITS, NOT_MEASURED, README, lines, stories, table, text, written
from records import PROMISES, record, sampled


def line(**changes: Any) -> dict[str, Any]:
    told = {"instrument": "crash", "story": "nodes killed", "database": "SQLite 3.40.1", "runs": 1, "tasks": 10}
    told |= {"took": 1.0, "python": "3.11.7", "cores": 2, "at": "2026-01-01T00:00:00+00:00"}
    return told | {"violations": {"no loss": 0}, "times": {}, "observed": {}} | changes


def row(rows: list[str], name: str) -> list[str]:
    (found,) = [row for row in rows if row.startswith(f"| {name} |")]
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_the_readme_has_the_tables_of_the_records() -> None:
    readme = README.read_text()
    assert written(readme, lines()) == readme, "run: python tests/promises.py --write"


def test_every_promise_has_a_row_and_a_limit() -> None:
    assert set(LIMITS) == set(PROMISES)
    assert [row(table([]), promise)[0] for promise in PROMISES] == list(PROMISES)


def test_what_no_run_checked_says_so() -> None:
    assert row(table([]), "fence")[2:6] == [NOT_MEASURED] * 4
    assert row(table([line()]), "no loss")[2:6] == ["1 (10 tasks)", NOT_MEASURED, NOT_MEASURED, "0"]
    assert row(table([line()]), "takeover")[6] == NOT_MEASURED


def test_what_was_broken_is_shown() -> None:
    found = [line(), line(violations={"no loss": 2})]
    assert row(table(found), "no loss")[2:6] == ["2 (20 tasks)", NOT_MEASURED, NOT_MEASURED, "2"]
    assert row(stories(found), "nodes killed")[4] == "2"


def test_the_worst_time_is_shown() -> None:
    checked: dict[str, Any] = {"violations": {"takeover": 0}}
    found = [line(**checked, times={"takeover": [1.0, 9.5, 2.0]}, observed={"takeover": 1}), line(**checked)]
    assert row(table(found), "takeover")[2:] == ["1", NOT_MEASURED, NOT_MEASURED, "0", "2.00 / 9.50 / 9.50 s (3)"]
    assert row(stories(found), "nodes killed")[5] == "3, 9.50 s"
    assert max(sampled([float(second) for second in range(5000)])) == 4999


def test_a_run_records_only_where_it_is_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {"tasks": 1, "took": 1, "violations": {"fence": 0}}
    monkeypatch.delenv("WORKQ_RECORDS", raising=False)
    record("crash", "SQLite 3.40.1", "nothing", **told)
    monkeypatch.setenv("WORKQ_RECORDS", str(tmp_path / "records"))
    record("crash", "SQLite 3.40.1", "nothing", **told)
    assert (tmp_path / "records").read_text().count("\n") == 1
    with pytest.raises(ValueError, match="no such promise"):
        record("crash", "SQLite 3.40.1", "nothing", tasks=1, took=1, violations={"speed": 0})


def test_without_records_there_is_a_table_of_what_is_missing() -> None:
    assert text([]).count(NOT_MEASURED) == 4 * len(PROMISES) + 3
