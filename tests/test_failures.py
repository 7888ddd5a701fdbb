"""Of every failure that was seen elsewhere (F01 to F62) a test says by its number that it cannot happen here.

`python tests/test_failures.py` prints which tests those are.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
NUMBERS = [f"F{number:02}" for number in range(1, 63)]
SECTION = "## Failures of others"


@cache
def named_by() -> dict[str, list[str]]:
    """The tests whose docstrings name each of them."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        module = ast.parse(path.read_text())
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                for number in sorted(set(re.findall(r"\bF\d\d\b", ast.get_docstring(node) or ""))):
                    found[number].append(f"{path.relative_to(ROOT).as_posix()}::{node.name}")
    return found


def told_in_readme() -> dict[str, str]:
    """The README's line for each of them."""
    _, _, section = (ROOT / "README.md").read_text().partition(f"{SECTION}\n")
    rows = re.findall(r"^\| (F\d\d) \| (.+) \|$", section.partition("\n## ")[0], re.MULTILINE)
    return dict(rows)


def test_every_failure_is_named_by_a_test() -> None:
    named = named_by()
    assert [number for number in NUMBERS if number not in named] == []


def test_the_readme_has_a_line_for_each_of_them() -> None:
    assert list(told_in_readme()) == NUMBERS


def test_no_test_names_a_failure_that_is_not_on_the_list() -> None:
    assert set(named_by()) <= set(NUMBERS)


if __name__ == "__main__":
    tests, lines = named_by(), told_in_readme()
    for number in NUMBERS:
        print(number, lines.get(number, ""))
        for test in tests.get(number, ()):
            print("   ", test)
