"""Names that nsqd accepts, addresses as users write them, and text as Go writes it."""

import contextlib
import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqtools.errors import ConfigurationError
from nsqtools.protocol import names
from nsqtools.protocol.names import http_url, parse_address
from nsqtools.protocol.text import (
    escape_json,
    escape_json_lines,
    escape_line,
    escape_text,
    format_duration,
    go_duration,
    go_json,
    harmless_traceback,
    parse_duration,
    quote,
)

ACCEPTED_NAMES = ["t", "a" * 64, "a.b_c-D9", "x#ephemeral", "a" * 54 + "#ephemeral", "..."]


@pytest.mark.parametrize("name", ACCEPTED_NAMES)
def test_a_name_that_nsqd_accepts_is_returned_unchanged(name: str) -> None:
    assert names.check_topic(name) == names.check_channel(name) == name
    assert names.is_ephemeral(name) == ("#" in name)


REFUSED_NAMES = ["", "t\n", "\nt", "a b", "a" * 65, "a" * 55 + "#ephemeral", "a#ephemeral\n"]
REFUSED_NAMES += ["#ephemeral", "a#other", "a#ephemeral#ephemeral"]
REFUSED_NAMES += ["ä", "٣", "a/b", "a\x00", "a\r"]


@pytest.mark.parametrize("name", REFUSED_NAMES)
def test_a_name_that_nsqd_refuses_is_an_error_with_that_name(name: str) -> None:
    with pytest.raises(ConfigurationError, match="invalid topic name") as caught:
        names.check_topic(name)
    assert repr(name) in str(caught.value)
    assert "1 to 64 characters" in caught.value.hint
    with pytest.raises(ConfigurationError, match="invalid channel name"):
        names.check_channel(name)


ADDRESSES = {"localhost": ("localhost", 4150), "localhost:4000": ("localhost", 4000)}
ADDRESSES |= {" 10.0.0.1:1 ": ("10.0.0.1", 1), "[::1]:4150": ("::1", 4150)}
ADDRESSES |= {"[fe80::1]": ("fe80::1", 4150), "nsqd.example.org:65535": ("nsqd.example.org", 65535)}


def test_an_address_is_parsed() -> None:
    assert {text: parse_address(text) for text in ADDRESSES} == ADDRESSES


NO_ADDRESSES = """
    :4150 host: host:0 host:65536 host:x host:-1 host:+1 host:1:2 ::1 [::1 [::1]4150 [::1]:
    host/path user@host:1 host:٤ []:1 host:0000080000
"""


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        *((text, "") for text in NO_ADDRESSES.split()),
        *((text, "") for text in ("", "ho st:1", "host:" + "1" * 5000)),
        # A likely mistake has its own hint.
        ("fe80::1", "[fe80::1]"),
        ("http://localhost:4150", "without a scheme"),
        *((text, "spaces") for text in ("a:4161,b:4161", "a,b", "10.0.0.1:1, 10.0.0.2:1")),
    ],
)
def test_an_invalid_address_is_refused_with_a_hint(text: str, remedy: str) -> None:
    with pytest.raises(ConfigurationError, match="invalid address") as caught:
        parse_address(text)
    assert caught.value.hint
    assert remedy in caught.value.hint


WITH_A_PASSWORD = """
    me:hush@lookup:4161 me:hush/x@lookup me:hush@lookup http://me:hush@h/#part http://me:hush@h:x
"""


