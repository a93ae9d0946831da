"""The envelope: its exact form, lossless round trips, and strict decoding."""

import itertools
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nsqtools.errors import NsqError
from nsqtools.protocol.frames import WireMessage
from nsqtools.records.envelope import (
    Envelope,
    Splitter,
    decode,
    decode_body,
    decode_dead_letter,
    encode_dead_letter,
    encode_lines,
    encode_many,
)

LINE = (
    b'{"topic": "clicks", "nsqd": "127.0.0.1:4150", "id": "0f1e2d3c4b5a6978",'
    b' "ts": 1700000000123456789, "attempts": 1, "body": "hello"}\n'
)
MESSAGE = WireMessage(1_700_000_000_123_456_789, 1, b"0f1e2d3c4b5a6978", b"hello")

messages = st.builds(
    WireMessage,
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 65535),
    st.binary(max_size=40).map(lambda head: head[:16].ljust(16, b'"')),
    st.one_of(st.binary(), st.text().map(lambda t: t.encode("utf-8", "surrogatepass"))),
)


def test_a_line_equals_json_dumps_or_has_body64() -> None:
    body = 'quote " backslash \\ newline \n tab \t nul \0 é 😀 \u2028'
    fields = json.loads(LINE) | {"body": body, "attempts": 65535}
    message = MESSAGE._replace(body=body.encode(), attempts=65535)
    line = encode_many("clicks", "127.0.0.1:4150", [message])
    assert line == json.dumps(fields, ensure_ascii=False).encode() + b"\n"
    assert decode_body(b'{"body": "hello"}') == b"hello"
    assert decode_body(b'{"body64": "/w=="}\n') == b"\xff"
    assert decode(with_fields(offset=7)).body == b"hello"
    for body in (b"\xff", b"\xed\xa0\x80", b"ok\x80", b"\xc0\x80"):
        line = encode_many("t", "h:1", [MESSAGE._replace(body=body)])
        assert (b'"body64": "' in line, b'"body":' in line) == (True, False)
        assert decode(line).body == body


@given(st.lists(messages, max_size=5), st.text(), st.text())
@example([MESSAGE._replace(body=b"\x00\n\r\x1f\x7f\xc2\x85")], "t", "n")
def test_messages_survive_encoding_and_decoding(
    batch: list[WireMessage], topic: str, nsqd: str
) -> None:
    topic, nsqd = (text.encode("utf-8", "ignore").decode() for text in (topic, nsqd))
    lines = encode_many(topic, nsqd, batch).split(b"\n")
    assert lines.pop() == b""
    assert [decode(line) for line in lines] == [
        Envelope(topic, nsqd, m.id, m.timestamp_ns, m.attempts, m.body) for m in batch
    ]


