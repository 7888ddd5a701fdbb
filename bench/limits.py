"""What the bare driver reaches on workq's table: the same rows, columns and indexes, the same server.

The figures of every p: round trips; commits that wait for the disk; one INSERT per task; the same in a transaction of
the caller's; and W's *per-task protocol* (claim up to the free places, every worker deletes its own task). Then rows of
multi-row INSERTs and DELETEs, in thousands.

    python bench/limits.py [--json] [--database postgres|sqlite] [--p 1 4 16 64]
"""

from __future__ import annotations

import argparse
from typing import Any

import limits_postgres
import limits_sqlite
from common import Kind, address, arguments, kinds, machine, print_result, run, table
from measure import Driver, Figures, Measure, as_json, medians, rate_arguments

DRIVERS: dict[Kind, Driver] = {"postgres": limits_postgres, "sqlite": limits_sqlite}


def main() -> None:
    parser = arguments(__doc__)
    rate_arguments(parser)
    options = parser.parse_args()
    result: dict[str, Any] = {}
    texts: list[str] = []
    for kind in kinds(options):
        with address(kind) as url:
            facts = machine(url)
            single, multi = take(url, DRIVERS[kind].SINGLE, DRIVERS[kind].MULTI, options)
        result[kind] = {
            "machine": facts,
            "single": {p: as_json(figures) for p, figures in single.items()},
            "multi": as_json(multi),
        }
        texts += [
            table(f"{kind}: the bare driver, a second", headings(single), lines(single)),
            table(f"{kind}: in thousands, rows a second", ["", "rows"], lines({1: multi})),
        ]
    print_result(options, result, "\n\n".join(texts))


def take(
    url: str, single: dict[str, Measure], multi: dict[str, Measure], options: argparse.Namespace
) -> tuple[dict[int, Figures], Figures]:
    """All figures: those of every p, and those of the statements with many rows."""
    return (
        {p: run(lambda p=p: medians(single, url, p, options)) for p in options.p},
        run(lambda: medians(multi, url, 1, options)),
    )


def headings(columns: dict[int, Figures]) -> list[str]:
    """A column for each p."""
    return ["", *(f"p = {p}" for p in columns)]


def lines(columns: dict[int, Figures]) -> list[list[object]]:
    """A line for each figure."""
    names = next(iter(columns.values()))
    return [[name, *(round(figures[name].rate) for figures in columns.values())] for name in names]


if __name__ == "__main__":
    main()
