"""Columns of messages and of their bodies, Parquet and the log of a Delta table, without Spark."""

import io
import json
import math
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plugins.archives import write_archive
from plugins.examples import examples
from plugins.http_server import MakeServer
from plugins.object_store import Bucket
from plugins.waiting import patience_s

from nsqtools.archive import body_columns, delta, parquet, table_writer
from nsqtools.archive.body_columns import FIELD, BodyColumns
from nsqtools.archive.body_schema import fields_of, json_schema, load_schema
from nsqtools.archive.columns import (
    batch_of_bodies,
    exact_columns,
    fast_columns,
    message_schema,
    read_batches,
)
from nsqtools.archive.delta import DeltaCatalog, TableFile, is_table
from nsqtools.archive.finding import find_archives
from nsqtools.archive.landing import Lander, Landings
from nsqtools.archive.layout import Head, TimeRange, index_of
from nsqtools.archive.place import LocalPlace
from nsqtools.archive.storage_objects import BucketPlace
from nsqtools.archive.table import convert
from nsqtools.archive.table_writer import _TIMES, TablePlan, Unfit
from nsqtools.errors import ConfigurationError, NsqError, OutputError
from nsqtools.protocol.frames import WireMessage
from nsqtools.records.envelope import BodyKind, decode_dead_letter, encode_many
from nsqtools.records.prometheus import encode_metrics

BASE_NS = 1_700_000_000_000_000_123
MESSAGES = [WireMessage(BASE_NS + n * 1000, n + 1, b"%016d" % n, b"body %d" % n) for n in range(5)]


LINE = encode_many("t", "n:1", MESSAGES[1:2])
LINE_OF = b'{"topic": "t", "nsqd": "n:1", "id": "%s", "ts": %s, "attempts": %s, "body": "%s"}\n'

lines = st.one_of(
    st.just(LINE),
    st.builds(
        lambda old, new: LINE.replace(old, new),
        st.sampled_from(b'"t" 0001 17 body "attempts" : 1 } {'.split()),
        st.sampled_from(
            [
                *(b"", b'"x": 1, ', b"\0", b"  ", b"\xff", b"\xed\xa0\x80", b"\xc3\xa9", b"9" * 20),
                *rb'null -1 1.0 65536 " body64 [] {} \ud800'.split(),
            ]
        ),
    ),
    st.builds(
        lambda body: LINE.replace(b'"body": "body 1"', b'"body64": "%s"' % body),
        st.sampled_from([b"AAAA", b"AAA", b"A A=", b"", b"\xc3\xa9", b'", "body": "x']),
    ),
    st.binary(max_size=20).map(lambda text: text.replace(b"\n", b"") + b"\n"),
    # Values of the lengths that `uniform_values` expects, and of nearly these lengths.
    st.builds(
        LINE_OF.__mod__,
        st.tuples(
            *(
                st.lists(st.sampled_from(parts), min_size=low, max_size=high).map(b"".join)
                for parts, low, high in (
                    (b'0 0 0 0 0 \\ " \\"'.split(), 15, 16),
                    (b"1 9 0 0x".split(), 18, 19),
                    (b"1 9 x".split(), 1, 2),
                    (b'a " \\ \\" } \xc3\xa9 \xff \t'.split(b" "), 0, 6),
                )
            )
        ),
    ),
)


@pytest.mark.parametrize("kind", [BodyKind.string, BodyKind.binary])
@given(text=st.lists(lines, min_size=1, max_size=4).map(b"".join))
@example(text=LINE)
def test_the_fast_and_the_exact_path_return_the_same_rows(text: bytes, kind: BodyKind) -> None:
    fast = fast_columns(text, text.count(b"\n"), message_schema(kind).names, kind)
    if fast is None:
        assert set(text.splitlines(keepends=True)) != {LINE}  # nsqtools writes exactly this line
        return
    exact, _, problems = exact_columns(text.split(b"\n")[:-1], kind)

    assert problems == []
    of_fast, of_exact = (
        {name: (column.type, column.to_pylist()) for name, column in columns.items()}
        for columns in (fast, exact)
    )
    assert of_fast == of_exact
    for names in (["topic"], ["nsqd", "timestamp"], ["body", "topic"], ["pos"]):
        selected = fast_columns(text, text.count(b"\n"), names, kind)
        assert {name: selected[name] for name in names if name != "pos"} == {
            name: fast[name] for name in names if name != "pos"
        }


