"""The main job on real input: log lines through ``nsq pub``, a real nsqd, and ``nsq tail``.

Every way to connect, each with and without AUTH; what comes out is compared, sorted, with what went
in. By default a few megabytes each; ``pytest -m slow tests/interop/test_main_job.py`` takes 100 MB.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, run

import pytest
from plugins.auth_server import AuthServer
from plugins.certificates import Certificates
from plugins.daemons import GoNsqd
from plugins.real_logs import sorted_digest

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


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("needs_auth", [False, True], ids=["open", "auth"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_log_goes_through_unchanged(
    transport: str,
    needs_auth: bool,
    size: int,
    go_nsqd: Callable[..., GoNsqd],
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
        _, tail_said = tail.communicate(timeout=300)

    assert pub.returncode == 0, pub.stderr.decode()
    assert pub.stderr.decode().startswith(f"nsq: {lines} confirmed, 0 rejected")
    assert tail.returncode == 0, tail_said.decode()
    assert sorted_digest(out) == (lines, digest)
