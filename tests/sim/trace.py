"""One story, printed: every statement and its fate, every change of a row, every run and event."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sim.story import Result, Story, play
from sim.world import Node


def traced(seed: int, folder: Path, since: float, until: float, tasks: set[int]) -> Result:
    """Play a seed and print what happened between two times (to some tasks, if any are named)."""
    lines: list[tuple[float, str]] = []
    told: list[Story] = []
    before: dict[tuple[Node, str], float] = {}

    def fate(story: Story, node: Node, name: str, params: Any, fate: Any) -> None:
        wrong = [
            mark
            for mark in ("refused", "broken", "unanswered", "swallowed", "dropped", "failed")
            if getattr(fate, mark)
        ]
        what = [tuple(lease[:2]) for lease in params.get("leases", params.get("endings", ()))]
        if name == "claim":
            what = f"limit={params['limit']} takeover={params['takeover']} tokens={params['tokens']}"  # type: ignore[assignment]
        at, last = story.world.loop.time(), before.get((node, name), float("-inf"))
        before[node, name] = at
        if at - last < 0.02 and not wrong:
            return  # again and again, while SQLite's writer is busy
        took = f"{fate.there + fate.back:.3f} s"
        lines.append((at, f"{node} sends {name} {what or ''} {' '.join(wrong)} {took}"))

    result = play(seed, folder, watch=fate, keep=told.append)
    (story,) = told
    world = story.world
    for node in world.nodes:
        print(
            f"{node}: lease {node.lease:g}, poll {node.poll:g}, workers {node.workers}, serves {', '.join(node.names)}"
            + (f", dead at {node.died:.3f}" if node.dead else "")
            + (f", stopped at {node.stopped:.3f}" if node.stopped is not None else "")
        )
    print(f"seed {seed} ({result.kind}): {result.title}; storm {story.storm:g} until {story.length:.3f}")
    for change in story.changes:
        row = change.new or change.old
        assert row is not None
        if tasks and row.id not in tasks:
            continue
        by = (
            "the crash"
            if change.call == 0
            else f"{world.calls[change.call - 1].name} of {world.calls[change.call - 1].node}"
        )
        new = "gone"
        if change.new is not None:
            ends = change.new.locked_until
            lease = "free" if ends is None else f"leased for {(ends - change.now) / 1e6:.3f} s"
            new = f"version {change.new.version}, {lease}, lost {change.new.lost}"
        lines.append((change.at, f"  row {row.id} {row.name}, by {by}: {new}"))
    for run in world.runs:
        if tasks and run.claim[0] not in tasks:
            continue
        lines.append((run.at, f"  run of {run.claim[0]} (version {run.claim[1]}) begins on {run.node}: {run.payload}"))
        if run.ended is not None:
            lines.append((run.ended, f"  run of {run.claim[0]} (version {run.claim[1]}) ends on {run.node}: {run.how}"))
    for node in world.nodes:
        lines += [
            (at, f"  {node} tells {event.kind} of {event.id}")
            for at, event in node.events
            if not tasks or event.id in tasks
        ]
    for at, line in sorted(lines, key=lambda pair: pair[0]):
        if since <= at <= until and not (tasks and not line.startswith("  ") and "sends" not in line):
            print(f"{at:9.4f} {line}")
    return result
