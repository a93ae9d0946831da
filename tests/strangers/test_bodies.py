"""Bodies that programs in several languages write, and their columns."""

import datetime
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from plugins.archives import numbered
from plugins.cli import RunNsq
from pyarrow import parquet

from nsqtools.records.envelope import encode_many

Convert = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def convert(run_nsq: RunNsq, tmp_path: Path) -> Convert:
    """Return a function that archives bodies, lands them in columns, and returns the rows."""

    def run(bodies: Sequence[str], *options: str, schema: object = None) -> list[dict[str, Any]]:
        messages = [
            message._replace(body=body.encode("utf-8", "surrogatepass"))
            for message, body in zip(numbered(0, len(bodies)), bodies, strict=True)
        ]
        (tmp_path / "x.log").write_bytes(encode_many("t", "n:1", messages))
        if schema is not None:
            (tmp_path / "s.json").write_text(json.dumps(schema))
            options += ("--schema", str(tmp_path / "s.json"))
        command = ["archive", "convert", tmp_path / "x.log", "-o", tmp_path / "table"]
        done = run_nsq([*command, "--store", "parquet", "--body", "json", *options])
        assert done.status in (0, 6), done.err  # 6: a body did not fit
        files = (tmp_path / "table").rglob("*.parquet")
        rows = [row for file in files for row in parquet.ParquetFile(file).read().to_pylist()]
        return sorted(rows, key=lambda row: row["ts_ns"])

    return run


NUMBERS = """1e22 1E+2 1e-7 -0.0 0.1 123456789012345678 9007199254740993 9223372036854775807
    -9223372036854775808 1.7976931348623157e308 5e-324 2.5e-324 0.30000000000000004
    1.0000000000000002 3.14159265358979323846264338327950288"""


def test_a_number_has_the_same_value_as_in_python(convert: Convert) -> None:
    numbers = {f"v{n}": number for n, number in enumerate(NUMBERS.split())}
    text = ", ".join(f'"{name}": {number}' for name, number in numbers.items())
    [row] = convert([f"{{{text}}}"])
    for name, number in numbers.items():
        value = json.loads(number)
        assert row[name] == value, number
        assert math.copysign(1, row[name]) == math.copysign(1, value), number


NO_NUMBERS = "1e400 01 +1 .5 1. 0x10 1_000 1e --1"


def test_an_invalid_json_number_is_reported(convert: Convert) -> None:
    bodies = [f'{{"k": 1, "v": {text}}}' for text in NO_NUMBERS.split()]
    for row in convert(['{"k": 0, "v": 2.5}', *bodies])[1:]:
        assert row["_error"], row
        assert row["v"] is None


TEXTS = ["a\0b", "\U0001f600", "\ufffe\uffff", "\u202e", "\x7f\x80", "é", "\r\n\t", "\\", '"', ""]


def test_text_keeps_every_character(convert: Convert) -> None:
    bodies = [json.dumps({"v": text, "n": n}) for n, text in enumerate(TEXTS)]
    rows = convert([*bodies, '{"\\u0076": "key", "n": 90}', '{"v": "\\ud800", "n": 91}'])
    assert [row["v"] for row in rows[:-1]] == [*TEXTS, "key"]
    assert rows[-1]["_error"]  # half of a surrogate pair is not a character


SEVERAL = [
    ['{"n":1}{"n":2}', '{"n":3}'],
    ['{"n":1}\n{"n":2}', '{"n":3}', '{"n":4}'],
    ['{"n":1} {"s":"}', '{"}', '{"n":3}'],
    ['{"n":1}}', '{{"n":2}', '{"n":3}'],
    ['{"n":1},{"n":2}', '{"n":3}'],
    ['{"n":1}\n{"n":2}', '{"n":3', '"x":4}'],
    ['{"n":1}', '{"a":{"n":9}}', '{"n":2}'],
]


@pytest.mark.parametrize("bodies", SEVERAL)
def test_values_stay_in_the_row_of_their_message(convert: Convert, bodies: list[str]) -> None:
    for row in convert(bodies):
        try:
            value = json.loads(row["body"]).get("n")
        except ValueError:
            value = None
            assert row["_error"]
        assert row.get("n") == value


UTC = datetime.UTC
AT = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
TIMES = {
    "2026-01-02T03:04:05Z": AT,
    "2026-01-02T03:04:05.1Z": AT.replace(microsecond=100_000),
    "2026-01-02T05:04:05+02:00": AT,
    "2026-01-02T02:34:05-00:30": AT,
    "1969-12-31T23:59:59.999999Z": datetime.datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
    "0001-01-01T00:00:00Z": datetime.datetime(1, 1, 1, tzinfo=UTC),
    "9999-12-31T23:59:59Z": datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC),
}
NO_TIMES = ["2026-02-30T00:00:00Z", "02/01/2026", "Fri, 02 Jan 2026 03:04:05 GMT", 1767323045, ""]


def test_a_time_is_converted_or_reported(convert: Convert) -> None:
    at = {"type": "string", "format": "date-time"}
    schema = {"type": "object", "properties": {"at": at}}
    rows = convert([json.dumps({"at": text}) for text in (*TIMES, *NO_TIMES)], schema=schema)
    assert [row["at"] for row in rows[: len(TIMES)]] == list(TIMES.values())
    for row in rows[len(TIMES) :]:
        assert (row["at"], bool(row["_error"])) == (None, True), row


NESTED = {
    "type": "object",
    "properties": {
        "o": {
            "type": ["object", "null"],
            "properties": {
                "k": {"type": "integer"},
                "p": {"type": "object", "properties": {"z": {"type": "string"}}},
            },
        },
        "l": {"type": "array", "items": {"type": ["integer", "null"]}},
        "lo": {
            "type": "array",
            "items": {"type": "object", "properties": {"x": {"type": "number"}}},
        },
    },
}
NESTED_VALUES: list[tuple[dict[str, Any], tuple[Any, Any, Any]]] = [
    (
        {"o": {"k": 1, "p": {"z": "a"}}, "l": [1, None, 3], "lo": [{"x": 1.5}, {}]},
        ({"k": 1, "p": {"z": "a"}}, [1, None, 3], [{"x": 1.5}, {"x": None}]),
    ),
    ({"n": 1}, (None, None, None)),
    ({"o": None, "l": None, "lo": None}, (None, None, None)),
    ({"o": {}, "l": [], "lo": []}, ({"k": None, "p": None}, [], [])),
    (
        {"o": {"k": 2, "more": [1, {"deep": []}]}, "lo": [None, {"x": 2, "y": "extra"}]},
        ({"k": 2, "p": None}, None, [None, {"x": 2.0}]),
    ),
    ({"o": {"p": None}, "l": [None]}, ({"k": None, "p": None}, [None], None)),
]


def test_missing_null_and_empty_objects_and_lists_are_distinguished(convert: Convert) -> None:
    rows = convert([json.dumps(body) for body, _ in NESTED_VALUES], schema=NESTED)
    assert [(row["o"], row["l"], row["lo"]) for row in rows] == [
        values for _, values in NESTED_VALUES
    ]
