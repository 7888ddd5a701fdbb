"""The promise "same value": what a codec takes comes back equal, and what would not is refused before sending."""

from __future__ import annotations

import enum
import itertools
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, NotRequired, TypeVar
from uuid import UUID
from zoneinfo import ZoneInfo

import attrs
import msgspec
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import core_schema
from typing_extensions import TypedDict

from workq import _json
from workq._codec import Codec, codec_for
from workq._errors import PayloadError


def numbered() -> Callable[[object], str]:
    """Names for parameters whose text is not the same in every process."""
    numbers = itertools.count(1)
    return lambda value: str(next(numbers))


LIBRARIES = ("msgspec", "pydantic", "builtin")
INNER = TypeVar("INNER")

NAN = float("nan")
INFINITY = float("inf")
SURROGATE = "\ud800"
EXACT_INTS = [0, 2**53 + 1, 2**63, -(2**63) - 1, 2**64, -(2**70), 10**300]
EXACT_FLOATS = [-0.0, 1e-320, 5e-324, 1e22, 0.1, 1.7976931348623157e308, 3.0]


def codec_with(library: str, kind: Any) -> Codec[Any]:
    """The codec of a type where only one of the libraries is installed, or none."""
    with pytest.MonkeyPatch.context() as patch:
        for other in ("msgspec", "pydantic"):
            if other != library:
                patch.setitem(sys.modules, other, None)
        return codec_for(kind)


every_library = pytest.mark.parametrize("library", LIBRARIES)


@dataclass
class Email:
    to: str
    subject: str = "hello"


@dataclass
class TracedEmail(Email):
    trace: object = None


@dataclass
class Item:
    sku: str
    count: int
    price: float | None = None


@dataclass
class Order:
    id: int
    paid: bool
    items: list[Item]
    notes: dict[str, str]
    first: Item | None
    parents: list[Order] = field(default_factory=list["Order"])
    size: Literal["small", "large"] = "small"
    reference: int | str | None = None


@dataclass
class Loose:
    value: Any
    maybe: float | None = None


@dataclass(eq=False)
class ById:
    name: str
    tags: list[str]


@dataclass
class Cached:
    name: str
    hits: Any = field(default=0, compare=False)


@dataclass
class Doubling:
    amount: int

    def __post_init__(self) -> None:
        self.amount *= 2


@dataclass
class Computed:
    first: str
    full: str = field(init=False, default="")

    def __post_init__(self) -> None:
        self.full = self.first + "!"


@dataclass
class Counted:
    name: str
    seen: int = field(init=False, default=0)


@dataclass
class Salted:
    name: str
    salt: InitVar[str]


def same(one: object, other: object) -> bool:
    """Equal, and to the last bit: -0.0 is not 0.0, and 1 is not True."""
    return one == other and repr(one) == repr(other)


# Plain JSON: Task[Any], and tasks enqueued by their bare name

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(deadline=None)
@given(json_values)
def test_every_json_value_comes_back_equal(value: Any) -> None:
    codec = codec_for(Any)
    assert same(codec.loads(codec.dumps(value)), value)


@pytest.mark.parametrize("number", [*EXACT_INTS, *EXACT_FLOATS], ids=str)
def test_plain_numbers_come_back_to_the_last_bit(number: float) -> None:
    codec = codec_for(object)
    assert same(codec.loads(codec.dumps([number])), [number])