def test_parquet_is_read_by_the_calling_thread_alone(tmp_path: Path) -> None:
    """A thread of Arrow that holds a file at the exit of the interpreter aborts the process."""
    with parquet.ParquetWriter(tmp_path / "a.parquet", message_schema()) as writer:
        writer.add(batch_of_bodies([b"body"]))
        writer.close()

    class OfOneThread(io.FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            assert threading.current_thread() is threading.main_thread()
            return super().read(size) or b""

    with OfOneThread(tmp_path / "a.parquet") as file:
        [batch] = parquet.read(file)  # type: ignore[arg-type]
        assert batch["body"].to_pylist() == ["body"]


def test_json_batches_are_short_and_row_groups_of_other_times_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsqtools.archive.columns.JSON_BATCH_ROWS", 2)
    (archive,) = find_archives([write_archive(tmp_path / "a.log", MESSAGES)])
    (batch,) = read_batches(archive, print)
    of_json = read_batches(archive, print, kind=BodyKind.json)
    assert [batch.num_rows for batch in of_json] == [2, 2, 1]  # Each may have a thousand columns.
    with parquet.ParquetWriter(tmp_path / "a.parquet", message_schema()) as writer:
        for number in range(5):
            writer.add(batch.slice(number, 1))
            writer.end_row_group()
        writer.close()
    within = TimeRange(BASE_NS + 1000, BASE_NS + 3000)

    batches = list(parquet.read(tmp_path / "a.parquet", ["id"], within))

    assert [batch.to_pydict() for batch in batches] == [{"id": [f"{1:016d}", f"{2:016d}"]}]
    with parquet.ParquetWriter(tmp_path / "b.parquet", message_schema()) as writer:
        writer.add(batch)
        writer.end_row_group()
        writer._checksums[0][-2] ^= 1
        with pytest.raises(OSError, match="not what was written"):
            writer.close()
    assert not (tmp_path / "b.parquet").exists()


@given(
    values=st.lists(st.none() | st.binary(max_size=5), max_size=8),
    other=st.lists(st.none() | st.binary(max_size=5), max_size=8),
    cut=st.integers(0, 8),
)
def test_a_checksum_does_not_depend_on_the_memory_layout(
    values: list[bytes | None], other: list[bytes | None], cut: int
) -> None:
    array = pyarrow.array(values, pyarrow.binary())
    chunked = pyarrow.chunked_array([array[:cut], array[cut:]], pyarrow.binary())
    within = pyarrow.array([b"x", *values, b"y"], pyarrow.binary())[1 : len(values) + 1]
    assert parquet.checksum(chunked) == parquet.checksum(array) == parquet.checksum(within)
    is_same = parquet.checksum(pyarrow.array(other, pyarrow.binary())) == parquet.checksum(array)
    assert is_same == (values == other)


def test_a_full_disk_is_an_error_and_the_file_is_removed(small_disk: Path) -> None:
    batch = pyarrow.record_batch({"id": [os.urandom(100_000).hex()]})
    with pytest.raises(OSError, match=f"No space left on device: '{small_disk}/draft'"):
        parquet.write([batch], small_disk / "draft", batch.schema)
    assert list(small_disk.iterdir()) == []


OWN = {*message_schema().names}


def typed(columns: BodyColumns, *bodies: bytes) -> list[dict[str, object]]:
    rows = columns.add(batch_of_bodies(bodies)).to_pylist()
    return [
        {name: row[name] for name in row if name not in OWN and row[name] is not None}
        for row in rows
    ]


def test_schemas_that_programs_generate_are_accepted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    definitions = {
        "Item": {"properties": {"sku": {"type": "string"}, "n": {"type": ["integer", "number"]}}},
        "Tree": {"properties": {"left": {"$ref": "#/$defs/Tree"}}},
        # Each level would have twice as many fields as the one above it.
        "Node": {
            "properties": {
                "value": {"type": "integer"},
                **{key: {"anyOf": [{"$ref": "#/$defs/Node"}]} for key in ("one", "two")},
            }
        },
    }
    properties: dict[str, Any] = {
        "id": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "at": {"anyOf": [{"type": "string", "format": "date-time"}, {"type": "null"}]},
        "item": {"$ref": "#/$defs/Item"},
        "items": {"type": "array", "items": {"allOf": [{"$ref": "#/$defs/Item"}]}},
        "status": {"enum": ["new", None]},
        "version": {"const": 1},
        "price": {"type": "number", "format": "decimal(9, 2)"},
        "node": {"$ref": "#/$defs/Node"},
    }
    odd: dict[str, Any] = {
        "both": {"type": ["integer", "string"]},
        "any": True,
        "empty": {"type": "object"},
        "list": {"type": "array", "items": [{"type": "integer"}]},
        "gone": {"$ref": "#/$defs/Gone"},
        "tree": {"$ref": "#/$defs/Tree"},
        "root": {"$ref": "#"},
        "wide": {"type": "string", "format": "decimal(39,2)"},
    }
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"properties": properties | odd, "$defs": definitions}))
    item = pyarrow.struct([("sku", pyarrow.string()), ("n", pyarrow.float64())])
    assert {field.name: field.type for field in fields_of(load_schema(path))} == {
        "id": pyarrow.int64(),
        "at": pyarrow.timestamp("us", tz="UTC"),
        "item": item,
        "items": pyarrow.list_(item),
        "status": pyarrow.string(),
        "version": pyarrow.int64(),
        "price": pyarrow.decimal128(9, 2),
        "node": pyarrow.struct([("value", pyarrow.int64())]),
    }
    assert all(f": {name}" in caplog.text for name in odd)
    for name in ("left", "one", "two", "root"):
        assert caplog.text.count(f"{name} refers to itself") == 1


def test_a_schema_with_too_many_levels_for_a_parser_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text('{"a":' * 100_000)
    with pytest.raises(ConfigurationError, match=r"s\.json is not JSON \(maximum recursion"):
        load_schema(path)


