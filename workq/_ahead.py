"""How much to claim ahead of the free places: a pure rule that is told how fast tasks end.

A claim costs a round trip, so an executor whose handlers end within milliseconds takes what its workers will use in
about 50 ms (one worker, no-op tasks: 700 a second without, 35,000 to 43,000 with). Slow handlers get none: their
tasks would wait here while another node has a free place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

HORIZON = 0.05
"""Seconds of work that are claimed ahead."""
MOST = 1000
"""Tasks claimed ahead at most."""
MOST_TEXT = 8 << 20
"""Characters of payload claimed ahead at most, as far as the payloads of the last page tell."""
HOLD = 0.12
"""Seconds after which a task that was claimed ahead and has not started is handed back."""
LATE = 0.04
"""Seconds by which the look at what waits may come late; more, and the program stood still."""
PENALTIES = 0.05, 5.0
"""Seconds without claiming ahead after that: at first, and at most when it happens again and again."""


class Ask(NamedTuple):
    """What the next claim is to take."""

    limit: int
    ahead: bool
    """More than there are free places: the page ends before a task that a vanished process held."""


def ask(free: int, waiting: int, target: int, *, look: bool) -> Ask | None:
    """The next claim, or None while enough is at hand. `look`: everything has to be looked at, not only fresh tasks."""
    if look or target == 0:
        return Ask(free, ahead=False) if waiting == 0 and free > 0 else None
    return Ask(free + target - waiting, ahead=True) if waiting <= target // 2 else None


class Pace:
    """The target, from what ended in the time since a full page came."""

    def __init__(self, workers: int, *, enabled: bool) -> None:
        self.target = 0
        self._workers = workers
        self._barred_until = float("-inf") if enabled else float("inf")
        self._penalty = PENALTIES[0]
        self._since: float | None = None
        self._ended = 0
        self._most = MOST

    def idle(self) -> None:
        """There is nothing more to claim; what comes next may be slower than what was."""
        self.target = 0

    def page(self, now: float, sizes: Sequence[int], *, full: bool, ended: int) -> None:
        """A page came, with payloads of these sizes; `ended` counts all tasks that ended so far.

        After one that is not full, places are idle, and there is nothing to measure.
        """
        if sizes:
            self._most = min(MOST, MOST_TEXT * len(sizes) // max(sum(sizes), 1))
        if not full:
            self._since = None
        elif self._since is None:
            self._since, self._ended = now, ended

    def measure(self, now: float, ended: int) -> None:
        """Set the target, once every place has turned over or the horizon has passed."""
        if self._since is None:
            return
        seconds, number = now - self._since, ended - self._ended
        if number < self._workers and seconds < HORIZON:
            return
        self._since, self._ended = now, ended
        wanted = int(number / max(seconds, 1e-6) * HORIZON)
        if now < self._barred_until or wanted < self._workers:
            wanted = 0  # a worker would not even come to one more task
        # It grows step by step, since the first tasks may be faster than those behind them.
        self.target = min(wanted, max(4 * self.target, 2 * self._workers, 8), self._most)

    def handed_back(self, now: float) -> None:
        """Tasks claimed ahead had to be handed back."""
        least, most = PENALTIES
        calm = now - self._barred_until > 2 * self._penalty
        self._penalty = least if calm else min(2 * self._penalty, most)
        self._barred_until = max(self._barred_until, now + self._penalty)
        self.target = 0
        self._since = None
