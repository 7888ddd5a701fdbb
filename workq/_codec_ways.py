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

    from workq._codec_declared import as_declared, class_of, nodes_of

    try:
        info = msgspec.inspect.type_info(kind)
    except TypeError as error:
        raise Unsupported(f"msgspec: {error}") from None
    nodes = list(nodes_of(info))
    for node in nodes:
        if is_foreign(node):
            raise Unsupported(f"msgspec does not know {name_of(node.cls)}")
    declared = set(map(class_of, nodes))
    encode_all = msgspec.json.Encoder(enc_hook=native_of).encode
    decode = msgspec.json.Decoder[Any](kind).decode

    def encode(payload: Any) -> str:
        if payload.__class__ in declared or not fields_of(payload.__class__):
            try:
                # Reading drops what the instances of subclasses further down add.
                return encode_all(decode(encode_all(payload))).decode()
            except Exception:  # noqa: S110
                pass  # What they add may be forbidden to read, or impossible to write.
        return encode_all(decode(encode_all(as_declared(payload, info, encode_all)))).decode()

    return Ways(encode, decode)


def is_foreign(node: Any) -> bool:
    """Whether msgspec describes a class that it takes for its user's own, or that is pydantic's."""
    from msgspec.inspect import CustomType, DataclassType

    # Any value is an object, so this one class needs no hook.
    custom = isinstance(node, CustomType) and node.cls is not object
    return custom or (isinstance(node, DataclassType) and hasattr(node.cls, "__pydantic_validator__"))


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
    import pydantic_core

    from workq._codec_alike import alike

    try:
        adapter = pydantic.TypeAdapter[Any](kind)
        if not getattr(adapter, "pydantic_complete", True):
            adapter.rebuild()
        schema = alike(adapter.core_schema)
        serializer = pydantic_core.SchemaSerializer(schema)
        validator = pydantic_core.SchemaValidator(schema)
    except NameError:
        raise
    except Exception as error:
        raise Unsupported("pydantic: " + str(error).partition("\n")[0].partition(". ")[0]) from None

    def encode(payload: Any) -> str:
        return serializer.to_json(payload, by_alias=True, round_trip=True, warnings=False).decode()

    return Ways(encode, by_either_name(validator.validate_json))


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
        message = fault["msg"]
        if fault["type"] == "union_tag_invalid":
            message = "Unknown tag"  # theirs quotes a value
        elif fault["type"] == "float_type" and fault["input"] is None:
            message += ", not null"
        faults.append(f"{message} - at `${path}`")
    return "; ".join(faults[:3]) + (f"; and {len(faults) - 3} more" if len(faults) > 3 else "")
