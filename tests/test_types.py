"""The types tell users of their mistakes, and of nothing else; and workq's own code is clean."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
TYPES = ROOT / "tests" / "types"
MARKED = ("types_check.py", "types_check2.py")
PACKAGES = ("workq", "workq_asyncpg", "workq_aiosqlite")

pytestmark = pytest.mark.timeout(600)


class Complaint(NamedTuple):
    file: Path
    line: int
    text: str


def tool(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a checker of this environment. (Without its PATH, `--verifytypes` looks at another one.)"""
    scripts = sysconfig.get_path("scripts")
    path = os.pathsep.join([scripts, os.environ.get("PATH", "")])
    return subprocess.run(
        [Path(scripts, name), *arguments],
        cwd=ROOT,
        env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def basedpyright(*files: Path) -> list[Complaint]:
    """What it says in strict mode of these files, or of all that pyproject.toml names."""
    ended = tool("basedpyright", "--pythonpath", sys.executable, "--outputjson", *files)
    report: dict[str, Any] = json.loads(ended.stdout)
    assert report["summary"]["filesAnalyzed"] >= max(len(files), 1), ended.stdout
    return [
        Complaint(Path(found["file"]), found["range"]["start"]["line"] + 1, found["message"])
        for found in report["generalDiagnostics"]
    ]


def mypy(*files: Path) -> list[Complaint]:
    """What it says in strict mode of these files, or of all that pyproject.toml names."""
    ended = tool("mypy", "--strict", "--no-error-summary", "--no-pretty", *files)
    assert ended.returncode in (0, 1), ended.stderr
    found = re.findall(r"^(.+?):(\d+): error: (.*)$", ended.stdout, re.MULTILINE)
    assert bool(found) == bool(ended.returncode), ended.stdout
    return [Complaint(ROOT / file, int(line), text) for file, line, text in found]


def marks(file: Path, letters: str) -> set[int]:
    """The lines that carry one of these marks."""
    lines = file.read_text().splitlines()
    return {number for number, line in enumerate(lines, 1) if re.search(rf"# [{letters}]\b", line)}


def lines_of(complaints: list[Complaint], file: Path) -> set[int]:
    return {complaint.line for complaint in complaints if complaint.file == file}


def test_basedpyright_reports_each_mistake_and_nothing_else() -> None:
    files = [TYPES / name for name in MARKED]
    complaints = basedpyright(*files)
    for file in files:
        assert lines_of(complaints, file) == marks(file, "E"), complaints


def test_mypy_reports_each_mistake_and_nothing_else() -> None:
    files = [TYPES / name for name in MARKED]
    complaints = mypy(*files)
    for file in files:
        assert lines_of(complaints, file) == marks(file, "EM"), complaints


def test_code_of_users_passes_both() -> None:
    files = [file for folder in (TYPES / "users", ROOT / "examples") for file in sorted(folder.rglob("*.py"))]
    assert basedpyright(*files) == []
    assert mypy(*files) == []


def test_everything_passes_basedpyright_strict() -> None:
    marked = [TYPES / name for name in MARKED]
    assert [complaint for complaint in basedpyright() if complaint.file not in marked] == []


def test_the_packages_pass_mypy_strict() -> None:
    assert mypy() == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_type_is_known(package: str) -> None:
    ended = tool("basedpyright", "--verifytypes", package, "--ignoreexternal")
    assert "Type completeness score: 100%" in ended.stdout, ended.stdout


def test_ruff_finds_nothing() -> None:
    ended = tool("ruff", "check", "--no-cache")
    assert ended.returncode == 0, ended.stdout