@pytest.mark.parametrize(
    "value",
    [NAN, INFINITY, -INFINITY, SURROGATE, {SURROGATE: 1}, (1,), {1}, {1: 2}, {None: 1}, b"x", object(), Email("a"),
     datetime.now(UTC), Decimal(1), 10**5000],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_plain_json_would_not_give_back_is_refused(value: Any) -> None:
    with pytest.raises(PayloadError):
        codec_for(Any).dumps({"deep": [value]})


def test_the_refusal_of_a_plain_value_names_its_place() -> None:
    with pytest.raises(PayloadError, match=r"payload\['users'\]\[1\]\['at'\] is of type datetime"):
        codec_for(Any).dumps({"users": [{}, {"at": datetime.now(UTC)}]})
    with pytest.raises(PayloadError, match=r"payload\[0\] has the key 3; JSON has only str keys"):
        codec_for(Any).dumps([{3: 4}])
    with pytest.raises(PayloadError, match=r"payload\['a'\] contains a lone surrogate"):
        codec_for(Any).dumps({"a": SURROGATE})


def test_the_text_is_compact_and_keeps_other_scripts_readable() -> None:
    assert codec_for(Any).dumps({"name": "Zoë", "n": [1, None]}) == '{"name":"Zoë","n":[1,null]}'
    assert codec_for(Email).dumps(Email("Zoë")) == '{"to":"Zoë","subject":"hello"}'


@pytest.mark.parametrize("text", ["", "{", "NaN", '{"a":Infinity}', "1" * 5000, "[" * 100_000])
def test_stored_text_that_is_no_json_is_a_payload_error(text: str) -> None:
    with pytest.raises(PayloadError):
        codec_for(Any).loads(text)


# No payload


def test_a_task_without_payload_takes_only_none() -> None:
    for kind in (None, type(None)):
        codec = codec_for(kind)
        assert codec.dumps(None) == "null"
        assert codec.loads("null") is None
        with pytest.raises(PayloadError, match="takes no payload"):
            codec.dumps({})
        with pytest.raises(PayloadError, match="takes no payload"):
            codec.loads("{}")


# Nesting


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


@pytest.mark.parametrize("kind", [Any, list[Any], Loose])
@every_library
def test_a_hundred_levels_are_taken_and_more_are_refused(library: str, kind: Any) -> None:
    codec = codec_with(library, kind)

    def payload(levels: int) -> Any:
        return Loose(nested(levels - 1)) if kind is Loose else nested(levels)

    assert codec.loads(codec.dumps(payload(100))) == payload(100)
    for levels in (101, 300, 100_000):
        with pytest.raises(PayloadError):
            codec.dumps(payload(levels))


@every_library
@pytest.mark.parametrize("kind", [Any, list[Any]])
def test_a_value_that_contains_itself_is_refused(library: str, kind: Any) -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(PayloadError):
        codec_with(library, kind).dumps(value)


@pytest.mark.parametrize("text", ["[NaN]", '{"a":-Infinity}', f'"{SURROGATE}"', "[" * 101 + "]" * 101])
def test_text_that_a_database_refuses_is_found_before_it_is_sent(text: str) -> None:
    with pytest.raises(PayloadError):
        _json.check_encoded(text)
    _json.check_encoded('["NaN","Infinity","\\ud800"]')


def test_only_brackets_outside_strings_are_levels() -> None:
    _json.check_depth('["' + "[" * 200 + '\\"{{{\\\\"]')
    _json.check_depth("[" + ",".join(["[{},{}]"] * 500) + "]")
    _json.check_depth("[" * 50 + '{"a":' * 50 + "1" + "}" * 50 + "]" * 50)
    with pytest.raises(PayloadError):
        _json.check_depth("[" * 51 + '{"a":' * 50 + "1" + "}" * 50 + "]" * 51)


# Dataclasses, by each library and by none

items = st.builds(Item, st.text(), st.integers(), st.none() | st.floats(allow_nan=False, allow_infinity=False))
orders = st.recursive(
    st.builds(
        Order,
        id=st.integers(),
        paid=st.booleans(),
        items=st.lists(items),
        notes=st.dictionaries(st.text(), st.text()),
        first=st.none() | items,
        parents=st.just(list[Order]()),
        size=st.sampled_from(["small", "large"]),
        reference=st.none() | st.integers() | st.text(),
    ),
    lambda inner: st.builds(Order, st.integers(), st.booleans(), st.just(list[Item]()), st.just(dict[str, str]()),
                            st.none(), st.lists(inner, max_size=3)),
    max_leaves=5,
)  # fmt: skip


@every_library
def test_every_order_comes_back_equal(library: str) -> None:
    codec = codec_with(library, Order)

    @settings(deadline=None)
    @given(orders)
    def comes_back(order: Order) -> None:
        assert same(codec.loads(codec.dumps(order)), order)

    comes_back()


@every_library
@pytest.mark.parametrize(
    ("kind", "numbers"), [(int, EXACT_INTS), (float, EXACT_FLOATS), (int | float, [*EXACT_INTS, *EXACT_FLOATS])]
)
def test_typed_numbers_come_back_to_the_last_bit(library: str, kind: Any, numbers: list[Any]) -> None:
    codec = codec_with(library, list[kind])
    assert same(codec.loads(codec.dumps(numbers)), numbers)


@every_library
def test_an_int_may_stand_for_a_float_if_it_is_one(library: str) -> None:
    codec = codec_with(library, Item)
    assert codec.loads(codec.dumps(Item("a", 1, 3))) == Item("a", 1, 3.0)
    with pytest.raises(PayloadError):
        codec.dumps(Item("a", 1, 2**53 + 1))


WRONG: list[tuple[Any, Any]] = [
    (Email, Email(3)),  # type: ignore[arg-type]
    (Email, {"to": "a", "subject": "b"}),
    (Email, Item("a", 1)),
    (Email, None),
    (Email, "a"),
    (Email | None, {"to": "a"}),
    (list[Email], [{"to": "a"}]),
    (list[Email], (Email("a"),)),
    (Item, Item("a", True)),
    (Item, Item("a", "3")),  # type: ignore[arg-type]
    (Item, Item("a", 3.0)),  # type: ignore[arg-type]
    (Item, Item("a", 1, NAN)),
    (Item, Item("a", 1, INFINITY)),
    (Item, Item(SURROGATE, 1)),
    (Loose, Loose(NAN)),
    (Loose, Loose([1, (2, 3)])),
    (Loose, Loose({1: 2})),
    (Loose, Loose({"deep": [Decimal(1)]})),
    (Loose, Loose(Email("a"))),
    (Loose, Loose({SURROGATE: 1})),
    (Cached, Cached("a", hits=NAN)),
    (Cached, Cached("a", hits=(1,))),
    (ById, ById("a", ("b",))),  # type: ignore[arg-type]
    (Doubling, Doubling(2)),
    (int, True),
    (int, "3"),
    (float, "3"),
    (str, None),
    (bool, 1),
    (list[int], [1, "2"]),
    (list[int], (1, 2)),
    (dict[str, int], {1: 2}),
    (dict[str, int], {"a": True}),
    (int | None, "x"),
    (Literal["a", "b"], "c"),
    (Literal[1], True),
]


@every_library
@pytest.mark.parametrize(("kind", "payload"), WRONG, ids=numbered())
def test_what_would_not_come_back_as_declared_is_refused(library: str, kind: Any, payload: Any) -> None:
    with pytest.raises(PayloadError):
        codec_with(library, kind).dumps(payload)


RIGHT: list[tuple[Any, Any]] = [
    (Email, Email("a\0b")),
    (Email | None, None),
    (Email | None, Email("a")),
    (int | None, 3),
    (int | str | None, "x"),
    (dict[str, Email], {"x": Email("a")}),
    (dict[str, Any], {"x": [1, None, {"y": -0.0}]}),
    (dict[str, object], {"x": [1]}),
    (list[list[int]], [[1], []]),
    (dict, {"a": 1}),
    (list, [1, "a"]),
    (bool, True),
    (str, "null"),
    (Literal["a", 1], 1),
    (NewType("UserId", int), 3),
    (Annotated[int, "of users"], 3),
    (list[Annotated[int, "of users"]], [3]),
    (dict[Annotated[str, "of users"], Annotated[Email, "theirs"] | None], {"x": Email("a")}),
    (Annotated[float, "or not"] | int, 3),
    (Cached, Cached("a", hits=[1])),
    (Computed, Computed("a")),
]


@every_library
@pytest.mark.parametrize(("kind", "payload"), RIGHT, ids=numbered())
def test_what_fits_the_declared_type_comes_back(library: str, kind: Any, payload: Any) -> None:
    codec = codec_with(library, kind)
    assert same(codec.loads(codec.dumps(payload)), payload)


@every_library
def test_a_refusal_names_the_type_the_place_and_what_was_expected(library: str) -> None:
    with pytest.raises(PayloadError, match=r"the payload of type Email: .*str.* - at `\$\.to`"):
        codec_with(library, Email).dumps(Email(3))  # type: ignore[arg-type]
    with pytest.raises(PayloadError, match=r"the payload of type list\[Order\]: .* - at `\$\[0\]\.items\[1\]\.count`"):
        codec_with(library, list[Order]).loads(
            '[{"id":1,"paid":true,"items":[{"sku":"a","count":1},{"sku":"a","count":{}}],"notes":{},"first":null}]'
        )
    with pytest.raises(PayloadError, match=r"^the payload of type Email: Expected `Email`, got `dict`$"):
        codec_with(library, Email).dumps({"to": "a"})
    with pytest.raises(PayloadError, match=r"the payload of type dict\[str, Any\]: .*'a'\]"):
        codec_with(library, dict[str, Any]).dumps({"a": (1, 2)})


@every_library
@pytest.mark.parametrize(
    "text", ["", "{", "null", "3", "[]", "{}", '{"to":3}', '{"to":null}', '{"to":"\\ud800"', "[" * 100_000]
)
def test_text_that_does_not_decode_is_a_payload_error_naming_the_type(library: str, text: str) -> None:
    with pytest.raises(PayloadError, match="the payload of type Email: "):
        codec_with(library, Email).loads(text)


@pytest.mark.parametrize("library", ["msgspec", "builtin"])
def test_a_missing_field_is_named(library: str) -> None:
    with pytest.raises(PayloadError, match=r"missing required field `sku` - at `\$\[1\]`"):
        codec_with(library, list[Item]).loads('[{"sku":"a","count":1},{"count":1}]')


@pytest.mark.parametrize("library", ["msgspec", "builtin"])
@pytest.mark.parametrize("kind", [bool, int, Literal[1]])
def test_true_is_no_number_and_1_no_truth(library: str, kind: Any) -> None:
    with pytest.raises(PayloadError):
        codec_with(library, kind).loads("1" if kind is bool else "true")


@pytest.mark.parametrize("library", ["msgspec", "builtin"])
def test_a_field_that_init_does_not_take_comes_back_as_it_was_left(library: str) -> None:
    payload = Counted("a")
    payload.seen = 3
    codec = codec_with(library, Counted)
    assert codec.loads(codec.dumps(payload)) == payload


@every_library
def test_text_of_older_and_newer_versions_of_the_type_is_read(library: str) -> None:
    codec = codec_with(library, Email)
    assert codec.loads('{"to":"a"}') == Email("a", "hello")
    assert codec.loads('{ "to": "a", "subject": "b", "added_later": [1] }') == Email("a", "b")


@every_library
def test_a_subclass_is_stored_as_the_declared_type(library: str) -> None:
    payload = TracedEmail("a", trace="secret")
    for kind, given_payload, view in (
        (Email, payload, Email("a")),
        (Email | None, payload, Email("a")),
        (list[Email], [payload], [Email("a")]),
    ):
        codec = codec_with(library, kind)
        text = codec.dumps(given_payload)
        assert "secret" not in text
        assert codec.loads(text) == view


@every_library
def test_what_a_subclass_adds_need_not_be_storable(library: str) -> None:
    codec = codec_with(library, Email)
    assert codec.loads(codec.dumps(TracedEmail("a", trace=object()))) == Email("a")
    with pytest.raises(PayloadError):
        codec.dumps(TracedEmail(3))  # type: ignore[arg-type]


@dataclass
class Envelope:
    email: Email
    copies: dict[str, list[Email | None]] = field(default_factory=dict[str, list[Email | None]])


@every_library
@pytest.mark.parametrize(
    ("kind", "payload", "view"),
    [
        (list[Email], [Email("a"), TracedEmail("b", trace=object())], [Email("a"), Email("b")]),
        (Envelope, Envelope(TracedEmail("a", trace=object())), Envelope(Email("a"))),
        (
            list[Envelope],
            [Envelope(Email("a"), {"x": [None, TracedEmail("b", trace=object())]})],
            [Envelope(Email("a"), {"x": [None, Email("b")]})],
        ),
    ],
    ids=numbered(),
)
def test_subclasses_at_any_depth_are_stored_as_the_declared_type(
    library: str, kind: Any, payload: Any, view: Any
) -> None:
    codec = codec_with(library, kind)
    assert same(codec.loads(codec.dumps(payload)), view)


@pytest.mark.parametrize("library", ["msgspec", "pydantic"])
def test_what_cannot_be_stored_of_a_subclass_further_down_is_refused_by_its_place(library: str) -> None:
    with pytest.raises(PayloadError, match=r"the payload of type list\[Envelope\]: .*str.* - at `\$\[0\]\.email\.to`"):
        codec_with(library, list[Envelope]).dumps([Envelope(TracedEmail(3, trace=object()))])  # type: ignore[arg-type]


@every_library
@pytest.mark.parametrize("number", [NAN, INFINITY, -INFINITY])
@pytest.mark.parametrize("kind", [float, list[float], list[int | float], Item])
def test_the_refusal_of_a_float_that_is_no_number_says_so(library: str, kind: Any, number: float) -> None:
    payload = {float: number, Item: Item("a", 1, number)}.get(kind, [1, number])
    with pytest.raises(PayloadError, match=r"JSON does not have, cannot be stored|JSON has no such number"):
        codec_with(library, kind).dumps(payload)


@every_library
def test_the_refusal_of_a_type_that_changes_its_value_names_the_remedy(library: str) -> None:
    with pytest.raises(PayloadError, match=r"`\$.amount` would not come back equal.*__post_init__.*codec=\.\.\."):
        codec_with(library, Doubling).dumps(Doubling(2))


@every_library
def test_objects_that_equal_only_themselves_are_taken(library: str) -> None:
    codec = codec_with(library, ById)
    back = codec.loads(codec.dumps(ById("a", ["b"])))
    assert (type(back), back.name, back.tags) == (ById, "a", ["b"])


@every_library
def test_a_payload_is_encoded_as_its_handler_left_it(library: str) -> None:
    codec = codec_with(library, Order)
    order = codec.loads('{"id":1,"paid":false,"items":[],"notes":{},"first":null}')
    order.items.append(Item("a", 1))
    order.paid = True
    assert codec.loads(codec.dumps(order)) == order
    order.items.append("b")
    with pytest.raises(PayloadError, match="the payload of type Order"):
        codec.dumps(order)


class Color(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


class Word(enum.StrEnum):
    HI = "hi"


@every_library
def test_a_subclass_of_a_native_type_is_stored_as_the_value_it_equals(library: str) -> None:
    codec = codec_with(library, Item)
    back = codec.loads(codec.dumps(Item(Word.HI, Level.LOW)))
    assert same(back, Item("hi", 1))


# More types, by msgspec and by pydantic


class Point(NamedTuple):
    x: int
    y: int = 0


class Person(TypedDict):
    name: str
    age: NotRequired[int]


@dataclass
class Box(Generic[INNER]):
    inner: INNER


@dataclass(frozen=True)
class Key:
    name: str


@dataclass(frozen=True)
class LongKey(Key):
    more: str = ""


@dataclass
class Rich:
    at: datetime
    day: date
    hour: time
    span: timedelta
    id: UUID
    amount: Decimal
    color: Color
    level: Level
    raw: bytes
    pair: tuple[int, str]
    numbers: tuple[int, ...]
    letters: set[str]
    keys: frozenset[Key]
    by_id: dict[UUID, int]
    by_number: dict[int, str]


ID = UUID("12345678-1234-5678-1234-567812345678")
RICH = Rich(
    at=datetime(2024, 2, 29, 12, 30, 15, 123456, tzinfo=UTC),
    day=date(2024, 2, 29),
    hour=time(1, 2, 3),
    span=timedelta(days=-1, microseconds=3),
    id=ID,
    amount=Decimal("1.10"),
    color=Color.RED,
    level=Level.LOW,
    raw=b"bytes",
    pair=(1, "a"),
    numbers=(1, 2, 3),
    letters={"a", "b"},
    keys=frozenset({Key("k")}),
    by_id={ID: 1},
    by_number={1: "one"},
)

TYPED: list[tuple[Any, Any]] = [
    (Rich, RICH),
    (datetime, RICH.at),
    (datetime, datetime(2024, 1, 1)),  # noqa: DTZ001
    (date, RICH.day),
    (UUID, ID),
    (Decimal, Decimal("-0.00")),
    (Color, Color.RED),
    (bytes, b""),
    (tuple[int, ...], (1, 2)),
    (tuple[int, str], (1, "a")),
    (set[int], {1, 2}),
    (frozenset[Key], frozenset({Key("a"), Key("b")})),
    (Point, Point(1, 2)),
    (list[Point], [Point(1)]),
    (Person, {"name": "Zoë"}),
    (Person, {"name": "Zoë", "age": 3}),
    (Box[int], Box(3)),
    (Box[Email], Box(Email("a"))),
    (UUID | None, ID),
    (dict[UUID, list[date]], {ID: [RICH.day]}),
]


@pytest.mark.parametrize("library", ["msgspec", "pydantic"])
@pytest.mark.parametrize(("kind", "payload"), TYPED, ids=numbered())
def test_types_of_the_standard_library_come_back_as_such(library: str, kind: Any, payload: Any) -> None:
    codec = codec_with(library, kind)
    back = codec.loads(codec.dumps(payload))
    assert back == payload
    assert type(back) is type(payload)


@pytest.mark.parametrize("library", ["msgspec", "pydantic"])
@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (tuple[int, ...], [1, 2]),
        (set[int], [1, 2]),
        (list[int], {1, 2}),
        (Point, (1, 2)),
        (Point, Point("1")),  # type: ignore[arg-type]
        (list[Point], [(1, 2)]),
        (Person, {"name": "a", "nickname": "b"}),
        (Person, {"name": 3}),
        (Person, [1]),
        (datetime, "2024-01-01T00:00:00Z"),
        (list[datetime], ["2024-01-01T00:00:00Z"]),
        (date, datetime(2024, 1, 1, tzinfo=UTC)),
        (UUID, str(ID)),
        (list[UUID], [str(ID)]),
        (list[Decimal], ["1.5"]),
        (list[Decimal], [3]),
        (Decimal, Decimal("NaN")),
        (Decimal, Decimal("sNaN")),
        (Color, "red"),
        (list[Color], ["red"]),
        (bytes, "x"),
        (Box[int], Box("a")),
    ],
    ids=str,
)
def test_what_only_encodes_alike_is_refused(library: str, kind: Any, payload: Any) -> None:
    with pytest.raises(PayloadError):
        codec_with(library, kind).dumps(payload)


