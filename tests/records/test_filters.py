"""Filters: grep on bytes, sampling with a given random source, several as one."""

from __future__ import annotations

import random

import pytest

from nsqtools.errors import ConfigurationError
from nsqtools.protocol.frames import WireMessage
from nsqtools.records.filters import every, grep, parse_share, sample, where


def message(body: bytes) -> WireMessage:
    return WireMessage(0, 1, b"0" * 16, body)


@pytest.mark.parametrize(
    ("pattern", "body", "kept"),
    [
        ("err", b"an error", True),
        ("^err", b"an error", False),
        ("ERR", b"an error", False),
        (r"\xff", b"a\xffb", True),
        ("\udcff", b"a\xffb", True),
        ("é", "café".encode(), True),
        ("", b"", True),
    ],
)
def test_grep_searches_the_bytes_of_the_body(pattern: str, body: bytes, kept: bool) -> None:
    assert grep(pattern)(message(body)) is kept
    assert grep(pattern, invert=True)(message(body)) is not kept


def test_grep_can_ignore_case() -> None:
    assert grep("ERR", ignore_case=True)(message(b"an error"))


def test_a_wrong_pattern_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="not a regular expression: missing"):
        grep("(")


def test_where_asks_the_json_of_the_body() -> None:
    keep = where(".status >= 500")
    assert [keep(message(body)) for body in (b'{"status":503}', b'{"status":1}', b"x")] == [
        True,
        False,
        False,
    ]


def test_sampling_keeps_the_share_that_the_random_source_gives() -> None:
    numbers = iter([0.0, 0.09, 0.1, 0.99])
    keep = sample(0.1, lambda: next(numbers))

    assert [keep(message(b"")) for _ in range(4)] == [True, True, False, False]


@pytest.mark.parametrize(("share", "kept"), [(0.0, 0), (1.0, 1000)])
def test_the_ends_of_the_range_keep_nothing_and_all(share: float, kept: int) -> None:
    keep = sample(share, random.Random(1).random)

    assert sum(keep(message(b"")) for _ in range(1000)) == kept


@pytest.mark.parametrize(
    ("text", "share"), [("10%", 0.1), ("0.25", 0.25), ("100%", 1.0), ("1", 1.0), ("0", 0.0)]
)
def test_a_share_is_percent_or_fraction(text: str, share: float) -> None:
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "%", "ten", "101%", "1.5", "-1%", "nan"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"write 10% or 0\.1"):
        parse_share(text)


def test_several_filters_keep_what_all_keep() -> None:
    keep = every([grep("a"), grep("b", invert=True)])

    assert keep is not None
    assert keep(message(b"a"))
    assert not keep(message(b"ab"))
    assert not keep(message(b"c"))
    assert every([]) is None


def test_a_later_filter_sees_only_what_the_earlier_kept() -> None:
    seen: list[bytes] = []
    keep = every([grep("a"), lambda m: seen.append(m.body) is None])
    assert keep is not None

    for body in (b"a", b"b", b"ca"):
        keep(message(body))

    assert seen == [b"a", b"ca"]
