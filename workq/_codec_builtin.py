"""The codec that needs nothing installed: JSON values and dataclasses of them.

A type becomes a function from JSON, or from a value of the type, to a value of exactly that type.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeAlias, TypeGuard, Union, get_args, get_origin, get_type_hints

from workq import _json
from workq._codec_same import name_of
from workq._codec_ways import Unsupported, Ways

View: TypeAlias = Callable[[Any], Any]

JSON_SCALARS = (str, int, float, bool, NoneType)
JSON_NAMES = {str: "str", int: "int", float: "float", bool: "bool", NoneType: "null", list: "array", dict: "object"}


class Misfit(ValueError):
    """What was found does not fit the type. Each level adds its step to the path on the way out."""

    path = ""

    def __str__(self) -> str:
        return f"{self.args[0]} - at `${self.path}`" if self.path else str(self.args[0])


def misfit(expected: str, got: Any) -> Misfit:
    kind: Any = got.__class__
    return Misfit(f"Expected `{expected}`, got `{JSON_NAMES.get(kind, kind.__qualname__)}`")


def builtin_ways(kind: Any) -> Ways:
    """JSON values and dataclasses of them."""
    view = view_of(kind, {})

    def encode(payload: Any) -> str:
        return _json.dumps(plain(view(payload)))

    def decode(text: str) -> Any:
        return view(_json.loads(text))

    return Ways(encode, decode)


def plain(value: Any) -> Any:
    """Turn the dataclasses in a value into dicts."""
    if value.__class__ in JSON_SCALARS:
        return value
    if is_array(value):
        return [plain(item) for item in value]
    if is_object(value):
        return {key: plain(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value


def view_of(kind: Any, known: dict[Any, View]) -> View:
    """The view of a type. `known` holds the dataclasses met on the way here, which may contain themselves."""
    kind = bare(kind)
    arguments = get_args(kind)
    match get_origin(kind) or kind:
        case native if native in NATIVE_KINDS:
            return NATIVE_KINDS[native]
        case origin if origin is list:
            return view_of_list(view_of(arguments[0] if arguments else Any, known))
        case origin if origin is dict and (not arguments or bare(arguments[0]) is str):
            return view_of_dict(view_of(arguments[1] if arguments else Any, known))
        case origin if origin is Union or origin is UnionType:
            return view_of_union(kind, arguments, known)
        case origin if origin is Literal and all(type(choice) in JSON_NAMES for choice in arguments):
            return view_of_literal(kind, arguments)
        case cls if isinstance(cls, type) and dataclasses.is_dataclass(cls) and not arguments:
            return known[cls] if cls in known else view_of_dataclass(cls, known)
        case _:
            raise Unsupported(f"{name_of(kind)} is neither a JSON value nor a dataclass")


def is_array(value: Any) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def is_object(value: Any) -> TypeGuard[dict[Any, Any]]:
    return isinstance(value, dict)


def view_of_anything(value: Any) -> Any:
    return value


def view_of_none(value: Any) -> None:
    if value is not None:
        raise misfit("null", value)


def view_of_bool(value: Any) -> bool:
    if value is True or value is False:
        return value
    raise misfit("bool", value)


# A subclass of a native type, such as a StrEnum, is stored as the native value it equals.


def view_of_str(value: Any) -> str:
    if isinstance(value, str):
        return str.__str__(value)
    raise misfit("str", value)


def view_of_int(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return int.__index__(value)
    raise misfit("int", value)


def view_of_float(value: Any) -> float:
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    raise misfit("float", value)


def view_of_list(item_view: View) -> View:
    def view(value: Any) -> list[Any]:
        if not is_array(value):
            raise misfit("array", value)
        items: list[Any] = []
        try:
            for item in value:
                items.append(item_view(item))
        except Misfit as error:
            error.path = f"[{len(items)}]{error.path}"
            raise
        return items

    return view


def view_of_dict(item_view: View) -> View:
    def view(value: Any) -> dict[str, Any]:
        if not is_object(value):
            raise misfit("object", value)
        items: dict[str, Any] = {}
        for key, item in value.items():
            try:
                items[view_of_str(key)] = item_view(item)
            except Misfit as error:
                error.path = f"[...]{error.path}"
                raise
        return items

    return view


def view_of_literal(kind: Any, choices: tuple[Any, ...]) -> View:
    def view(value: Any) -> Any:
        for choice in choices:
            if value == choice and isinstance(value, bool) == isinstance(choice, bool):
                return choice
        raise misfit(name_of(kind), value)

    return view


def view_of_union(kind: Any, members: tuple[Any, ...], known: dict[Any, View]) -> View:
    members = tuple(map(bare, members))
    # An int fits both int and float, and should come back as the int it was.
    scalars = [view_of(member, known) for member in sorted(filter(is_scalar, members), key=lambda kind: kind is float)]
    others = [view_of(member, known) for member in members if not is_scalar(member)]
    if len(others) > 1 or Any in members or object in members:
        raise Unsupported(f"{name_of(kind)} has several members that could read the same JSON")

    def view(value: Any) -> Any:
        if others and not isinstance(value, JSON_SCALARS):
            return others[0](value)
        for member in scalars:
            try:
                return member(value)
            except Misfit:
                pass
        raise misfit(name_of(kind), value)

    return view


def bare(kind: Any) -> Any:
    """What a NewType or an Annotated is of."""
    while hasattr(kind, "__supertype__") or get_origin(kind) is Annotated:
        kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind.__supertype__
    return kind


def is_scalar(kind: Any) -> bool:
    return kind in NATIVE_KINDS or get_origin(kind) is Literal


def view_of_dataclass(cls: type[Any], known: dict[Any, View]) -> View:
    def view(value: Any) -> Any:
        if isinstance(value, cls):
            given: dict[Any, Any] = {name: getattr(value, name) for name in views if hasattr(value, name)}
        elif is_object(value):
            given = value
        else:
            raise misfit("object", value)
        found: dict[str, Any] = {}
        for name, field_view in views.items():
            if name in given:
                try:
                    found[name] = field_view(given[name])
                except Misfit as error:
                    error.path = f".{name}{error.path}"
                    raise
            elif name in required:
                raise Misfit(f"Object missing required field `{name}`")
        made = cls(**{name: item for name, item in found.items() if name not in computed})
        for name in computed & found.keys():
            object.__setattr__(made, name, found[name])
        return made

    known[cls] = view
    fields = dataclasses.fields(cls)
    hints = get_type_hints(cls)
    if any(isinstance(hint, dataclasses.InitVar) for hint in hints.values()):
        raise Unsupported(f"{cls.__name__} has an InitVar, which is not stored")
    views = {field.name: view_of(hints[field.name], known) for field in fields}
    computed = {field.name for field in fields if not field.init}
    required = {
        field.name
        for field in fields
        if field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    return view


NATIVE_KINDS: dict[Any, View] = {
    Any: view_of_anything,
    object: view_of_anything,
    None: view_of_none,
    NoneType: view_of_none,
    bool: view_of_bool,
    str: view_of_str,
    int: view_of_int,
    float: view_of_float,
}
