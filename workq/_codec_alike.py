"""What pydantic is to write and read of types that msgspec knows as well: the same text, whichever is installed."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

from pydantic_core import PydanticSerializationUnexpectedValue, core_schema


def alike(schema: Any) -> Any:
    """A core schema, changed where pydantic's text is another than msgspec's. A model keeps its own."""
    if isinstance(schema, list):
        return list(map(alike, cast("Any", schema)))
    if isinstance(schema, tuple):  # a choice and its label
        return tuple(map(alike, cast("Any", schema)))
    if not isinstance(schema, dict):
        return schema
    node = cast("dict[str, Any]", schema)
    kind = node.get("type")
    if not isinstance(kind, str):  # fields by name
        return {name: alike(item) for name, item in node.items()}
    if hasattr(node.get("cls"), "__pydantic_validator__") or is_plain(node.get("serialization")):
        return node
    match kind:
        case "bytes":
            text = core_schema.no_info_after_validator_function(from_base64, core_schema.bytes_schema())
            limits: Any = {name: item for name, item in node.items() if name != "ref"}
            return core_schema.chain_schema([text, limits], ref=node.get("ref"), serialization=written_by(to_base64))
        case "timedelta":
            return node | {"serialization": written_by(to_duration)}
        case "decimal":
            return {"allow_inf_nan": True} | node
        case _:
            return {name: item if name in ("default", "metadata") else alike(item) for name, item in node.items()}


def is_plain(serialization: Any) -> bool:
    """Whether a type has its own way to be written, which does not ask for that of what is inside."""
    return serialization is not None and "schema" not in serialization


def written_by(write: Callable[[Any], str]) -> Any:
    return core_schema.plain_serializer_function_ser_schema(write)


def to_base64(value: Any) -> str:
    if not isinstance(value, bytes):
        raise PydanticSerializationUnexpectedValue("not bytes")  # another member of the union may know it
    return b64encode(value).decode()


def from_base64(text: bytes) -> bytes:
    return b64decode(text, validate=True)


def to_duration(value: Any) -> str:
    """In days and seconds. pydantic writes years of 365 days, which msgspec does not read."""
    if not isinstance(value, timedelta):
        raise PydanticSerializationUnexpectedValue("not a timedelta")
    span = abs(value)
    days = f"{span.days}D" if span.days or not span else ""
    seconds = f"{span.seconds}.{span.microseconds:06}".rstrip("0").rstrip(".")
    return f"{'-' if value < timedelta(0) else ''}P{days}" + (f"T{seconds}S" if seconds != "0" else "")