@pytest.mark.parametrize("text", WITH_A_PASSWORD.split())
def test_a_password_in_an_invalid_address_is_not_shown(text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        http_url(text, names.LOOKUPD_HTTP_PORT)
    assert "hush" not in f"{caught.value} {caught.value.hint}"


@given(st.text(max_size=40))
def test_any_text_is_an_address_or_a_configuration_error(text: str) -> None:
    for parse in (parse_address, lambda text: http_url(text, names.LOOKUPD_HTTP_PORT)):
        with contextlib.suppress(ConfigurationError):
            parse(text)


THIS_MACHINE = ("localhost", "localhost:4161", "localhost:4161/", "http://localhost:4161")
AS_THEY_ARE = ["http://localhost", "https://h:1/nsq/lookup", "http://h:1?token=a%20b"]
AS_THEY_ARE += ["http://h:1/lookup?topic=other&x="]
URLS = dict.fromkeys(THIS_MACHINE, "http://localhost:4161") | {url: url for url in AS_THEY_ARE}
URLS |= dict.fromkeys(("[::1]:4161", "http://[::1]:4161/"), "http://[::1]:4161")
URLS |= {"https://lookup.example.org/": "https://lookup.example.org"}
URLS |= {"10.0.0.1:4161/prefix": "http://10.0.0.1:4161/prefix"}


def test_every_form_of_an_http_address_becomes_a_url() -> None:
    assert {text: http_url(text, names.LOOKUPD_HTTP_PORT) for text in URLS} == URLS


NO_URLS = """
    ftp://host:1 http:// http://host:x http://host:0 http://host:99999 http://[::1
    http://host/#part host?x=1 http://[1:2]:1 [1:2]:1
"""


@pytest.mark.parametrize("text", [*NO_URLS.split(), "http://ho st/", ""])
def test_an_invalid_http_address_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(ConfigurationError, match="invalid") as caught:
        http_url(text, names.LOOKUPD_HTTP_PORT)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("pattern", "allowed", "others"),
    [
        ("*.nsq.internal:4150", ["a.nsq.internal:4150"], ["a.nsq.internal:1", "nsq.internal:4150"]),
        ("10.1.*", ["10.1.2.3:4150", "10.1.2.3:1"], ["10.2.1.1:4150", "evil.10.1.1:1"]),
        ("NSQ-?:41*", ["nsq-1:4150"], ["nsq-12:4150", "nsq-1:5150"]),
        ("[fd00::*]:4150", ["[fd00::1]:4150"], ["[fd00::1]:1", "[fe80::1]:4150"]),
        ("[::1]", ["[::1]:9"], ["[::2]:9"]),
        ("*:4150", ["any:4150"], ["any:4151"]),
        ("[ab]:1", [], ["a:1"]),
        ("a[bc]:1", [], ["ab:1"]),
    ],
)
def test_an_address_is_allowed_by_a_matching_pattern(
    pattern: str, allowed: list[str], others: list[str]
) -> None:
    patterns = names.parse_patterns(f"unlikely, {pattern}")
    assert all(names.is_allowed(parse_address(text), patterns) for text in allowed)
    assert not any(names.is_allowed(parse_address(text), patterns) for text in others)


@pytest.mark.parametrize("text", [":4150", "a:b", "http://h:1", "h:1/x"])
def test_an_invalid_pattern_of_addresses_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="invalid pattern of addresses"):
        names.parse_patterns(text)


LONGEST_HOST = ("h." * names.MAX_HOST_LENGTH)[: names.MAX_HOST_LENGTH]
HOSTS = [(host, host) for host in ("nsqd-1.example", "fe80::1%eth0", LONGEST_HOST)]
NO_HOSTS = ("", LONGEST_HOST + "h", "a b", "[a", None, 7, "a/b", "1:2", ":::")


@pytest.mark.parametrize(
    ("name", "host"), [*HOSTS, ("[fe80::1]", "fe80::1"), *((name, "") for name in NO_HOSTS)]
)
def test_the_announced_host_of_a_daemon_is_valid_or_empty(name: object, host: str) -> None:
    assert names.announced_host(name) == host


QUOTED = {b"": b'""', b"plain name": b'"plain name"', b'"\\': rb'"\"\\"'}
QUOTED |= {b"\a\b\f\n\r\t\v": rb'"\a\b\f\n\r\t\v"', b"\x00\x01\x7f": rb'"\x00\x01\x7f"'}
QUOTED |= {b"\xff\xc3": rb'"\xff\xc3"', "é €".encode(): '"é €"'.encode()}
QUOTED |= {"\u2028\u200b".encode(): rb'"\u2028\u200b"', "\U000e0001".encode(): rb'"\U000e0001"'}


def test_text_is_quoted_as_by_go() -> None:
    assert {data: quote(data) for data in QUOTED} == QUOTED


@given(st.binary())
def test_quoted_text_is_one_line_of_utf8(data: bytes) -> None:
    assert quote(data).decode().isprintable()


def test_json_is_encoded_as_by_go() -> None:
    assert go_json({"b": 1, "a": [None, True]}) == b'{"b":1,"a":[null,true]}'
    assert go_json("<&>\u2028é") == '"\\u003c\\u0026\\u003e\\u2028é"'.encode()
    assert go_json("lone \udcff") == b'"lone ?"'


