"""The text of an error as it is stored: type, message, traceback without locals, capped, and fit for any database."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, cast

_OURS = str(Path(__file__).parent) + os.sep
MAX_MESSAGE = 8 << 10
MAX_KIND = 200
MAX_MEMBERS = 60
MAX_TRACEBACK = 32 << 10
MAX_FRAMES = 40


def describe(error: BaseException | str) -> str:
    """One readable text for an error, whatever it is made of. Never raises."""
    if issubclass(type(error), str):  # isinstance would ask the error for its __class__
        return capped(storable(str(error)), MAX_MESSAGE)
    found = cast(BaseException, error)
    head, message = kind_of(found), message_of(found)
    if message:
        head = f"{head}: {message}"
    try:
        trace = traceback_of(found)
    except BaseException:
        trace = ""  # it shows nothing of itself
    return head if not trace else f"{head}\n\n{trace}"


def kind_of(error: BaseException) -> str:
    """The name of its type, with the module unless that says nothing."""
    kind = type(error)
    try:
        name, module = kind.__qualname__, kind.__module__
    except BaseException:
        # A metaclass with ideas of its own.
        name, module = type.__getattribute__(kind, "__qualname__"), type.__getattribute__(kind, "__module__")
    try:
        return storable(str(name if module in ("builtins", "__main__") else f"{module}.{name}"))[:MAX_KIND]
    except BaseException:
        return "an error whose type has no name"


def _short(error: BaseException) -> str:
    return kind_of(error).rpartition(".")[2]


def message_of(error: BaseException) -> str:
    """What `str` says of an error, and its notes, capped; what it raises instead, if it raises."""
    try:
        text = _without_input(error) or str(error)
    except BaseException as mistake:
        return f"<its __str__ raised {_short(mistake)}>"
    try:
        text = "\n".join([text, *map(str, getattr(error, "__notes__", ()))])
    except BaseException:
        text += "\n<its notes cannot be shown>"
    return capped(storable(text), MAX_MESSAGE)


def without_value(text: str) -> str:
    """What msgspec says of enums, literals, tags and fields, less the value, which may be a secret."""
    what = r"^(Invalid (?:enum )?value|Object contains unknown field) .*?((?: - at `[^`]*`)?)$"
    return re.sub(what, r"\1\2", text, flags=re.DOTALL)


def _without_input(error: BaseException) -> str | None:
    """A decoder's error without the input, which its `str` shows and which may be somebody's secret."""
    kind = kind_of(error)
    if kind.startswith("msgspec."):
        return without_value(str(error))
    if not kind.startswith("pydantic") or not hasattr(error, "errors"):
        return None
    found: Any = error
    lines = [f"{found.error_count()} validation error(s) for {found.title}"]
    for one in found.errors(include_url=False, include_context=False, include_input=False):
        lines.append(f"{'.'.join(map(str, one['loc']))}: {one['msg']} ({one['type']})")
    return "\n".join(lines)


def traceback_of(error: BaseException) -> str:
    """Where it was raised, and what caused it, without the messages (they are capped apart) and without locals."""
    parts: list[str] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen and len(parts) < 10:
        seen.add(id(current))
        try:
            frames = traceback.format_tb(_from_handler(current.__traceback__), limit=-MAX_FRAMES)
        except Exception:
            frames = []
        text = "".join(frames)
        group = as_group(current)
        if group is not None:
            text += "".join(_members(group))
        if current is not error:
            text = f"caused by {_short(current)}: {capped(message_of(current), 500)}\n{text}"
        if text:
            parts.append(text)
        if current.__cause__ is not None:
            current = current.__cause__
        else:
            current = None if current.__suppress_context__ else current.__context__
    return capped(storable("\n".join(parts)), MAX_TRACEBACK)


def _from_handler(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of workq that led to the handler."""
    found = trace
    while found is not None and found.tb_frame.f_code.co_filename.startswith(_OURS):
        found = found.tb_next
    return trace if found is None else found


def _members(group: BaseExceptionGroup[BaseException]) -> list[str]:
    """The members of a group and of the groups in it, the first MAX_MEMBERS of all."""
    lines: list[str] = []
    waiting = [(1, member) for member in _reversed(group)]
    for _ in range(MAX_MEMBERS):
        if not waiting:
            return lines
        depth, member = waiting.pop()
        lines.append(f"{'  ' * min(depth, 20)}| {_short(member)}: {capped(message_of(member), 500)}\n")
        try:
            lines.extend(traceback.format_tb(member.__traceback__, limit=-3))
        except Exception:
            lines.append("(its traceback cannot be shown)\n")
        nested = as_group(member)
        if nested is not None:
            waiting += [(depth + 1, inner) for inner in _reversed(nested)]
    return [*lines, f"... and {len(waiting)} more\n"]


def _reversed(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    return list(reversed(cast("Sequence[BaseException]", group.exceptions)[:MAX_MEMBERS]))


def as_group(error: BaseException) -> BaseExceptionGroup[BaseException] | None:
    """The error as a group, if it is one."""
    return cast("BaseExceptionGroup[BaseException]", error) if issubclass(type(error), BaseExceptionGroup) else None


def capped(text: str, most: int) -> str:
    """At most `most` bytes of UTF-8, the head and the tail kept, cut between characters."""
    if len(text) <= most // 4:
        return text
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= most:
        return text
    mark = f"\n... {len(data) - most:,} bytes left out ...\n"
    keep = (most - len(mark)) // 2
    head = data[:keep].decode("utf-8", "ignore")
    tail = data[len(data) - keep :].decode("utf-8", "ignore")
    return head + mark + tail


def storable(text: str) -> str:
    """Text that both databases take: NUL and lone surrogates are written out."""
    if "\0" in text:
        text = text.replace("\0", "\\x00")
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def frames_of(error: BaseException) -> tuple[type[BaseException], BaseException, TracebackType | None]:
    """For `exc_info=`: where it was raised, and its first line. A driver's error may go on with a whole row, payload
    included, and so may what caused it."""
    return RuntimeError, RuntimeError(one_line(error)), error.__traceback__


def one_line(error: BaseException) -> str:
    """For a log line: type and the first line of the message, escaped."""
    text = message_of(error).partition("\n")[0][:300]
    kind = _short(error)
    return f"{kind}: {text.encode('unicode_escape').decode()}" if text else kind
