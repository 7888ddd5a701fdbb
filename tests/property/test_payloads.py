"""same value: both databases agree on what they take and on what they give back, which is what went in."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, NamedTuple, NotRequired, cast
from uuid import UUID

import msgspec
import pydantic
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typing_extensions import TypedDict

import workq
from support import SOON, Database, PostgresDatabase, SQLiteDatabase
from workq._codec import TypedCodec
from workq._codec_ways import msgspec_ways, pydantic_ways


class Size(enum.Enum):
    SMALL = "small"
    LARGE = "large"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@dataclass
class Address:
    street: str
    zip: str | None = None
    at: datetime | None = None


@dataclass
class Order:
    id: UUID
    at: datetime
    day: date
    waits: timedelta
    price: Decimal
    size: Size
    level: Level
    weight: float
    count: int
    home: Address
    others: list[Address]
    by_name: dict[str, Address | None]
    dates: dict[str, datetime]
    pair: tuple[int, str]
    raw: bytes
    flags: set[str]
    paid: bool = False
    note: str | None = None
    kind: Literal["a", "b"] = "a"
    parents: list[Order] = field(default_factory=list["Order"])


class Movie(TypedDict):
    title: str
    year: int
    rated: NotRequired[Decimal]
    shown: NotRequired[list[datetime]]


class Point(NamedTuple):
    x: float
    y: float
    label: str | None
    seen: datetime


class Letter(msgspec.Struct):
    to: str
    sent: datetime
    id: UUID
    parts: list[Address]
    tags: dict[str, Decimal]
    size: Size = Size.SMALL


class Signup(pydantic.BaseModel):
    email: str
    born: date
    at: pydantic.AwareDatetime
    id: UUID
    balance: Decimal
    size: Size
    home: Address | None
    more: dict[str, list[int]]


class Anything(pydantic.BaseModel):
    """A model inside another, and fields that could be read in several ways."""

    value: int | str | None
    signup: Signup
    extra: Any = None


text = st.text(max_size=12)
"""Any characters at all but surrogates, NUL included."""
instants = st.datetimes(timezones=st.timezones() | st.just(UTC))
numbers = st.integers() | st.integers(-(2**70), 2**70)
floats = st.floats(allow_nan=False, allow_infinity=False)
decimals = st.decimals(allow_nan=False, allow_infinity=False)
addresses = st.builds(Address, text, st.none() | text, st.none() | instants)
signups = st.builds(
    Signup,
    email=text,
    born=st.dates(),
    at=instants,
    id=st.uuids(),
    balance=decimals,
    size=st.sampled_from(Size),
    home=st.none() | addresses,
    more=st.dictionaries(text, st.lists(numbers, max_size=2), max_size=2),
)


def orders_with(parents: st.SearchStrategy[list[Order]]) -> st.SearchStrategy[Order]:
    return st.builds(
        Order,
        id=st.uuids(),
        at=instants | st.datetimes(),
        day=st.dates(),
        waits=st.timedeltas(),
        price=decimals,
        size=st.sampled_from(Size),
        level=st.sampled_from(Level),
        weight=floats,
        count=numbers,
        home=addresses,
        others=st.lists(addresses, max_size=2),
        by_name=st.dictionaries(text, st.none() | addresses, max_size=2),
        dates=st.dictionaries(text, instants, max_size=2),
        pair=st.tuples(numbers, text),
        raw=st.binary(max_size=8),
        flags=st.sets(text, max_size=3),
        paid=st.booleans(),
        note=st.none() | text,
        kind=st.sampled_from(["a", "b"]),
        parents=parents,
    )


orders = orders_with(st.lists(orders_with(st.just([])), max_size=1))
movies = st.fixed_dictionaries(
    {"title": text, "year": numbers}, optional={"rated": decimals, "shown": st.lists(instants, max_size=2)}
)
points = st.builds(Point, floats, floats, st.none() | text, instants)
letters = st.builds(
    Letter,
    to=text,
    sent=instants,
    id=st.uuids(),
    parts=st.lists(addresses, max_size=2),
    tags=st.dictionaries(text, decimals, max_size=2),
    size=st.sampled_from(Size),
)
anythings = st.builds(
    Anything,
    value=st.none() | numbers | text,
    signup=signups,
    extra=st.none() | st.booleans() | numbers | floats | st.lists(text, max_size=2),
)
TYPES: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "dataclass": (Order, orders),
    "TypedDict": (Movie, movies),
    "NamedTuple": (Point, points),
    "msgspec Struct": (Letter, letters),
    "pydantic model": (Signup, signups),
    "model in a model": (Anything, anythings),
    "list of dataclasses": (list[Address], st.lists(addresses, max_size=3)),
    "dict of instants": (dict[str, datetime], st.dictionaries(text, instants, max_size=3)),
    "union": (Address | None, st.none() | addresses),
}

json_values = st.recursive(
    st.none() | st.booleans() | numbers | floats | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=15,
)
surrogates = st.text(st.characters(categories=["Cs", "Ll"]), min_size=1, max_size=4)
no_json = (
    st.floats()
    | surrogates
    | st.tuples(st.integers())
    | st.binary(max_size=4)
    | st.sets(st.integers(), max_size=2)
    | st.dictionaries(st.integers() | st.none() | surrogates, st.none(), min_size=1, max_size=2)
    | st.datetimes()
    | st.uuids()
    | st.decimals()
    | st.sampled_from([10**4000, -(10**4200), object(), Level.HIGH, Size, ...])
)


def nested(depth: int) -> Any:
    value: Any = "deep"
    for level in range(depth):
        value = [value] if level % 2 else {"": value}
    return value


anything = st.recursive(
    json_values | no_json | st.integers(95, 105).map(nested),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=5,
)


def plain(value: Any) -> Any:
    """A value as what tells it from every other: types, fields, bits of floats, digits of decimals, instants."""
    kind: Any = value.__class__
    match value:
        case None | bool() | str() | bytes() | enum.Enum():
            return kind, value
        case float():
            return kind, value.hex()
        case Decimal():
            return kind, value.as_tuple()
        case datetime():
            return (kind, value) if value.tzinfo is None else (kind, value.astimezone(UTC))
        case dict():
            return kind, [(key, plain(item)) for key, item in cast("dict[Any, Any]", value).items()]
        case set():
            return kind, value
        case tuple() | list():
            return kind, [plain(item) for item in cast("list[Any]", value)]
        case pydantic.BaseModel():
            return kind, {name: plain(getattr(value, name)) for name in kind.model_fields}
        case msgspec.Struct():
            return kind, {name: plain(getattr(value, name)) for name in value.__struct_fields__}
        case _ if dataclasses.is_dataclass(value):
            return kind, {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        case _:
            return kind, value


class Side:
    """One of the two databases, with an executor that keeps what its handlers get."""

    def __init__(self, database: Database, queue: workq.Queue) -> None:
        self.database = database
        self.queue = queue
        self.got: dict[int, Any] = {}

    def keeps(self, spec: workq.Spec[Any]) -> workq.Handler[Any, Any]:
        @workq.handler(spec)
        async def keep(task: workq.Task[Any]) -> None:
            self.got[task.id] = task.payload

        return keep

    async def sent(self, spec: workq.Spec[Any] | str, payload: Any) -> tuple[int | None, str | None]:
        """The id, or why it was refused."""
        try:
            return await self.queue.enqueue(None, spec, payload, delay=3600), None
        except (ValueError, TypeError) as error:
            return None, f"{type(error).__name__}: {error}"

    async def shown(self, id: int) -> Any:
        """What `get` shows of it."""
        row = await self.queue.get(id)
        assert row is not None
        return row.payload

    async def ran(self, id: int) -> Any:
        """What its handler gets."""
        assert await self.queue.reschedule(None, id)
        await self.queue.wait(timeout=SOON)
        assert await self.queue.get(id) is None
        return self.got.pop(id)


SPECS = {name: workq.Spec(name, kind) for name, (kind, _) in TYPES.items()}
PLAIN: workq.Spec[Any] = workq.Spec("plain", object)


@pytest_asyncio.fixture
async def both(tmp_path: Path, postgres: PostgresDatabase) -> AsyncGenerator[list[Side]]:
    """SQLite and PostgreSQL at once."""
    databases: list[Database] = [SQLiteDatabase(tmp_path / "both.db"), postgres]
    async with AsyncExitStack() as stack:
        sides: list[Side] = []
        for database in databases:
            queue = workq.Queue(await stack.enter_async_context(database.open()))
            await queue.migrate()
            side = Side(database, queue)
            handlers = [side.keeps(spec) for spec in (*SPECS.values(), PLAIN)]
            await stack.enter_async_context(workq.Executor(queue, handlers, poll_interval=0.2))
            sides.append(side)
        yield sides


async def agreed(both: list[Side], spec: workq.Spec[Any] | str, payload: Any) -> bool:
    """Send it to both, compare what comes of it, and say whether it was taken."""
    answers = [await side.sent(spec, payload) for side in both]
    refusals = {refusal for _, refusal in answers}
    assert len(refusals) == 1, answers
    if refusals != {None}:
        for side in both:
            assert await side.queue.find() == [], refusals
        return False
    shown: list[Any] = []
    for side, (id, _) in zip(both, answers, strict=True):
        assert id is not None
        shown.append(await side.shown(id))
        if isinstance(spec, workq.Spec):
            assert plain(await side.ran(id)) == plain(payload)
        else:
            assert plain(shown[-1]) == plain(payload)
            assert await side.queue.delete(None, id)
    assert plain(shown[0]) == plain(shown[1])
    return True


ONE_FIXTURE = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
quick = settings(max_examples=40, deadline=None, suppress_health_check=ONE_FIXTURE)
thorough = settings(max_examples=2000, deadline=None, suppress_health_check=ONE_FIXTURE)


# The code is the same for both, and hypothesis keeps its settings with the function.


async def check_json(both: list[Side], payload: Any) -> None:
    assert await agreed(both, "plain", payload)
    assert await agreed(both, PLAIN, payload)


@quick
@given(payload=json_values)
async def test_both_databases_take_every_json_value_and_give_it_back_equal(both: list[Side], payload: Any) -> None:
    """F42, F43: by its bare name and through a handler."""
    await check_json(both, payload)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@thorough
@given(payload=json_values)
async def test_both_databases_take_thousands_of_json_values(both: list[Side], payload: Any) -> None:
    """F42, F43."""
    await check_json(both, payload)


def is_json(value: Any, depth: int = 0) -> bool:
    """What the documentation says is taken: strict JSON, at most 100 levels, integers that Python will read again."""
    kind: Any = value.__class__
    if kind in (list, dict):
        items = cast("list[Any]", list(value.values()) if kind is dict else value)
        keys_fit = kind is list or all(type(key) is str and storable(key) for key in value)
        return depth < 100 and keys_fit and all(is_json(item, depth + 1) for item in items)
    if kind is float:
        return value - value == 0
    if kind is int:
        return value.bit_length() <= 13_000
    return value is None or kind is bool or (kind is str and storable(value))


def storable(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


async def check_anything(both: list[Side], payload: Any) -> None:
    assert await agreed(both, "plain", payload) == is_json(payload)
    assert await agreed(both, PLAIN, payload) == is_json(payload)


@quick
@given(payload=anything)
async def test_both_databases_refuse_alike_what_is_no_json_and_store_nothing_of_it(
    both: list[Side], payload: Any
) -> None:
    """F42, F43: with the same words, and nothing else is refused."""
    await check_anything(both, payload)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@thorough
@given(payload=anything)
async def test_both_databases_refuse_alike_thousands_of_values(both: list[Side], payload: Any) -> None:
    """F42, F43."""
    await check_anything(both, payload)


async def check_typed(both: list[Side], typed: tuple[str, Any]) -> None:
    name, payload = typed
    await agreed(both, SPECS[name], payload)


typed_values = st.sampled_from(sorted(TYPES)).flatmap(lambda name: TYPES[name][1].map(lambda value: (name, value)))


@settings(quick, max_examples=120)
@given(typed=typed_values)
async def test_both_databases_agree_on_typed_payloads_and_give_them_back_equal(
    both: list[Side], typed: tuple[str, Any]
) -> None:
    """F43: whatever a type can hold is refused by both, or comes back with every digit and instant."""
    await check_typed(both, typed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(thorough, max_examples=5000)
@given(typed=typed_values)
async def test_both_databases_agree_on_thousands_of_typed_payloads(both: list[Side], typed: tuple[str, Any]) -> None:
    """F43."""
    await check_typed(both, typed)


alike = st.sampled_from(["dataclass", "NamedTuple", "list of dataclasses", "dict of instants"])


@settings(quick, max_examples=200)
@given(typed=alike.flatmap(lambda name: TYPES[name][1].map(lambda value: (TYPES[name][0], value))))
def test_msgspec_and_pydantic_write_the_same_and_read_each_others(typed: tuple[Any, Any]) -> None:
    """F43: the one process may have msgspec installed and the other pydantic."""
    kind, payload = typed
    codecs = [TypedCodec(kind, msgspec_ways(kind)), TypedCodec(kind, pydantic_ways(kind))]
    for writer in codecs:
        try:
            text = writer.dumps(payload)
        except workq.PayloadError:
            for other in codecs:
                with pytest.raises(workq.PayloadError):
                    other.dumps(payload)
            return
        for reader in codecs:
            assert plain(reader.loads(text)) == plain(payload)


async def test_of_every_type_ordinary_values_are_taken(both: list[Side]) -> None:
    """F43: the agreement above is not one on refusing everything."""
    at = datetime(2026, 3, 29, 1, 30, 0, 123456, UTC)
    home = Address("Main\0 Street ä€𝄞", None, at)
    small = Order(
        UUID(int=7), at, at.date(), timedelta(days=-1, microseconds=1), Decimal("1.10"), Size.LARGE, Level.HIGH, -0.0,
        2**70, home, [home], {"": None, "x": home}, {"a": at}, (1, "\0"), b"\0\xff", {"a", "b"},
    )  # fmt: skip
    signup = Signup(
        email="\0", born=at.date(), at=at, id=UUID(int=8), balance=Decimal("1E+3"), size=Size.SMALL, home=home,
        more={"a": [1, 2**63]},
    )  # fmt: skip
    ordinary: dict[str, Any] = {
        "dataclass": dataclasses.replace(small, parents=[small]),
        "TypedDict": {"title": "t", "year": 2**53 + 1, "rated": Decimal("0.10"), "shown": [at]},
        "NamedTuple": Point(5e-324, -0.0, None, at),
        "msgspec Struct": Letter("a", at, UUID(int=9), [home], {"x": Decimal("1.50")}, Size.LARGE),
        "pydantic model": signup,
        "model in a model": Anything(value="7", signup=signup, extra=[1, "2"]),
        "list of dataclasses": [home, Address("x")],
        "dict of instants": {"a": at, "b": at.replace(year=1901)},
        "union": home,
    }
    assert ordinary.keys() == TYPES.keys()
    for name, payload in ordinary.items():
        assert await agreed(both, SPECS[name], payload), name


@dataclass
class Wrong:
    """What could stand in a field by mistake."""

    name: str
    payload: Any


mistakes = st.sampled_from(
    [
        Wrong("dataclass", Address("no order")),
        Wrong("dataclass", {"id": 7}),
        Wrong("TypedDict", {"title": "t"}),
        Wrong("TypedDict", {"title": "t", "year": "1999"}),
        Wrong("TypedDict", {"title": "t", "year": 1, "more": 2}),
        Wrong("NamedTuple", (0.0, 0.0, None)),
        Wrong("NamedTuple", Point(float("nan"), 0.0, None, datetime(2026, 1, 1, tzinfo=UTC))),
        Wrong("NamedTuple", Point(0.0, 0.0, "\ud800", datetime(2026, 1, 1, tzinfo=UTC))),
        Wrong("msgspec Struct", None),
        Wrong("msgspec Struct", Letter("a", cast(Any, "today"), UUID(int=9), [], {})),
        Wrong("pydantic model", {"email": "x"}),
        Wrong("pydantic model", Signup.model_construct(email=7, born=None)),
        Wrong("list of dataclasses", (Address("x"),)),
        Wrong("list of dataclasses", [Address("x"), None]),
        Wrong("list of dataclasses", [Address("\ud800")]),
        Wrong("list of dataclasses", [Address(cast(Any, 7))]),
        Wrong("dict of instants", {"a": "2026-01-01T00:00:00Z"}),
        Wrong("dict of instants", {7: datetime(2026, 1, 1, tzinfo=UTC)}),
        Wrong("union", "neither"),
    ]
)


@settings(quick, max_examples=60)
@given(wrong=mistakes)
async def test_both_databases_refuse_alike_what_its_type_does_not_allow(both: list[Side], wrong: Wrong) -> None:
    """F43: before anything is sent."""
    assert not await agreed(both, SPECS[wrong.name], wrong.payload)
