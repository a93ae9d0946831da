"""Bodies for people, in three forms."""

from __future__ import annotations

import pytest

from nsqtools.records.lines import BodyForm, body_decoder


@pytest.mark.parametrize(
    ("form", "body", "shown"),
    [
        (BodyForm.utf8, "café".encode(), "café".encode()),
        (BodyForm.utf8, b"a\xffb", b"a\\xffb"),
        (BodyForm.hex, b"\x00\xff", b"00ff"),
        (BodyForm.base64, b"hi", b"aGk="),
    ],
)
def test_the_forms_of_a_body(form: BodyForm, body: bytes, shown: bytes) -> None:
    assert body_decoder(form)(body) == shown
