"""How a run ends: exit status, one line on stderr, a hint, and nothing on stdout but data."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from plugins.cli import GivenCommand, RunNsq, SpawnNsq

from nsqtools import __version__, errors
from nsqtools.cli.main import main
from nsqtools.cli.running.ends import STATUS_OF_CATEGORY, ExitStatus, explain


def raising(error: BaseException) -> Callable[..., int]:
    def command(*_arguments: object) -> int:
        raise error

    return command


def test_version(run_nsq: RunNsq) -> None:
    assert run_nsq(["--version"]) == (0, f"nsq {__version__}\n".encode(), "")


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["shcema"], "no such command 'shcema'. Did you mean 'schema'?", "See nsq --help."),
        (["options"], "there is no nsq options any more: use nsq config show", "See nsq --help."),
        (
            ["config", "path"],
            "there is no nsq config path any more: use nsq config show",
            "See nsq",
        ),
        (["profile", "ls"], "there is no nsq profile any more: use nsq config profiles", "See nsq"),
        (["_complete"], "no such command '_complete'", "See nsq --help."),  # hidden ones stay so
        (["schema", "--jsn"], "no such option: --jsn", "Did you mean --json?"),
        (["schema", "--zzz"], "no such option: --zzz", "See nsq schema --help."),
        (["nodes", "x"], "got unexpected extra argument(s) (x)", "See nsq nodes --help."),
        (["schema", "--log-format"], "option '--log-format' requires an argument", "See nsq sche"),
        (["schema", "--log-format", "xml"], "is not one of text, json", "See nsq schema --help."),
        (["--json", "schema"], "no such option: --json", "Options come after the command"),
        (["nodes", "\x1b[31m"], "got unexpected extra argument(s) (\\x1b[31m)", "See nsq"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_a_hint(
    run_nsq: RunNsq, arguments: list[str], message: str, hint: str
) -> None:
    status, out, err = run_nsq(arguments)

    error_line, hint_line = err.splitlines()
    assert (status, out) == (2, b"")
    assert error_line.startswith("nsq: error: ")
    assert message in error_line
    assert hint_line.startswith(f"hint: {hint}")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.ConfigurationError("no"), 2),
        (errors.NotFoundError("no"), 3),
        (errors.ConnectionFailed("no"), 4),
        (errors.DeadlineExceeded("no"), 4),
        (errors.PublishNotSent("no"), 4),
        (errors.TLSError("no"), 5),
        (errors.ServerRefused("E_UNAUTHORIZED", "no", fatal=True), 5),
        (errors.HTTPError("no", status=404), 3),
        (errors.HTTPError("no", status=403), 5),
        (errors.HTTPError("no", status=500), 1),
        (errors.OutputError("no"), 1),
        (errors.ProtocolError("no"), 1),
    ],
)
def test_the_category_of_an_error_picks_the_status(
    given_command: GivenCommand,
    capsys: pytest.CaptureFixture[str],
    error: errors.NsqError,
    status: int,
) -> None:
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


def test_debug_shows_the_traceback_and_then_the_same_lines(
    given_command: GivenCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    given_command(raising(errors.NsqError("no")), raw=True)

    assert main(["given", "--debug"]) == 1

    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1] == "nsq: error: no"


def test_the_environment_can_ask_for_the_traceback(
    given_command: GivenCommand,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NSQ_DEBUG", "1")
    given_command(raising(errors.NsqError("no")), raw=True)

    main(["given"])

    assert capsys.readouterr().err.startswith("Traceback")


def test_interrupted_is_130_without_a_word(
    given_command: GivenCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    given_command(raising(KeyboardInterrupt()), raw=True)

    assert main(["given"]) == 130
    assert capsys.readouterr().err == ""


def test_a_raw_command_gets_its_arguments_untouched(given_command: GivenCommand) -> None:
    seen: list[list[str]] = []
    given_command(seen.append, raw=True)

    assert main(["given", "-data-path=/x", "--help", "--", "-1"]) == 0
    assert seen == [["-data-path=/x", "--help", "--", "-1"]]


@pytest.mark.parametrize("raw", [True, False])
def test_a_command_chooses_its_status(given_command: GivenCommand, raw: bool) -> None:
    def command(_arguments: list[str] | None = None) -> int:
        return ExitStatus.LIMIT_NOT_REACHED

    def parsed() -> int:
        return ExitStatus.LIMIT_NOT_REACHED

    given_command(command if raw else parsed, raw=raw)

    assert main(["given"]) == 7


@pytest.mark.parametrize(
    "arguments", [["--help"], ["schema", "--help"], ["schema"], ["schema", "--json"]]
)
def test_a_closed_stdout_is_141_without_a_word(spawn_nsq: SpawnNsq, arguments: list[str]) -> None:
    process = spawn_nsq(arguments)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()

    assert process.wait(30) == 141
    assert process.stderr.read() == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["--help"], ["schema", "--help"], ["schema"]])
def test_a_full_disk_under_stdout_is_an_error_in_one_line(
    nsq_env: dict[str, str], arguments: list[str]
) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "nsqtools", *arguments],
            env=nsq_env,
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=30,
            check=False,
        )

    assert done.returncode == 1
    (line,) = done.stderr.decode().splitlines()
    assert "No space left on device" in line


@pytest.mark.parametrize("arguments", ["--help", "schema --help", "schema"])
def test_a_closed_descriptor_for_stdout_is_an_error(
    nsq_env: dict[str, str], arguments: str
) -> None:
    done = shell(f"nsq {arguments} >&-", nsq_env)

    assert done.returncode == 1
    assert "Bad file descriptor" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_without_stdin_and_stderr_a_command_runs_as_ever(nsq_env: dict[str, str]) -> None:
    assert shell("nsq schema <&-", nsq_env).stdout == shell("nsq schema", nsq_env).stdout
    assert shell("nsq shcema 2>&-", nsq_env).returncode == 2


def shell(line: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    line = line.replace("nsq", f"{sys.executable} -m nsqtools", 1)
    return subprocess.run(
        ["sh", "-c", line], env=env, capture_output=True, text=True, timeout=30, check=False
    )


def test_an_oserror_names_its_file() -> None:
    message, _ = explain(FileNotFoundError(2, "No such file or directory", "/x/y"))

    assert message == "No such file or directory: /x/y"
