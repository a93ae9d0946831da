"""``pub -> to-file -> spark compact -> spark replay -> tail``: every body, byte for byte.

The real commands through a real nsqd: those of Spark in the session that tests share, the others
each in a process of its own, as a user runs them.
"""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow.parquet as pq
from plugins.cli import Result, RunNsq
from plugins.daemons import GoNsqd
from plugins.spark import RunSpark

MIB = 1 << 20
MARK, DELIMITER = b"\x1e<end>", "\\x1e<end>"  # is in none of the bodies

BODIES = [
    b"plain",
    b"two\nlines\n",
    b"\n",
    b"nul \0 in it, and at the end \0",
    b"\0",
    b"\xff\xfe\x80 is no UTF-8",
    b"\xc3",  # the first half of a character
    "ü \u2028 \U0001f600".encode(),
    b'{"json": "with \\" and \\u0000"}',
    b" ",
    b"\r\n\t\x1b[31m",
    bytes(range(256)),
    random.Random(1).randbytes(MIB),
    b"\n" * MIB,
    b"a" * MIB,
]


def test_every_byte_comes_back(
    nsqd: GoNsqd, run_nsq: RunNsq, run_spark: RunSpark, tmp_path: Path
) -> None:
    archive, parquet = tmp_path / "archive", tmp_path / "parquet"
    archive.mkdir()
    nsqd.create_channel("clicks", "archive")
    place = ["--nsqd-tcp-address", nsqd.tcp_address]

    def nsq(*arguments: object, stdin: bytes = b"") -> Result:
        if arguments[0] == "spark":
            result = run_spark(*arguments[1:])
        else:
            result = run_nsq([*map(str, arguments)], stdin=stdin, timeout=120)
        assert result.status == 0, result.err
        return result

    limits = ("-n", len(BODIES), "--for", "20s")
    nsq("pub", "-t", "clicks", "-d", DELIMITER, *place, stdin=MARK.join(BODIES))
    nsq("to-file", "-t", "clicks", "-c", "archive", "--output-dir", archive, *limits, *place)
    nsq("spark", "compact", archive, "-o", parquet, "--open-days")
    nsq("spark", "replay", parquet, "--topic", "clicks=again", *place)
    tailed = nsq("tail", "-t", "again", "-c", "check", "-d", DELIMITER, *limits, *place)

    stored = [
        row["body"].encode() if row["body_bytes"] is None else row["body_bytes"]
        for path in parquet.glob("topic=clicks/date=*/*.parquet")
        for row in pq.ParquetFile(path).read(["body", "body_bytes"]).to_pylist()
    ]
    assert sorted(stored) == sorted(BODIES)
    assert sorted(tailed.out.split(MARK)[:-1]) == sorted(BODIES)
