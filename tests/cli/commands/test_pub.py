"""``nsq pub`` as a process: pipelines, counts, exit statuses, and what it refuses."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from plugins.auth_server import AuthServer
from plugins.cli import RunNsq, SpawnNsq, TerminalNsq
from plugins.clients import bodies_in
from plugins.daemons import GoNsqd
from plugins.embedded import EmbeddedServer
from plugins.http_api import Nsqd
from plugins.waiting import patience_s, wait_until


def to(nsqd: Nsqd, topic: str = "events") -> list[str]:
    return ["pub", "-t", topic, "--nsqd-tcp-address", nsqd.tcp_address]


def test_lines_of_standard_input_are_published_and_counted(run_nsq: RunNsq, nsqd: GoNsqd) -> None:
    result = run_nsq(to(nsqd), stdin=b"one\n\ntwo\nlast")

    assert (result.status, result.out) == (0, b"")
    assert result.err == "nsq: 3 confirmed, 0 rejected, 0 unknown, 0 unsent, 1 empty skipped\n"
    assert nsqd.depth("events") == 3


def test_quiet_says_nothing(run_nsq: RunNsq, nsqd: GoNsqd) -> None:
    result = run_nsq([*to(nsqd), "-q"], stdin=b"one\n")

    assert (result.status, result.err) == (0, "")


def test_files_and_standard_input_can_be_mixed(
    run_nsq: RunNsq, nsqd: GoNsqd, tmp_path: Path
) -> None:
    (tmp_path / "a").write_text("1\n2\n")

    result = run_nsq([*to(nsqd), f"@{tmp_path / 'a'}", "-"], stdin=b"3\n")

    assert result.err.startswith("nsq: 3 confirmed")


def test_a_delimiter_can_be_any_bytes(run_nsq: RunNsq, nsqd: GoNsqd) -> None:
    result = run_nsq([*to(nsqd), "--delimiter", "\\0"], stdin=b"a\nb\0c\0")

    assert result.err.startswith("nsq: 2 confirmed")


def test_a_line_of_a_live_log_is_not_kept_waiting(spawn_nsq: SpawnNsq, nsqd: GoNsqd) -> None:
    process = spawn_nsq(to(nsqd))
    assert process.stdin is not None
    for count in (1, 2, 3):
        process.stdin.write(b"line\n")
        process.stdin.flush()
        wait_until(
            lambda count=count: nsqd.stats("events")["topics"] and nsqd.depth("events") == count,
            what="the line is published while the input stays open",
        )
    process.stdin.close()

    assert process.wait(patience_s(10)) == 0


def test_a_record_is_sent_again_while_the_input_is_silent(
    spawn_nsq: SpawnNsq, tmp_path: Path
) -> None:
    nsqd = EmbeddedServer(tmp_path)
    process = spawn_nsq(to(nsqd))
    assert process.stdin is not None
    process.stdin.write(b"line\n")
    process.stdin.flush()
    time.sleep(1.0)  # it was tried at least once
    nsqd.start()
    try:
        wait_until(
            lambda: nsqd.stats("events")["topics"] and nsqd.depth("events") == 1,
            what="the line is published while the input stays open",
        )
    finally:
        nsqd.stop()


def test_it_gives_up_while_the_input_is_silent(spawn_nsq: SpawnNsq) -> None:
    address = ["--nsqd-tcp-address", "127.0.0.1:1"]
    process = spawn_nsq(["pub", "-t", "events", *address, "--retry-timeout", "0s"])
    assert process.stdin is not None
    process.stdin.write(b"line\n")
    process.stdin.flush()

    assert process.wait(patience_s(10)) == 4


@pytest.mark.parametrize(("rate", "lines", "seconds"), [(10, 11, 1.0), (100_000, 100_000, 1.0)])
@pytest.mark.alone
def test_the_rate_is_kept_when_low_and_when_high(
    spawn_nsq: SpawnNsq, nsqd: GoNsqd, tmp_path: Path, rate: int, lines: int, seconds: float
) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"x\n" * lines)
    nsqd.create_topic("events")
    started = time.monotonic()
    process = spawn_nsq([*to(nsqd), "-f", str(path), "--rate", str(rate)])

    def published() -> int:
        count: int = nsqd.topic_stats("events")["message_count"]
        return count

    wait_until(published, what="publishing has begun")
    seen = time.monotonic()
    wait_until(lambda: published() == lines, what="all is published", timeout_s=10)
    ended = time.monotonic()

    assert process.wait(patience_s(10)) == 0
    # the first may be seen late, so the lower bound starts before it; test_pacing.py is exact
    assert ended - started > seconds * 0.9
    assert ended - seen < patience_s(seconds * 2)  # generous: the machine may be busy


def test_progress_is_shown_on_a_terminal_only(
    nsq_on_a_terminal: TerminalNsq, nsqd: GoNsqd, tmp_path: Path
) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"x\n" * 3000)
    terminal = nsq_on_a_terminal([*to(nsqd), f"@{path}", "--rate", "5000"])

    terminal.expect(r"[\d,]+ confirmed")
    terminal.expect_exact("3000 confirmed, 0 rejected, 0 unknown, 0 unsent")
    terminal.wait()
    assert terminal.exitstatus == 0


def test_nobody_there_is_status_4_and_the_records_are_in_the_unsent_file(
    run_nsq: RunNsq, unreachable_address: str, tmp_path: Path
) -> None:
    unsent = tmp_path / "unsent"
    place = ["--nsqd-tcp-address", unreachable_address, "--producer-opt", "dial_timeout=300ms"]
    result = run_nsq(
        ["pub", "-t", "events", *place, "--retry-timeout", "300ms", "--unsent-file", str(unsent)],
        stdin=b"a\n\xff\x00\nlast",
    )

    assert result.status == 4
    assert result.err.splitlines()[0].startswith("nsq: error: not published: cannot connect to")
    assert unreachable_address in result.err
    assert result.err.endswith("0 confirmed, 0 rejected, 0 unknown, 3 unsent\n")
    assert unsent.read_bytes() == b"a\n\xff\x00\nlast\n"


def test_a_part_confirmed_is_status_6(
    run_nsq: RunNsq, go_nsqd: Callable[..., GoNsqd], tmp_path: Path
) -> None:
    nsqd = go_nsqd("-max-msg-size=10")

    result = run_nsq(to(nsqd), stdin=b"short\n" + b"x" * 11 + b"\n")

    assert result.status == 6
    assert "E_BAD_MESSAGE" in result.err
    assert result.err.endswith("1 confirmed, 1 rejected, 0 unknown, 0 unsent\n")


def test_a_refused_secret_is_status_5_and_never_shown(
    run_nsq: RunNsq, go_nsqd: Callable[..., GoNsqd], auth_server: AuthServer, tmp_path: Path
) -> None:
    nsqd = go_nsqd(f"-auth-http-address={auth_server.address}")
    secret = tmp_path / "secret"
    secret.write_text("hunter2\n")

    without = run_nsq(to(nsqd), stdin=b"x\n")
    wrong = run_nsq([*to(nsqd), "--auth-secret-file", str(secret)], stdin=b"x\n")

    assert without.status == wrong.status == 5
    assert "requires authentication" in without.err
    assert "E_AUTH_FAILED" in wrong.err
    assert "hunter2" not in wrong.err


def test_an_interrupt_settles_what_is_under_way(spawn_nsq: SpawnNsq, nsqd: GoNsqd) -> None:
    process = spawn_nsq(to(nsqd))
    assert process.stdin is not None
    process.stdin.write(b"one\ntwo\n")
    process.stdin.flush()
    wait_until(
        lambda: nsqd.stats("events")["topics"] and nsqd.depth("events") == 2, what="both are there"
    )
    process.send_signal(signal.SIGINT)
    # the input stays open: communicate() would close it
    status = process.wait(patience_s(10))

    assert status == 130
    assert process.stderr is not None
    assert process.stderr.read() == b"nsq: 2 confirmed, 0 rejected, 0 unknown, 0 unsent\n"


BAD_INPUT = [
    (["-t", "bad topic"], 2, "invalid topic name 'bad topic'"),
    (["-t", "e", "--producer-opt", "bogus"], 2, "unknown client option 'bogus'"),
    (["-t", "e", "--producer-opt", "snappy", "--deflate"], 2, "snappy and deflate"),
    (["-t", "e", "-f", "/no/such/file"], 1, "cannot read /no/such/file"),
    (["-t", "e", "--unsent-file", "/no/dir/file"], 1, "/no/dir/file"),
    (["-t", "e", "--delimiter", "\\q"], 2, "unknown escape"),
    (["-t", "e", "--delimiter", ""], 2, "delimiter"),
    (["-t", "e", "--defer", "2h"], 2, "2h"),
    (["-t", "e", "--rate", "-1"], 2, "--rate"),
    (["-t", "e", "--tls-cert", "/no/cert.pem", "--tls"], 2, "tls_cert"),
    ([], 2, "--topic"),
]


@pytest.mark.parametrize(("arguments", "status", "named"), BAD_INPUT)
def test_bad_input_is_one_line_with_a_remedy(
    run_nsq: RunNsq, arguments: list[str], status: int, named: str
) -> None:
    result = run_nsq(["pub", *arguments, "-q"], stdin=b"x\n")

    lines = result.err.splitlines()
    assert result.status == status, result.err
    assert lines[0].startswith("nsq: error: ")
    assert named in lines[0]
    assert all(line.startswith("hint: ") for line in lines[1:])
    assert len(lines) <= 2


def test_a_message_can_stand_on_the_command_line(run_nsq: RunNsq, nsqd: GoNsqd) -> None:
    result = run_nsq([*to(nsqd), "-m", "hello", "--message", "two\nlines"], stdin=b"not read")

    assert result.status == 0
    assert result.err == "nsq: 2 confirmed, 0 rejected, 0 unknown, 0 unsent\n"
    assert bodies_in(nsqd, "events", 2) == [b"hello", b"two\nlines"]


def test_a_message_and_a_file_exclude_each_other(run_nsq: RunNsq) -> None:
    result = run_nsq(["pub", "-t", "events", "-m", "hello", "@log.txt"])

    assert result.status == 2
    assert "give either texts or files" in result.err


def test_a_file_that_is_not_there_is_named_and_the_text_has_an_option(run_nsq: RunNsq) -> None:
    result = run_nsq(["pub", "-t", "events", "@hello"])

    assert result.status == 1
    assert result.err == (
        "nsq: error: cannot read hello (No such file or directory)\n"
        "hint: To publish the text itself: -m @hello\n"
    )


def test_the_name_of_a_file_is_not_published_by_mistake(
    run_nsq: RunNsq, nsqd: GoNsqd, tmp_path: Path
) -> None:
    log = tmp_path / "app.log"
    log.write_text("line\n")

    refused = run_nsq([*to(nsqd), str(log)])
    meant = run_nsq([*to(nsqd), "-m", str(log)])

    assert refused.status == 2
    assert f"Write @{log} to publish its lines, or -m {log} for the text." in refused.err
    assert meant.status == 0
    assert bodies_in(nsqd, "events", 1) == [str(log).encode()]


def test_a_line_above_the_usual_limit_names_the_options_that_raise_it(
    run_nsq: RunNsq, go_nsqd: Callable[..., GoNsqd]
) -> None:
    nsqd = go_nsqd("-max-msg-size=4000000", "-max-body-size=8000000")
    line = b"x" * 1_500_000 + b"\n"

    refused = run_nsq(to(nsqd), stdin=line)
    raised = [word for word in refused.err.splitlines()[-1].split() if "=" in word]
    taken = run_nsq([*to(nsqd), *(part for word in raised for part in ("-X", word))], stdin=line)

    assert refused.status == 1
    assert refused.err.splitlines()[-1] == (
        "hint: Where nsqd takes larger messages: -X publish_max_msg_size=1500000"
    )
    assert (taken.status, nsqd.depth("events")) == (0, 1)
