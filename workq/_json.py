"""Strict JSON text: what both databases store and give back unchanged, or an error before anything is sent."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from workq._errors import PayloadError

MAX_DEPTH = 100
MAX_BITS = 13_000  # Python refuses to read or write integers of more than 4,300 digits, which are 14,284 bits.
NATIVE = "a dict with str keys, list, str, int, float, bool or None"
INFINITIES = (float("inf"), float("-inf"))
STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"')
NOT_BRACKETS = re.compile(r"[^\[\]{}]+")


def dumps(value: object) -> str:
    """Encode a JSON value. Raises PayloadError for anything that would not come back equal."""
    check(value)
    return ENCODER.encode(value)


def loads(text: str) -> Any:
    """Decode JSON text. Raises PayloadError."""
    try:
        return DECODER.decode(text)
    except RecursionError:
        raise PayloadError("the stored payload is nested too deep to be read") from None
    except ValueError as error:
        raise PayloadError(f"the stored payload is not valid JSON: {error}") from None


def check(value: object, path: str = "payload", depth: int = 0) -> None:
    """Raise PayloadError, naming the place, unless `value` is a JSON value that comes back equal."""
    found = fault(value, depth)
    if found is not None:
        place, reason = found
        raise PayloadError(f"{path}{place if len(place) <= 200 else place[:200] + '...'} {reason}")


def fault(value: Any, depth: int) -> tuple[str, str] | None:
    """Where and why `value` is no JSON value, or None. The place is put together only on the way out."""
    kind: type[Any] = type(value)  # pyright: ignore[reportUnknownVariableType]
    if kind is str:
        return None if value.isascii() else surrogate("", value)
    if value is None or kind is bool:
        return None
    if kind is int:
        return None if value.bit_length() <= MAX_BITS else ("", "is an integer of over 3,900 digits; store it as a str")
    if kind is float:
        return None if value == value and value not in INFINITIES else ("", f"is {value}; JSON has no such number")
    if kind is not dict and kind is not list:
        return "", (
            f"is of type {kind.__qualname__}, which would not come back as it was. Give {NATIVE}, "
            "or declare the type: Spec(name, Type) or @handler(name) on a function that takes Task[Type]"
        )
    if depth >= MAX_DEPTH:
        return "", f"is nested deeper than {MAX_DEPTH} levels"
    if kind is list:
        for index, item in enumerate(value):
            found = fault(item, depth + 1)
            if found is not None:
                return f"[{index}]{found[0]}", found[1]
        return None
    for key, item in value.items():
        if type(key) is not str:
            return "", f"has the key {key!r:.60}; JSON has only str keys"
        found = (None if key.isascii() else surrogate("a key that ", key)) or fault(item, depth + 1)
        if found is not None:
            return f"[{key!r:.40}]{found[0]}", found[1]
    return None


def surrogate(what: str, text: str) -> tuple[str, str] | None:
    """The fault of a text with a lone surrogate, which neither UTF-8 nor a database takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return "", f"{'is ' if what else ''}{what}contains a lone surrogate, which cannot be stored"
    return None


def check_text(what: str, text: str) -> None:
    """Raise PayloadError for a lone surrogate, which neither UTF-8 nor a database takes."""
    if not text.isascii() and surrogate("", text) is not None:
        raise PayloadError(f"{what} contains a lone surrogate, which cannot be stored")


def check_depth(text: str) -> None:
    """Raise PayloadError if JSON text from a codec is nested too deep to be read everywhere."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    brackets = NOT_BRACKETS.sub("", STRING.sub("", text)).replace("{", "[").replace("}", "]")
    for _ in range(MAX_DEPTH):
        # Each pass takes away the innermost level, 20 times as fast as counting in Python.
        brackets = brackets.replace("[]", "")
        if not brackets:
            return
    raise PayloadError(f"the payload is nested deeper than {MAX_DEPTH} levels")


def check_encoded(text: str) -> None:
    """Raise PayloadError for JSON text that Python's libraries write but a database or another reader refuses."""
    check_text("it", text)
    check_depth(text)
    if "NaN" in text or "Infinity" in text:
        try:
            DECODER.decode(text)
        except ValueError:
            raise PayloadError("it contains NaN or an infinity, and JSON has no such number") from None


def refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


# The check above has already met every cycle, as a nesting that is too deep.
ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":"))
DECODER = json.JSONDecoder(parse_constant=refuse_constant)