class Span(NamedTuple):
    span: timedelta
    raw: bytes


class Blob(TypedDict):
    type: bytes
    default: NotRequired[timedelta]


@dataclass
class Either:
    raw: bytes | Email | None
    span: timedelta | Email | None


LONG = timedelta(days=400, hours=25, microseconds=1)
BERLIN = ZoneInfo("Europe/Berlin")

ALIKE: list[tuple[Any, list[Any]]] = [
    (bytes, [b"", b"hello\0", b"abcd", b"\xff\xfb\xbf\xfe"]),
    (set[bytes], [{b"\xff"}]),
    (Sequence[bytes], [[b"\xff"]]),
    (dict[bytes, timedelta], [{b"\xff\xfb": LONG}]),
    (list[Annotated[bytes, pydantic.Field(max_length=2)]], [[b"\xff\xfb", b""]]),
    (timedelta, [timedelta(0), timedelta(hours=1), LONG, -LONG, timedelta(microseconds=-1), timedelta(10),
                 timedelta(days=365), timedelta.max, timedelta.min]),
    (datetime, [RICH.at, RICH.at.replace(tzinfo=None), datetime(2026, 7, 1, 1, microsecond=5, tzinfo=BERLIN),
                datetime.min.replace(tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, 999999, UTC),
                datetime(2026, 1, 1, tzinfo=timezone(-timedelta(hours=23, minutes=59)))]),
    (date, [date.min, RICH.day, date.max]),
    (time, [time(), time(1, 2, 3, 4), time(1, tzinfo=UTC), time(1, tzinfo=timezone(timedelta(minutes=-90)))]),
    (UUID, [ID, UUID(int=0)]),
    (Decimal, [Decimal(text) for text in ("1.10", "1E+3", "-0", "0E+5", "1E-30", "Infinity", "9" * 50)]),
    (Decimal | int, [Decimal(5), 5]),
    (Color | Level, [Color.RED, Level.LOW]),
    (Word, [Word.HI]),
    (set[int], [{3, 1}, set()]),
    (frozenset[Key], [frozenset({Key("a")})]),
    (tuple[int, bytes], [(1, b"\xff")]),
    (tuple[timedelta, ...], [(LONG, LONG)]),
    (dict[UUID, date], [{ID: date.max}]),
    (dict[timedelta, Decimal], [{LONG: Decimal("1.0")}]),
    (dict[Color, time], [{Color.RED: time(1)}]),
    (Rich, [RICH]),
    (Span, [Span(LONG, b"\xff")]),
    (Blob, [{"type": b"\xff"}, {"type": b"", "default": LONG}]),
    (Either, [Either(b"\xff", LONG), Either(Email("a"), Email("b")), Either(None, None)]),
    (list[Box[bytes]], [[Box(b"\xff")]]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "payloads"), ALIKE, ids=numbered())
