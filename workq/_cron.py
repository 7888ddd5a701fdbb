"""Cron expressions by the wall clock of a time zone, and what happens to them when clocks change.

The matching itself is cronsim's, on times without a zone; the rule is ours: a fixed hour that is skipped in spring runs
when the gap ends, one that is repeated in autumn runs the first time; one with a wildcard runs as often as it comes.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

SHIFT = timedelta(hours=3)
"""More than any clock was ever moved at once since time zones became orderly."""

ALIASES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}


class Cron:
    """One expression in one zone."""

    def __init__(self, expression: str, zone: ZoneInfo) -> None:
        try:
            self._cronsim: Any = importlib.import_module("cronsim")
        except ImportError:
            raise ImportError('cron() needs the package cronsim: pip install "workq[cron]"') from None
        self._expression = expression
        self._fields = ALIASES.get(expression.strip().lower(), expression)
        self._zone = zone
        try:
            next(self._matches(datetime.now(zone).replace(tzinfo=None)))
        except (self._cronsim.CronSimError, StopIteration) as error:
            raise ValueError(f"{expression!r} is not a cron expression that ever matches: {error}") from None
        # Five fields begin with minutes, six with seconds.
        fields = self._fields.split()
        self._every_hour = fields[-4].startswith("*")

    def after(self, last: datetime) -> datetime:
        """The first moment after `last` that matches. Raises ValueError if there is none."""
        wall = last.astimezone(self._zone).replace(tzinfo=None)
        following = next(self._matches(wall), None)
        if following is not None:
            if self._steady(wall) and self._steady(following):
                return self._instant(following)
            found = self._hourly(last, wall) if self._every_hour else self._fixed(last, wall)
            if found is not None:
                return found
        raise ValueError(f"{self._expression!r} never matches again after {last}")

    def _fixed(self, last: datetime, wall: datetime) -> datetime | None:
        moments = (self._moment(match) for match in self._matches(wall - SHIFT))
        return next((moment for moment in moments if moment > last), None)

    def _hourly(self, last: datetime, wall: datetime) -> datetime | None:
        best: datetime | None = None
        for match in self._matches(wall - SHIFT):
            for fold in (0, 1):
                instant = self._instant(match, fold)
                shown = instant.astimezone(self._zone).replace(tzinfo=None, fold=0)
                if shown == match and instant > last and (best is None or instant < best):
                    best = instant
            if best is not None and self._instant(match) > best + SHIFT:
                return best
        return best

    def _matches(self, wall: datetime) -> Iterator[datetime]:
        matches: Iterator[datetime] = self._cronsim.CronSim(self._fields, wall)
        return matches

    def _instant(self, wall: datetime, fold: int = 0) -> datetime:
        return wall.replace(tzinfo=self._zone, fold=fold).astimezone(UTC)

    def _steady(self, wall: datetime) -> bool:
        """Are no clocks changed near this time?"""
        offset = wall.replace(tzinfo=self._zone).utcoffset()
        return all(
            near.replace(tzinfo=self._zone, fold=fold).utcoffset() == offset
            for near in (wall - SHIFT, wall, wall + SHIFT)
            for fold in (0, 1)
        )

    def _moment(self, wall: datetime) -> datetime:
        """When a wall clock shows this time first; if it is skipped, when the gap ends."""
        late, early = self._instant(wall, 0), self._instant(wall, 1)
        if early >= late:
            return late
        before = early.astimezone(self._zone).utcoffset()
        while late - early > timedelta(seconds=1):
            middle = (early + (late - early) / 2).replace(microsecond=0)
            if middle <= early:
                break
            if middle.astimezone(self._zone).utcoffset() == before:
                early = middle
            else:
                late = middle
        return late
