"""Filters: grep on bytes, sampling, jq's programs over bodies with every digit of a number kept."""

from __future__ import annotations

import pytest

from nsqtools.errors import ConfigurationError
from nsqtools.protocol.frames import WireMessage
from nsqtools.records.filters import (
    compile_pick,
    every,
    grep,
    json_filters,
    parse_share,
    sample,
    where,
)


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


def test_sampling_keeps_the_share_that_the_random_source_gives() -> None:
    for share, kept in ((0.0, 0), (0.1, 2), (1.0, 4)):
        numbers = iter([0.0, 0.09, 0.1, 0.99])
        keep = sample(share, numbers.__next__)
        assert sum(keep(message(b"")) for _ in range(4)) == kept


@pytest.mark.parametrize(
    ("text", "share"), [("10%", 0.1), ("0.25", 0.25), ("100%", 1.0), ("1", 1.0), ("0", 0.0)]
)
def test_a_share_is_percent_or_fraction(text: str, share: float) -> None:
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "%", "ten", "101%", "1.5", "-1%", "nan"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"write 10% or 0\.1"):
        parse_share(text)


def test_several_filters_keep_what_all_keep_and_a_later_one_sees_only_what_is_left() -> None:
    seen: list[bytes] = []
    keep = every([grep("a"), lambda m: seen.append(m.body) is None, grep("b", invert=True)])
    assert [keep(message(body)) for body in (b"a", b"ab", b"c")] == [True, False, False]
    assert seen == [b"a", b"ab"]
    assert every([]) is None


@pytest.mark.parametrize(
    ("program", "body", "is_wanted"),
    [
        (".status >= 500", b'{"status": 503}', True),
        (".status >= 500", b'{"status": 200}', False),
        (".status >= 500 # only errors", b'{"status": 503}', True),
        ("select(.a)", b'{"a": 1}', True),
        ("select(.a)", b'{"b": 1}', False),
        (".tags[] == 3", b'{"tags": [1, 3]}', True),
        ("{a: .b}", b"{}", True),
        (".a", b'{"a": 0}', True),
        (".a", b'{"a": null}', False),
        (".a.b", b"[1]", False),
        (".a", b"no JSON", False),
        (".a", b"\xff", False),
        (".a", b"", False),
    ],
)
def test_where_wants_what_any_result_is_true_for(
    program: str, body: bytes, is_wanted: bool
) -> None:
    assert where(program)(message(body)) is is_wanted


@pytest.mark.parametrize(
    ("program", "picked"),
    [
        (".name", b"caf\xc3\xa9"),
        (".id", b"12345678901234567890"),
        ("{id, price}", b'{"id":12345678901234567890,"price":1.10}'),
        (".tags[]", b"a\nb"),
        (".nothing", b"null"),
        ("empty", None),
        ("def f: .name; f # of the user", b"caf\xc3\xa9"),
    ],
)
def test_pick_gives_text_as_it_is_and_the_rest_as_compact_json(
    program: str, picked: bytes | None
) -> None:
    body = '{"name": "café", "id": 12345678901234567890, "price": 1.10, "tags": ["a", "b"]}'
    assert compile_pick(program)(body.encode()) == picked


@pytest.mark.parametrize("body", [b"no JSON", b"\xff", b"[1]", b'"\\ud800"'])
def test_pick_says_that_it_cannot(body: bytes) -> None:
    with pytest.raises(ValueError):
        compile_pick(".a.b")(body)


@pytest.mark.parametrize("compile", [where, compile_pick])
@pytest.mark.parametrize("program", [".a[", ") | (", "nonsense"])
def test_a_wrong_program_is_refused_in_a_line(compile: object, program: str) -> None:
    assert callable(compile)
    with pytest.raises(ConfigurationError, match="is not a program of jq: ") as refused:
        compile(program)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999", "true", 'x"y'])
def test_a_value_that_is_no_number_is_text(value: str) -> None:
    keep, _ = json_filters(None, None, required="a", value=value, whitelist=())
    assert keep(message(b'{"a": "%b"}' % value.replace('"', '\\"').encode()))
    assert not keep(message(b'{"a": 1}'))
