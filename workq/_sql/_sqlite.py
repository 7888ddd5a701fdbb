"""The statements for SQLite 3.35 and later.

Instants are integers, microseconds since 1970 in UTC; `:now` is the machine's clock, read before the statement waits
for the writer. Lists arrive as JSON (json_extract, since `->>` needs 3.38). Every statement begins with INSERT,
UPDATE, DELETE or SELECT: Python's sqlite3 opens no implicit transaction for one that begins with WITH, which would
survive the caller's rollback.

SQLite has no LATERAL, but a function in FROM sees the tables before it: the claim goes through its lanes by
json_each over a list of ids (500 rows in 1.5 ms; merging the lanes row by row by a recursive query took 19). See the
PostgreSQL file for what a lane is.
"""

from __future__ import annotations

from workq._names import Names
from workq._sql._statement import Statement, Statements, filled

# Without AUTOINCREMENT ids are reused, and a stale finish or a person's delete(id) would hit a new task.
VERSION_1 = (
    """
create table {table} (
  id integer primary key autoincrement,
  queue text not null,
  name text not null,
  key text,
  scheduled integer not null default 0,
  priority integer not null default 0 check (priority between -100 and 100),
  run_at integer not null,
  attempt integer not null default 0,
  lost integer not null default 0,
  version integer not null default 0,
  locked_by integer,
  locked_until integer,
  failed_at integer,
  finished_at integer,
  created_at integer not null,
  node text,
  payload text not null check (json_valid(payload)),
  headers text,
  error text
)
""",
    "create index {schema}.{index:due} on {bare} (queue, name, priority, run_at, id) where failed_at is null",
    """
create unique index {schema}.{index:key} on {bare} (queue, name, key)
 where key is not null and failed_at is null and not scheduled
""",
    # Null keys would be distinct, and one schedule would have many rows.
    "create unique index {schema}.{index:scheduled} on {bare} (queue, name, coalesce(key, '')) where scheduled",
    "create index {schema}.{index:failed} on {bare} (failed_at, id) where failed_at is not null",
    "create index {schema}.{index:failed_id} on {bare} (id) where failed_at is not null",
)

MIGRATIONS = (VERSION_1,)

# A file has one schema, and its commits are seen in the file: there is nothing to make and nothing to ring.
SCHEMA_EXISTS = None
MAKE_SCHEMA = None
RING = None

# `works_from` is the oldest version of the code's schema that may go on running here; null: only `version` itself.
MAKE_VERSION_TABLE = """
create table if not exists {version_table} (
  one integer primary key default 1 check (one = 1),
  version integer not null,
  works_from integer,
  migrated_at text not null default current_timestamp
)
"""

TABLE_EXISTS = Statement(
    "select count(*) from {schema}.sqlite_master where type = 'table' and name = :version_table_name",
    writes=False,
)

READ_VERSION = Statement("select version, works_from from {version_table}", writes=False)

WRITE_VERSION = Statement(
    """
insert into {version_table} (one, version, works_from) values (1, :version, :works_from)
on conflict (one) do update
   set version = excluded.version, works_from = excluded.works_from, migrated_at = current_timestamp
returning version
"""
)

NOW = Statement("select :now", instants=(0,), writes=False)

INSERT_ONE = Statement(
    """
insert into {table} (queue, name, payload, headers, priority, run_at, created_at)
values (:queue, :name, :payload, :headers, :priority, coalesce(:run_at, :now + :delay), :now)
returning id
"""
)

# For tasks that differ only in their payloads.
INSERT_ALIKE = Statement(
    """
insert into {table} (queue, name, payload, headers, priority, run_at, created_at)
select :queue, :name, i.value, :headers, :priority, coalesce(:run_at, :now + :delay), :now
  from json_each(:payloads) i
 order by i.key
returning id
"""
)

INSERT = Statement(
    """
insert into {table} (queue, name, payload, headers, priority, run_at, created_at)
select json_extract(i.value, '$[0]'), json_extract(i.value, '$[1]'), json_extract(i.value, '$[2]'),
       json_extract(i.value, '$[3]'), json_extract(i.value, '$[4]'),
       coalesce(json_extract(i.value, '$[5]'), :now + json_extract(i.value, '$[6]')), :now
  from json_each(:items) i
 order by i.key
returning id
"""
)

