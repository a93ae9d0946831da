"""Filters: grep on bytes, sampling, and jq programs that keep every digit of a number."""

from typing import Any

import pytest

from nsqtools.errors import ConfigurationError
from nsqtools.protocol.frames import WireMessage
from nsqtools.records.filters import (
    compile_pick,
    every,
    grep,
    json_filters,
    parse_share,
    reporting,
    sample,
    where,
)


def message(body: bytes) -> WireMessage:
    return WireMessage(0, 1, b"0" * 16, body)


def test_grep_searches_the_bytes_of_the_body() -> None:
    kept = [("err", b"an error"), (r"\xff", b"a\xffb"), ("\udcff", b"a\xffb")]
    kept += [("é", "café".encode()), ("", b"")]
    rejected = [("^err", b"an error"), ("ERR", b"an error")]
    for pattern, body in (*kept, *rejected):
        results = [grep(pattern, invert=invert)(message(body)) for invert in (False, True)]
        is_kept = (pattern, body) in kept
        assert results == [is_kept, not is_kept], pattern


@pytest.mark.parametrize("pattern", ["[[:digit:]]+", "[[]", "[a--z]"])
def test_a_set_that_python_may_read_otherwise_is_refused(pattern: str) -> None:
    with pytest.raises(ConfigurationError, match=r"write .* for .:digit:"):
        grep(pattern)


def test_sampling_keeps_its_share_and_filters_are_combined_in_order() -> None:
    for share, kept in ((0.0, 0), (0.1, 2), (1.0, 4)):
        numbers = iter([0.0, 0.09, 0.1, 0.99])
        keep = sample(share, numbers.__next__)
        assert sum(keep(message(b"")) for _ in range(4)) == kept
    judged: list[bytes] = []
    keep = every([grep("a"), lambda m: judged.append(m.body) is None, grep("b", invert=True)])
    assert [keep(message(body)) for body in (b"a", b"ab", b"c")] == [True, False, False]
    assert judged == [b"a", b"ab"]
    assert every([]) is None


SHARES = {"10%": 0.1, "0.25": 0.25, "100%": 1.0, "1": 1.0, "0": 0.0}


@pytest.mark.parametrize("text", ["", "%", "ten", "101%", "1.5", "-1%", "nan"])
def test_a_share_is_a_percentage_or_fraction(text: str) -> None:
    assert {share: parse_share(share) for share in SHARES} == pytest.approx(SHARES)
    with pytest.raises(ValueError, match=r"write 10% or 0\.1"):
        parse_share(text)


WANTED = [(".status >= 500", b'{"status": 503}'), (".tags[] == 3", b'{"tags": [1, 3]}')]
WANTED += [("select(.a)", b'{"a": 1}'), ("{a: .b}", b"{}"), (".a", b'{"a": 0}')]
WANTED += [(".status >= 500 # only errors", b'{"status": 503}')]
NOT_WANTED = [(".status >= 500", b'{"status": 200}'), ("select(.a)", b'{"b": 1}')]
NOT_WANTED += [(".a", b'{"a": null}'), ("empty", b"1")]
# bytes that are not UTF-8 and lone surrogates become U+FFFD; the other fields stay as they are
WANTED += [(".a", b'{"a": 1, "n": "M\xfcller"}'), (".a", b'{"a": 1, "n": "cut \\ud83d"}')]
WANTED += [
    (".a", b'{"\\uDE00": 1, "a": "\\ud83d\\ude00"}'),
    ('.a == "\\\\ud83d"', rb'{"a": "\\ud83d"}'),
]
WANTED += [
    ('.a == "\\ufffd"', b'{"a": "\xff"}'),
    (".a", b'\xef\xbb\xbf{"a": 1}'),
    (".a", b'{"a": 0} {"a": null}'),
]
UNJUDGED = [
    b"no JSON",
    b"[1]",
    b"",
    b" \n",
    b"\xef\xbb\xbf",
    b"\xff",
    b'{"a": 1}\0',
    b'{"a": 1',
    b'{"a": null} {"a',
]
UNJUDGED += [b'{"a": 1, "d": ' + b"[" * 11_000 + b"]" * 11_000 + b"}", b'"a"', b"{'a': 1}"]


@pytest.mark.parametrize(("program", "body"), [*WANTED, *NOT_WANTED])
def test_where_keeps_messages_with_a_true_result(program: str, body: bytes) -> None:
    assert where(program)(message(body)) is ((program, body) in WANTED)


@pytest.mark.parametrize("body", UNJUDGED)
def test_where_and_pick_raise_for_a_body_that_is_not_a_json_object(
    body: bytes,
) -> None:
    with pytest.raises(ValueError):
        where(".a")(message(body))
    with pytest.raises(ValueError):
        compile_pick(".a")(body)


def test_a_rejecting_filter_decides_if_another_cannot_judge_the_body() -> None:
    doubtful, refused = message(b"no JSON"), []
    for filters in ([where(".a"), grep("^x")], [grep("^x"), where(".a")]):
        keep = every(filters)
        assert keep is not None
        assert not keep(doubtful)
    keep = reporting(every([where(".a"), grep("")]), lambda *unjudged: refused.append(unjudged))
    assert keep is not None
    assert not keep(doubtful)
    assert [(unjudged, "parse error" in str(error)) for unjudged, error in refused] == [
        (doubtful, True)
    ]


PICKED = {".name": b"caf\xc3\xa9", ".id": b"12345678901234567890", ".tags[]": b"a\nb"}
PICKED |= {"{id, price}": b'{"id":12345678901234567890,"price":1.10}', ".nothing": b"null"}
PICKED |= {"empty": None, "def f: .name; f # of the user": b"caf\xc3\xa9"}


def test_pick_returns_text_unchanged_and_other_values_as_compact_json() -> None:
    body = '{"name": "café", "id": 12345678901234567890, "price": 1.10, "tags": ["a", "b"]}'
    assert {program: compile_pick(program)(body.encode()) for program in PICKED} == PICKED


def test_pick_raises_only_where_its_result_would_differ_from_the_body() -> None:
    for damaged in (b"M\xfcller", b"cut \\ud83d", b"\\uDC00"):
        body = b'{"id": 1, "n": "%b"}' % damaged
        assert compile_pick(".id")(body) == b"1"
        with pytest.raises(ValueError, match="not UTF-8, or half of a surrogate pair"):
            compile_pick(".")(body)
    assert compile_pick(".")('{"n":"\ufffd"}'.encode()) == '{"n":"\ufffd"}'.encode()


@pytest.mark.parametrize("compile", [where, compile_pick])
@pytest.mark.parametrize("program", [".a[", ") | (", "nonsense"])
def test_an_invalid_program_is_refused_in_one_line(compile: Any, program: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a program of jq: ") as refused:
        compile(program)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999", "true", 'x"y'])
def test_a_value_that_is_not_a_number_is_compared_as_text(value: str) -> None:
    keep, _ = json_filters(None, None, required="a", value=value, whitelist=())
    assert keep(message(b'{"a": "%b"}' % value.replace('"', '\\"').encode()))
    assert not keep(message(b'{"a": 1}'))
