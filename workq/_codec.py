"""Payload codecs: one is chosen per declared type, and it refuses what would not come back equal."""

from __future__ import annotations

import re
from typing import Any, Protocol, cast, get_origin

from typing_extensions import TypeVar, is_typeddict

from workq import _json
from workq._codec_builtin import builtin_ways
from workq._codec_same import difference, generic_of, name_of
from workq._codec_ways import Unsupported, Ways, is_model, model_ways, msgspec_ways, pydantic_ways, validation_reason
from workq._describe import without_value
from workq._errors import PayloadError

P = TypeVar("P", default=Any)

# Of msgspec and of pydantic, which both write null for a float that is no JSON number.
NULL_FOR_FLOAT = re.compile(r"Expected `[^`]*\bfloat\b[^`]*`, got `null`|valid number, not null")


class Codec(Protocol[P]):
    """Turns payloads of one type into JSON text and back. Give your own with `Spec(name, Type, codec=...)`."""

    def dumps(self, payload: P, /) -> str:
        """Encode a payload. Raise PayloadError for one that `loads` would not give back equal."""
        ...

    def loads(self, text: str, /) -> P:
        """Decode what `dumps` wrote. Whatever this raises fails the task, and the text is kept."""
        ...


class CheckedCodec:
    """A codec of the user's: what it writes must be JSON that both databases take."""

    def __init__(self, name: str, codec: Codec[Any]) -> None:
        if not callable(getattr(codec, "dumps", None)) or not callable(getattr(codec, "loads", None)):
            raise TypeError(f"the codec of {name!r} needs the methods dumps(payload) and loads(text)")
        self._name = name
        self._codec = codec

    def dumps(self, payload: Any, /) -> str:
        text = self._codec.dumps(payload)
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PayloadError(f"the codec of {self._name!r} must return a str, not {type(text).__name__}")
        try:
            _json.loads(text)
            _json.check_encoded(text)
        except PayloadError as error:
            raise PayloadError(f"the codec of {self._name!r} wrote what cannot be stored: {error}") from None
        return text

    def loads(self, text: str, /) -> Any:
        return self._codec.loads(text)


def codec_for(kind: Any) -> Codec[Any]:
    """The codec of a declared payload type. Raises TypeError if nothing installed can encode it."""
    if kind is None or kind is type(None):
        return NoPayload()
    if kind is Any or kind is object:
        return PlainCodec()
    try:
        return TypedCodec(kind, ways_for(kind))
    except NameError as error:
        first_line = str(error).partition("\n")[0]  # pydantic adds a link
        raise TypeError(
            f"the fields of the payload type {name_of(kind)} cannot be resolved: {first_line}. "
            "Define what they name at module level, outside `if TYPE_CHECKING`"
        ) from error


def ways_for(kind: Any) -> Ways:
    """The first way to encode a type that is installed and supports it."""
    if is_model(kind):
        return model_ways(kind)
    reasons: list[str] = []
    for ways in (msgspec_ways, pydantic_ways, builtin_ways):
        try:
            return ways(kind)
        except ModuleNotFoundError as error:
            reasons.append(f'{error.name} is not installed (pip install "workq[{error.name}]")')
        except Unsupported as error:
            reasons.append(str(error))
    raise TypeError(
        f"no codec for the payload type {name_of(kind)}: {'; '.join(reasons)}. "
        "Or give your own: Spec(name, Type, codec=...)"
    )


class NoPayload:
    """The codec of `Task` and `Task[None]`."""

    def dumps(self, payload: None, /) -> str:
        if payload is not None:
            raise PayloadError(f"the task takes no payload, and was given one of type {name_of(type(payload))}")
        return "null"

    def loads(self, text: str, /) -> None:
        if text.strip() != "null":
            raise PayloadError("the task takes no payload, and one is stored")


class PlainCodec:
    """The codec of JSON values: `Task[Any]`, and tasks enqueued by their bare name."""

    def dumps(self, payload: Any, /) -> str:
        return _json.dumps(payload)

    def loads(self, text: str, /) -> Any:
        return _json.loads(text)


class TypedCodec:
    """Encodes, decodes again and compares, so that `dumps` refuses what `loads` would not give back."""

    __slots__ = ("_class", "_decode", "_encode", "_what")

    def __init__(self, kind: Any, ways: Ways) -> None:
        self._class = class_of(kind)
        self._encode, self._decode = ways
        self._what = f"the payload of type {name_of(kind)}"

    def dumps(self, payload: Any, /) -> str:
        try:
            return self._dumps(payload)
        except Exception as error:
            # A chained error would be printed with it, and pydantic's shows the payload.
            raise PayloadError(f"{self._what}: {reason(error)}{remedy(reason(error))}") from None

    def loads(self, text: str, /) -> Any:
        try:
            return self._decode(text)
        except Exception as error:
            raise PayloadError(f"{self._what}: {reason(error)}") from None

    def _dumps(self, payload: Any) -> str:
        if self._class is not None and not isinstance(payload, self._class):
            raise PayloadError(f"Expected `{name_of(self._class)}`, got `{name_of(type(payload))}`")
        text = self._encode(payload)
        _json.check_encoded(text)
        found = difference(payload, self._decode(text))
        if found is not None:
            raise PayloadError(f"`${found[0]}` {found[1]}")
        return text


def class_of(kind: Any) -> type[Any] | None:
    """The class whose instances a payload of this type must be, or None where `difference` alone decides."""
    if isinstance(kind, type) and get_origin(kind) is None and not is_typeddict(kind) and kind is not float:
        return cast("type[Any]", generic_of(kind))
    return None


def remedy(problem: str) -> str:
    """What to do about problems whose messages do not say it."""
    if NULL_FOR_FLOAT.search(problem):
        return "; NaN and infinities, which JSON does not have, cannot be stored"
    if "invalid utf-8 sequence" in problem:
        return '; a model with bytes needs ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")'
    return ""


def reason(error: Exception) -> str:
    """What is wrong, without what pydantic and msgspec quote of the payload."""
    if isinstance(error, RecursionError):
        return "it is nested too deep, or contains itself"
    if type(error).__module__ == "msgspec":
        return without_value(str(error))
    if isinstance(error, (ValueError, TypeError)):
        return validation_reason(error) or str(error)
    return f"{type(error).__name__}: {error}"
