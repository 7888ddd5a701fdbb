"""Checks of what users give, before anything is sent: each error names the remedy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from workq._errors import PayloadError
from workq._json import check_text
from workq._outcome import LONGEST, seconds

T = TypeVar("T")

MAX_NAME = 200
MAX_KEY = 1000  # bytes; a PostgreSQL index entry must stay below 2,704
MAX_HEADERS = 16 << 10
EARLIEST = datetime(1970, 1, 1, tzinfo=UTC)
LATEST = datetime(9999, 1, 1, tzinfo=UTC)


def check_name(what: str, name: object, *, empty: bool = False) -> str:
    """A task's or queue's name: printable, so that it cannot forge a log line, and short."""
    if not isinstance(name, str):
        raise TypeError(f"the {what} must be a str, not {name!r:.80}")
    if not name and not empty:
        raise ValueError(f"the {what} must not be empty")
    if len(name) > MAX_NAME:
        raise ValueError(f"the {what} {name[:40]!r}... has {len(name)} characters; at most {MAX_NAME}")
    if not name.isprintable():
        raise ValueError(f"the {what} {name!r} contains characters that cannot be printed (NUL, line breaks, ...)")
    return name


def check_key(key: object) -> str:
    """A task's or schedule's key."""
    if not isinstance(key, str):
        raise TypeError(f"a key must be a str, not {key!r:.80}")
    if "\0" in key:
        raise ValueError("a key must not contain NUL")
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        raise ValueError("a key must not contain lone surrogates") from None
    if size > MAX_KEY:
        raise ValueError(f"a key may have {MAX_KEY} bytes, this one has {size}; use a hash of it")
    return key


def check_priority(priority: object) -> int:
    """-100 to 100, smaller first."""
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise TypeError(f"priority must be an int, not {priority!r:.80}")
    if not -100 <= priority <= 100:
        raise ValueError(f"priority must be from -100 (first) to 100 (last), not {priority}")
    return priority


def check_id(id: object) -> int:
    """A task's id, as `enqueue` returned it."""
    if isinstance(id, bool) or not isinstance(id, int):
        raise TypeError(f"the id of a task is an int, not {id!r:.80}" + _none_hint(id))
    if not -(2**63) <= id < 2**63:
        raise ValueError(f"the id of a task fits 64 bits; {id} does not")
    return id


def _none_hint(id: object) -> str:
    return "; enqueue returned None because a live task has the key" if id is None else ""


def check_instant(what: str, at: object) -> datetime:
    """An aware point in time, in UTC."""
    if not isinstance(at, datetime):
        raise TypeError(f"{what} must be a datetime, not {at!r:.80}")
    at = check_aware(what, at)
    if not EARLIEST <= at <= LATEST:
        raise ValueError(f"{what} must be between 1970 and 9999, not {at}")
    return at


def check_aware(what: str, at: datetime) -> datetime:
    """A point in time, in UTC. A naive one would mean something else on every machine."""
    if at.tzinfo is None or at.utcoffset() is None:
        raise ValueError(f"{what} is the naive datetime {at}; give an aware one, such as datetime.now(UTC)")
    try:
        return at.astimezone(UTC)
    except OverflowError:
        raise ValueError(f"{what} is out of range: {at}") from None


def check_delay(delay: object) -> timedelta:
    """A delay in seconds from now."""
    if isinstance(delay, timedelta):
        raise TypeError("delay is a number of seconds; use delay=d.total_seconds()")
    return timedelta(seconds=seconds("delay", delay))


def check_headers(headers: object) -> dict[str, str]:
    """Small texts that travel beside the payload."""
    if not isinstance(headers, Mapping):
        raise TypeError(f"headers must be a mapping of str to str, not {headers!r:.80}")
    checked: dict[str, str] = {}
    size = 0
    for key, value in headers.items():  # pyright: ignore[reportUnknownVariableType]
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError("headers must be a mapping of str to str")
        if "\0" in key or "\0" in value:
            raise ValueError(f"the header {key!r} contains NUL")
        check_text(f"the header {key!r}", key + value)
        size += len(key) + len(value)
        checked[key] = value
    if size > MAX_HEADERS:
        raise ValueError(f"headers may have {MAX_HEADERS} characters in all, these have {size}")
    return checked


def check_pattern(pattern: object) -> str:
    """An SQL pattern for LIKE: % and _, escaped by a backslash."""
    if not isinstance(pattern, str):
        raise TypeError(f"error_like must be a str, not {pattern!r:.80}")
    if "\0" in pattern:
        raise ValueError("error_like must not contain NUL")
    check_text("error_like", pattern)
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise ValueError("error_like ends in its escape character: write a backslash as two")
    return pattern


def check_size(text: str, most: int) -> str:
    """A payload's JSON text, against the queue's limit in bytes."""
    size = len(text) if text.isascii() else len(text.encode())
    if size > most:
        raise PayloadError(
            f"the payload has {size} bytes of JSON; at most {most} are taken (Queue(max_payload=...)); "
            "store large data elsewhere and enqueue a reference to it"
        )
    return text


def positive(what: str, value: object, *, least: float = 0, zero: bool = False) -> float:
    """A setting in seconds."""
    checked = seconds(what, value)
    if checked < least or (checked == 0 and not zero):
        raise ValueError(f"{what} must be more than 0 seconds" if not least else f"{what} must be at least {least} s")
    return min(checked, LONGEST)


def count(what: str, value: object, *, least: int) -> int:
    """A whole number."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} must be an int, not {value!r:.80}")
    if value < least:
        raise ValueError(f"{what} must be at least {least}, not {value}")
    return value


def functions(what: str, given: Iterable[T]) -> tuple[T, ...]:
    """A setting that is a list of functions."""
    if callable(given) or not isinstance(given, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{what} is a list of functions, {what}=[function], not {given!r:.80}")
    return tuple(given)
