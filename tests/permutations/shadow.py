"""What the table must look like after each step, and so what the next one may answer: plain Python, no database.

There is one task. Steps take effect one after the other (one that waits for a row lock, when it has it), so the answer
of every statement of workq's own is known; a snapshot of an application's may make its statement fail or miss the row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from workq._task import Lease


@dataclass
class Shadow:
    """The task's row as last committed, and who has it locked."""

    failed: bool = False
    exists: bool = True
    alive: bool = False
    """Its lease was extended by a beat: a claim's own is over at once here."""
    owner: Lease | None = None
    locked_by: int | None = None
    """The participant whose transaction changed it."""
    pending: str = ""
    ended: set[Lease] = field(default_factory=set[Lease])
    """Leases whose result was accepted."""

    @property
    def locked(self) -> bool:
        return self.locked_by is not None

    def is_ours(self, lease: Lease) -> bool:
        return self.exists and self.owner == lease

    def may_claim(self) -> bool:
        return self.exists and not self.failed and not self.alive and not self.locked

    def claimed(self, lease: Lease) -> None:
        self.owner, self.alive = lease, False

    def ends(self, lease: Lease, what: str) -> None:
        """A result of a holder was accepted."""
        assert lease not in self.ended, "fence: a second result of one claim was accepted"
        assert self.is_ours(lease), "fence: the result of a stale holder was accepted"
        self.ended.add(lease)
        self.owner, self.alive = None, False
        if what == "fail":
            self.failed = True
        else:
            self.exists = False

    def would(self, what: str, lease: Lease | None) -> bool:
        """Does the row, as it is now, meet the condition of an application's statement?"""
        if what == "retry":
            return self.exists and self.failed
        return self.exists if what == "delete" else lease is not None and self.is_ours(lease)

    def changed(self, who: int, what: str) -> None:
        """In an open transaction. What changed nothing ("") may hold the lock all the same."""
        assert not self.locked, "two transactions changed the same row"
        self.locked_by, self.pending = who, what

    def committed(self, who: int, lease: Lease | None) -> None:
        if self.locked_by != who:
            return
        what, self.locked_by, self.pending = self.pending, None, ""
        if what == "complete":
            assert lease is not None
            self.ends(lease, "complete")
        elif what == "delete":
            self.exists, self.owner = False, None
        elif what == "retry":
            self.failed, self.owner, self.alive = False, None, False

    def rolled_back(self, who: int) -> None:
        if self.locked_by == who:
            self.locked_by, self.pending = None, ""
