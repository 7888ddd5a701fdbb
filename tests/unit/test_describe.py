"""The stored text of an error: whatever the error is made of, it is short, readable, storable, and no second error."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workq._describe import MAX_MESSAGE, MAX_TRACEBACK, capped, describe, message_of, one_line, storable

MOST = MAX_MESSAGE + MAX_TRACEBACK + 1024
"""Bytes of a whole description: message, traceback, and the type's name."""

E = TypeVar("E", bound=BaseException)

anything = st.text(st.characters())
"""Any str at all, NUL and lone surrogates included."""


def raised(error: E) -> E:
    """The error with a traceback of its own."""
    try:
        raise error
    except type(error):
        return error


def size(text: str) -> int:
    """Bytes in the database. Raises UnicodeEncodeError for what it would refuse."""
    assert "\0" not in text
    return len(text.encode())


class Unprintable(Exception):
    def __init__(self, mistake: BaseException) -> None:
        super().__init__()
        self.mistake = mistake

    def __str__(self) -> str:
        raise self.mistake


# What it says


def test_an_error_is_its_type_its_message_and_where_it_was_raised() -> None:
    text = describe(raised(ValueError("no such user")))
    first, _, rest = text.partition("\n")
    assert first == "ValueError: no such user"
    assert "test_describe.py" in rest
    assert "in raised" in rest


def test_an_error_of_a_library_is_named_with_its_module() -> None:
    class Error(Exception):
        pass

    Error.__module__, Error.__qualname__ = "mailer.errors", "Refused"
    assert describe(Error("x")) == "mailer.errors.Refused: x"


def test_an_error_without_a_message_is_its_type() -> None:
    assert describe(KeyError()) == "KeyError"


def test_a_text_stands_for_itself() -> None:
    assert describe("out of stock") == "out of stock"


def test_notes_are_part_of_the_message() -> None:
    error = ValueError("no such user")
    error.add_note("while sending letter 7")
    assert describe(error) == "ValueError: no such user\nwhile sending letter 7"


def test_causes_are_told_with_their_places() -> None:
    def connect() -> None:
        raise OSError("no route")

    with pytest.raises(OSError, match="no route") as cause:
        connect()
    error = ValueError("no mail")
    error.__cause__ = cause.value
    text = describe(error)
    assert "caused by OSError: no route" in text
    assert "in connect" in text


def test_a_cause_that_was_hidden_on_purpose_is_not_told() -> None:
    try:
        raise OSError("secret-host")
    except OSError:
        error = raised(ValueError("no mail"))
    assert "caused by OSError: secret-host" in describe(error)
    error.__suppress_context__ = True
    assert "secret-host" not in describe(error)


def test_local_variables_are_not_told() -> None:
    """F61: a traceback is shown without what its frames hold."""

    def login(password: str) -> None:
        attempts = [password] * 2
        raise PermissionError(f"refused after {len(attempts)} attempts")

    with pytest.raises(PermissionError) as refusal:
        login("".join(["hun", "ter2"]))
    assert "in login" in describe(refusal.value)
    assert "hunter2" not in describe(refusal.value)


# How much it says


@settings(deadline=None)
@given(anything, st.integers(min_value=200, max_value=400))
def test_a_capped_text_fits_and_keeps_head_and_tail(text: str, most: int) -> None:
    """F44: cut on a character boundary."""
    text = (text or "x") * 60
    short = capped(text, most)
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= most:
        assert short == text
        return
    assert size(short.replace("\0", " ")) <= most
    head, mark, tail = short.partition("\n... ")
    left_out, words, tail = tail.partition(" bytes left out ...\n")
    assert mark
    assert words
    whole = data.decode()
    assert whole.startswith(head)
    assert whole.endswith(tail)
    assert len(head.encode()) > most // 4
    assert len(tail.encode()) > most // 4
    assert int(left_out.replace(",", "")) > 0


