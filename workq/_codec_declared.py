"""What msgspec is to store of the instances of subclasses: what the declared type has, and no more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, get_origin

import msgspec
from msgspec import inspect as types

CONTAINERS: dict[Any, Any] = {
    types.ListType: list,
    types.SetType: set,
    types.FrozenSetType: frozenset,
    types.VarTupleType: tuple,
    types.TupleType: tuple,
    types.DictType: dict,
    types.TypedDictType: dict,
}


def nodes_of(info: Any) -> Iterator[Any]:
    """The description of a type and all those inside it, each once."""
    seen: set[int] = set()
    left: list[Any] = [info]
    while left:
        node = left.pop()
        if node.__class__ is tuple:
            left += node
        elif isinstance(node, (types.Type, types.Field)) and id(node) not in seen:
            seen.add(id(node))
            yield node
            left += [getattr(node, name) for name in node.__struct_fields__]


def class_of(info: Any) -> Any:
    """The class whose instances have something inside to go into; () if there is none."""
    cls = CONTAINERS.get(info.__class__) or getattr(info, "cls", ())
    return get_origin(cls) or cls


def as_declared(value: Any, info: Any, encode: Callable[[Any], Any], place: str = "$") -> Any:
    """A value as lists and dicts of what its type declares. An error of `encode` gets the place."""

    def inner(item: Any, kind: Any, step: str) -> Any:
        return as_declared(item, kind, encode, place + step)

    while isinstance(info, types.Metadata):
        info = info.type
    if isinstance(info, types.UnionType):
        info = member_of(value, info.types)
    if isinstance(value, class_of(info)):
        match info:
            case types.CollectionType():
                return [inner(item, info.item_type, f"[{index}]") for index, item in enumerate(value)]
            case types.TupleType() if len(value) == len(info.item_types):
                return [inner(value[index], kind, f"[{index}]") for index, kind in enumerate(info.item_types)]
            case types.DictType():
                return {key: inner(item, info.value_type, f"[{key!r:.40}]") for key, item in value.items()}
            case types.TypedDictType():
                kinds = {field.name: field.type for field in info.fields}
                return {key: inner(item, kinds.get(key), f"[{key!r:.40}]") for key, item in value.items()}
            case types.StructType() | types.DataclassType() | types.NamedTupleType():
                items: dict[str, Any] = {}
                if isinstance(info, types.StructType) and info.tag_field is not None:
                    items[info.tag_field] = info.tag
                for field in info.fields:
                    item = getattr(value, field.name, msgspec.UNSET)
                    if item is not msgspec.UNSET:
                        items[field.encode_name] = inner(item, field.type, f".{field.name}")
                if isinstance(info, types.NamedTupleType) or getattr(info, "array_like", False):
                    return list(items.values())
                return items
            case _:
                pass
    try:
        encode(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{error} - at `{place}`") from None
    return value


def member_of(value: Any, members: tuple[Any, ...]) -> Any:
    """The member of a union that declares the nearest class of a value; None if no member does."""
    by_class = {class_of(member): member for member in members}
    return next((by_class[cls] for cls in type(value).__mro__ if cls in by_class), None)
