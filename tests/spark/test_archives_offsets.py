"""Offsets of archives: small, ordered, and the same as text whenever they are the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqtools.archive.layout import Head
from nsqtools.errors import ConfigurationError
from nsqtools.spark.archives.offsets import (
    Offset,
    decode_offset,
    format_spans,
    has_number,
    numbers_beyond,
    parse_spans,
    unite,
)

WRITER, OTHER = "a" * 32, "b" * 32

numbers = st.sets(st.integers(1, 60))
heads = st.builds(Head, st.sampled_from([WRITER, OTHER]), st.integers(1, 60))


@given(some=numbers, before=numbers)
def test_spans_hold_exactly_their_numbers(some: set[int], before: set[int]) -> None:
    spans, earlier = (unite((number, number) for number in each) for each in (some, before))

    assert {number for number in range(62) if has_number(spans, number)} == some
    assert parse_spans(format_spans(spans)) == spans
    assert numbers_beyond(spans, earlier) == sorted(some - before)


@given(read=st.sets(heads), under_way=st.dictionaries(heads, st.integers(1)), started=st.booleans())
def test_an_offset_is_read_back_as_it_was(
    read: set[Head], under_way: dict[Head, int], started: bool
) -> None:
    offset = Offset({}, under_way, {"old.log": 7}, is_start=started).with_read(read)

    decoded = decode_offset(json.loads(json.dumps(offset.encode())))

    assert decoded == offset
    assert json.dumps(decoded.encode()) == json.dumps(offset.encode())
    assert all(decoded.has_read(head) for head in read)
    assert set(decoded.under_way) == set(under_way) - read


def test_ten_thousand_files_stay_small() -> None:
    files = {f"host/clicks.2026-11-21_{n:05}.log.gz": 4000 + n * 7919 % 5000 for n in range(10_000)}
    numbered = Offset().with_read([Head(WRITER, number) for number in range(1, 10_001)])
    assert numbered.encode() == {
        "version": 1,
        "writers": {WRITER: {"read": "1-10000", "under_way": {}}},
    }

    text = json.dumps(Offset(files=files).encode())

    assert decode_offset(json.loads(text)) == Offset(files=files)
    assert len(text) < len(json.dumps(files)) / 5
    assert json.dumps(decode_offset(json.loads(text)).encode()) == text


WRITERS = [
    {},
    {"read": "9-1", "under_way": {}},
    {"read": "1-5,4", "under_way": {}},
    {"read": "", "under_way": {"x": 1}},
]


@pytest.mark.parametrize(
    "document",
    [
        *({}, [], None, {"version": 1}),
        *({"version": 1, "writers": {WRITER: each}} for each in WRITERS),
        *({"version": 2, "writers": {}, "packed_files": each} for each in ("", "AAA!", "AAAA", 7)),
    ],
)
def test_what_is_no_offset_is_refused(document: Any) -> None:
    with pytest.raises(ConfigurationError, match="is not an offset of an archive"):
        decode_offset(document)
    with pytest.raises(ConfigurationError, match="version 3, this program knows 2"):
        decode_offset({"version": 3, "writers": {}})
