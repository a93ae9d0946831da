"""Templates: every field and form, escapes, and refusals before anything runs."""

import json
import time
from urllib.parse import unquote_to_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqtools.protocol.frames import WireMessage
from nsqtools.records.template import compile_template

MESSAGE = WireMessage(1_700_000_000_123_456_789, 3, b"0f1e2d3c4b5a6978", b"caf\xc3\xa9")


def fill(template: str, message: WireMessage = MESSAGE, topic: str = "clicks") -> bytes:
    return compile_template(template)(topic, "host:4150", [message])


FILLED = {"": b"", "{body}": b"caf\xc3\xa9", "{body:hex}": b"636166c3a9", r"\\n": b"\\n"}
FILLED |= {"{body:base64}": b"Y2Fmw6k=", "{body:json}": b'"caf\\u00e9"'}
FILLED |= {r"\x1e{size}\0": b"\x1e5\0"}
FILLED |= {"{timestamp:%Y-%m-%dT%H:%M:%S.%fZ}": b"2023-11-14T22:13:20.123456Z"}
FILLED |= {"{timestamp}": b"1700000000123456789", "{{{id}}}": b"{0f1e2d3c4b5a6978}"}
FILLED |= {r"{id}\t{body}\n": b"0f1e2d3c4b5a6978\tcaf\xc3\xa9\n"}
FILLED |= {"{topic} {nsqd} {attempts} {size}": b"clicks host:4150 3 5"}
FILLED |= {"100 % of é {size}%d": "100 % of é 5%d".encode()}


def test_every_field_and_form_is_filled_in() -> None:
    assert {template: fill(template) for template in FILLED} == FILLED


REFUSED = {"{}": "unknown field", "{id": "single {", "id}": "single }"}
REFUSED |= {"{bodi}": "known are topic, nsqd, id, timestamp, attempts, size, body"}
REFUSED |= {"{body:yaml}": "body has hex, base64, url, json"}
REFUSED |= {"{topic:upper}": "topic has no other form", "{.a:hex}": ".a has url"}
REFUSED |= dict.fromkeys((r"{id}\q", "{id}\\", r"\xg1"), "unknown escape")
REFUSED |= {"{.a[}": r"'\.a\[' is not a program of jq"}


@pytest.mark.parametrize("template", REFUSED)
def test_an_invalid_template_is_refused_when_it_is_compiled(template: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[template]):
        compile_template(template)


def test_batches_are_joined_and_percent_signs_and_old_times_work() -> None:
    encode_many = compile_template("{attempts},")
    assert encode_many("t", "h:1", [MESSAGE, MESSAGE._replace(attempts=40_000)]) == b"3,40000,"
    assert fill("{topic}{id}", topic="100%d") == b"100%d0f1e2d3c4b5a6978"
    assert fill("{timestamp:%Y %f}", MESSAGE._replace(timestamp_ns=-1)) == b"1969 999999"


def test_seconds_since_1970_do_not_depend_on_the_time_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        assert fill("{timestamp:%s %%s}") == b"1700000000 %s"
    finally:
        monkeypatch.undo()
        time.tzset()


@given(st.binary())
def test_a_body_is_written_raw_or_as_reversible_json_or_url(body: bytes) -> None:
    assert fill("<{body}>", MESSAGE._replace(body=body)) == b"<" + body + b">"
    text = json.loads(fill("{body:json}", MESSAGE._replace(body=body)))
    assert text.encode("utf-8", "surrogateescape") == body
    url = fill("{body:url}", MESSAGE._replace(body=body)).decode("ascii")
    assert unquote_to_bytes(url) == body
    assert not set("/?=&# +") & set(url)


@given(st.text(st.sampled_from("{}:%%\\\\nx0body timestampHf\udcff é"), max_size=20))
def test_any_text_is_a_template_or_a_value_error(template: str) -> None:
    try:
        encode_many = compile_template(template)
    except ValueError:
        return
    assert isinstance(encode_many("t", "h:1", [MESSAGE]), bytes)


IN_JSON = b'{"user": {"id": 12345678901234567890}, "q": "a b/\xc3\xa9", "no": false, "none": null}'
PATHS = {"{.user.id}": b"12345678901234567890", "[{.nothing}{.user.name.first}]": b"[]"}
PATHS |= {"q={.q:url}&all={body:url}": b"q=a%20b%2F%C3%A9&all="}
PATHS |= {"{.no}{.none}{.user.id # a comment}": b"false12345678901234567890"}


@pytest.mark.parametrize("template", PATHS)
def test_a_path_is_looked_up_in_the_json_of_the_body(template: str) -> None:
    assert fill(template, MESSAGE._replace(body=IN_JSON)).startswith(PATHS[template])
    assert b"12345678901234567890" not in fill(template.partition("&")[0], MESSAGE)


def test_fields_in_a_url_are_percent_encoded() -> None:
    text = "/{topic}/{.p}?a={.p:url}&b={.p:raw}&c={body:base64}&d={timestamp:%H:%M}"
    record = WireMessage(0, 1, b"0" * 16, rb'{"p": "a/?#&=%+ \u00fc"}')

    target = compile_template(text, is_url=True)("t#ephemeral", "h:1", [record]).decode()

    once = "a%2F%3F%23%26%3D%25%2B%20%C3%BC"
    base64 = "eyJwIjogImEvPyMmPSUrIFx1MDBmYyJ9"
    assert target == (f"/t%23ephemeral/{once}?a={once}&b=a/?#&=%+ ü&c={base64}&d=00:00")
    for form in ("{body:raw}", "{.p:raw}"):
        with pytest.raises(ValueError, match="unknown form"):
            compile_template(form)
    strict = compile_template("{.a}", is_url=True, is_strict=True)
    with pytest.raises(ValueError, match="parse error"):
        strict("t", "h:1", [record._replace(body=b"no JSON")])
