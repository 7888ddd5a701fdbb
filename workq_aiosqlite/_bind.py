"""Python's values as SQLite stores them: lists as JSON, instants and durations as integer microseconds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

from workq.dialect import Params, Rows, Statement

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
NATIVE = frozenset((str, int, bool, type(None)))
MICROSECOND = timedelta(microseconds=1)


def bound(params: Params) -> Mapping[str, object]:
    """The parameters of one statement."""
    return {name: value if type(value) in NATIVE else plain(value) for name, value in params.items()}


def plain(value: object) -> object:
    """One parameter."""
    if isinstance(value, list | tuple):
        return ENCODER.encode(value)
    if isinstance(value, datetime | timedelta):
        return micros(value)
    return value


def micros(value: object) -> int:
    """An instant since 1970 or a duration, in microseconds."""
    if isinstance(value, datetime):
        return (value - EPOCH) // MICROSECOND
    if isinstance(value, timedelta):
        return value // MICROSECOND
    raise TypeError(f"SQLite cannot store {value!r:.80}")


ENCODER = json.JSONEncoder(ensure_ascii=False, default=micros)


@lru_cache(maxsize=2048)  # one time for many rows: that of a claim, of a batch
def instant(value: int | None) -> datetime | None:
    """An aware point in time."""
    return None if value is None else EPOCH + timedelta(microseconds=value)


def read(statement: Statement, rows: Iterable[Sequence[Any]]) -> Rows:
    """The rows of a statement, its instants as datetimes."""
    if not statement.instants:
        return list(rows)
    converted: list[list[Any]] = []
    for row in rows:
        values: list[Any] = row if isinstance(row, list) else list(row)
        for place in statement.instants:
            values[place] = instant(values[place])
        converted.append(values)
    return converted
