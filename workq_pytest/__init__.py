"""The pytest plugin: fixtures that hand out what `workq.testing` has.

A package of its own, because pytest imports plugins in every run: workq is imported when a test asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from workq import Queue


@pytest.fixture(scope="session")
def workq_queue() -> Callable[..., AbstractAsyncContextManager[Queue]]:
    """`async with workq_queue() as queue:`, see `workq.testing.queue`. Fits event loops of every scope."""
    from workq.testing import queue

    return queue


@pytest.fixture(scope="session")
def workq_postgres() -> Callable[[], AbstractAsyncContextManager[str]]:
    """`async with workq_postgres() as url:`, see `workq.testing.postgres`."""
    from workq.testing import postgres

    return postgres
