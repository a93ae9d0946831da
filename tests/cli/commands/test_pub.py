"""``nsq pub`` as a process: pipelines, counts, exit statuses and refusals."""

import re
import signal
from collections import Counter
from pathlib import Path

import pytest
from plugins.cli import NsqProcess, RunNsq, SpawnNsq
from plugins.http_server import AuthServer
from plugins.servers import EmbeddedServer, GoNsqd, MakeNsqd, Nsqd, Serve
from plugins.waiting import patience_s, wait_until

from nsqtools.errors import ConfigurationError, OutputError
from nsqtools.files.durable import replace_file
from nsqtools.publish.input import (
    InputBatch,
    InputCheckpoint,
    InputPlace,
    RecordSource,
    locked_checkpoint,
)


def to(nsqd: Nsqd, topic: str = "events") -> list[str]:
    return ["pub", "-t", topic, "--nsqd-tcp-address", nsqd.tcp_address]


def type_line(process: NsqProcess) -> None:
    process.stdin.write(b"line\n")
    process.stdin.flush()


def wait_for(nsqd: Nsqd, count: int) -> None:
    """Wait until the typed lines are published, while the input stays open."""
    wait_until(lambda: nsqd.stats("events")["topics"] and nsqd.depth("events") == count, what="it")


def test_a_line_is_published_immediately_and_counted_after_an_interrupt(
    spawn_nsq: SpawnNsq, nsqd: GoNsqd
) -> None:
    process = spawn_nsq(to(nsqd))
    for count in (1, 2):
        type_line(process)
        wait_for(nsqd, count)
    process.send_signal(signal.SIGINT)

    # communicate() would close the input
    assert process.wait(patience_s(10)) == 130
    assert process.stderr.read() == b"nsq: 2 confirmed, 0 rejected, 0 unknown, 0 unsent\n"


def test_a_record_is_retried_or_given_up_while_the_input_is_idle(
    spawn_nsq: SpawnNsq, serve: Serve, tmp_path: Path
) -> None:
    nsqd = EmbeddedServer(tmp_path)
    type_line(spawn_nsq(to(nsqd)))
    type_line(process := spawn_nsq([*to(nsqd), "--retry-timeout", "0s"]))
    assert process.wait(patience_s(10)) == 4  # by now the first process has tried as well
    wait_for(serve(nsqd), 1)