def test_values_that_do_not_fit_are_null_and_reported() -> None:
    properties = {"user": {"type": "integer"}, "at": {"type": "string", "format": "date-time"}}
    columns = BodyColumns(fields_of({"properties": properties}))
    second = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    rows = {
        b'{"user": 1}': {"user": 1},
        b'{"user": "x", "new": 1.5}': {"new": 1.5, "_error": "user is not int64"},
        b"text": {"_error": "it is not JSON"},
        b"[1]": {"_error": "it is not a JSON object"},
        b"\xff": {"_error": "it is not UTF-8"},
        b'{"user": null, "new": 2.5}': {"new": 2.5},
        b'{"user": 3} {"user": 4}': {"_error": "it is not JSON"},
        b'{"id": true, "deep": {"x": 1}}': {"body_id": True},
        b'{"user": 5, "\\ud800": 1}': {"user": 5, "_error": "it does not fit its columns"},
        b'{"user": 6, "user": 7, "new": 1}': {"new": 1.0, "_error": "user occurs 2 times"},
        b'{"user": 2.0, "new": 9007199254740993}': {"user": 2, "_error": "new is not double"},
        b'{"user": 18446744073709551615, "new": 1e400}': {
            "_error": "user is not int64; new is not double"
        },
        b'{"at": "2026-01-02 03:04:05.000000999+00:00", "new": Infinity}': {
            "at": second,
            "new": math.inf,
        },
        b'{"at": "2026-01-02T03:04:05Z", "user": %s}' % (b"9" * 5000): {
            "at": second,
            "_error": "user is not int64",
        },
    }

    assert typed(columns, *rows) == [*rows.values()]
    assert columns.misfits == 10
    assert columns.without_column == {"\ud800"}
    assert fields_of(json_schema(columns.fields)) == columns.fields
    assert typed(columns, b'{"at": "2026-01-02T03:04:05.000000999Z"}') == [{"at": second}]
    assert columns.misfits == 10  # Arrow parses the times that Go writes.


def test_an_integer_column_becomes_double_until_a_file_has_it() -> None:
    columns = BodyColumns()
    assert typed(columns, b'{"price": 10}') == [{"price": 10}]
    bodies = [b'{"price": 10.25}', b'{"price": "free"}', b'{"price": 9007199254740993}']
    errors = [{"_error": "price is not double"}] * 2
    assert typed(columns, *bodies) == [{"price": 10.25}, *errors]
    columns = BodyColumns()
    mixed = [b'{"price": 9007199254740993}', b'{"price": "free"}', b'{"price": 10.25}', b"text"]
    assert typed(columns, *mixed) == [*errors, {"price": 10.25}, {"_error": "it is not JSON"}]
    columns = BodyColumns()
    columns.add(batch_of_bodies([b'{"price": 10}']))
    columns.freeze_types()
    assert typed(columns, b'{"price": 10.25}') == [{"_error": "price is not int64"}]


@pytest.mark.parametrize("odd", [b"{}", b"text", b'{"\\ud800": 1, "x": 1, "x": 1}'])
def test_decimals_have_all_digits(odd: bytes) -> None:
    kind = {"type": "number", "format": "decimal(22,2)"}
    fields = {"price": kind, "of": {"properties": {"v": kind}}}
    columns = BodyColumns(fields_of({"properties": fields}))
    price = Decimal("123456789012345678.25")
    bodies = {
        b'{"price": 123456789012345678.25, "new": 1.5}': {"price": price, "new": 1.5},
        b'{"price": "10.5", "of": {"v": 123456789012345678.25}}': {
            "price": Decimal("10.50"),
            "of": {"v": price},
        },
        b'{"price": 18446744073709551615}': {"price": Decimal(2**64 - 1)},
    }
    assert typed(columns, *bodies, odd)[:3] == [*bodies.values()]
    for value in (b"%d" % 2**70, b"0.125", b'"free"', b"true", b"NaN", b"9" * 5000):
        assert typed(columns, b'{"price": %s}' % value) == [
            {"_error": "price is not decimal128(22, 2)"}
        ]
    assert fields_of(json_schema(columns.fields)) == columns.fields


def test_one_invalid_body_does_not_make_a_batch_slow() -> None:
    columns = BodyColumns([pyarrow.field("n", pyarrow.int64())])
    bodies = [b'{"n": %d}' % number for number in range(5000)]
    bodies[77] = b'{"n": 1, "x": "\\ud800", "x": "\\ud800"}'
    with patch.object(body_columns, "_read", wraps=body_columns._read) as read:
        rows = typed(columns, *bodies)
    assert [row for row in rows if "_error" in row] == [rows[77]]
    assert read.call_count < 50


def test_fields_beyond_the_limit_of_columns_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_columns, "MAX_COLUMNS", 2)
    columns = BodyColumns()
    typed(columns, b'{"a": 1, "b": 1, "c": 1}')
    typed(columns, b'{"a": 1, "d": 1, "of": {"e": 1}}')
    assert columns.without_column == {"c", "d"}
    of_table = [pyarrow.field(name, pyarrow.int64()) for name in "ab"]  # 0.3.0 made such columns
    columns = BodyColumns((), of_table)
    assert typed(columns, b'{"a": 1, "b": 2, "c": 3}') == [{"a": 1, "b": 2}]
    assert columns.without_column == {"c"}


