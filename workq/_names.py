"""Names of database objects: validated and quoted here, and nowhere else."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

LONGEST_SUFFIX = "_scheduled"
MAX_BYTES = 63  # PostgreSQL cuts longer identifiers silently, and then two tables would share one index name


@dataclass(frozen=True, slots=True)
class Names:
    """The table's qualified, quoted names."""

    table: str
    version_table: str
    schema: str
    bare: str
    """The table's name as given, for index names."""

    @property
    def channel(self) -> str:
        """Where rings for this table go (PostgreSQL): an identifier, which may have 63 bytes."""
        return "workq_" + hashlib.blake2s(self.table.encode(), digest_size=8).hexdigest()

    def fill(self, text: str) -> str:
        """Put the names into a statement: `{table}`, `{version_table}`, `{schema}`, `{bare}`, `{index:suffix}`."""
        text = text.replace("{table}", self.table).replace("{version_table}", self.version_table)
        text = text.replace("{schema}", self.schema).replace("{bare}", quote(self.bare))
        for suffix in ("due", "key", "scheduled", "failed", "failed_id"):
            text = text.replace(f"{{index:{suffix}}}", quote(f"{self.bare}_{suffix}"))
        return text


def names(schema: str, table: str) -> Names:
    """Check and quote the names of one table. Raises ValueError for names that do not fit."""
    check("table", table, room=len(LONGEST_SUFFIX))
    check("schema", schema)
    return Names(
        table=f"{quote(schema)}.{quote(table)}",
        version_table=f"{quote(schema)}.{quote(f'{table}_version')}",
        schema=quote(schema),
        bare=table,
    )


def check(kind: str, name: str, *, room: int = 0) -> None:
    """Raise ValueError unless `name` can be an identifier on both databases, with `room` bytes to spare."""
    if not isinstance(name, str) or not name:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"the {kind} name must be a non-empty string, not {name!r}")
    if "\0" in name:
        raise ValueError(f"the {kind} name {name!r} contains a NUL character")
    if "{" in name or "}" in name:
        raise ValueError(f"the {kind} name {name!r} contains a brace; choose another name")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise ValueError(f"the {kind} name {name!r} is not valid Unicode") from None
    if size > MAX_BYTES - room:
        raise ValueError(f"the {kind} name {name!r} is {size} bytes long; at most {MAX_BYTES - room} fit")
    if kind == "table" and name.lower().startswith("sqlite_"):
        raise ValueError(f"the table name {name!r} begins with sqlite_, which SQLite keeps for itself")


def quote(name: str) -> str:
    """Quote one identifier."""
    return '"' + name.replace('"', '""') + '"'
