"""Bodies are decoded to the type of a handler's annotation."""

import inspect
from dataclasses import dataclass
from typing import Any, Protocol

import pytest
from pydantic import BaseModel
from typing_extensions import TypedDict

from nsqtools import Message
from nsqtools.errors import ConfigurationError
from nsqtools.work import Decoding
from nsqtools.work.handler import make_decoder

NO_ANNOTATION = inspect.Parameter.empty


@dataclass
class Customer:
    name: str


@dataclass
class Order:
    id: int
    customer: Customer


class Row(TypedDict):
    id: int


class Model(BaseModel):
    id: int


class HasBody(Protocol):
    body: bytes


@pytest.mark.parametrize(
    ("annotation", "body", "value"),
    [
        (NO_ANNOTATION, b'[1, "\xc3\xa9"]', [1, "é"]),
        (Any, b"null", None),
        (dict, b'{"id": 1}', {"id": 1}),
        (list[int], b"[1, 2]", [1, 2]),
        (Row, b'{"id": 1}', {"id": 1}),
        (Model, b'{"id": 1, "new": true}', Model(id=1)),
        (Order, b'{"id": 1, "customer": {"name": "ann"}}', Order(1, Customer("ann"))),
    ],
)
def test_json_becomes_a_value_of_the_annotated_type(
    annotation: Any, body: bytes, value: object
) -> None:
    decode = make_decoder(annotation, "bill", Decoding.json)
    assert decode is not None
    assert decode(body) == value


@pytest.mark.parametrize(
    ("annotation", "body", "reason"),
    [
        (NO_ANNOTATION, b"no JSON", "Expecting value: line 1"),
        (NO_ANNOTATION, b"\xff", "can't decode byte 0xff"),
        (NO_ANNOTATION, b"[" * 100_000, "nested too deeply"),
        (dict, b"[]", "Input should be"),
        (Row, b'{"id": "secret"}', "^id: Input should be a valid integer, unable to parse"),
        (Order, b'{"id": 1, "customer": {}}', "^customer.name: Field required$"),
        (Model, b"no JSON", "^Invalid JSON"),
    ],
)
def test_the_reason_of_a_misfit_names_the_field_and_not_its_value(
    annotation: Any, body: bytes, reason: str
) -> None:
    decode = make_decoder(annotation, "bill", Decoding.json)
    assert decode is not None
    with pytest.raises(ValueError, match=reason) as caught:
        decode(body)
    assert "secret" not in str(caught.value)


def test_text_and_bytes() -> None:
    as_text = make_decoder(str, "bill", Decoding.text)
    as_bytes = make_decoder(NO_ANNOTATION, "bill", Decoding.bytes)
    assert as_text is not None
    assert as_bytes is not None
    assert as_text(b"\xc3\xa9") == "é"
    assert as_bytes(b"\xff") == b"\xff"
    with pytest.raises(ValueError, match="invalid start byte"):
        as_text(b"\xff")


@pytest.mark.parametrize("annotation", [Message, NO_ANNOTATION, Any, object, HasBody])
def test_a_message_is_passed_as_it_is(annotation: Any) -> None:
    assert make_decoder(annotation, "bill", None) is None


@pytest.mark.parametrize(
    ("annotation", "decoding", "text"),
    [
        (Order, None, "bill takes Order, but would get Message"),
        (str, Decoding.bytes, "bill takes str, but would get bytes"),
        (Message, Decoding.text, "bill takes Message, but would get str"),
        (Message, Decoding.json, "bill takes a Message, but would get a value"),
        (type("Opaque", (), {}), Decoding.json, "bill has a type that cannot be decoded: "),
    ],
)
def test_an_annotation_that_contradicts_the_option_is_refused_at_the_start(
    annotation: Any, decoding: Decoding | None, text: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"^{text}"):
        make_decoder(annotation, "bill", decoding)
