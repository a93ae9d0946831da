"""Topic and channel names: what nsqd accepts, and nothing that could become a second command."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqtools.errors import ConfigurationError
from nsqtools.protocol.names import check_channel, check_topic, is_ephemeral, is_valid_name


@pytest.mark.parametrize(
    "name", ["t", "a" * 64, "a.b_c-D9", "x#ephemeral", "a" * 54 + "#ephemeral", "..."]
)
def test_a_name_that_nsqd_accepts_comes_back_unchanged(name: str) -> None:
    assert check_topic(name) == name
    assert check_channel(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "t\n",
        "\nt",
        "a b",
        "a" * 65,
        "a" * 55 + "#ephemeral",
        "#ephemeral",
        "a#other",
        "a#ephemeral#ephemeral",
        "a#ephemeral\n",
        "ä",
        "٣",
        "a/b",
        "a\x00",
        "a\r",
    ],
)
def test_a_name_that_nsqd_refuses_is_an_error_that_shows_it(name: str) -> None:
    with pytest.raises(ConfigurationError, match="invalid topic name") as caught:
        check_topic(name)
    assert repr(name) in str(caught.value)
    assert "1 to 64 characters" in caught.value.hint
    with pytest.raises(ConfigurationError, match="invalid channel name"):
        check_channel(name)


@given(st.text())
def test_a_valid_name_never_ends_or_splits_a_command_line(name: str) -> None:
    if is_valid_name(name):
        line = b"SUB " + name.encode() + b" c\n"
        assert line.count(b"\n") == 1
        assert len(line.split(b" ")) == 3


def test_ephemeral_names_are_recognized_by_their_ending() -> None:
    assert is_ephemeral("t#ephemeral")
    assert not is_ephemeral("ephemeral")