def test_a_column_keeps_the_metadata_of_other_programs(tmp_path: Path) -> None:
    catalog = new_table(str(tmp_path / "lake"))
    named = pyarrow.field("n", pyarrow.int64(), metadata={FIELD: b"N"})
    catalog.add_columns([named.with_metadata({"comment": "a count"})])
    assert catalog.add_columns([named]) == {}
    words = {b"comment": b"a count", FIELD: b"N"}
    assert catalog.schema().field("n").metadata == words
    assert catalog.add_columns([named.with_metadata({FIELD: b"n"})]) == {"n": pyarrow.int64()}


names = st.sampled_from(["a", "A", "b c", "b_c", "B C", "id", "ID", "Id", "body_id", "Timestamp"])
logs = st.lists(st.dictionaries(names, st.integers(0, 9), min_size=1), min_size=1, max_size=3)


def written(
    table: dict[str, pyarrow.Field], log: list[dict[str, int]], field_names: list[str]
) -> None:
    """Write a log as a process that has only the table and perhaps a schema."""
    fields = [pyarrow.field(name, pyarrow.int64()) for name in field_names]
    columns = BodyColumns(fields, table.values())
    batch = columns.add(batch_of_bodies([json.dumps(body).encode() for body in log]))
    for column in columns.schema():
        if column.metadata:
            table[column.name] = column
    for body, row in zip(log, batch.to_pylist(), strict=True):
        for name, value in body.items():
            (column,) = [field for field in table if field_in(table[field]) == name]
            assert row[column] == value


def field_in(column: pyarrow.Field) -> str | None:
    return column.metadata[FIELD].decode() if column.metadata else None


@given(work=st.lists(st.tuples(logs, st.lists(names, unique=True, max_size=2)), min_size=2))
@settings(max_examples=examples(30))
def test_a_field_keeps_its_column_for_all_writers(
    work: list[tuple[list[dict[str, int]], list[str]]],
) -> None:
    table: dict[str, pyarrow.Field] = {}
    owners: dict[str, str | None] = {}
    for log, field_names in work:
        written(table, log, field_names)
        fields = {name: field_in(column) for name, column in table.items()}
        assert owners.items() <= fields.items()
        assert len({*fields.values()}) == len({name.lower() for name in fields}) == len(fields)
        owners = fields