def with_fields(**changes: object) -> bytes:
    fields = json.loads(LINE) | changes
    return json.dumps({k: v for k, v in fields.items() if v is not ...}).encode()


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"hello", "not JSON: Expecting value at character 0"),
        (b"\xff\xfe{}", "not UTF-8 at byte 0"),
        (b"[1]", "not a JSON object"),
        (b"[" * 100_000, "nested too deeply"),
        (with_fields(topic=...), '"topic" is missing'),
        (with_fields(topic=5), '"topic" is not text'),
        (with_fields(nsqd=None), '"nsqd" is not text'),
        (with_fields(id="0f1e2d3c4b5a697"), '"id" is not 16 characters'),
        (with_fields(id="0f1e2d3c4b5a697€"), '"id" is not 16 characters'),
        (with_fields(ts="5"), '"ts" is not an integer'),
        (with_fields(ts=2**63), '"ts" is out of range'),
        (with_fields(attempts=True), '"attempts" is not an integer'),
        (with_fields(attempts=65536), '"attempts" is out of range'),
        (with_fields(attempts=-1), '"attempts" is out of range'),
        (with_fields(body=...), '"body" is missing'),
        (with_fields(body=["x"]), '"body" is not text'),
        (with_fields(body64="aGk="), "both .* are present"),
        (with_fields(body=..., body64="aG k="), '"body64" is not base64'),
        (with_fields(body=..., body64="é"), '"body64" is not base64'),
        (with_fields(body="\ud800"), "half of a surrogate pair"),
        (with_fields(nsqd="\ud800"), "half of a surrogate pair"),
    ],
)
def test_an_invalid_line_is_refused_with_the_reason(line: bytes, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        decode(line)


@given(st.binary())
def test_random_bytes_raise_only_value_error(line: bytes) -> None:
    with pytest.raises(ValueError):
        decode(line)


LETTER = WireMessage(1_700_000_000_000_000_001, 6, b"0f1e2d3c4b5a6978", b"caf\xc3\xa9 \xff")


def test_a_dead_letter_survives_a_round_trip_and_is_an_envelope() -> None:
    line = encode_dead_letter("t", "n:4150", LETTER, error='400 "no"\n', failed_at_ns=5)

    message, error = decode_dead_letter(line)
    assert message == decode(line)
    assert message == ("t", "n:4150", LETTER.id, LETTER.timestamp_ns, 6, LETTER.body)
    assert error == '400 "no"\n'
    assert line.count(b"\n") == 1
    assert line.endswith(b', "failed_at": 5}\n')
    assert decode_dead_letter(encode_many("t", "n:4150", [LETTER]))[1] == ""  # without a reason
    line = encode_dead_letter("t", "n", LETTER, error="\udcff", failed_at_ns=5)
    assert decode_dead_letter(line)[1] == "?"
    with pytest.raises(ValueError, match='"topic" is missing'):
        decode_dead_letter(b'{"error": "x"}')


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, b"a\n\n\x1b\xff\n"),
        ({"delimiter": b"\0"}, b"a\0\0\x1b\xff\0"),
        ({"delimiter": b""}, b"a\x1b\xff"),
        ({"escape": True}, b"a\n\n\\x1b\\xff\n"),
        ({"print_topic": True}, b"t | a\nt | \nt | \x1b\xff\n"),
    ],
)
def test_each_body_ends_with_the_delimiter(options: dict[str, object], text: bytes) -> None:
    messages_of_batch = [WireMessage(0, 1, b"0" * 16, body) for body in (b"a", b"", b"\x1b\xff")]
    assert encode_lines("t", "h:1", messages_of_batch, **options) == text


def split(chunks: list[bytes], delimiter: bytes = b"\n") -> list[bytes]:
    splitter = Splitter(delimiter, limit=1 << 20)
    return [record for chunk in chunks for record in splitter.feed(chunk)] + splitter.end()


@pytest.mark.parametrize("delimiter", [b"\n", b"\0", b"\r\n", b"--", b"abab"])
@given(data=st.data())
def test_records_do_not_depend_on_chunk_boundaries(delimiter: bytes, data: st.DataObject) -> None:
    pieces = st.sampled_from([delimiter, b"a", b"\xff", b"-", b"\r", b"\n", b"\0"])
    text = b"".join(data.draw(st.lists(pieces, max_size=30)))
    places = st.lists(st.integers(0, len(text)), max_size=30)
    cuts = [0, *sorted(data.draw(places)), len(text)]
    chunks = [text[begin:end] for begin, end in itertools.pairwise(cuts)]
    *records, last = text.split(delimiter)
    assert split(chunks, delimiter) == records + ([last] if last else [])


def test_without_a_delimiter_the_stream_is_one_record() -> None:
    splitter = Splitter(b"", limit=10)
    assert [splitter.feed(b"a\n"), splitter.feed(b"\0b")] == [[], []]
    assert splitter.end() == [b"a\n\0b"]
    splitter.feed(b"x" * 11)
    with pytest.raises(NsqError, match="record 1 is longer than 10 bytes"):
        splitter.end()


def test_a_record_over_the_limit_ends_the_input() -> None:
    splitter = Splitter(limit=10)
    assert splitter.feed(b"a") == []
    assert splitter.feed(b"\n" + b"x" * 10) == [b"a"]  # without waiting for the next chunk
    assert splitter.feed(b"\n") == [b"x" * 10]

    splitter = Splitter(limit=10)
    assert splitter.feed(b"a\nb\n" + b"x" * 11) == [b"a", b"b"]
    with pytest.raises(NsqError, match="record 3 is longer than 10 bytes"):
        splitter.feed(b"x\n")
    with pytest.raises(NsqError, match="record 3"):
        splitter.end()
    splitter = Splitter(b"\r\n", limit=1 << 22)
    for _ in range(100_000):
        splitter.feed(b"0123456789")
    assert len(splitter.end()[0]) == 1_000_000