# "where true": without it the parser takes ON CONFLICT for a join's ON.
INSERT_KEYED = Statement(
    """
insert into {table} (queue, name, payload, headers, priority, run_at, key, created_at)
select json_extract(i.value, '$[0]'), json_extract(i.value, '$[1]'), json_extract(i.value, '$[2]'),
       json_extract(i.value, '$[3]'), json_extract(i.value, '$[4]'),
       coalesce(json_extract(i.value, '$[5]'), :now + json_extract(i.value, '$[6]')),
       json_extract(i.value, '$[7]'), :now
  from json_each(:items) i
 where true
 order by i.key
on conflict (queue, name, key) where key is not null and failed_at is null and not scheduled do nothing
returning id, queue, name, key
"""
)

INSERT_SCHEDULES = Statement(
    """
insert into {table} (scheduled, queue, name, key, payload, priority, run_at, created_at)
select 1, json_extract(i.value, '$[0]'), json_extract(i.value, '$[1]'), json_extract(i.value, '$[2]'),
       json_extract(i.value, '$[3]'), json_extract(i.value, '$[4]'), json_extract(i.value, '$[5]'), :now
  from json_each(:items) i
 where true
 order by i.key
on conflict (queue, name, coalesce(key, '')) where scheduled do nothing
returning id
"""
)

# `page` selects the rows as the update leaves them. A step of a statement gives Python's lock up and has to get it
# back from a busy event loop, so hundreds of rows of RETURNING take 100 ms; as JSON, in parts of some megabytes, 5.
CLAIM = Statement(
    """
update {table}
   set locked_by = :token, locked_until = :now + :lease, version = version + 1, node = :node,
       lost = lost + (locked_until is not null and locked_by not in (select k.value from json_each(:tokens) k))
 where id in (select i.value from json_each(:ids) i)
""",
    page="""
with recursive
 lane(name, priority) as (
   select n.value, (select w.priority from {table} w where w.queue = :queue and w.name = n.value and w.failed_at is null
                     order by w.priority limit 1)
     from json_each(:names) n
   union all
   select l.name, (select w.priority from {table} w where w.queue = :queue and w.name = l.name and w.failed_at is null
                     and w.priority > l.priority order by w.priority limit 1)
     from lane l where l.priority is not null),
 head(name, priority, id) as (
   select l.name, l.priority, (select w.id from {table} w
       where w.queue = :queue and w.name = l.name and w.priority = l.priority and w.failed_at is null
         and w.run_at <= :now
         and (w.run_at, w.id) > (coalesce(json_extract(c.value, '$[2]'), -9223372036854775807),
                                 coalesce(json_extract(c.value, '$[3]'), 0))
         and (w.locked_until is null or w.locked_by in (select k.value from json_each(:tokens) k)
              or (:takeover and w.locked_until < :now))
         and (w.lost + (w.locked_until is not null) >= :suspect) = :suspects
         and (not w.scheduled or exists (
              select 1 from json_each(:schedules) s
               where json_extract(s.value, '$[0]') = w.name and json_extract(s.value, '$[1]') = coalesce(w.key, '')))
       order by w.run_at, w.id limit 1)
     from lane l
     left join json_each(:cursor) c
       on json_extract(c.value, '$[0]') = l.name and json_extract(c.value, '$[1]') = l.priority
    where l.priority is not null),
 line(name, priority, run_at, id) as materialized (
   select h.name, h.priority, w.run_at, w.id
     from head h cross join {table} w on w.id = h.id
    order by h.priority, w.run_at, w.id
    limit -1),  -- without a limit the order would be optimized away
 page(id) as materialized (
   select i.value
     from line l
    cross join json_each((
      select json_group_array(due.id) from (
        select w.id from {table} w
         where w.queue = :queue and w.name = l.name and w.priority = l.priority and w.failed_at is null
           and w.run_at <= :now and (w.run_at, w.id) >= (l.run_at, l.id)
           and (w.locked_until is null or w.locked_by in (select k.value from json_each(:tokens) k)
                or (:takeover and w.locked_until < :now))
           and (w.lost + (w.locked_until is not null) >= :suspect) = :suspects
           and (not w.scheduled or exists (
                select 1 from json_each(:schedules) s
                 where json_extract(s.value, '$[0]') = w.name
                   and json_extract(s.value, '$[1]') = coalesce(w.key, '')))
         order by w.run_at, w.id
         limit :limit) due)) i
    limit :limit)
select json_group_array(json_array(
         taken.id, taken.version + 1, taken.name, cast(taken.key as text), taken.scheduled, taken.priority,
         taken.run_at, taken.attempt, taken.lost + (taken.locked_until is not null
                                      and taken.locked_by not in (select k.value from json_each(:tokens) k)),
         cast(taken.payload as text), cast(taken.headers as text), :now))
  from (select w.id, w.version, w.name, w.key, w.scheduled, w.priority, w.run_at, w.attempt, w.lost, w.payload,
               w.headers, w.locked_by, w.locked_until,
               sum(length(w.payload)) over (rows unbounded preceding) / 4000000 as part,
               max(:ahead and (w.lost > 0 or (w.locked_until is not null
                     and w.locked_by not in (select k.value from json_each(:tokens) k))))
                 over (rows unbounded preceding) as past
          from page p cross join {table} w on w.id = p.id) taken
 where not taken.past
 group by taken.part
""",
    instants=(6, 11),
)