@pytest.mark.parametrize("is_delta", [False, True])
@pytest.mark.parametrize("is_labelled", [False, True])
def test_each_archiver_writes_a_field_to_the_same_column(
    tmp_path: Path, is_delta: bool, is_labelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table without labels is one of 0.3.0; each archiver has an empty directory."""
    plan = TablePlan(str(tmp_path / "lake"), is_delta, "h", BodyKind.json)
    for number in range(3):
        value = b'"x"' if number == 2 else b"1"
        body = b'{"Id": 1, "user id": 1, "A": 1, "a": 2, "v": %b}' % value
        bodies = [body if number < 2 else b'{"late": true, ' + body[1:]]
        messages = [WireMessage(BASE_NS, 1, b"%016d" % number, body) for body in bodies]
        log = write_archive(tmp_path / f"{number}" / "a.log", messages, head=Head("a" * 32, number))
        with monkeypatch.context() as old:
            if not (number or is_labelled):
                bare = BodyColumns._body_fields
                old.setattr(
                    BodyColumns,
                    "_body_fields",
                    lambda self, bare=bare: [field.remove_metadata() for field in bare(self)],
                )
            landed = Lander(plan, log.parent).land([log])
        assert landed.unfit.bodies == (number == 2)

    files = find_archives([plan.url])
    rows = [
        row
        for file in files
        for row in pyarrow.parquet.read_table(file.shown, partitioning=None).to_pylist()
    ]
    values = [[row[name] for name in ("body_Id", "user_id", "A", "body_a")] for row in rows]
    assert values == [[1, 1, 1, 2]] * 3
    assert [row["_error"] for row in rows if row.get("late")] == ["v is not int64"]
    extra = {*rows[-1]} - OWN - {"body_Id", "user_id", "A", "body_a", "v", "_error", "late"}
    assert extra == set()


def test_bodies_with_ids_as_keys_or_deep_nesting_need_bounded_memory() -> None:
    ids = [b'{"count": 1, "of": {"%d": 1}}' % number for number in range(3000)]
    wide = b'{"of": {%s}}' % b",".join(b'"%d": 1' % number for number in range(100_000))
    deep = [
        b'{"of":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"of":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ]
    pool = pyarrow.proxy_memory_pool(default_pool := pyarrow.default_memory_pool())
    pyarrow.set_memory_pool(pool)
    columns = BodyColumns()
    columns.add(batch_of_bodies([*ids, wide, *deep, *ids]))
    pyarrow.set_memory_pool(default_pool)

    assert [field.name for field in columns.fields] == ["count"]
    assert pool.max_memory() < 60 << 20


scalars = st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False)
json_values = st.recursive(
    scalars | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=4,
)
objects = st.dictionaries(st.sampled_from(["a", "b", "A", "id"]), json_values, max_size=3)
NO_OBJECTS = [b'{"a":', b"1}", b"{}{}", b"", b'{"a":"}', b'{"}', b" {} ", b"\xff", b"{}\n{}"]
json_bodies = objects.map(lambda value: json.dumps(value).encode()) | st.sampled_from(NO_OBJECTS)


@given(bodies=st.lists(json_bodies, min_size=1, max_size=5))
@settings(max_examples=examples(30))
def test_columns_belong_to_the_rows_of_their_bodies(bodies: list[bytes]) -> None:
    columns = BodyColumns()
    rows = columns.add(batch_of_bodies(bodies)).to_pylist()
    for body, row in zip(bodies, rows, strict=True):
        wrong = row["_error"] or ""
        value = {} if wrong.startswith("it is not") else json.loads(body)
        for name, column in columns._columns.items():
            assert row[column] == (None if f"{name} is not" in wrong else value.get(name))


def table_file(name: str, rows: int = 1) -> TableFile:
    path = f"topic=clicks/date=2026-11-23/{name}.parquet"
    return TableFile(path, 10, rows, 5, 6, {"topic": "clicks", "date": "2026-11-23"})


def new_table(place: str) -> DeltaCatalog:
    catalog = DeltaCatalog(place)
    schema = message_schema().append(pyarrow.field("date", pyarrow.date32()))
    catalog.create(schema, ["topic", "date"])
    return catalog


def test_a_repeated_commit_does_nothing(lake_url: str) -> None:
    catalog = new_table(lake_url)

    with patch.object(delta, "sync_data", wraps=delta.sync_data) as synced:
        first = [catalog.commit([table_file("a")], app_id="w", number=1) for _ in range(2)]
    # Each commit syncs the table's folder and its own file.
    assert synced.call_count == (0 if "://" in lake_url else 4)
    second = catalog.commit([table_file("b")], [table_file("a")], app_id="w", number=2)
    reopened = DeltaCatalog(lake_url)

    assert (first, second) == ([True, False], True)
    assert reopened.files() == [table_file("b")]
    assert (reopened.number_of("w"), reopened.number_of("other")) == (2, 0)
    with pytest.raises(OutputError, match=r"a\.parquet is not in the table"):
        reopened.commit([], [table_file("a")], app_id="w", number=3)
    reopened.add_columns([pyarrow.field("user", pyarrow.int64())])
    assert catalog.schema().field("user").type == pyarrow.int64()
    log, newest = [entry.name for entry in catalog.storage.list("_delta_log")], reopened._snapshot()
    # The log is read only when it is needed.
    with patch.object(reopened, "_newest", return_value=newest):
        for name in log:
            catalog.storage.delete(name)
        with pytest.raises(NsqError, match="cannot use the Delta table"):
            reopened.number_of("unknown")
    if "://" not in lake_url:
        (loop := Path(lake_url, name)).symlink_to(loop)
        with pytest.raises(NsqError, match=r"Unable to .* Too many levels of symbolic links"):
            reopened.files()  # The reason is the last part of the message.


def test_files_have_bounds_of_times_and_plain_columns(tmp_path: Path) -> None:
    plan = TablePlan(str(tmp_path / "lake"), True, "h", BodyKind.json)
    for number in range(2):
        bodies = [
            b'{"n": %d, "x": %s, "s": "%s"}' % (number, nan, b"s" * (20 + 20 * number))
            for nan in (b"NaN", b"0.5")
        ]
        sent = [
            WireMessage(BASE_NS + number * 10**9 + n * 1000, 1, b"%016d" % n, body)
            for n, body in enumerate(bodies)
        ]
        write_archive(tmp_path / "a" / f"{number}.log", sent, head=Head("a" * 32, number))
    assert len(list(convert(find_archives([tmp_path / "a"]), plan, tmp_path))) == 2
    table = DeltaCatalog(plan.url)._table()
    actions = pyarrow.table(table.get_add_actions(flatten=True)).sort_by("min.n").to_pylist()
    assert [(row["min.n"], row["max.n"], row["null_count.n"]) for row in actions] == [
        (0, 0, 0),
        (1, 1, 0),
    ]
    assert actions[0]["max.timestamp"] < actions[1]["max.timestamp"]
    # They are rounded down and up.
    assert actions[1]["min.timestamp"] < actions[1]["max.timestamp"]
    assert [row.get("max.s") for row in actions] == ["s" * 20, None]  # Long text has no bounds.
    assert actions[0].get("max.x") is None  # In Spark, NaN is larger than any maximum.


def test_a_recreated_table_gets_no_commit_of_its_predecessor(tmp_path: Path) -> None:
    catalog = new_table(str(tmp_path / "table"))
    for number in range(1, 4):
        assert catalog.commit([table_file(f"{number}.parquet")], app_id="a", number=number)
    shutil.rmtree(tmp_path / "table")
    recreated = new_table(str(tmp_path / "table"))
    assert catalog.commit([table_file("new.parquet")], app_id="a", number=2)
    assert ([file.rows for file in recreated.files()], recreated.number_of("a")) == ([1], 2)


def test_commits_read_only_newer_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog, other = (new_table(str(tmp_path / "table")) for _ in range(2))
    catalog.number_of("a")
    with monkeypatch.context() as without_loading:
        without_loading.setattr("deltalake.DeltaTable.__init__", None)
        for number in range(1, 5):
            assert catalog.commit([table_file(f"{number}.parquet")], app_id="a", number=number)
    other.add_columns([pyarrow.field("new", pyarrow.int64())])
    assert "new" in catalog.schema().names
    assert len(catalog.files()) == 4
    monkeypatch.setattr(delta, "CHECKPOINT_INTERVAL", 3)
    catalog.commit([table_file("5.parquet")], app_id="a", number=5)
    assert list((tmp_path / "table" / "_delta_log").glob("*6.checkpoint.parquet"))
    assert len(new_table(str(tmp_path / "table")).files()) == 5


def test_concurrent_commits_are_kept_in_a_place_of_any_name(lake_url: str) -> None:
    new_table(lake_url)

    def write(writer: int) -> None:
        for number in (1, 2, 2):
            file = table_file(f"{writer}-{number}")
            DeltaCatalog(lake_url).commit([file], app_id=f"w{writer}", number=number)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(write, range(3)))

    paths = [table_file(f"{writer}-{n}").path for writer in range(3) for n in (1, 2)]
    assert sorted(file.path for file in DeltaCatalog(lake_url).files()) == paths
    catalog = new_table(f"{lake_url}/a #?%x")
    catalog.storage.put("file", b"")
    catalog.commit([table_file("a")], app_id="w", number=1)
    assert len(list(catalog.storage.list("_delta_log"))) == 2
    assert catalog.files() == [table_file("a")]
    with pytest.raises(ConfigurationError, match=r"cannot be a Delta table: %2f is in"):
        new_table(f"{lake_url}/a%2fb")


def test_stores_need_conditional_puts(
    bucket: Bucket, http_server: MakeServer, dead_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.storage.put("_delta_log/.nsqtools-1", b"1")
    assert not is_table(bucket.storage)
    put = BucketPlace.put_if_absent  # A lost response makes the client repeat the request.
    monkeypatch.setattr(BucketPlace, "put_if_absent", lambda *args: [put(*args), put(*args)])
    table = new_table(f"{bucket.url}/table")
    monkeypatch.setattr(BucketPlace, "put_if_absent", BucketPlace.put)
    with pytest.raises(ConfigurationError, match="no conditional puts"):
        new_table(f"{bucket.url}/other")
    refused, away = http_server(*[403] * 9).url, f"http://{dead_address}"
    messages = {"refused": "_last_checkpoint ↳ Error", "connect": "cannot connect to the store"}
    for url, (category, message) in zip((refused, away), messages.items(), strict=True):
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        with pytest.raises(NsqError, match=message) as raised:
            table.files()
        assert raised.value.category == category


def test_a_landing_process_with_stray_output_or_a_damaged_state_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('hello', flush=True)")
    landings = Landings(TablePlan(str(tmp_path / "lake"), False, "web1"), tmp_path, None)
    with monkeypatch.context() as stray_output:
        stray_output.setenv("PYTHONPATH", str(tmp_path))
        with pytest.raises(ChildProcessError, match="the landing process ended with"):
            landings._land([])
    (tmp_path / ".nsq-landing").mkdir()
    (tmp_path / ".nsq-landing/state.json").write_bytes(b"")
    for _ in range(2):
        with pytest.raises(OutputError, match=r"cannot read \S+/state\.json"):
            landings._land([])
    landings.close()


def test_metrics_have_the_rows_and_the_newest_time_of_each_topic(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    write_archive(logs / "a.log", MESSAGES, head=Head("a" * 32, 1))
    landings = Landings(TablePlan(str(tmp_path / "lake"), True, "h"), logs, None)
    landings.put(logs / "a.log")
    assert landings.close() == 0
    page = encode_metrics(landings.metrics())
    newest_ns = max(message.timestamp_ns for message in MESSAGES)
    assert f'nsq_table_rows_total{{topic="clicks"}} {len(MESSAGES)}\n' in page
    assert f'nsq_table_newest_timestamp_seconds{{topic="clicks"}} {newest_ns / 10**9}\n' in page


def test_consumption_pauses_while_the_disk_has_no_room_to_land_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = write_archive(tmp_path / "logs" / "a.log", MESSAGES, head=Head("a" * 32, 1))
    landings = Landings(TablePlan(str(tmp_path / "lake"), False, "h"), log.parent, None)
    pauses: list[bool] = []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))

    landings.regulate(pauses.append)
    assert pauses == []  # A disk that is full without a log to land is the archiver's problem.
    landings.put(log)
    landings.regulate(pauses.append)
    assert pauses == [True]
    assert landings.health == (
        False,
        f"paused: {landings.totals.waiting_bytes} bytes wait for their upload",
    )
    assert landings.close() == 0
    landings.regulate(pauses.append)

    assert pauses == [True, False]


def test_a_place_taken_over_since_the_start_gets_no_files(tmp_path: Path) -> None:
    log = write_archive(tmp_path / "a.log", MESSAGES, head=Head("a" * 32, 1))
    lander = Lander(TablePlan(str(tmp_path / "lake"), False, "web1"), tmp_path)
    (tmp_path / "lake" / "_spark_metadata").mkdir(parents=True)
    with pytest.raises(ConfigurationError, match="is written by Spark, whose log has its files"):
        lander.land([log])
    assert log.exists()


def add_to_log(catalog: DeltaCatalog, *actions: dict[str, object]) -> None:
    """Commit these actions as another engine would."""
    log = Path(catalog.storage.url, "_delta_log")
    number = len(list(log.glob("*.json")))
    (log / f"{number:020}.json").write_text("\n".join(map(json.dumps, actions)))


FEATURES = [  # a feature, the name in the refusal, and the uses that are allowed
    ({"reader": "typeWidening"}, "typeWidening", ""),
    ({"reader": "deletionVectors"}, "", "read append replace"),
    ({"writer": "rowTracking"}, "rowTracking", "read"),
    ({"writer": "clustering"}, "clustering", "read"),
    ({"writer": "invariants"}, "", "read append replace"),
    ({"key": "delta.columnMapping.mode", "to": "name"}, "columnMapping", ""),
    ({"key": "delta.constraints.positive", "to": "n > 0"}, "checkConstraints", "read"),
    ({"key": "delta.appendOnly", "to": "true"}, "appendOnly", "read append"),
    ({"key": "delta.enableChangeDataFeed", "to": "true"}, "changeDataFeed", "read append"),
    ({"key": "delta.enableInCommitTimestamps", "to": "true"}, "inCommitTimestamp", "read"),
    ({"column": {"delta.generationExpression": "n + 1"}}, "generatedColumns", "read"),
    ({"column": {"delta.identity.start": 1}}, "identityColumns", "read"),
    ({"column": {"delta.invariants": "{}"}}, "invariants", "read"),
    ({"column": {"CURRENT_DEFAULT": "1"}}, "allowColumnDefaults", "read"),
    ({"nullable": False}, "the NOT NULL column n", "read"),
]


@pytest.mark.parametrize(("has", "refused", "allowed"), FEATURES)
def test_a_table_with_an_unsupported_feature_is_refused(
    tmp_path: Path, has: dict[str, Any], refused: str, allowed: str
) -> None:
    catalog = DeltaCatalog(str(tmp_path / "table"))
    catalog.create(pyarrow.schema([("n", pyarrow.int64())]), [])
    metadata = {
        "id": "x",
        "format": {"provider": "parquet", "options": {}},
        "partitionColumns": [],
        "configuration": {has["key"]: has["to"]} if "key" in has else {},
        "schemaString": json.dumps(
            {
                "type": "struct",
                "fields": [
                    {
                        "name": "n",
                        "type": "long",
                        "nullable": has.get("nullable", True),
                        "metadata": {
                            "delta.columnMapping.id": 1,
                            "delta.columnMapping.physicalName": "n",
                            **has.get("column", {}),
                        },
                    }
                ],
            }
        ),
    }
    readers = ["columnMapping", *([has["reader"]] if "reader" in has else [])]
    writers = [*readers, *([has["writer"]] if "writer" in has else [])]
    features = {"readerFeatures": readers, "writerFeatures": writers}
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7, **features}
    add_to_log(catalog, {"protocol": protocol}, {"metaData": metadata})
    uses = {
        "read": catalog.files,
        "append": catalog.check_writable,
        "replace": lambda: catalog.check_writable(removes=True),
    }
    for name, use in uses.items():
        if name in allowed:
            use()
        else:
            with pytest.raises(ConfigurationError, match=f"the table has {refused}") as raised:
                use()
            assert raised.value.hint


def test_a_refused_landing_keeps_the_log_and_ends_immediately(tmp_path: Path) -> None:
    catalog = new_table(str(tmp_path / "lake"))
    catalog._table().alter.add_constraint({"early": "attempts < 2"})
    log = write_archive(tmp_path / "logs" / "a.log", MESSAGES, head=Head("a" * 32, 1))
    landings = Landings(TablePlan(str(tmp_path / "lake"), True, "h"), log.parent, None)
    landings.put(log)

    begin = time.monotonic()
    assert landings.close() == 1
    assert time.monotonic() - begin < patience_s(15)
    assert (log.exists(), catalog.files()) == (True, [])
    assert "checkConstraints" in str(landings.last_error)


@pytest.mark.parametrize("is_delta", [False, True])
def test_partition_values_that_are_too_long_or_null_are_converted(
    tmp_path: Path, is_delta: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_writer, "MAX_OPEN_PARTITIONS", 2)
    fields = {"properties": {"c": {"type": "string"}, "n": {"type": "integer"}}}
    dead_letters = tmp_path / "dead.jsonl"
    plan = TablePlan(
        str(tmp_path / "lake"), is_delta, "h", BodyKind.json, fields, ("c",), {}, str(dead_letters)
    )
    bodies = [b'{"c": "%b", "n": "x"}' % (b"x" * 201)]
    bodies += [b'{"c": "%d", "n": 1, "new": 1}' % (n % 5) for n in range(10)]
    messages = [WireMessage(BASE_NS + n, 1, b"%016d" % n, body) for n, body in enumerate(bodies)]
    archives = find_archives([write_archive(tmp_path / "a.log", messages)])

    [(_, files, problem, unfit)] = convert(archives, plan, tmp_path)

    assert (problem, sorted(file.rows or 0 for file in files)) == ("", [1, *[2] * 5])
    (odd,) = [file for file in files if file.partition["c"] is None]
    (row,) = pyarrow.parquet.read_table(tmp_path / "lake" / odd.path, partitioning=None).to_pylist()
    assert row["_error"] == "n is not int64; c is too long for a partition"
    assert (unfit.bodies, list(tmp_path.glob("*.parquet"))) == (1, [])
    assert [*convert(archives, plan, tmp_path)] == [(archives[0], [], "", Unfit())]
    [line] = dead_letters.read_bytes().splitlines()
    message, error = decode_dead_letter(line)
    assert (message.topic, message.id, message.body) == ("clicks", b"%016d" % 0, bodies[0])
    assert (message.timestamp_ns, error) == (BASE_NS, row["_error"])


def test_each_message_is_in_one_partition(tmp_path: Path) -> None:
    fields = {"properties": {"n": {"type": "number"}}}
    plan = TablePlan(str(tmp_path / "lake"), False, "h", BodyKind.json, fields, ("n",))
    bodies = [b'{"n": NaN}', b'{"n": 0.0}', b'{"n": -0.0}', b"{}"]
    messages = [WireMessage(BASE_NS, 1, b"%016d" % n, body) for n, body in enumerate(bodies)]
    archives = find_archives([write_archive(tmp_path / "a.log", messages)])
    [(_, files, problem, _)] = convert(archives, plan, tmp_path)
    assert (problem, [file.rows for file in files]) == ("", [1, 1, 1, 1])
    inner = {"x": {"type": "string"}}
    odd = {"a b": {"type": "string"}, "o": {"type": "object", "properties": inner}}
    for name in odd:  # One column is named a_b, the other has no order.
        with pytest.raises(ConfigurationError, match=f"{name} needs a plain field"):
            TablePlan(plan.url, False, "h", BodyKind.json, {"properties": odd}, (name,)).check()


@pytest.mark.parametrize("is_delta", [False, True])
def test_an_archive_is_converted_once_and_skipped_files_are_reported(
    tmp_path: Path, is_delta: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"properties": {"n": {"type": "integer"}}}
    plan = TablePlan(str(tmp_path / "lake"), is_delta, "h", BodyKind.json, fields, ("n",))
    drafts, bare = tmp_path / "drafts", tmp_path / "bare.log"
    drafts.mkdir()
    odd = _TIMES.encode()  # a column that nsqtools uses itself
    bodies = [b'{"n": %d, "%b": 7}' % (n > 1, odd) for n in range(4)]
    messages = [WireMessage(BASE_NS + n, 1, b"%016d" % n, body) for n, body in enumerate(bodies)]
    for name, count in (("cut", 3), ("whole", 4)):
        write_archive(
            tmp_path / name / "a.log", messages[:2], messages[2:count], head=Head("a" * 32, 1)
        )

    def convert_again(path: Path) -> tuple[int, str]:
        [(_, files, problem, _)] = convert(find_archives([path]), plan, drafts, lambda _: "t")
        return len(files), problem

    assert convert_again(tmp_path / "cut") == (2, "")
    assert convert_again(tmp_path / "cut") == (0, "")
    assert "the table has a copy with" in convert_again(tmp_path / "whole")[1]

    bare.write_bytes(b'{"n": 1}\n{"n": 2}\n')
    real = LocalPlace.put
    with monkeypatch.context() as killed:  # killed between two files, or before the commit
        killed.setattr(DeltaCatalog, "commit", None)
        puts = iter([real])
        killed.setattr(LocalPlace, "put", lambda *args: next(puts)(*args))
        with pytest.raises((TypeError, RuntimeError)):
            convert_again(bare)
    assert convert_again(bare) == (2 if is_delta else 1, "")
    os.utime(bare, (0, 0))  # Its day now belongs to another partition.
    assert convert_again(bare) == (0, "")
    bare.write_bytes(b'{"n": 1}\n{"n": 2}\n{"n": 3}\n')
    assert convert_again(bare) == (0, "it has grown since it was converted")
    bare.write_bytes(b'{"n": 4}\n{"n": 2}\n{"n": 3}\n')  # another file of this name
    assert convert_again(bare) == (3, "")
    lines = encode_many("clicks", "n:1", messages)
    (live := tmp_path / "live.log").write_bytes(lines)  # messages without an index
    assert convert_again(live)[0] == 2
    assert convert_again(live.rename(tmp_path / "moved.log")) == (0, "")
    live.write_bytes(lines * 3)
    assert convert_again(live) == (0, "it has grown since it was converted")
    assert sum(archive.messages or 0 for archive in find_archives([plan.url])) == 3 + 2 + 3 + 4

    index = index_of(
        write_archive(tmp_path / "damaged" / "a.log", messages, head=Head("b" * 32, 1))
    )
    index.write_bytes(index.read_bytes().replace(b" 4 ", b" 5 "))
    assert "5 in its index" in convert_again(tmp_path / "damaged")[1]
    assert list(drafts.iterdir()) == []  # Drafts of damaged files are removed too.