@pytest.mark.parametrize("letter", ["x", "é", "表", "😀"])
@pytest.mark.parametrize("shift", range(4))
def test_no_character_is_cut_in_two(letter: str, shift: int) -> None:
    """F44: whatever the bytes at the cut."""
    text = "a" * shift + letter * 5000
    short = capped(text, 1000)
    assert set(short.replace("\n... ", "").replace(" bytes left out ...\n", "")) <= {"a", letter, *"0123456789,"}


def test_a_message_of_ten_megabytes_is_cut_and_its_ends_are_kept() -> None:
    """F44: 8 KiB of message, 32 KiB of traceback."""
    text = describe(raised(ValueError("begin " + "x" * 10_000_000 + " end")))
    assert size(text) <= MOST
    assert text.startswith("ValueError: begin xxx")
    assert "xxx end\n" in text
    assert "bytes left out" in text
    assert "in raised" in text
    assert size(describe("begin" + "y" * 10_000_000 + "end")) <= MAX_MESSAGE


@pytest.mark.parametrize("letter", ["\0", "\ud800"], ids=ascii)
@pytest.mark.parametrize("number", [2000, 8000, 10_000_000])
def test_what_has_to_be_written_out_counts_as_it_is_written(letter: str, number: int) -> None:
    """F44: the cap is of what is stored, not of what it was before."""
    assert size(describe(letter * number)) <= MAX_MESSAGE
    assert size(describe(ValueError(letter * number))) <= MAX_MESSAGE + len("ValueError: ")


def test_the_name_of_a_type_is_capped_too() -> None:
    """F44: nothing that a user chose is stored without a limit."""
    huge = type("E" * 1_000_000, (Exception,), {})
    assert size(describe(raised(huge("message")))) <= MOST
    assert size(describe(raised(ExceptionGroup("g", [huge("message")])))) <= MOST


def test_a_deep_recursion_is_told_in_few_lines() -> None:
    """F44: the innermost frames, where it broke."""

    def deeper(depth: int) -> int:
        return deeper(depth + 1) + 1

    with pytest.raises(RecursionError) as broken:
        deeper(0)
    text = describe(broken.value)
    assert text.startswith("RecursionError: maximum recursion depth exceeded")
    assert "in deeper" in text
    assert size(text) <= MOST


def test_a_chain_of_a_thousand_causes_is_told_in_part() -> None:
    """F44: the nearest causes."""
    error = ValueError("cause 0")
    for number in range(1, 1000):
        following = ValueError(f"cause {number} " + "x" * 1000)
        following.__cause__ = error
        error = following
    text = describe(error)
    assert text.startswith("ValueError: cause 999 x")
    assert "cause 998 x" in text
    assert size(text) <= MOST


# Groups


def test_the_members_of_a_group_are_told() -> None:
    """F44: types, messages and places, in nested groups too."""
    inner = ExceptionGroup("inner", [raised(KeyError("deep"))])
    text = describe(raised(ExceptionGroup("outer", [raised(ValueError("shallow")), inner])))
    assert text.startswith("ExceptionGroup: outer (2 sub-exceptions)")
    for part in ("ValueError: shallow", "ExceptionGroup: inner", "KeyError: 'deep'", "in raised"):
        assert part in text


def test_a_group_of_thousands_is_told_in_part() -> None:
    """F44: the first of them."""
    text = describe(ExceptionGroup("many", [ValueError(f"member {n} " + "x" * 1000) for n in range(5000)]))
    assert "ValueError: member 0 x" in text
    assert size(text) <= MOST


def test_groups_in_groups_are_told_in_part() -> None:
    """F44: not every one of 160,000 members is walked."""
    told = 0

    class Leaf(Exception):
        def __str__(self) -> str:
            nonlocal told
            told += 1
            return "leaf"

    group: ExceptionGroup[Exception] = ExceptionGroup("level", [Leaf()] * 20)
    for _ in range(3):
        group = ExceptionGroup("level", [group] * 20)
    text = describe(group)
    assert told <= 1000
    assert "Leaf: leaf" in text
    assert size(text) <= MOST


# It never raises