def test_either_library_writes_the_same_text_and_reads_the_others(kind: Any, payloads: list[Any]) -> None:
    """A task may be enqueued where one is installed, and run where the other is."""
    by_msgspec, by_pydantic = codec_with("msgspec", kind), codec_with("pydantic", kind)
    for payload in payloads:
        text = by_msgspec.dumps(payload)
        assert by_pydantic.dumps(payload) == text
        for codec in (by_msgspec, by_pydantic):
            assert codec.loads(text) == payload


@pytest.mark.parametrize("library", ["msgspec", "pydantic"])
@pytest.mark.parametrize("text", ['"hello"', '"_-8="', '"\u00e4"', "3", "[1]"])
def test_text_that_is_no_base64_is_refused(library: str, text: str) -> None:
    with pytest.raises(PayloadError):
        codec_with(library, bytes).loads(text)


@pytest.mark.parametrize("library", ["msgspec", "pydantic"])
def test_a_set_of_a_subclass_comes_back_as_a_set_of_the_declared_type(library: str) -> None:
    codec = codec_with(library, set[Key])
    assert codec.loads(codec.dumps({LongKey("a", "x"), LongKey("b")})) == {Key("a"), Key("b")}
    with pytest.raises(PayloadError):
        codec.dumps({LongKey("a", "x"), LongKey("a", "y")})


