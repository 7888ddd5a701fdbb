"""Takes URLs apart without quoting in an error what may be a piece of a password."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

UNREADABLE = (
    "the URL cannot be read: are there characters in the user's name or password that must be percent-encoded "
    "(urllib.parse.quote)?"
)


def split_url(url: str) -> SplitResult:
    """The parts of a URL. Raises ValueError."""
    try:
        return urlsplit(url)
    except ValueError:
        raise ValueError(UNREADABLE) from None
