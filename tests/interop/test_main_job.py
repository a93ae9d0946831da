"""The main job on real input: log lines through ``nsq pub``, a real nsqd, and ``nsq tail``.

Every way to connect, with AUTH, which comes on top; what comes out is compared, sorted, with what
went in. Lines are what this machine has logged, repeated: made-up ones are all alike, real ones
have every length, quoting and encoding that logs have. By default a few megabytes each;
``pytest -m slow tests/interop/test_main_job.py`` takes 100 MB, and does without AUTH, too.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, run

import pytest
from plugins.auth_server import AuthServer
from plugins.certificates import Certificates
from plugins.servers import MakeNsqd
from plugins.waiting import patience_s

LOGS = Path("/var/log")
NSQ = [sys.executable, "-m", "nsqtools"]
SECRET = "open sesame"

TRANSPORTS = {
    "plain": [],
    "tls": ["--tls"],
    "snappy": ["--snappy"],
    "deflate": ["--deflate-level", "1"],
    "tls-snappy": ["--tls", "--snappy"],
    "tls-deflate": ["--tls", "--deflate-level", "1"],
}

SIZES = [
    pytest.param(3_000_000, id="3MB"),
    pytest.param(100_000_000, id="100MB", marks=pytest.mark.slow),
]


@pytest.fixture
def real_log(tmp_path: Path) -> Callable[[int], Path]:
    """A factory of files of the lines of this machine's logs, at least so many bytes large."""
    lines: list[bytes] = []
    for path in sorted(LOGS.rglob("*.log")):
        with suppress(OSError):  # not everybody may read every log
            text = path.read_bytes()
            lines += [line for line in text.split(b"\n") if line and b"\0" not in text]
    if len(lines) < 1000:
        pytest.skip(f"only {len(lines)} log lines below {LOGS}: too few to be of use")

    def make(size: int) -> Path:
        path, block = tmp_path / "real.log", b"\n".join(lines) + b"\n"
        path.write_bytes(block * -(-size // len(block)))
        return path

    return make


def sorted_digest(path: Path) -> tuple[int, str]:
    """The number of lines of a file, and a digest of them in order."""
    *lines, rest = path.read_bytes().split(b"\n")  # splitlines() would also split at a lone \r
    assert rest == b"", "the file ends inside a line"
    return len(lines), hashlib.sha256(b"\n".join(sorted(lines))).hexdigest()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "needs_auth",
    [pytest.param(False, id="open", marks=pytest.mark.slow), pytest.param(True, id="auth")],
)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_log_goes_through_unchanged(
    transport: str,
    needs_auth: bool,
    size: int,
    go_nsqd: MakeNsqd,
    auth_server: AuthServer,
    certificates: Certificates,
    real_log: Callable[[int], Path],
    nsq_env: dict[str, str],
    tmp_path: Path,
) -> None:
    log, out = real_log(size), tmp_path / "out.log"
    flags = list(TRANSPORTS[transport])
    nsqd_flags: list[str] = []
    if "--tls" in flags:
        flags += ["--tls-ca-file", str(certificates.ca)]
        nsqd_flags += certificates.server.nsqd_flags
    if needs_auth:
        auth_server.allow(SECRET)
        nsqd_flags.append(f"-auth-http-address={auth_server.address}")
        nsq_env["NSQ_AUTH_SECRET"] = SECRET
    nsqd = go_nsqd(*nsqd_flags)
    nsqd.create_channel("log", "c")
    lines, digest = sorted_digest(log)
    place = ["-t", "log", "--nsqd-tcp-address", nsqd.tcp_address, *flags]

    with out.open("wb") as sink, log.open("rb") as source:
        limits = ["-n", str(lines), "--exit-idle", "60s"]
        tail = Popen(
            [*NSQ, "tail", *place, "-c", "c", *limits], stdout=sink, stderr=PIPE, env=nsq_env
        )
        pub = run([*NSQ, "pub", *place], stdin=source, stdout=DEVNULL, stderr=PIPE, env=nsq_env)
        _, tail_said = tail.communicate(timeout=patience_s(100))

    assert pub.returncode == 0, pub.stderr.decode()
    assert pub.stderr.decode().startswith(f"nsq: {lines} confirmed, 0 rejected")
    assert tail.returncode == 0, tail_said.decode()
    assert sorted_digest(out) == (lines, digest)
