"""W's benchmark: the raw overhead of workq, with tasks that do nothing, beside what the bare driver reaches.

p producers enqueue tasks one by one; then one executor with p workers runs them all. Each measure takes turns with its
limit (see limits.py), and the ratio is that of the two medians. A task's payload is one number in a dataclass; an event
hook is set, and all settings are the defaults (see throughput_workq.py).

    python bench/throughput.py [--json] [--database postgres|sqlite] [--p 1 4 16 64] [--tasks 5000]
"""

from __future__ import annotations

from typing import Any

import throughput_workq
from common import address, arguments, kinds, machine, print_result, table
from limits import DRIVERS, headings, lines, take
from measure import Figures, Measure, as_json, rate_arguments

LIMITS = {
    "execute": "per-task protocol",
    "enqueue(None)": "INSERT",
    "enqueue(tx)": "INSERT in a transaction",
    "enqueue_many": "multi-row INSERT",
}
"""What each measure is compared with."""


def main() -> None:
    parser = arguments(__doc__)
    rate_arguments(parser)
    options = parser.parse_args()
    result: dict[str, Any] = {}
    texts: list[str] = []
    for kind in kinds(options):
        with address(kind) as url:
            facts = machine(url)
            single = in_pairs(throughput_workq.SINGLE, DRIVERS[kind].SINGLE)
            multi = in_pairs(throughput_workq.MULTI, DRIVERS[kind].MULTI)
            per_p, in_thousands = take(url, single, multi, options)
        result[kind] = {
            "machine": facts,
            "single": {p: as_json(figures) | {"ratios": ratios(figures)} for p, figures in per_p.items()},
            "multi": as_json(in_thousands) | {"ratios": ratios(in_thousands)},
        }
        texts += [
            table(f"{kind}: tasks a second", headings(per_p), beside_limits(per_p)),
            table(f"{kind}: in thousands, rows a second", ["", "rows"], beside_limits({1: in_thousands})),
        ]
    print_result(options, result, "\n\n".join(texts))


def in_pairs(measures: dict[str, Measure], limits: dict[str, Measure]) -> dict[str, Measure]:
    """Every measure next to its limit, so that both meet the machine in the same mood; then the other limits."""
    pairs: dict[str, Measure] = {}
    for name, measure in measures.items():
        pairs |= {name: measure, LIMITS[name]: limits[LIMITS[name]]}
    return pairs | limits


def ratios(figures: Figures) -> dict[str, float]:
    """Every measure against its limit."""
    return {
        name: round(figures[name].rate / figures[limit].rate, 3) for name, limit in LIMITS.items() if name in figures
    }


def beside_limits(columns: dict[int, Figures]) -> list[list[object]]:
    """A line for each figure; under a measure and its limit, their ratio."""
    shares = [ratios(figures) for figures in columns.values()]
    compared = {limit: name for name, limit in LIMITS.items()}
    result: list[list[object]] = []
    for line in lines(columns):
        result.append(line)
        if name := compared.get(str(line[0])):
            result.append([f"{name}, ratio", *(share[name] for share in shares)])
    return result


if __name__ == "__main__":
    main()