@pytest.mark.parametrize("library", ["msgspec", "pydantic"])
def test_the_repeated_hour_of_the_year_is_no_reason_to_refuse_a_time(library: str) -> None:
    # Python calls this time unequal to itself in UTC, although both are the same instant.
    at = datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin"))
    codec = codec_with(library, datetime)
    assert codec.loads(codec.dumps(at)).timestamp() == at.timestamp()


def test_subclasses_that_libraries_make_of_standard_types_are_taken() -> None:
    class FrozenTime(datetime): ...

    class DriverUUID(UUID): ...

    class Cents(Decimal): ...

    at = FrozenTime(2024, 1, 1, 12, tzinfo=UTC)
    assert codec_for(datetime).loads(codec_for(datetime).dumps(at)) == at
    assert codec_for(UUID).loads(codec_for(UUID).dumps(DriverUUID(int=3))) == UUID(int=3)
    assert codec_for(list[Decimal]).loads(codec_for(list[Decimal]).dumps([Cents("1.5")])) == [Decimal("1.5")]


class Struct(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    count: int = 0


class WiderStruct(Struct):
    extra: object = None


class StructById(msgspec.Struct, eq=False):
    name: str


class Cat(msgspec.Struct, tag=True):
    name: str


class TracedCat(Cat):
    trace: object = None


class Pair(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    left: int
    right: int = 0


class TracedPair(Pair):
    trace: object = None


class Dog(msgspec.Struct, tag=True):
    name: str


@attrs.define
class Attrs:
    name: str
    counts: list[int]
    _cache: int = attrs.field(default=0, alias="cache")


def test_what_msgspec_leaves_out_of_an_attrs_class_is_refused_rather_than_lost() -> None:
    with pytest.raises(PayloadError, match=r"`\$._cache` would not come back equal"):
        codec_for(Attrs).dumps(Attrs("a", [], cache=3))


def test_structs_and_attrs_classes_come_back() -> None:
    payloads = [(Struct, Struct("a")), (WiderStruct, WiderStruct("a", extra=[1])), (Attrs, Attrs("a", [1]))]
    for kind, payload in [*payloads, (Cat | Dog, Dog("a"))]:
        codec = codec_for(kind)
        assert same(codec.loads(codec.dumps(payload)), payload)
    assert codec_for(StructById).loads(codec_for(StructById).dumps(StructById("a"))).name == "a"
    assert same(codec_for(Struct).loads(codec_for(Struct).dumps(WiderStruct("a", extra=object()))), Struct("a"))
    with pytest.raises(PayloadError, match=r"the payload of type Struct: Expected `int`, got `str` - at `\$.count`"):
        codec_for(Struct).dumps(Struct("a", "b"))  # type: ignore[arg-type]


class Seen(NamedTuple):
    struct: Struct


class Zoo(TypedDict):
    cats: NotRequired[list[Cat | Dog]]


@pytest.mark.parametrize(
    ("kind", "payload", "view"),
    [
        (list[Struct], [WiderStruct("a")], [Struct("a")]),
        (dict[int, Struct | None], {1: WiderStruct("a", extra=object()), 2: None}, {1: Struct("a"), 2: None}),
        (list[Cat], [Cat("a"), TracedCat("b")], [Cat("a"), Cat("b")]),
        (Cat | Dog, TracedCat("a"), Cat("a")),
        (Zoo, {"cats": [TracedCat("a", object()), Dog("b")]}, {"cats": [Cat("a"), Dog("b")]}),
        (tuple[Struct, int], (WiderStruct("a", extra=object()), 1), (Struct("a"), 1)),
        (tuple[Pair, ...], (TracedPair(1, 2, object()),), (Pair(1, 2),)),
        (Seen, Seen(WiderStruct("a", extra=object())), Seen(Struct("a"))),
        (Box[Annotated[Struct, msgspec.Meta(extra={"x": 1})]], Box(WiderStruct("a")), Box(Struct("a"))),
    ],
    ids=numbered(),
)
def test_subclasses_of_structs_are_stored_as_declared_wherever_they_are(kind: Any, payload: Any, view: Any) -> None:
    codec = codec_for(kind)
    assert same(codec.loads(codec.dumps(payload)), view)


def test_what_msgspec_cannot_write_is_refused_by_its_place() -> None:
    with pytest.raises(PayloadError, match=r"objects of type object is unsupported - at `\$\[0\].inner\['x'\]`"):
        codec_for(list[Box[dict[str, Any]]]).dumps([Box({"x": object()})])


# Pydantic models


class Model(pydantic.BaseModel):
    name: str
    count: int = 0
    ratio: float | None = None


class WiderModel(Model):
    extra: str = "secret"


class StrictModel(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    by_alias: int = pydantic.Field(alias="byAlias")
    read_alias: int = pydantic.Field(validation_alias="readAlias")


class OpenModel(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow", ser_json_inf_nan="constants")
    ratio: float


class WordyModel(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(ser_json_inf_nan="strings")
    ratio: float


class PrivateModel(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    name: str
    _calls: int = 0

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def shout(self) -> str:
        return self.name.upper()

    def call(self) -> None:
        self._calls += 1


class Page(pydantic.BaseModel, Generic[INNER]):
    entries: list[INNER]


class Secret(pydantic.BaseModel):
    password: pydantic.SecretStr


@pydantic.dataclasses.dataclass
class PydanticData:
    name: str = pydantic.Field(max_length=3)


class Own:
    """A user's own class, as pydantic lets it be one: without __eq__."""

    def __init__(self, tags: Any) -> None:
        self.tags = tags

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        return core_schema.no_info_plain_validator_function(
            lambda value: value if isinstance(value, cls) else cls(value),
            serialization=core_schema.plain_serializer_function_ser_schema(lambda own: own.tags),
        )


class Raw(pydantic.BaseModel):
    raw: bytes


class SafeRaw(Raw):
    model_config = pydantic.ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")


@dataclass
class RawHolder:
    raw: bytes
    model: Raw


@dataclass
class Holder:
    model: Model
    models: dict[str, list[Model]]


MODELS: list[tuple[Any, Any]] = [
    (Model, Model(name="a", count=2**70, ratio=-0.0)),
    (StrictModel, StrictModel.model_validate({"byAlias": 1, "readAlias": 2})),
    (OpenModel, OpenModel.model_validate({"ratio": 1.5, "more": [1]})),
    (PrivateModel, PrivateModel(name="a")),
    (Page[int], Page[int](entries=[1])),
    (Holder, Holder(Model(name="a"), {"x": [Model(name="b")]})),
    (PydanticData, PydanticData("a")),
    (list[Model], [Model(name="a")]),
    (Model | None, Model(name="a")),
    (Model | int, 3),
    (pydantic.RootModel[list[int]], pydantic.RootModel[list[int]]([1])),
    (Raw, Raw(raw=b"a\0")),
    (SafeRaw, SafeRaw(raw=b"\xff\xfb\xbf")),
    (RawHolder, RawHolder(b"\xff", Raw(raw=b"a\0"))),
    (pydantic.Base64Bytes, b"\xff\xfb\xbf"),
    (str | bytes, "abcd"),
]


@pytest.mark.parametrize(("kind", "payload"), MODELS, ids=numbered())
def test_models_come_back_alone_and_inside_other_types(kind: Any, payload: Any) -> None:
    codec = codec_for(kind)
    assert same(codec.loads(codec.dumps(payload)), payload)


def test_a_model_is_written_by_its_aliases_and_read_by_them_or_by_name() -> None:
    codec = codec_for(StrictModel)
    model = StrictModel.model_validate({"byAlias": 1, "readAlias": 2})
    assert codec.dumps(model) == '{"byAlias":1,"read_alias":2}'
    assert codec.loads('{"by_alias":1,"readAlias":2}') == model


def test_a_pydantic_dataclass_inside_another_type_is_read_by_pydantic() -> None:
    with pytest.raises(PayloadError, match=r"at most 3 characters - at `\$\[0\].name`"):
        codec_for(list[PydanticData]).loads('[{"name":"long"}]')


def test_an_own_class_without_equality_is_compared_by_its_attributes() -> None:
    codec = codec_for(list[Own])
    assert codec.loads(codec.dumps([Own([1])]))[0].tags == [1]
    with pytest.raises(PayloadError, match="is of type tuple and would come back as list"):
        codec.dumps([Own((1,))])


def test_a_generic_model_may_be_built_without_its_argument() -> None:
    codec = codec_for(Page[int])
    assert codec.loads(codec.dumps(Page(entries=[1]))) == Page[int](entries=[1])
    with pytest.raises(PayloadError):
        codec.dumps(Page(entries=["a"]))


def test_a_subclass_of_a_model_is_stored_as_the_declared_model() -> None:
    wider = WiderModel(name="a")
    assert codec_for(Model).loads(codec_for(Model).dumps(wider)) == Model(name="a")
    assert "secret" not in codec_for(Model).dumps(wider)
    assert "secret" not in codec_for(Holder).dumps(Holder(wider, {"x": [wider]}))


def wrong_models() -> list[tuple[Any, Any]]:
    changed = PrivateModel(name="a")
    changed.call()
    return [
        (Model, Model.model_construct(name=3)),
        (Model, Model.model_construct(name="a", count="3")),
        (Model, Model.model_construct(name="a", count=True)),
        (Model, Model(name="a", ratio=NAN)),
        (Model, Model.model_construct(name=SURROGATE)),
        (Model, {"name": "a"}),
        (Model, None),
        (Model, Struct("a")),
        (OpenModel, OpenModel(ratio=INFINITY)),
        (OpenModel, OpenModel(ratio=NAN)),
        (WordyModel, WordyModel(ratio=INFINITY)),
        (OpenModel, OpenModel.model_validate({"ratio": 1, "more": (1, 2)})),
        (PrivateModel, changed),
        (Secret, Secret(password=pydantic.SecretStr("x"))),
        (Holder, Holder({"name": "a"}, {})),  # type: ignore[arg-type]
        (Holder, Holder(Model(name="a"), {"x": (Model(name="b"),)})),  # type: ignore[dict-item]
    ]


@pytest.mark.parametrize(("kind", "payload"), wrong_models(), ids=numbered())
def test_a_model_that_would_not_come_back_is_refused(kind: Any, payload: Any) -> None:
    with pytest.raises(PayloadError):
        codec_for(kind).dumps(payload)


class Tagged(pydantic.BaseModel):
    kind: Literal["tagged"]


class Other(pydantic.BaseModel):
    kind: Literal["other"]


@dataclass
class EitherTag:
    item: Tagged | Other = pydantic.Field(discriminator="kind")


@pytest.mark.parametrize(
    ("kind", "text", "place"),
    [
        (Model, '{"name":"a","count":"hunter2"}', r"\$.count"),
        (Holder, '{"model":{"name":{"hunter2":1}},"models":{}}', r"\$.model.name"),
        (EitherTag, '{"item":{"kind":"hunter2"}}', r"\$.item"),
        (Model, '{"name":"hunter2"', r"\$"),
    ],
)
def test_the_error_of_a_model_says_where_and_not_what(kind: Any, text: str, place: str) -> None:
    with pytest.raises(PayloadError, match=f"the payload of type {kind.__name__}: .* - at `{place}`") as caught:
        codec_for(kind).loads(text)
    assert "hunter2" not in str(caught.value)
    assert caught.value.__suppress_context__


def test_what_a_model_hides_or_cannot_write_is_refused_with_the_remedy() -> None:
    with pytest.raises(PayloadError, match=r"`\$.password` would not come back equal.*SecretStr.*codec=\.\.\."):
        codec_for(Secret).dumps(Secret(password=pydantic.SecretStr("x")))
    with pytest.raises(PayloadError, match='a model with bytes needs .*val_json_bytes="base64"'):
        codec_for(Raw).dumps(Raw(raw=b"\xff"))


def test_a_model_is_refused_without_its_values() -> None:
    with pytest.raises(PayloadError) as caught:
        codec_for(Model).dumps(Model.model_construct(name="a", count="hunter2"))
    assert "hunter2" not in str(caught.value)


# All together

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.binary() | st.decimals()
    | st.datetimes() | st.dates() | st.timedeltas() | st.uuids() | st.sampled_from([Color.RED, Level.LOW, Word.HI]),
    lambda inner: st.lists(inner)
    | st.tuples(inner, inner)
    | st.dictionaries(st.text(st.characters()) | st.integers() | st.booleans() | st.uuids(), inner)
    | st.builds(Loose, inner, st.none() | st.floats())
    | st.builds(Email, inner, inner)
    | st.builds(Key, inner)
    | st.builds(Item, inner, inner, inner)
    | st.builds(Box[Any], inner)
    | st.builds(Point, inner, inner)
    | st.builds(Model.model_construct, name=inner, ratio=inner),
    max_leaves=6,
)  # fmt: skip

keys = st.text(st.characters()) | st.integers() | st.booleans()
SHAPES: list[tuple[Any, Any]] = [
    (dict[str, Any], st.dictionaries(st.text(st.characters()), anything)),
    (list[Any], st.lists(anything)),
    (Loose, st.builds(Loose, anything, st.none() | st.floats())),
    (Loose | None, st.none() | st.builds(Loose, anything, anything)),
    (Item, st.builds(Item, st.text(st.characters()), anything, st.floats() | st.integers())),
    (Email | int, st.builds(Email, anything, st.text())),
    (Box[Any], st.builds(Box[Any], anything)),
    (Box[int | None], st.builds(Box[Any], anything)),
    (Point, st.builds(Point, anything, st.integers())),
    (Model, st.builds(Model.model_construct, name=st.text() | anything, count=anything, ratio=st.floats() | anything)),
    (int | float | None, st.none()),
    (dict[int, Any], st.dictionaries(keys, anything)),
    (tuple[Any, ...], st.lists(anything).map(tuple)),
    (set[Any], st.sets(st.integers() | st.text() | st.floats() | st.binary() | st.uuids() | st.booleans() | st.none())),
    (Decimal, st.decimals() | st.floats()),
    (datetime, st.datetimes(timezones=st.none() | st.just(UTC)) | st.dates()),
    (timedelta, st.timedeltas()),
    (bytes, st.binary()),
]


@pytest.mark.parametrize("library", ["msgspec", "pydantic", "builtin"])
@pytest.mark.parametrize(("kind", "shaped"), SHAPES, ids=numbered())
def test_whatever_is_accepted_comes_back_equal(library: str, kind: Any, shaped: Any) -> None:
    try:
        codec = codec_with(library, kind)
    except TypeError:
        assert library == "builtin"
        return

    @settings(max_examples=40, deadline=None)
    @given(shaped | anything)
    def comes_back_or_is_refused(payload: Any) -> None:
        try:
            text = codec.dumps(payload)
        except PayloadError:
            return
        assert codec.loads(text) == payload
        _json.loads(text)

    comes_back_or_is_refused()


# Which codec, and what if there is none


class Strange:
    pass


@dataclass
class Dated:
    at: datetime


@dataclass
class Unresolvable:
    what: NowhereDefined  # type: ignore[name-defined] # noqa: F821 # pyright: ignore[reportUndefinedVariable]


NEEDS_MORE: list[Any] = [Strange, list[Strange], Dated, tuple[int, ...], Point, Person, Salted, Item | Email, UUID]


@pytest.mark.parametrize("kind", NEEDS_MORE)
def test_a_type_nothing_can_encode_is_refused_at_once_and_the_remedy_named(kind: Any) -> None:
    with pytest.raises(TypeError) as caught:
        codec_with("builtin", kind)
    for remedy in ('pip install "workq[msgspec]"', 'pip install "workq[pydantic]"', "Spec(name, Type, codec=...)"):
        assert remedy in str(caught.value)


def test_with_everything_installed_the_reasons_are_named() -> None:
    with pytest.raises(TypeError, match=r"payload type Strange: msgspec does not know Strange; pydantic: .*codec="):
        codec_for(Strange)


@every_library
def test_a_type_with_an_unknown_name_in_it_is_refused_by_that_name(library: str) -> None:
    with pytest.raises(TypeError, match="Unresolvable cannot be resolved: name 'NowhereDefined' is not defined"):
        codec_with(library, Unresolvable)


def test_what_msgspec_does_not_know_goes_to_pydantic() -> None:
    codec = codec_for(Item | Email)  # msgspec takes one dataclass in a union
    assert codec.loads(codec.dumps(Email("a"))) == Email("a")


def test_nothing_is_imported_before_a_type_needs_it() -> None:
    script = """
import sys
from dataclasses import dataclass
from typing import Any
from workq._codec import codec_for

@dataclass
class Email:
    to: str

codec_for(Any).dumps({}), codec_for(None)
assert not {"msgspec", "pydantic"} & sys.modules.keys(), "too early"
codec_for(Email).loads(codec_for(Email).dumps(Email("a")))
assert "msgspec" in sys.modules and "pydantic" not in sys.modules, "too much"
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
