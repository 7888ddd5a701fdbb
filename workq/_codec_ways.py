"""Payload types by msgspec or pydantic. Each is imported only when a type needs it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, NamedTuple, cast

from workq._codec_same import fields_of, name_of


class Ways(NamedTuple):
    """How the payloads of one type are turned into text and back."""

    encode: Callable[[Any], str]
    """Writes no more than the declared fields, and need not check that they come back."""
    decode: Callable[[str], Any]


class Unsupported(Exception):
    """This way does not know the type; another may."""


def msgspec_ways(kind: Any) -> Ways:
    """Dataclasses, attrs classes, Structs, TypedDict, NamedTuple and the types of the standard library."""
    import msgspec
    import msgspec.inspect

    try:
        unknown = foreign_class(msgspec.inspect.type_info(kind))
    except TypeError as error:
        raise Unsupported(f"msgspec: {error}") from None
    if unknown is not None:
        raise Unsupported(f"msgspec does not know {name_of(unknown)}")
    encode_all = msgspec.json.Encoder(enc_hook=native_of).encode
    decode = msgspec.json.Decoder[Any](kind).decode

    def encode(payload: Any) -> str:
        if payload.__class__ is not kind and fields_of(payload.__class__):
            # Of a subclass: what it adds may be forbidden to read, or impossible to write.
            payload = msgspec.convert(payload, kind, from_attributes=True)
        # Reading drops what the instances of subclasses further down add.
        return encode_all(decode(encode_all(payload))).decode()

    return Ways(encode, decode)


def foreign_class(info: Any) -> Any:
    """A class inside a type that msgspec takes for its user's own, or that is pydantic's; None if there is none."""
    from msgspec.inspect import CustomType, DataclassType, Field, Type

    seen: set[int] = set()
    left: list[Any] = [info]
    while left:
        node = left.pop()
        if node.__class__ is tuple:
            left += node
        elif isinstance(node, (Type, Field)) and id(node) not in seen:
            seen.add(id(node))
            # Any value is an object, so this one class needs no hook.
            if isinstance(node, CustomType) and node.cls is not object:
                return node.cls
            if isinstance(node, DataclassType) and hasattr(node.cls, "__pydantic_validator__"):
                return node.cls
            left += [getattr(node, name) for name in node.__struct_fields__]
    return None


def native_of(value: Any) -> Any:
    """What an instance of a subclass extends: msgspec knows no pendulum.DateTime and no Markup."""
    match value:
        case str():
            return str.__str__(value)
        case int():
            return int.__index__(value)
        case float():
            return float.__float__(value)
        case bytes():
            return bytes(value)
        case datetime():
            return datetime.isoformat(value)
        case date():
            return date.isoformat(value)
        case time():
            return time.isoformat(value)
        case timedelta():
            return timedelta(value.days, value.seconds, value.microseconds)
        case Decimal():
            return Decimal.__str__(value)
        case _:
            raise TypeError(f"Encoding objects of type {type(value).__qualname__} is unsupported")


def is_model(kind: Any) -> bool:
    """Whether a type is a pydantic model. No import: if it is one, pydantic has long been imported."""
    return isinstance(kind, type) and hasattr(kind, "model_validate_json") and hasattr(kind, "__pydantic_validator__")


def model_ways(kind: Any) -> Ways:
    """A pydantic model, by its own methods."""

    def encode(payload: Any) -> str:
        if type(payload) is kind:
            return cast("str", payload.model_dump_json(by_alias=True, round_trip=True, warnings=False))
        # A subclass's own method would write all its fields.
        text: bytes = serializer.to_json(payload, by_alias=True, round_trip=True, warnings=False)
        return text.decode()

    if not kind.__pydantic_complete__:
        kind.model_rebuild()
    serializer = kind.__pydantic_serializer__
    return Ways(encode, by_either_name(kind.model_validate_json))


def pydantic_ways(kind: Any) -> Ways:
    """What has a pydantic model somewhere inside, and all else if there is no msgspec."""
    import pydantic

    try:
        adapter = pydantic.TypeAdapter[Any](kind)
        if not getattr(adapter, "pydantic_complete", True):
            adapter.rebuild()
    except NameError:
        raise
    except Exception as error:
        raise Unsupported("pydantic: " + str(error).partition("\n")[0].partition(". ")[0]) from None

    def encode(payload: Any) -> str:
        return adapter.dump_json(payload, by_alias=True, round_trip=True, warnings=False).decode()

    return Ways(encode, by_either_name(adapter.validate_json))


def by_either_name(validate: Callable[..., Any]) -> Callable[[str], Any]:
    """Read fields by alias or by name: one with a validation alias only is written by name. Since pydantic 2.11."""
    if "by_name" not in inspect.signature(validate).parameters:
        return validate

    def read(text: str) -> Any:
        return validate(text, by_name=True)

    return read


def validation_reason(error: Exception) -> str | None:
    """What a pydantic ValidationError says, without the input it quotes; None for any other error."""
    core: Any = sys.modules.get("pydantic_core")
    if core is None or not isinstance(error, core.ValidationError):
        return None
    faults: list[str] = []
    for fault in cast("Any", error).errors(include_url=False, include_context=False):
        path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in fault["loc"])
        # This one message quotes a value.
        message = "Unknown tag" if fault["type"] == "union_tag_invalid" else fault["msg"]
        faults.append(f"{message} - at `${path}`")
    return "; ".join(faults[:3]) + (f"; and {len(faults) - 3} more" if len(faults) > 3 else "")