@pytest.mark.parametrize(
    "mistake",
    [ValueError("x"), RecursionError(), MemoryError(), SystemExit(1), asyncio.CancelledError(), GeneratorExit()],
    ids=lambda mistake: type(mistake).__name__,
)
def test_an_error_that_cannot_be_printed_is_told_by_its_type(mistake: BaseException) -> None:
    """F44: a __str__ that raises, whatever it raises, is no second error."""
    error = raised(Unprintable(mistake))
    for text in (describe(error), describe(ExceptionGroup("g", [error])), one_line(error)):
        assert f"its __str__ raised {type(mistake).__name__}" in text


def test_an_error_whose_str_is_no_str_is_told() -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            return 7  # type: ignore[return-value]

    assert describe(Odd()).endswith("Odd: <its __str__ raised TypeError>")


def test_a_circle_of_errors_is_told_once() -> None:
    """F44: cyclic causes and contexts."""
    one, other = ValueError("one"), KeyError("other")
    one.__context__, other.__context__ = other, one
    assert describe(one).count("other") == 1
    one.__cause__, other.__cause__ = other, one
    assert describe(one).count("other") == 1
    one.__cause__ = one
    assert describe(one).startswith("ValueError: one")


@pytest.mark.parametrize("attribute", ["__bool__", "__len__", "__eq__", "__hash__"])
def test_a_cause_is_told_whatever_its_operators_do(attribute: str) -> None:
    """F44: an error is a value with methods of its own, which are not asked."""

    def broken(*args: object) -> Any:
        raise RuntimeError("an operator was asked")

    kind = type("Odd", (OSError,), {attribute: broken})
    error = ValueError("outer")
    error.__cause__ = kind("odd")
    assert "caused by Odd: odd" in describe(error)


def test_a_cause_that_counts_as_false_is_told() -> None:
    """F44: an error that is an empty collection is an error."""

    class Errors(Exception):
        def __len__(self) -> int:
            return 0

    error = ValueError("outer")
    error.__cause__ = Errors("empty")
    assert "Errors: empty" in describe(error)


@pytest.mark.parametrize("notes", [7, [3, None], [object()], "text"], ids=["a number", "a list", "objects", "a text"])
def test_odd_notes_do_no_harm(notes: Any) -> None:
    error = ValueError("message")
    error.__notes__ = notes
    assert describe(error).startswith("ValueError: ")


@settings(deadline=None)
@given(anything)
def test_any_text_can_be_stored(text: str) -> None:
    """F44, F42: NUL and lone surrogates are written out; everything else stays as it is."""
    stored = storable(text)
    size(stored)
    if "\0" not in text and not any("\ud800" <= letter <= "\udfff" for letter in text):
        assert stored == text


@settings(deadline=None)
@given(anything, anything, anything)
def test_any_error_can_be_stored(message: str, note: str, cause: str) -> None:
    """F44, F42: message, notes and causes alike."""
    error = ValueError(message)
    error.add_note(note)
    error.__cause__ = ExceptionGroup(cause, [KeyError(cause)])
    assert size(describe(raised(error))) <= MOST
    assert size(describe(message)) <= MAX_MESSAGE


def test_nul_and_surrogates_stay_readable() -> None:
    """F42: as Python would write them."""
    assert describe(ValueError("a\0b\ud800c")) == "ValueError: a\\x00b\\ud800c"
    assert message_of(ValueError("plain")) == "plain"


# A log line


@settings(deadline=None)
@given(anything)
def test_a_log_line_is_one_line_of_printable_characters(message: str) -> None:
    """F62: line breaks and terminal escapes do not reach the log."""
    line = one_line(ValueError(message))
    assert line.isascii()
    assert line.isprintable()
    assert len(line) <= len("ValueError: ") + 300 * len("\\U0010ffff")


def test_a_log_line_tells_only_the_first_line() -> None:
    assert one_line(ValueError("first\nsecond")) == "ValueError: first"
    assert one_line(KeyError()) == "KeyError"
