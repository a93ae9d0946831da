"""nsq_to_nsq's filters by JSON field."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nsqtools.records.filters import json_filters


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999", "true", 'x"y'])
def test_a_value_that_is_no_number_is_text(value: str) -> None:
    keep, _ = json_filters(None, None, required="a", value=value, whitelist=())
    assert keep is not None
    bodies: list[Any] = [
        SimpleNamespace(body=b'{"a": "%b"}' % value.replace('"', '\\"').encode()),
        SimpleNamespace(body=b'{"a": 1}'),
    ]
    assert [keep(message) for message in bodies] == [True, False]
