"""``nsq to-file``: files, rotation, partitions, limits, hook and metrics."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from urllib.request import urlopen

import pytest
from plugins.archives import finished_files, lines_of, messages_of, parts, text_of, unfinished
from plugins.cli import RunNsq, SpawnNsq
from plugins.daemons import GoNsqd
from plugins.waiting import patience_s, wait_until

TOPIC, CHANNEL = "clicks", "archive"
DEADLINE_S = patience_s(30.0)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def to_file(nsqd: GoNsqd, out: Path, *flags: str) -> list[str]:
    place = ["--nsqd-tcp-address", nsqd.tcp_address, "--output-dir", str(out)]
    return ["to-file", "-t", TOPIC, "-c", CHANNEL, *place, *flags]


def publish(nsqd: GoNsqd, *bodies: bytes) -> None:
    nsqd.create_channel(TOPIC, CHANNEL)
    nsqd.publish(TOPIC, *bodies)


def wait_until_drained(nsqd: GoNsqd) -> None:
    wait_until(
        lambda: unfinished(nsqd, TOPIC, CHANNEL) == 0, what="an empty channel", timeout_s=DEADLINE_S
    )


def stop(process: subprocess.Popen[bytes]) -> str:
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 143, stderr.decode()
    return stderr.decode()


@pytest.mark.parametrize(
    "flags", [[], ["--gzip"], ["--gzip-level", "9"], ["--compression", "zstd"]]
)
def test_every_kind_of_body_is_kept_byte_for_byte(
    nsqd: GoNsqd, out: Path, run_nsq: RunNsq, flags: list[str]
) -> None:
    bodies = [b"a\nb", b"\0", b"\xff\xfe", b"x", bytes(range(256)) * 4096, "ü".encode()]
    publish(nsqd, *bodies)

    result = run_nsq(to_file(nsqd, out, "-n", str(len(bodies)), *flags))

    assert result.status == 0
    assert result.out == b""
    assert sorted(message["body"] for message in messages_of(out)) == sorted(bodies)


def test_zstd_files_are_named_so_and_read_by_every_command(
    nsqd: GoNsqd, out: Path, run_nsq: RunNsq
) -> None:
    publish(nsqd, b"one", b"two")

    run_nsq(to_file(nsqd, out, "-n", "2", "--zstd-level", "9"))

    [path] = finished_files(out)
    assert path.name.endswith(".log.zst")
    assert run_nsq(["archive", "cat", "--bodies", str(out)]).out.split() == [b"one", b"two"]
    assert run_nsq(["archive", "verify", str(out)]).status == 0
    assert b"jsonl zstd" in run_nsq(["archive", "info", str(out)]).out
    again = ["--topic", "again", "--nsqd-tcp-address", nsqd.tcp_address]
    assert run_nsq(["replay", str(out), *again]).status == 0
    path.write_bytes(path.read_bytes() + b"rubbish")
    assert run_nsq(["archive", "repair", str(out)]).status == 0
    assert run_nsq(["archive", "cat", "--bodies", str(out)]).out.split() == [b"one", b"two"]


@pytest.mark.parametrize(
    "flags",
    [["--gzip", "--compression", "zstd"], ["--zstd-level", "3", "--gzip-level", "3"]],
)
def test_two_compressions_are_refused(
    nsqd: GoNsqd, out: Path, run_nsq: RunNsq, flags: list[str]
) -> None:
    result = run_nsq(to_file(nsqd, out, *flags))
    assert (result.status, "different compressions" in result.err) == (2, True)


@pytest.mark.parametrize(("level", "said"), [("1", 4), ("6", 0), ("9", 2)])
def test_gzip_is_as_hard_as_asked_for(
    nsqd: GoNsqd, out: Path, run_nsq: RunNsq, level: str, said: int
) -> None:
    publish(nsqd, b"one")

    run_nsq(to_file(nsqd, out, "-n", "1", "--gzip-level", level))

    [path] = finished_files(out)
    extra_flags = path.read_bytes()[8]  # RFC 1952: 2 slowest, 4 fastest
    assert extra_flags == said


def test_a_file_in_progress_is_hidden_and_readable_up_to_its_last_flush(
    nsqd: GoNsqd, out: Path, spawn_nsq: SpawnNsq
) -> None:
    publish(nsqd, b"one")
    process = spawn_nsq(to_file(nsqd, out, "--format", "raw", "--gzip"))
    wait_until_drained(nsqd)

    assert finished_files(out) == []
    (part,) = parts(out)
    with part.open("rb") as file:
        assert subprocess.check_output(["zcat"], stdin=file) == b"one\n"
    stop(process)


def test_a_file_is_rotated_by_its_size(nsqd: GoNsqd, out: Path, run_nsq: RunNsq) -> None:
    publish(nsqd, *[b"%05d" % number for number in range(3000)])

    run_nsq(to_file(nsqd, out, "--format", "raw", "--rotate-size", "6000", "--until-empty"))

    sizes = [path.stat().st_size for path in finished_files(out)]
    assert sum(sizes) == 18_000
    assert len(sizes) > 1
    assert all(size >= 6000 for size in sizes[:-1])


def test_a_file_is_rotated_by_its_age(nsqd: GoNsqd, out: Path, spawn_nsq: SpawnNsq) -> None:
    publish(nsqd, b"one")
    process = spawn_nsq(to_file(nsqd, out, "--rotate-age", "1s"))
    wait_until(lambda: finished_files(out), what="a finished file", timeout_s=10)
    stop(process)


def test_a_quiet_time_has_an_empty_file_only_when_asked_for(
    nsqd: GoNsqd, out: Path, run_nsq: RunNsq
) -> None:
    nsqd.create_channel(TOPIC, CHANNEL)

    run_nsq(to_file(nsqd, out, "--for", "1500ms"))
    assert finished_files(out) == []
    run_nsq(to_file(nsqd, out, "--for", "1500ms", "--no-skip-empty-files", "--gzip"))
    (empty,) = finished_files(out)

    assert text_of(empty) == b""


def test_partitions_by_message_time_are_files_of_their_own(
    nsqd: GoNsqd, out: Path, run_nsq: RunNsq
) -> None:
    days = [datetime.now(UTC).strftime("%Y-%m-%d")]
    publish(nsqd, b"one")
    days.append(datetime.now(UTC).strftime("%Y-%m-%d"))  # another one at midnight
    name = ["--filename-format", "<PARTITION>/<TOPIC><REV>.jsonl", "--partition-by", "message"]

    run_nsq(to_file(nsqd, out, *name, "--partition-format", "day=%Y-%m-%d", "--utc", "-n", "1"))

    (path,) = finished_files(out)
    assert path in [out / f"day={day}" / "clicks-000000.jsonl" for day in days]


def test_each_finished_file_goes_to_the_hook(
    nsqd: GoNsqd, out: Path, tmp_path: Path, run_nsq: RunNsq
) -> None:
    publish(nsqd, b"one")
    target = tmp_path / "uploaded"
    target.mkdir()

    result = run_nsq(to_file(nsqd, out, "-n", "1", "--on-file", f"cp {{path}} {target}/"))

    assert result.status == 0
    assert [path.name for path in target.iterdir()] == [path.name for path in finished_files(out)]


def test_a_hook_that_fails_is_reported_and_shows_in_the_status(
    nsqd: GoNsqd, out: Path, run_nsq: RunNsq
) -> None:
    publish(nsqd, b"one")

    result = run_nsq(to_file(nsqd, out, "-n", "1", "--on-file", "sh -c 'echo no way >&2; exit 3'"))

    assert result.status == 6
    assert "status 3 no way" in result.err


def test_metrics_are_kept_in_a_file(
    nsqd: GoNsqd, out: Path, tmp_path: Path, spawn_nsq: SpawnNsq
) -> None:
    publish(nsqd, b"one", b"two")
    metrics = tmp_path / "nsq.prom"
    process = spawn_nsq(to_file(nsqd, out, "--metrics-file", str(metrics)))

    wait_until(
        lambda: (
            metrics.exists()
            and 'nsq_to_file_messages_total{topic="clicks"} 2' in metrics.read_text()
        ),
        what="the count in the metrics",
        timeout_s=20,
    )
    stop(process)


def test_a_supervisor_sees_that_it_is_ready_well_and_stopping(
    nsqd: GoNsqd, out: Path, spawn_nsq: SpawnNsq, tmp_path: Path
) -> None:
    publish(nsqd, b"one", b"two")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(DEADLINE_S)
        environ = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        process = spawn_nsq(to_file(nsqd, out, "--listen-http", "0", "-v"), environ)
        assert systemd.recv(100) == b"READY=1"
        assert process.stderr is not None
        said = next(line for line in process.stderr if b"/health" in line)
        (url,) = re.findall(rb"http://\S+/metrics", said)
        wait_until_drained(nsqd)

        with urlopen(url.decode(), timeout=DEADLINE_S) as page:
            assert 'nsq_to_file_messages_total{topic="clicks"} 2\n' in page.read().decode()
        with urlopen(url.decode().replace("metrics", "health"), timeout=DEADLINE_S) as page:
            assert page.read() == b"archiving 1 topics\n"
        stop(process)
        assert systemd.recv(100) == b"STOPPING=1"


def test_a_count_over_several_topics_is_exact(nsqd: GoNsqd, out: Path, run_nsq: RunNsq) -> None:
    for topic in ("clicks", "views"):
        nsqd.create_channel(topic, CHANNEL)
        nsqd.publish(topic, *[b"%d" % number for number in range(50)])

    run_nsq(to_file(nsqd, out, "-t", "views", "-n", "70"))

    assert len(lines_of(out)) == 70
    left = sum(nsqd.channel_stats(topic, CHANNEL)["depth"] for topic in ("clicks", "views"))
    assert left == 30


def test_a_directory_that_vanishes_stops_finishing_until_it_is_back(
    nsqd: GoNsqd, out: Path, spawn_nsq: SpawnNsq
) -> None:
    publish(nsqd, b"one")
    process = spawn_nsq(to_file(nsqd, out, "--consumer-opt", "max_backoff_duration=1s"))
    wait_until_drained(nsqd)
    shutil.rmtree(out)

    publish(nsqd, b"two")
    assert process.stderr is not None
    told = ""
    while "cannot write" not in told:
        told = process.stderr.readline().decode()
    assert str(out) in told
    wait_until(lambda: unfinished(nsqd, TOPIC, CHANNEL) == 1, what="it is kept")
    out.mkdir()
    wait_until_drained(nsqd)
    stop(process)

    assert [message["body"] for message in messages_of(out)] == [b"two"]
