"""The statements that fill a table for `backlog.py`, for both databases: `{rows}` rows of one kind."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from common import Kind

DUE = timedelta(days=1)
"""The due tasks have been due since then, a millisecond apart; those that are done came before."""

POSTGRES = {
    "due": """
insert into workq (queue, name, run_at, payload)
select '', 'due', now() - interval '1 day' + n * interval '1 ms', '1' from generate_series(1, {rows}) n
""",
    # Half of them in the lane of the due ones, half in one of a higher priority.
    "future": """
insert into workq (queue, name, priority, run_at, payload)
select '', 'due', -(n % 2), now() + interval '1 day' + n * interval '1 ms', '1' from generate_series(1, {rows}) n
""",
    "failed": """
insert into workq (queue, name, run_at, payload, attempt, failed_at, error)
select '', 'due', now() - interval '2 days' + n * interval '1 ms', '1', 1, now(), 'ValueError: no such user'
  from generate_series(1, {rows}) n
""",
    "foreign": """
insert into workq (queue, name, run_at, payload)
select '', 'foreign', now() - interval '2 days' + n * interval '1 ms', '1' from generate_series(1, {rows}) n
""",
    "done": """
insert into workq (queue, name, run_at, payload)
select '', 'due', now() - interval '3 days' + n * interval '1 ms', '1' from generate_series(1, {rows}) n
""",
}

NUMBERS = "with recursive n(n) as (select 1 union all select n + 1 from n where n < {rows}) "
NOW = "(cast(strftime('%s', 'now') as integer) * 1000000)"
DAY = "86400000000"

SQLITE = {
    "due": f"""
{NUMBERS} insert into workq (queue, name, run_at, payload, created_at)
select '', 'due', {NOW} - {DAY} + n * 1000, '1', 0 from n
""",
    "future": f"""
{NUMBERS} insert into workq (queue, name, priority, run_at, payload, created_at)
select '', 'due', -(n % 2), {NOW} + {DAY} + n * 1000, '1', 0 from n
""",
    "failed": f"""
{NUMBERS} insert into workq (queue, name, run_at, payload, created_at, attempt, failed_at, error)
select '', 'due', {NOW} - 2 * {DAY} + n * 1000, '1', 0, 1, {NOW}, 'ValueError: no such user' from n
""",
    "foreign": f"""
{NUMBERS} insert into workq (queue, name, run_at, payload, created_at)
select '', 'foreign', {NOW} - 2 * {DAY} + n * 1000, '1', 0 from n
""",
}

HEAPS: Mapping[Kind, Mapping[str, str]] = {"postgres": POSTGRES, "sqlite": SQLITE}

SETTLED: Mapping[Kind, str] = {"postgres": "vacuum (analyze) workq", "sqlite": "analyze"}
"""What autovacuum does; on SQLite, what an application may do."""


FINISHED = (
    """
update workq set locked_by = 1, locked_until = now() + interval '30 s', version = version + 1
 where run_at < now() - interval '2 days'
""",
    "delete from workq where run_at < now() - interval '2 days'",
)
"""PostgreSQL: the life of the tasks that are done. Each was claimed, then deleted."""
