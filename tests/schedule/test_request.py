"""Requests: the document that any client may send, and invalid messages."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqtools.protocol.schedule_request import encode_cancellation, encode_request
from nsqtools.schedule.request import (
    Cancellation,
    CatchUp,
    Cron,
    Entry,
    Interval,
    InvalidRequest,
    parse_request,
    recurrence_text,
)

S = 1_000_000_000
ASKED = 1_800_000_000 * S


def parse(**fields: Any) -> Entry | Cancellation:
    return parse_request(json.dumps(fields).encode(), default_key="a:4150/01", asked_ns=ASKED)


@given(st.binary(min_size=1), st.integers(0, 2**62 // 1000).map(lambda us: us * 1000))
def test_any_body_and_time_survive_a_round_trip(body: bytes, at_ns: int) -> None:
    request = encode_request("orders", body, at_ns=at_ns, key="k", envelope=True)
    entry = parse_request(request, default_key="", asked_ns=ASKED)
    assert entry == Entry("k", at_ns, "orders", body, has_envelope=True)


@given(st.binary(max_size=80) | st.text().map(str.encode))
def test_any_invalid_message_raises_invalid_request(text: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_request(text, default_key="", asked_ns=ASKED)


def test_an_entry_without_a_key_gets_the_key_of_its_message() -> None:
    entry = parse(topic="orders", body="x", at="2027-01-15T08:00:00Z")
    assert entry == Entry("a:4150/01", 1_800_000_000 * S, "orders", b"x")


@pytest.mark.parametrize(
    ("fields", "due_s", "recurrence"),
    [
        ({"at": "+90m"}, 5400, None),
        ({"every": "10m"}, 600, Interval(ASKED, 600 * S)),
        ({"every": "1d"}, 86_400, Interval(ASKED, 86_400 * S)),
        ({"every": "10m", "at": "+1h"}, 3600, Interval(ASKED + 3600 * S, 600 * S)),
        ({"cron": "30 9 * * *", "timezone": "Asia/Tokyo"}, 59400, Cron("30 9 * * *", "Asia/Tokyo")),
        ({"cron": "0 * * * *"}, 3600, Cron("0 * * * *", "UTC")),
        ({"cron": "0 * * * *", "at": "2027-01-15T08:00:00Z"}, 0, Cron("0 * * * *", "UTC")),
    ],
)  # fmt: skip
def test_the_first_due_time_follows_from_the_request(
    fields: dict[str, str], due_s: int, recurrence: object
) -> None:
    entry = parse(topic="orders", body="x", key="k", **fields)
    assert isinstance(entry, Entry)
    assert (entry.due_ns - ASKED) / S == due_s
    assert entry.recurrence == recurrence
    assert entry.catch_up is CatchUp.last


def test_an_interval_is_shown_as_a_duration_and_a_time() -> None:
    interval = Interval(1_800_000_000 * S, 90 * 60 * S)
    assert recurrence_text(interval) == "every 1h30m from 2027-01-15T08:00:00Z"


def test_a_cancellation_names_its_key() -> None:
    request = encode_cancellation("order-42")
    assert parse_request(request, default_key="", asked_ns=0) == Cancellation("order-42")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"at": None}, "at is not a text"),
        ({"at": ""}, "none of at, every and cron"),
        ({"at": "tomorrow"}, "is not a time"),
        ({"at": "+9999999h"}, "beyond 292 years"),
        ({"at": "2262-04-12T00:00:00Z"}, "between 1970 and 2262"),
        ({"at": "1969-12-31T23:59:59Z"}, "between 1970 and 2262"),
        ({"every": "1m", "cron": "* * * * *"}, "exclude"),
        ({"timezone": "UTC"}, "timezone is for cron"),
        ({"cron": "* * *"}, "five fields"),
        ({"topic": "no topic"}, "no topic"),
        ({"topic": 7}, "topic is not a text"),
        ({"body": ""}, "one of body and body64"),
        ({"body64": "eA=="}, "one of body and body64"),
        ({"body": "", "body64": "x"}, "base64"),
        ({"body": "\ud800"}, "surrogates"),
        ({"key": "\ud800"}, "key is not UTF-8"),
        ({"at": "", "every": "2500000h"}, "between 1970 and 2262"),
        ({"catch_up": "some"}, "some"),
        ({"key": "k" * 257}, "256"),
        ({"cancel": True}, "cancel needs a key"),
        ({"cancel": True, "key": ""}, "cancel needs a key"),
        ({"att": "+1h"}, "'att' is not known"),
    ],
)
def test_an_invalid_request_is_refused_with_its_field(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        parse(**{"topic": "orders", "body": "x", "at": "+1h", **changes})


def test_an_envelope_has_the_due_time_and_any_body() -> None:
    entry = Entry("order-42", ASKED, "orders", b"\xff", has_envelope=True)
    assert json.loads(entry.published_body(ASKED + S)) == {
        "key": "order-42",
        "due": "2027-01-15T08:00:01Z",
        "body64": "/w==",
    }