SECONDS = {"250ms": 0.25, "30s": 30, "5m": 300, "1h30m": 5400, "1.5h": 5400, ".5s": 0.5}
SECONDS |= {"1h0.5s": 3600.5, "10us": 1e-5, "10µs": 1e-5, "7ns": 7e-9, "-1s": -1, "+2m": 120}
SECONDS |= {"0": 0, "-0": 0}
SHORT = {0: "0s", 0.25: "250ms", 1.5: "1.5s", 60: "1m", 90: "1m30s", 3600: "1h", 5400: "1h30m"}
SHORT |= {0.000_05: "50us", -1: "-1s"}
AS_GO = {0: "0s", 1: "1ns", 2_155: "2.155µs", 632_134_542: "632.134542ms", 250_000_000: "250ms"}
AS_GO |= {1_000_000_000: "1s", 1_500_000_000: "1.5s", 60_000_000_000: "1m0s"}
AS_GO |= {3_600_000_000_000: "1h0m0s", 90_061_000_000_000: "25h1m1s", -1_500_000: "-1.5ms"}


def test_durations_are_parsed_and_formatted_shortly_or_as_by_go() -> None:
    assert {text: parse_duration(text) for text in SECONDS} == pytest.approx(SECONDS)
    assert {seconds: format_duration(seconds) for seconds in SHORT} == SHORT
    assert {duration_ns: go_duration(duration_ns) for duration_ns in AS_GO} == AS_GO


NO_DURATIONS = ["", "s", "1", "1.5", "1x", "1 s", "s1", "--1s", "1s\n", "٣s", "1d", "2562048h"]
NO_DURATIONS += ["0-", "9" * 400 + "h"]


@pytest.mark.parametrize("text", NO_DURATIONS)
def test_an_invalid_duration_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="write 250ms, 30s, 5m or 1h30m") as refused:
        parse_duration(text)
    assert ("has no unit" in str(refused.value)) == (text in ("1", "1.5"))


@given(st.integers(min_value=0, max_value=10**9).map(lambda us: us / 1e6))
def test_a_formatted_duration_is_parsed_to_the_same(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, abs=1e-6)


AS_IT_IS = [b"plain\ttext\n", "café 😀".encode(), "👩\u200d👧".encode()]  # Joiners are kept.
SHOWN = {text: text for text in AS_IT_IS} | {b"\x1b[31mred": b"\\x1b[31mred", b"\xff": b"\\xff"}
SHOWN |= {b"bell\x07 del\x7f cr\r": b"bell\\x07 del\\x7f cr\\r", b"\xc2\x9b31m": b"\\x9b31m"}
SHOWN |= {b"\x9b31m": b"\\x9b31m", "a\u202eb\u2028c".encode(): b"a\\u202eb\\u2028c"}


def test_control_characters_are_escaped_and_a_line_stays_one_line() -> None:
    assert {text: escape_text(text) for text in SHOWN} == SHOWN
    assert escape_line("a\nb\tc\r\x85d\u2029e\udc80") == r"a\nb\tc\r\x85d\u2029e\udc80"


def test_escaped_json_keeps_its_value() -> None:
    value = {"a": "\x7f\x9b\u202e\ud800\U000e0041 é 😀\n\x1b"}
    escaped = escape_json(json.dumps(value, ensure_ascii=False, indent=1))
    assert json.loads(escaped) == value
    assert steering(escaped) == ["\n", "\n"]
    assert "é 😀" in escaped


def test_lines_of_json_are_escaped_like_single_characters() -> None:
    for number in (*range(0x20, 0xD800), *range(0xE000, 0x10000), *range(0xE0000, 0xE0100)):
        if chr(number) != (escaped := escape_json(chr(number))):
            assert escape_json_lines(f"é{chr(number)}\n".encode()) == f"é{escaped}\n".encode()
    plain = '{"body": "é 漢 😀 \u061b"}\n'.encode()
    assert escape_json_lines(plain) == plain


def test_a_message_in_a_traceback_starts_no_line() -> None:
    assert harmless_traceback("Traceback (most recent call last):\nE: 1\nnsq: forged\x1b\n") == (
        "Traceback (most recent call last):\n  E: 1\n  nsq: forged\\x1b"
    )


@given(st.binary())
def test_no_control_character_reaches_the_terminal(text: bytes) -> None:
    assert set(steering(escape_text(text).decode())) <= {"\t", "\n"}


@given(st.text(st.characters()))
def test_no_text_breaks_a_line(text: str) -> None:
    escaped = escape_line(text)
    assert not steering(escaped)
    assert len(escaped.splitlines()) <= 1
    escaped.encode()


def steering(text: str) -> list[str]:
    """The characters that a terminal may interpret, by their Unicode category."""
    bidirectional = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    kinds = {"Cc", "Cs", "Zl", "Zp"}
    category, direction = unicodedata.category, unicodedata.bidirectional
    return [c for c in text if category(c) in kinds or direction(c) in bidirectional]
