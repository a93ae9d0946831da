"""Names that nsqd accepts; addresses as users write them, and the URL that asks nsqlookupd."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqtools.errors import ConfigurationError
from nsqtools.protocol import names
from nsqtools.protocol.names import Address, http_url, parse_address

ACCEPTED_NAMES = ["t", "a" * 64, "a.b_c-D9", "x#ephemeral", "a" * 54 + "#ephemeral", "..."]


@pytest.mark.parametrize("name", ACCEPTED_NAMES)
def test_a_name_that_nsqd_accepts_comes_back_unchanged(name: str) -> None:
    assert names.check_topic(name) == names.check_channel(name) == name
    assert names.is_ephemeral(name) == ("#" in name)


REFUSED_NAMES = ["", "t\n", "\nt", "a b", "a" * 65, "a" * 55 + "#ephemeral", "a#ephemeral\n"]
REFUSED_NAMES += ["#ephemeral", "a#other", "a#ephemeral#ephemeral"]
REFUSED_NAMES += ["ä", "٣", "a/b", "a\x00", "a\r"]


@pytest.mark.parametrize("name", REFUSED_NAMES)
def test_a_name_that_nsqd_refuses_is_an_error_that_shows_it(name: str) -> None:
    with pytest.raises(ConfigurationError, match="invalid topic name") as caught:
        names.check_topic(name)
    assert repr(name) in str(caught.value)
    assert "1 to 64 characters" in caught.value.hint
    with pytest.raises(ConfigurationError, match="invalid channel name"):
        names.check_channel(name)


# -- addresses ------------------------------------------------------------------------------------


ADDRESSES = {"localhost": ("localhost", 4150), "localhost:4000": ("localhost", 4000)}
ADDRESSES |= {" 10.0.0.1:1 ": ("10.0.0.1", 1), "[::1]:4150": ("::1", 4150)}
ADDRESSES |= {"[fe80::1]": ("fe80::1", 4150), "nsqd.example.org:65535": ("nsqd.example.org", 65535)}


def test_an_address_is_read() -> None:
    assert {text: parse_address(text) for text in ADDRESSES} == ADDRESSES
    assert parse_address("localhost") == Address("localhost", 4150)


NO_ADDRESSES = """
    :4150 host: host:0 host:65536 host:x host:-1 host:+1 host:1:2 ::1 [::1 [::1]4150 [::1]:
    host/path user@host:1 host:٤ []:1 host:0000080000
"""


@pytest.mark.parametrize("text", [*NO_ADDRESSES.split(), "", "ho st:1", "host:" + "1" * 5000])
def test_what_is_no_address_is_refused_with_a_remedy(text: str) -> None:
    with pytest.raises(ConfigurationError, match="invalid address") as caught:
        parse_address(text)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("fe80::1", "[fe80::1]"),
        ("http://localhost:4150", "without a scheme"),
        *((text, "spaces") for text in ("a:4161,b:4161", "a,b", "10.0.0.1:1, 10.0.0.2:1")),
    ],
)
def test_a_likely_mistake_has_a_remedy_of_its_own(text: str, remedy: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_address(text)
    assert remedy in caught.value.hint


@pytest.mark.parametrize(
    "text",
    [
        "me:hush@lookup:4161",
        "me:hush/x@lookup",
        "me:hush@lookup",
        "http://me:hush@h/#part",
        "http://me:hush@h:x",
    ],
)
def test_a_password_in_what_is_no_address_is_not_shown(text: str) -> None:
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


def test_every_form_of_an_http_address_is_a_url() -> None:
    assert {text: http_url(text, names.LOOKUPD_HTTP_PORT) for text in URLS} == URLS


NO_URLS = """
    ftp://host:1 http:// http://host:x http://host:0 http://host:99999 http://[::1
    http://host/#part host?x=1 http://[1:2]:1 [1:2]:1
"""


@pytest.mark.parametrize("text", [*NO_URLS.split(), "http://ho st/", ""])
def test_what_is_no_http_address_is_refused_with_a_remedy(text: str) -> None:
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
def test_patterns_of_addresses(pattern: str, allowed: list[str], others: list[str]) -> None:
    patterns = names.parse_patterns(f"unlikely, {pattern}")
    assert all(names.is_allowed(parse_address(text), patterns) for text in allowed)
    assert not any(names.is_allowed(parse_address(text), patterns) for text in others)


@pytest.mark.parametrize("text", [":4150", "a:b", "http://h:1", "h:1/x"])
def test_what_is_no_pattern_of_addresses_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="invalid pattern of addresses"):
        names.parse_patterns(text)


LONGEST_HOST = ("h." * names.MAX_HOST_LENGTH)[: names.MAX_HOST_LENGTH]


@pytest.mark.parametrize(
    ("name", "host"),
    [
        ("nsqd-1.example", "nsqd-1.example"),
        ("[fe80::1]", "fe80::1"),
        ("fe80::1%eth0", "fe80::1%eth0"),
        (LONGEST_HOST, LONGEST_HOST),
        *(
            (name, "")
            for name in ("", LONGEST_HOST + "h", "a b", "[a", None, 7, "a/b", "1:2", ":::")
        ),
    ],
)
def test_what_a_daemon_announces_is_a_host_or_nothing(name: object, host: str) -> None:
    assert names.announced_host(name) == host
