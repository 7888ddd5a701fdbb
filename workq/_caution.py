"""When to doubt that an expired lease means a dead holder: after a stall, everybody's beats may be late.

A handler's transaction longer than the lease blocks every writer of an SQLite file, beats included; when it ends, a
claim may come before the beats and take live tasks (8 of 8, in 12 of 12 trials; 0 of 12 with this rule). The same
goes for a process that was frozen, and for a clock that jumped. So after a stall an executor first beats, and then
takes nothing over for one beat interval; rows that nobody holds it may claim.
"""

from __future__ import annotations

from datetime import datetime

IMPATIENT = 0.1
"""Seconds of waiting for SQLite's writer from which on others may have waited too long."""
PATIENT = 1.0
"""Seconds that a claim waits which takes over nothing: then it looks at the clock again, or its leases would be old."""


class Caution:
    """The rule as a small machine: it is told what happened, and says what a claim may do. No I/O, no clock."""

    def __init__(self, lease: float, poll_interval: float, monotonic: float, wall: datetime) -> None:
        self._beat = lease / 3
        self._longest = lease / 3 + poll_interval + 0.25
        self._looked = monotonic
        self._wall = wall
        self._stalled = False
        self._until: float | None = None
        self._patient = False
        self._beat_waited = monotonic
        self._claimed = monotonic
        self._usual = poll_interval + 0.25
        self._doubted = float("inf")

    def looked(self, monotonic: float, wall: datetime) -> None:
        """A beat or a claim succeeded, sent at this time."""
        if monotonic >= self._looked:  # a reply may come after that to a younger statement
            self.stalled(monotonic, wall)  # or a beat would hide from the next claim what it came after
            self._looked, self._wall = monotonic, wall

    def waited(self, monotonic: float) -> None:
        """A claim waited too long for SQLite's writer, until now."""
        self._stalled, self._claimed = True, monotonic

    def beat_waited(self, since: float) -> None:
        """A beat did. It matters where no claim was under way meanwhile, which would have had to wait as well."""
        self._beat_waited = since

    def before_claim(self, monotonic: float, wall: datetime) -> bool:
        """A claim is about to be sent. Must there be a beat first?"""
        if self._claimed < self._beat_waited:
            # Between the usual claims that counts for one lease only: in a file that is always busy, there would be
            # such a beat in every pause, and never a takeover.
            self._doubted = min(self._doubted, monotonic)
            rested = monotonic - self._claimed > self._usual
            self._stalled = self._stalled or rested or monotonic - self._doubted < 3 * self._beat
        return self.stalled(monotonic, wall)

    def stalled(self, monotonic: float, wall: datetime) -> bool:
        """Did this process stand still, or everybody wait?"""
        elapsed = monotonic - self._looked
        jump = (wall - self._wall).total_seconds() - elapsed
        self._stalled = self._stalled or elapsed > self._longest or abs(jump) > self._beat
        return self._stalled

    def may_take_over(self, monotonic: float) -> bool:
        """May a claim take expired leases now?"""
        if self._stalled:
            return False
        if self._until is not None and monotonic >= self._until:
            # Everyone had time for a beat, so a wait of one beat interval more cannot expire a live lease: without
            # this patience, a file that is always busy would never see a takeover.
            self._until, self._patient = None, True
        return self._until is None

    def patience(self, *, takeover: bool) -> float:
        """Seconds that a claim waits for SQLite's writer, which it may have then with a new look at the clock."""
        if takeover:
            return max(self._beat, IMPATIENT) if self._patient else IMPATIENT
        return max(min(self._beat, PATIENT), IMPATIENT)

    def claimed(self, sent: float, replied: float, wall: datetime, *, takeover: bool) -> None:
        """A claim succeeded. The first one after a stall ends it and begins the pause, one in the pause that had to
        wait for a whole beat interval begins it anew."""
        self.looked(sent, wall)
        self._claimed = replied
        if takeover:
            self._patient, self._doubted = False, float("inf")
        elif self._stalled or replied - sent >= self._beat:
            self._stalled = False
            self._until = replied + self._beat
