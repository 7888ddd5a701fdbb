"""URLs that cannot be read: the error quotes no piece of a password."""

from __future__ import annotations

import pytest

import workq
from workq_asyncpg import Hosts


@pytest.mark.parametrize("password", ["p[hunter2]w", "hunter2\N{ACCOUNT OF}x", "hunter2]"])
@pytest.mark.parametrize("hosts", ["localhost/db", "one,two/db"])
def test_what_is_no_url_is_named_without_its_password(password: str, hosts: str) -> None:
    """F61."""
    for make in (workq.connect, Hosts):
        with pytest.raises(ValueError, match="percent-encoded") as caught:
            make(f"postgresql://user:{password}@{hosts}")
        assert "hunter2" not in str(caught.value)
        assert caught.value.__suppress_context__