def test_a_file_whose_name_is_a_dash_is_no_standard_input(
    run_nsq: RunNsq, nsqd: GoNsqd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("-").write_bytes(b"of the file\n")
    assert run_nsq([*to(nsqd), "-f", "./-"]).status == 0
    assert nsqd.depth("events") == 1


def test_repeated_texts_end_when_one_is_given_up(spawn_nsq: SpawnNsq, dead_address: str) -> None:
    words = ["--nsqd-tcp-address", dead_address, "--repeat", "2", "--interval", "1h"]
    process = spawn_nsq(["pub", "-t", "events", *words, "--retry-timeout", "0s", "text"])
    assert process.wait(patience_s(10)) == 4


def test_a_refused_secret_is_status_5_and_not_shown(
    run_nsq: RunNsq, go_nsqd: MakeNsqd, auth_server: AuthServer, tmp_path: Path
) -> None:
    nsqd = go_nsqd(f"-auth-http-address={auth_server.address}")
    secret = tmp_path / "secret"
    secret.write_text("hunter2\n")

    without = run_nsq(to(nsqd), stdin=b"x\n")
    wrong = run_nsq([*to(nsqd), "--auth-secret-file", str(secret)], stdin=b"x\n")

    assert (without.status, "requires authentication" in without.err) == (5, True)
    assert (wrong.status, "E_AUTH_FAILED" in wrong.err, "hunter2" in wrong.err) == (5, True, False)


def test_a_checkpoint_continues_where_an_interrupted_run_stopped(
    run_nsq: RunNsq, spawn_nsq: SpawnNsq, nsqd: GoNsqd, tmp_path: Path
) -> None:
    nsqd.create_channel("events", "c")
    first, second = tmp_path / "a.log", tmp_path / "b.log"
    first.write_bytes(b"".join(b"a%d\n" % n for n in range(30_000)))
    second.write_bytes(b"b0\nb1")
    files = ["-f", str(first), "-f", str(second), "--checkpoint", str(tmp_path / "done")]
    process = spawn_nsq([*to(nsqd), *files, "--rate", "1500"])
    wait_until(lambda: nsqd.topic_stats("events")["message_count"] > 1200, what="it is under way")
    _, stderr = process.end(signal.SIGINT)

    with locked_checkpoint(tmp_path / "done"):
        meanwhile = run_nsq([*to(nsqd), *files])
    again = run_nsq([*to(nsqd), *files])
    third = run_nsq([*to(nsqd), *files])

    done = int(re.search(rb"nsq: ([\d,]+) records? done", stderr)[1].replace(b",", b""))  # type: ignore[index]
    assert meanwhile[:2] == (1, b"")
    assert meanwhile.err.startswith("nsq: error: another run uses the checkpoint ")
    assert process.returncode == 130
    assert 1000 <= done < 30_000
    assert f"nsq: continuing after {done:,} records" in again.err
    assert int(again.err.split("nsq: ")[2].split()[0]) == 30_002 - done  # confirmed
    assert "0 confirmed" in third.err
    tail = ["tail", "-t", "events", "-c", "c", *nsqd.options, "--until-empty"]
    bodies = run_nsq(tail).out.splitlines()
    assert Counter(bodies) == Counter([b"a%d" % n for n in range(30_000)] + [b"b0", b"b1"])


def test_a_checkpoint_advances_to_the_first_unsent_record(tmp_path: Path) -> None:
    """With --rate, a run with a time limit may not finish a single batch."""
    path, done = tmp_path / "log", tmp_path / "done"
    path.write_bytes(b"1\r\n22\r\n333\r\n")
    source = RecordSource([str(path)], b"\r\n", lambda: False)
    batch = next(source.batches())
    batch.retryable |= {2, 1}
    checkpoint = InputCheckpoint(done, [str(path)], b"\r\n")
    checkpoint.advance(batch)
    assert checkpoint.place == InputPlace(0, 3, 1)
    few = RecordSource([str(path)], b"\r\n", lambda: False, checkpoint.place, rate=0.5).batches()
    assert [batch.records for batch in few] == [[b"22"], [b"333"]]


def test_the_offset_of_a_source_counts_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"".join(b"%d\r\n" % n for n in range(5000)) + b"\r\nlast")
    source = RecordSource([str(path)], b"\r\n", lambda: False)
    places = [(source.place.offset, batch.records[-1]) for batch in source.batches()]

    data = path.read_bytes()
    for offset, last in places[:-1]:
        assert data[:offset].endswith(last + b"\r\n")
    assert places[-1] == (len(data), b"last")


@pytest.mark.parametrize("now", [b"", b"more\n"])
def test_a_file_truncated_or_replaced_during_a_run_is_not_continued(
    tmp_path: Path, now: bytes
) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"1\n2\n")
    checkpoint = InputCheckpoint(tmp_path / "checkpoint", [str(path)])
    checkpoint.advance(InputBatch([b"1"], end=InputPlace(0, 2, 1)))
    replace_file(path, now)
    checkpoint.place = InputPlace(0, 4, 2)
    checkpoint.save()
    with pytest.raises(ConfigurationError, match="is not the file"):
        InputCheckpoint(tmp_path / "checkpoint", [str(path)])


def test_a_file_unreadable_for_a_while_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"1\n2\n")
    checkpoint = InputCheckpoint(tmp_path / "checkpoint", [str(path)])
    checkpoint.advance(InputBatch([b"1"], end=InputPlace(0, 2, 1)))
    checkpoint.place = InputPlace(0, 4, 2)
    path.rename(tmp_path / "aside")
    path.symlink_to(path)
    with pytest.raises(OutputError, match=r"cannot read .*log "):
        checkpoint.save()
    (tmp_path / "aside").replace(path)
    assert InputCheckpoint(tmp_path / "checkpoint", [str(path)]).place == InputPlace(0, 2, 1)
