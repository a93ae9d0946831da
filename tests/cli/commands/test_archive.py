"""``nsq archive``: verify, repair, cat and info, on good files and on damaged ones."""

import json
import resource
import zlib
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as pq
from plugins.archives import BEGIN_NS, numbered, write_archive
from plugins.cli import RunNsq, TerminalNsq, peak_kb_of

from nsqtools.archive.layout import index_of
from nsqtools.records.envelope import Envelope, encode_many


def test_changed_bytes_of_a_table_are_reported_once_with_a_remedy(
    run_nsq: RunNsq, tmp_path: Path
) -> None:
    lake, out = tmp_path / "lake", str(tmp_path / "out")
    write_archive(tmp_path / "clicks.log.gz", numbered(0, 10), numbered(10, 20))
    assert run_nsq(["archive", "convert", str(tmp_path), "-o", str(lake)]).status == 0
    (path,) = lake.rglob("*.parquet")
    ids = pq.ParquetFile(path).metadata.row_group(0).column(1)
    data = bytearray(path.read_bytes())
    data[ids.data_page_offset + ids.total_compressed_size - 10] ^= 1
    path.write_bytes(data)

    dry = run_nsq(["replay", str(lake), "--dry-run"])
    repaired = run_nsq(["archive", "repair", str(lake)])
    compacted = run_nsq(["archive", "compact", str(lake), "-o", out])
    skipped = run_nsq(["archive", "compact", str(lake), "-o", out, "--skip-damaged"])

    assert run_nsq(["archive", "verify", str(lake)]).status == 1
    assert (dry.status, dry.err.count("it is not whole Parquet")) == (6, 1), dry.err
    assert "hint: Restore it, or remove it and convert its archive again" in repaired.err
    assert compacted.status == 1
    assert f"cannot read {path}: it is not whole Parquet" in compacted.err
    assert "hint: Restore it, or remove it and convert its archive again" in compacted.err
    assert (skipped.status, skipped.err.count("it is not whole Parquet")) == (6, 1), skipped.err
    path.unlink()
    again = run_nsq(["archive", "convert", str(tmp_path / "clicks.log.gz"), "-o", str(lake)])
    verified = run_nsq(["archive", "verify", str(lake)])
    assert (again.status, verified.status, path.exists()) == (0, 0, True)


def test_a_column_of_another_type_in_foreign_parquet_is_damage(
    tmp_path: Path, run_nsq: RunNsq
) -> None:
    columns = {
        "topic": ["t"],
        "nsqd": ["n:1"],
        "id": ["0" * 16],
        "ts_ns": [BEGIN_NS],
        "body": ["b"],
    }
    file, nanoseconds = str(tmp_path / "x.parquet"), pyarrow.timestamp("ns")
    good: dict[str, Any] = {"timestamp": pyarrow.array([BEGIN_NS + 1], nanoseconds)}
    bad: dict[str, Any] = {"id": [1], "topic": [1], "nsqd": [["x"]], "body": [1], "attempts": ["x"]}
    large: dict[str, Any] = {"attempts": [2**40]}  # readable, but too large for our column
    for values, *statuses in (
        (good, 0, 0),
        (large, 0, 1),
        *(({name: value}, 6, 1) for name, value in bad.items()),
    ):
        pq.write_table(pyarrow.table(columns | values), file)
        cat = run_nsq(["archive", "cat", file])
        compacted = run_nsq(["archive", "compact", file, "-o", str(tmp_path / "out")])

        assert [cat.status, compacted.status] == statuses, (values, compacted.err)
        assert (f"cannot read {file}: " in compacted.err) is (values is not good)


def test_on_a_terminal_messages_are_colored(nsq_on_a_terminal: TerminalNsq, tmp_path: Path) -> None:
    write_archive(tmp_path / "clicks.log", numbered(0, 1))
    child = nsq_on_a_terminal(["archive", "cat", str(tmp_path), "--color=always"])
    child.expect_exact('{\x1b[34m"topic"\x1b[0m: \x1b[32m"clicks"\x1b[0m, ')


def test_cat_takes_little_memory_for_long_messages(tmp_path: Path) -> None:
    path = tmp_path / "lines.log"
    message = Envelope("clicks", "n:4150", b"0" * 16, 1, 1, b"x" * 1_000_000)
    path.write_bytes(encode_many("clicks", "n:4150", [message] * 60))
    assert peak_kb_of("archive", "cat", str(path)) < 110_000


def test_verify_takes_bounded_memory_for_a_gzip_bomb_and_many_problems(
    tmp_path: Path, run_nsq: RunNsq
) -> None:
    path = tmp_path / "bomb.log.gz"
    compressor = zlib.compressobj(1, zlib.DEFLATED, 31)
    packed = b"".join(compressor.compress(bytes(1 << 20)) for _ in range(1 << 10))
    packed += compressor.flush()
    path.write_bytes(packed)
    index_of(path).write_text(f"0 {len(packed)} 1 1 2\n")
    peak_before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    lines = encode_many("clicks", "n:4150", numbered(0, 1)) + b"nonsense\n" * 1100
    (tmp_path / "lines.log").write_bytes(lines)
    result = run_nsq(["archive", "verify", str(tmp_path), "--json"])

    assert result.status == 1
    _, many = json.loads(result.out)["damaged"]
    assert (len(many["problems"]), many["problems"][-1]) == (1001, "and 100 more")
    printed = run_nsq(["archive", "cat", str(tmp_path / "lines.log")])
    assert (printed.status, printed.err.count("\n")) == (6, 1100)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_before_kb < 500 << 10
