"""``nsq nsqlookupd``: the command line, the file, the log and the end of the real one."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest
from plugins.cli import RunNsq, SpawnNsq
from plugins.ports import ReservedPort
from plugins.waiting import patience_s

TIMEOUT_S = patience_s(10.0)
FREE_PORTS = ("-tcp-address=127.0.0.1:0", "--http-address", "127.0.0.1:0")
LINE = re.compile(
    r"\[nsqlookupd\] \d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d{6} (DEBUG|INFO|WARNING|ERROR|FATAL): "
)


def lines_until(stream: IO[bytes] | None, word: str) -> list[str]:
    """The lines up to one with the word; it fails at the end of the stream."""
    assert stream is not None
    lines = []
    for line in stream:
        lines.append(line.decode().rstrip("\n"))
        if word in lines[-1]:
            return lines
    raise AssertionError(f"no {word!r} in {lines}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_says_where_it_listens_and_ends_with_0_on_a_signal(
    spawn_nsq: SpawnNsq, number: signal.Signals
) -> None:
    process = spawn_nsq(["nsqlookupd", *FREE_PORTS])
    lines = lines_until(process.stderr, "HTTP: listening on")

    assert all(LINE.match(line) for line in lines)
    assert re.search(r"INFO: nsqlookupd v1\.3\.0 \(built w/\S+\)$", lines[0])
    found = re.search(r"TCP: listening on 127\.0\.0\.1:(\d+)$", "\n".join(lines), re.MULTILINE)
    assert found is not None
    with socket.create_connection(("127.0.0.1", int(found[1])), timeout=TIMEOUT_S) as connection:
        connection.sendall(b"  V1PING\n")
        assert connection.recv(6) == b"\0\0\0\2OK"

        process.send_signal(number)

        assert process.wait(timeout=TIMEOUT_S) == 0
    assert process.stdout is not None
    assert process.stdout.read() == b""


def test_the_version_is_in_the_form_of_the_real_one(run_nsq: RunNsq) -> None:
    result = run_nsq(["nsqlookupd", "-version"])

    assert (result.status, result.err) == (0, "")
    assert re.fullmatch(rb"nsqlookupd v1\.3\.0 \(built w/\S+\)\n", result.out)


def test_the_usage_is_that_of_the_real_one(
    run_nsq: RunNsq, go_program: Callable[[str], Path]
) -> None:
    real = subprocess.run(
        [go_program("nsqlookupd"), "-help"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    result = run_nsq(["nsqlookupd", "-help"])

    assert (result.status, result.out, result.err) == (real.returncode, b"", real.stderr)


@pytest.mark.parametrize(
    "arguments",
    [
        ["-nonsense"],
        ["-tombstone-lifetime=5"],
        ["-log-level=loud"],
        ["-data-path=/tmp"],
        ["---version"],
        ["-tcp-address"],
        ["-version=maybe"],
    ],
)
def test_a_command_line_is_refused_in_the_words_of_the_real_one(
    run_nsq: RunNsq, go_program: Callable[[str], Path], arguments: list[str]
) -> None:
    real = subprocess.run(
        [go_program("nsqlookupd"), *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    result = run_nsq(["nsqlookupd", *arguments])

    assert (result.status, result.out, result.err) == (2, b"", real.stderr)


def test_a_file_gives_options_and_the_command_line_wins(
    spawn_nsq: SpawnNsq, tmp_path: Path
) -> None:
    port = ReservedPort()
    address = f"127.0.0.1:{port.number}"
    config = tmp_path / "nsqlookupd.cfg"
    config.write_text(
        f'tcp_address = "{address}"\n'
        f'http_address = "{address}"\n'
        'log_prefix = "[lookup] "\n'
        'tombstone_lifetime = "10s"\n'
        "inactive_producer_timeout = 1500\n"
        "unknown = true\n"
    )

    process = spawn_nsq(["nsqlookupd", f"--config={config}", "--http-address=127.0.0.1:0"])
    lines = lines_until(process.stderr, "HTTP: listening on")

    assert all(line.startswith("[lookup] ") for line in lines)
    assert any(line.endswith(f"TCP: listening on {address}") for line in lines)
    process.terminate()
    assert process.wait(timeout=TIMEOUT_S) == 0


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("tcp_address = [", "failed to load config file"),
        ('tombstone_lifetime = "soon"', "failed to coerce value 'soon' for tombstone_lifetime"),
        ('log_level = "loud"', "log_level"),
    ],
)
def test_a_bad_file_is_a_line_and_exit_1(
    run_nsq: RunNsq, tmp_path: Path, content: str, complaint: str
) -> None:
    config = tmp_path / "nsqlookupd.cfg"
    config.write_text(content)

    result = run_nsq(["nsqlookupd", f"-config={config}"])

    assert (result.status, result.out) == (1, b"")
    [line] = result.err.splitlines()
    assert " FATAL: " in line
    assert complaint in line


def test_a_port_in_use_is_a_line_and_exit_1(run_nsq: RunNsq) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = run_nsq(["nsqlookupd", *FREE_PORTS, f"-tcp-address={address}"])

    assert result.status == 1
    assert result.err.splitlines()[-1].endswith(
        f"FATAL: failed to instantiate nsqlookupd - listen ({address}) failed - "
        f"listen tcp {address}: bind: address already in use"
    )