# Nobody holds a single row's lock here: whoever writes has the whole file. So every row that is ours is extended.
EXTEND = Statement(
    """
update {table} set locked_until = :now + :lease
 where id in (
   select w.id from json_each(:leases) h
     join {table} w on w.id = json_extract(h.value, '$[0]')
      and w.version = json_extract(h.value, '$[1]') and w.locked_by = json_extract(h.value, '$[2]'))
returning id, version, 1 as extended
"""
)

SUCCEED = Statement(
    """
delete from {table}
 where id in (
   select w.id from json_each(:leases) h
     join {table} w on w.id = json_extract(h.value, '$[0]')
      and w.version = json_extract(h.value, '$[1]') and w.locked_by = json_extract(h.value, '$[2]'))
""",
    page="""
select json_group_array(json_array(w.id))
  from json_each(:leases) h
  join {table} w on w.id = json_extract(h.value, '$[0]')
   and w.version = json_extract(h.value, '$[1]') and w.locked_by = json_extract(h.value, '$[2]')
""",
)

# Retry, failure, schedule, Later and hand-back alike. The row keeps the token, so that a finish whose reply was lost
# can be told from one that came too late. (UPDATE ... FROM is new in 3.33.)
SETTLE = Statement(
    """
update {table} as t
   set run_at = coalesce(json_extract(d.value, '$[3]'), :now + json_extract(d.value, '$[4]'), t.run_at),
       payload = coalesce(json_extract(d.value, '$[5]'), t.payload),
       failed_at = case when json_extract(d.value, '$[6]') then :now end,
       attempt = json_extract(d.value, '$[7]'),
       error = case when json_extract(d.value, '$[9]') then t.error else json_extract(d.value, '$[8]') end,
       lost = case when json_extract(d.value, '$[10]') then t.lost else 0 end,
       finished_at = case when json_extract(d.value, '$[11]') then :now else t.finished_at end,
       locked_until = null,
       version = t.version + 1
  from json_each(:endings) d
 where t.id = json_extract(d.value, '$[0]')
   and t.version = json_extract(d.value, '$[1]') and t.locked_by = json_extract(d.value, '$[2]')
returning id, run_at
""",
    instants=(1,),
)

LOOK = Statement(
    "select id, version, locked_by from {table} where id in (select i.value from json_each(:ids) i)",
    writes=False,
)

# In the caller's transaction, which keeps every other writer out.
COMPLETE = Statement(
    """
delete from {table}
 where id = :id and version = :version and locked_by = :token
returning id
"""
)

COMPLETE_SCHEDULE = Statement(
    """
update {table}
   set run_at = :run_at, payload = :payload, attempt = 0, error = null, lost = 0,
       finished_at = :now, locked_until = null, version = version + 1
 where id = :id and version = :version and locked_by = :token
returning id
"""
)

# A live task with the same key: the row stays as it is, and the caller looks why.
RETRY = Statement(
    """
update or ignore {table}
   set run_at = coalesce(:run_at, :now), payload = coalesce(:payload, payload),
       failed_at = null, error = null, attempt = 0, lost = 0,
       locked_by = null, locked_until = null, version = version + 1
 where id = :id and failed_at is not null
returning id, queue, name, key, headers
"""
)

