"""How a run ends: exit status, one line on stderr, a hint, and only data on stdout.

And logs: only to stderr, as text or JSON lines, with the level of -q and -v.
"""

import io
import json
import logging
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from plugins.cli import GivenCommand, RunNsq, SpawnNsq
from plugins.waiting import patience_s

from nsqtools import errors
from nsqtools.cli.main import main
from nsqtools.cli.parsing import app
from nsqtools.cli.running import runtime
from nsqtools.cli.running.runtime import (
    SIGNALS,
    ExitStatus,
    ReaderGone,
    Runtime,
    Session,
    configure_logging,
    exit_on_signals,
    stop_on_signals,
    write_whole,
)


def raising(error: BaseException) -> Callable[..., int]:
    def command(*_arguments: object) -> int:
        raise error

    return command


class Terminal(io.TextIOWrapper):
    """A terminal on which these bytes were typed."""

    def __init__(self, typed: bytes) -> None:
        super().__init__(io.BytesIO(typed), encoding="utf-8")

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("typed", [b"", b"\n", b"n\n", b"yy\n", b"\xe9\n"])
def test_any_answer_except_yes_is_a_no(typed: bytes) -> None:
    stderr = Terminal(b"")

    assert not Runtime(stderr, stderr, stdin=Terminal(typed)).confirm([], "Go on?", yes=False)


BUG = "hint: This is a bug: run it again with --debug (or NSQ_DEBUG=1) and report what it prints."


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (errors.ConfigurationError("no"), 2, "no"),
        (errors.NotFoundError("no"), 3, "no"),
        (errors.DeadlineExceeded("no"), 4, "no"),
        (errors.PublishNotSent("no"), 4, "no"),
        (errors.TLSError("no"), 5, "no"),
        (errors.ServerRefused("E_UNAUTHORIZED", "no", fatal=True), 5, "E_UNAUTHORIZED no"),
        (errors.HTTPError("no", status=404), 3, "no"),
        (errors.HTTPError("no", status=403), 5, "no"),
        (errors.HTTPError("no", status=500), 1, "no"),
        (errors.OutputError("no"), 1, "no"),
        # control characters are escaped
        (errors.NsqError("E\r\n\x1b[2Jx", hint="try\nthis"), 1, "E \\x1b[2Jx\nhint: try this"),
        (FileNotFoundError(2, "No such file", "/x/y"), 1, "No such file: /x/y"),
        (FileNotFoundError(2, "No such file"), 1, "No such file: working directory"),
        (MemoryError(), 1, "out of memory"),
        (RuntimeError("can't start new thread"), 1, "can't start new thread"),
        (KeyError("topic"), 1, f"unexpected KeyError: 'topic'\n{BUG}"),
    ],
)
def test_an_error_is_one_line_and_sets_the_exit_status(
    given_command: GivenCommand,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    status: int,
    said: str,
) -> None:
    given_command(raising(error), raw=True)

    assert main(["given"]) == status
    assert capsys.readouterr() == ("", f"nsq: error: {said}\n")

    kinds = [getattr(errors, name) for name in errors.__all__]
    assert {kind.category for kind in kinds} <= {status.name.lower() for status in ExitStatus}


def test_an_interrupt_is_silent_and_debug_shows_tracebacks(
    given_command: GivenCommand, run_nsq: RunNsq
) -> None:
    given_command(raising(KeyboardInterrupt()), raw=True)
    assert run_nsq(["given"]) == (130, b"", "")
    lock, signals = threading.RLock(), [KeyboardInterrupt(), SystemExit(143)]

    def wait(_: object) -> int:
        with lock:
            lock.release()  # as Condition.wait does
            raise signals.pop(0)

    given_command(wait, raw=True)
    assert run_nsq(["given"]) == (130, b"", "")
    with pytest.raises(SystemExit, match="143"):
        main(["given"])
    given_command(raising(errors.NsqError("no")), raw=True)
    for result in (run_nsq(["given", "--debug"]), run_nsq(["given"], env={"NSQ_DEBUG": "1"})):
        lines = result.err.splitlines()
        assert (result.status, lines[0][:9], lines[-1]) == (1, "Traceback", "nsq: error: no")


def test_a_raw_command_gets_its_arguments_unchanged(
    given_command: GivenCommand,
) -> None:
    received: list[list[str]] = []

    def raw(arguments: list[str]) -> int:
        received.append(arguments)
        return ExitStatus.LIMIT_NOT_REACHED

    given_command(raw, raw=True)
    assert main(["given", "-data-path=/x", "--help", "--", "-1"]) == 7
    assert received == [["-data-path=/x", "--help", "--", "-1"]]
    given_command(lambda: ExitStatus.LIMIT_NOT_REACHED)
    assert main(["given"]) == 7


