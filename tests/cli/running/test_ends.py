"""How a run ends: exit status, one line on stderr, a hint, and nothing on stdout but data."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
from plugins.cli import GivenCommand, RunNsq, SpawnNsq
from plugins.waiting import patience_s

from nsqtools import errors
from nsqtools.cli.main import main
from nsqtools.cli.running.runtime import STATUS_OF_CATEGORY, ExitStatus, explain


def raising(error: BaseException) -> Callable[..., int]:
    def command(*_arguments: object) -> int:
        raise error

    return command


def test_the_category_of_an_error_picks_the_status(
    given_command: GivenCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    for error, status in (
        (errors.ConfigurationError("no"), 2),
        (errors.NotFoundError("no"), 3),
        (errors.DeadlineExceeded("no"), 4),
        (errors.PublishNotSent("no"), 4),
        (errors.TLSError("no"), 5),
        (errors.ServerRefused("E_UNAUTHORIZED", "no", fatal=True), 5),
        (errors.HTTPError("no", status=404), 3),
        (errors.HTTPError("no", status=403), 5),
        (errors.HTTPError("no", status=500), 1),
        (errors.OutputError("no"), 1),
    ):
        given_command(raising(error), raw=True)
        assert main(["given"]) == status
        assert capsys.readouterr().err == f"nsq: error: {error}\n"


def test_every_category_has_a_status() -> None:
    categories = {
        kind.category
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.NsqError)
    }

    assert categories <= set(STATUS_OF_CATEGORY)


def test_a_message_with_newlines_and_escapes_stays_one_harmless_line(
    given_command: GivenCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    given_command(raising(errors.NsqError("E_BAD\r\n\x1b[2Jgone", hint="try\nthis")), raw=True)

    main(["given"])

    assert capsys.readouterr().err == "nsq: error: E_BAD \\x1b[2Jgone\nhint: try this\n"


def test_a_bug_is_one_line_too_and_says_how_to_report_it(
    given_command: GivenCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    given_command(raising(KeyError("topic")), raw=True)

    assert main(["given"]) == 1

    error_line, hint_line = capsys.readouterr().err.splitlines()
    assert error_line == "nsq: error: unexpected KeyError: 'topic'"
    assert "--debug" in hint_line


@pytest.mark.parametrize(
    ("environ", "arguments"), [({}, ["--debug"]), ({"NSQ_DEBUG": "1"}, [])], ids=["option", "env"]
)
def test_debug_shows_the_traceback_and_then_the_same_line(
    given_command: GivenCommand, run_nsq: RunNsq, environ: dict[str, str], arguments: list[str]
) -> None:
    given_command(raising(errors.NsqError("no")), raw=True)

    status, _, err = run_nsq(["given", *arguments], env=environ)

    lines = err.splitlines()
    assert (status, lines[0][:9], lines[-1]) == (1, "Traceback", "nsq: error: no")


def test_interrupted_is_130_without_a_word(
    given_command: GivenCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    given_command(raising(KeyboardInterrupt()), raw=True)

    assert main(["given"]) == 130
    assert capsys.readouterr().err == ""


def test_a_raw_command_gets_its_arguments_untouched_and_chooses_its_status(
    given_command: GivenCommand,
) -> None:
    seen: list[list[str]] = []

    def raw(arguments: list[str]) -> int:
        seen.append(arguments)
        return ExitStatus.LIMIT_NOT_REACHED

    given_command(raw, raw=True)
    assert main(["given", "-data-path=/x", "--help", "--", "-1"]) == 7
    assert seen == [["-data-path=/x", "--help", "--", "-1"]]
    given_command(lambda: ExitStatus.LIMIT_NOT_REACHED)
    assert main(["given"]) == 7


@pytest.mark.parametrize("arguments", [["--help"], ["schema"]])
def test_a_closed_stdout_is_141_without_a_word(spawn_nsq: SpawnNsq, arguments: list[str]) -> None:
    process = spawn_nsq(arguments)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()

    assert process.wait(patience_s(30)) == 141
    assert process.stderr.read() == b""


@pytest.mark.parametrize(
    ("arguments", "place", "complaint"),
    [
        ("--help", "/dev/full", "No space left on device"),
        ("schema", "/dev/full", "No space left on device"),
        ("schema", "&-", "Bad file descriptor"),
    ],
)
def test_a_stdout_that_cannot_be_written_to_is_an_error_in_one_line(
    nsq_env: dict[str, str], arguments: str, place: str, complaint: str
) -> None:
    done = shell(f"nsq {arguments} >{place}", nsq_env)

    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert complaint in line


def test_without_stdin_and_stderr_a_command_runs_as_ever(nsq_env: dict[str, str]) -> None:
    assert shell("nsq schema <&-", nsq_env).stdout == shell("nsq schema", nsq_env).stdout
    assert shell("nsq shcema 2>&-", nsq_env).returncode == 2


def shell(line: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    line = line.replace("nsq", f"{sys.executable} -m nsqtools", 1)
    return subprocess.run(
        ["sh", "-c", line],
        env=env,
        capture_output=True,
        text=True,
        timeout=patience_s(30),
        check=False,
    )


def test_an_oserror_names_its_file() -> None:
    message, _ = explain(FileNotFoundError(2, "No such file or directory", "/x/y"))

    assert message == "No such file or directory: /x/y"
