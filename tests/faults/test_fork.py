"""fence: a forked child cannot use what its parent opened, learns why, and does the parent no harm."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from faults.nodes import ENVIRONMENT
from support import SOON, Database

FORKER = Path(__file__).with_name("forker.py")
USES = ("enqueue", "enqueue_many", "find", "migrate", "new queue", "start", "start another", "leave connect")
ALONE = [pytest.param((use,), marks=pytest.mark.slow, id=use) for use in USES]


async def lines_of(command: list[str]) -> dict[str, str]:
    """What a program printed, `name: text` on each line. Whatever it forked ends with it."""
    process = await asyncio.create_subprocess_exec(
        *command, env=ENVIRONMENT, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        async with asyncio.timeout(6 * SOON):
            printed, _ = await process.communicate()
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    return dict(line.split(": ", 1) for line in printed.decode().splitlines())


@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("uses", [pytest.param(USES, id="all"), *ALONE])
async def test_a_forked_child_is_told_that_it_forked_and_its_parent_goes_on(
    database: Database, uses: tuple[str, ...], where: str
) -> None:
    """F33: in a new loop (fork inside a running one), and in the loop that the child was born with.

    To leave what the parent opened may succeed, if it touches nothing.
    """
    schema = [] if database.schema is None else [f"--schema={database.schema}"]
    met = await lines_of([sys.executable, str(FORKER), where, database.url, *uses, *schema])
    assert met.pop("parent", None) == "fine", met
    assert set(met) == set(uses)
    if met.get("leave connect") == "nothing":
        del met["leave connect"]
    untold = {use: text for use, text in met.items() if "fork" not in text}
    assert untold == {}