# Row by row in the order of the sub-select; a second row of one key is ignored.
RETRY_ALL = Statement(
    """
update or ignore {table}
   set run_at = :now, failed_at = null, error = null, attempt = 0, lost = 0,
       locked_by = null, locked_until = null, version = version + 1
 where failed_at is not null
   and id in (
     select f.id
       from (select o.id, o.queue, o.name, o.key, o.scheduled, o.failed_at,
                    o.scheduled or o.key is null
                    or row_number() over (partition by o.queue, o.name, o.key, o.scheduled order by o.id) = 1 as first
               from {table} o
              where o.failed_at is not null
                and (:name is null or o.name = :name) and (:queue is null or o.queue = :queue)
                and (:error_like is null or o.error like :error_like escape '\\')) f
      where f.first
        and (f.scheduled or f.key is null or not exists (
             select 1 from {table} o
              where o.queue = f.queue and o.name = f.name and o.key = f.key and not o.scheduled
                and o.failed_at is null))
      order by f.failed_at, f.id
      limit :limit)
returning id, queue, name, key, headers
"""
)

RESCHEDULE = Statement(
    """
update {table}
   set run_at = coalesce(:run_at, :now), locked_by = null, locked_until = null, version = version + 1
 where id = :id and failed_at is null and (locked_until is null or locked_until < :now)
returning id, queue
"""
)

DISABLE = Statement(
    """
update {table}
   set failed_at = :now, error = 'disabled', locked_by = null, locked_until = null, version = version + 1
 where id = :id and failed_at is null and (locked_until is null or locked_until < :now)
returning id
"""
)

DELETE = Statement("delete from {table} where id = :id returning id")

GET = Statement(
    """
select id, queue, name, key,
       case when failed_at is not null then 'failed' when locked_until >= :now then 'running'
            else 'waiting' end as state,
       scheduled, priority, payload, headers, created_at, run_at, attempt, lost, node, locked_until,
       failed_at, finished_at, error
  from {table}
 where id = :id
""",
    instants=(9, 10, 14, 15, 16),
    writes=False,
)

FIND = Statement(
    """
select id, queue, name, key,
       case when failed_at is not null then 'failed' when locked_until >= :now then 'running'
            else 'waiting' end as state,
       scheduled, priority, payload, headers, created_at, run_at, attempt, lost, node, locked_until,
       failed_at, finished_at, error
  from {table}
 where id > :after
   and (:name is null or name = :name) and (:queue is null or queue = :queue) and (:key is null or key = :key)
   and (:state is null
        or (:state = 'running' and failed_at is null and locked_until >= :now)
        or (:state = 'waiting' and failed_at is null and (locked_until is null or locked_until < :now)))
 order by id
 limit :limit
""",
    instants=(9, 10, 14, 15, 16),
    writes=False,
)

# Apart from `find`, for the index of failed rows.
FIND_FAILED = Statement(
    """
select id, queue, name, key, 'failed' as state,
       scheduled, priority, payload, headers, created_at, run_at, attempt, lost, node, locked_until,
       failed_at, finished_at, error
  from {table}
 where failed_at is not null
   and id > :after
   and (:name is null or name = :name) and (:queue is null or queue = :queue) and (:key is null or key = :key)
 order by id
 limit :limit
""",
    instants=(9, 10, 14, 15, 16),
    writes=False,
)

# Lane by lane, as in the claim: with nothing due, a look does not walk through what is due later.
LEFT = Statement(
    """
select w.queue, w.name, w.locked_until >= :now as running
  from (
    with recursive lane(queue, name, priority) as (
      select w.queue, w.name, w.priority from {table} w
       where w.id = (select x.id from {table} x where x.failed_at is null
                      order by x.queue, x.name, x.priority limit 1)
      union all
      select w.queue, w.name, w.priority
        from lane l
       cross join {table} w
          on w.id = coalesce(  -- of a comparison of rows only the first column would use the index
               (select x.id from {table} x where x.failed_at is null and x.queue = l.queue and x.name = l.name
                   and x.priority > l.priority order by x.priority limit 1),
               (select x.id from {table} x where x.failed_at is null and x.queue = l.queue and x.name > l.name
                 order by x.name, x.priority limit 1),
               (select x.id from {table} x where x.failed_at is null and x.queue > l.queue
                 order by x.queue, x.name, x.priority limit 1)))
    select queue, name, priority from lane) l
 cross join {table} w
    on w.queue = l.queue and w.name = l.name and w.priority = l.priority
   and w.failed_at is null and w.run_at <= :now
 where (:names is null or l.name in (select n.value from json_each(:names) n))
   and (not w.scheduled or exists (
        select 1 from json_each(:schedules) s
         where json_extract(s.value, '$[0]') = w.queue and json_extract(s.value, '$[1]') = w.name
           and json_extract(s.value, '$[2]') = coalesce(w.key, '')))
 limit :limit
""",
    writes=False,
)


def sqlite(names: Names) -> Statements:
    """The statements for one table in SQLite."""
    return filled(names, globals())
