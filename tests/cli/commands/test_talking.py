"""Talking in and out of messages: texts, templates, selection by jq, and where a run goes on."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from plugins.cli import RunNsq, SpawnNsq
from plugins.daemons import GoNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools.publish.input import RecordSource


def to(nsqd: GoNsqd, topic: str = "events") -> list[str]:
    return ["pub", "-t", topic, "--nsqd-tcp-address", nsqd.tcp_address]


def from_(nsqd: GoNsqd, command: str = "tail", topic: str = "events") -> list[str]:
    place = ["--nsqd-tcp-address", nsqd.tcp_address, "--nsqd-http-address", nsqd.http_address]
    return [command, "-t", topic, "-c", "c", *place]


def published(run_nsq: RunNsq, nsqd: GoNsqd) -> list[bytes]:
    count = str(nsqd.topic_stats("events")["message_count"])
    return sorted(run_nsq([*from_(nsqd), "-n", count]).out.splitlines())


# pub


def test_a_checkpoint_continues_where_an_interrupted_run_stopped(
    run_nsq: RunNsq, spawn_nsq: SpawnNsq, nsqd: GoNsqd, tmp_path: Path
) -> None:
    nsqd.create_channel("events", "c")
    first, second = tmp_path / "a.log", tmp_path / "b.log"
    first.write_bytes(b"".join(b"a%d\n" % n for n in range(9000)))
    second.write_bytes(b"b0\nb1")
    files = ["-f", str(first), "-f", str(second), "--checkpoint", str(tmp_path / "done")]
    process = spawn_nsq([*to(nsqd), *files, "--rate", "1500"])
    wait_until(lambda: nsqd.topic_stats("events")["message_count"] > 1200, what="it is under way")
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=patience_s(10))

    again = run_nsq([*to(nsqd), *files])
    third = run_nsq([*to(nsqd), *files])

    done = int(re.search(rb"nsq: ([\d,]+) records are done", said)[1].replace(b",", b""))  # type: ignore[index]
    assert process.returncode == 130
    assert 1000 <= done < 9000
    assert f"nsq: going on after {done:,} records" in again.err
    confirmed = int(again.err.split("nsq: ")[2].split()[0])
    assert confirmed == 9002 - done
    assert "0 confirmed" in third.err
    bodies = published(run_nsq, nsqd)
    assert {b"a%d" % n for n in range(9000)} | {b"b0", b"b1"} == set(bodies)
    assert len(bodies) - 9002 < 1000  # what was under way may come twice


def test_the_place_counts_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"".join(b"%d\r\n" % n for n in range(5000)) + b"\r\nlast")
    source = RecordSource([str(path)], b"\r\n", lambda: False)
    places = [(source.place.offset, batch.records[-1]) for batch in source.batches()]

    data = path.read_bytes()
    for offset, last in places[:-1]:
        assert data[:offset].endswith(last + b"\r\n")
    assert places[-1] == (len(data), b"last")


# tail and peek


def test_tail_ends_when_the_channel_is_empty_although_messages_keep_coming(
    run_nsq: RunNsq, spawn_nsq: SpawnNsq, nsqd: GoNsqd
) -> None:
    nsqd.create_channel("events", "c")
    nsqd.publish("events", *(b"%d" % n for n in range(1000)))
    spawn_nsq([*to(nsqd), "x{n}", "--repeat", "100000", "--interval", "20ms"])

    result = run_nsq([*from_(nsqd), "--until-empty"])

    assert result.status == 0
    assert len(set(result.out.splitlines()) & {b"%d" % n for n in range(1000)}) == 1000