@pytest.mark.parametrize("arguments", [["--help"], ["schema"]])
def test_a_closed_stdout_is_status_141_without_a_message(
    spawn_nsq: SpawnNsq, arguments: list[str]
) -> None:
    process = spawn_nsq(arguments)
    process.stdout.close()

    assert process.wait(patience_s(30)) == 141
    assert process.stderr.read() == b""


def test_an_unwritable_stdout_is_a_one_line_error(
    nsq_env: dict[str, str],
) -> None:
    for typed, complaint in (
        ("nsq --help >/dev/full", "No space left on device"),
        ("nsq schema >/dev/full", "No space left on device"),
        ("nsq schema >&-", "Bad file descriptor"),
    ):
        done = shell(typed, nsq_env)
        assert (done.returncode, done.stderr.count("\n"), complaint in done.stderr) == (1, 1, True)
    assert shell("nsq schema <&-", nsq_env).stdout == shell("nsq schema", nsq_env).stdout
    quiet = {"shcema 2>&-": 2, "shcema 2>/dev/full": 2, "config use --none 2>/dev/full": 0}
    for typed, status in quiet.items():
        assert shell(f"nsq {typed}", nsq_env).returncode == status


def shell(line: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = ["sh", "-c", line.replace("nsq", f"{sys.executable} -m nsqtools", 1)]
    limit_s = patience_s(30)
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit_s)


def test_a_repeated_signal_stops_once_and_handlers_are_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtime, "SIGNAL_DEBOUNCE_S", 600.0)
    handlers_before = [signal.getsignal(number) for number in SIGNALS]
    called: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()
    with stop_on_signals(lambda: called.put(threading.current_thread())) as signals:
        assert signals.status(otherwise=7) == 7
        for _ in range(2):  # timeout(1) sends it twice
            os.kill(os.getpid(), signal.SIGTERM)
        assert called.get(timeout=patience_s(30)) is not threading.main_thread()
    assert signals.status(otherwise=7) == 143
    assert [signal.getsignal(number) for number in SIGNALS] == handlers_before

    def be_stopped() -> None:
        with exit_on_signals():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit, match="143"):
        be_stopped()


@pytest.mark.parametrize("blocking", [True, False])
def test_large_output_is_written_whole_until_the_reader_closes(blocking: bool) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, blocking)
    data = os.urandom(1 << 20)
    with open(reader, "rb") as file, ThreadPoolExecutor(1) as pool:
        read = pool.submit(file.read, len(data))
        write_whole(writer, data)
        assert read.result(patience_s(30)) == data
    with pytest.raises(ReaderGone):
        write_whole(writer, b"x")
    os.close(writer)


@pytest.fixture
def logger(own_logging: None) -> logging.Logger:
    """A logger of the package."""
    return logging.getLogger("nsqtools.client")


def test_a_log_line_is_text_or_json_with_the_exception(logger: logging.Logger) -> None:
    text, json_lines = io.StringIO(), io.StringIO()
    configure_logging(logging.WARNING, text)
    logger.warning("lost %s", "127.0.0.1:4150")
    logger.info("not shown")
    configure_logging(logging.WARNING, json_lines, json=True)
    try:
        raise OSError("gone")
    except OSError:
        logger.exception("lost\n%s", "é")

    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    assert re.fullmatch(rf"{time} warning: lost 127.0.0.1:4150\n", text.getvalue())
    (line,) = json_lines.getvalue().splitlines()
    fields = json.loads(line)
    values = (fields["level"], fields["logger"], fields["message"])
    assert values == ("error", "nsqtools.client", "lost\né")
    assert "OSError: gone" in fields["exception"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", ["a", "done"]),
        ("-q", []),
        ("-v", ["a", "b", "done"]),
        ("-vv", ["a", "b", "c", "done"]),
        ("--debug", ["a", "b", "c", "done"]),
    ],
)
def test_the_log_level_follows_the_options(
    given_command: GivenCommand,
    capsys: pytest.CaptureFixture[str],
    logger: logging.Logger,
    line: str,
    said: list[str],
) -> None:
    def talk(*, runtime: Session) -> None:
        logger.warning("a")
        logger.info("b")
        logger.debug("c")
        runtime.info("done")

    given_command(talk)
    app.run(["given", *line.split()])

    out, err = capsys.readouterr()
    assert out == ""
    assert [text.split(": ")[-1] for text in err.splitlines()] == said
