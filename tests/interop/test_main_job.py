"""The main job: lines through ``nsq pub``, a real nsqd, and ``nsq tail``.

With AUTH, through each transport. The sorted output is compared with the input.
``pytest -m slow tests/interop/test_main_job.py`` takes 100 MB.
"""

import random
import sys
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, run

import pytest
from plugins.certificates import Certificates
from plugins.examples import slow
from plugins.http_server import AuthServer
from plugins.servers import DataPath, GoNsqd, Serve
from plugins.waiting import patience_s, wait_until

NSQ = [sys.executable, "-m", "nsqtools"]

TRANSPORTS = {
    "plain": [],
    "1.1.0": [],
    "tls": ["--tls"],
    "snappy": ["--snappy"],
    "deflate": ["--deflate-level", "1"],
    "tls-snappy": ["--tls", "--snappy"],
    "tls-deflate": ["--tls", "--deflate-level", "1"],
}
# Together they cover the code of all others, whose layers tests/conformance tests one by one.
SHORT_FORMS = ["1.1.0", "tls-snappy", "tls-deflate"]


def made_log(path: Path, size: int) -> Path:
    """Write at least ``size`` bytes of lines with all lengths and bytes."""
    chance = random.Random(size)
    bodies = (chance.randbytes(chance.randrange(1, 400)) for _ in range(10_000))
    block = b"".join(body.replace(b"\n", b"-") + b"\n" for body in bodies)
    path.write_bytes(block * -(-size // len(block)))
    return path


def sorted_lines(path: Path) -> list[bytes]:
    return sorted(path.read_bytes().split(b"\n"))  # splitlines() would also split at a lone \r


@pytest.mark.real_nsqd
@pytest.mark.parametrize(
    ("transport", "size"),
    [
        *((transport, 3_000_000) for transport in SHORT_FORMS),
        *(slow(transport, 100_000_000) for transport in TRANSPORTS),
    ],
)
def test_a_log_arrives_unchanged(
    transport: str,
    size: int,
    serve: Serve,
    data_path: DataPath,
    auth_server: AuthServer,
    certificates: Certificates,
    nsq_env: dict[str, str],
    tmp_path: Path,
) -> None:
    log, out = made_log(tmp_path / "in.log", size), tmp_path / "out.log"
    flags = list(TRANSPORTS[transport])
    nsqd_flags = [f"-auth-http-address={auth_server.address}"]
    if "--tls" in flags:
        flags += ["--tls-ca-file", str(certificates.ca)]
        nsqd_flags += certificates.server.nsqd_flags
    auth_server.allow("open sesame")
    nsq_env["NSQ_AUTH_SECRET"] = "open sesame"
    nsqd = GoNsqd(data_path(), *nsqd_flags)
    nsqd.name += "-1.1.0" if transport == "1.1.0" else ""
    serve(nsqd).create_channel("log", "c")
    lines = sorted_lines(log)
    count = len(lines) - 1  # the last one ends with the file
    place = ["-t", "log", "--nsqd-tcp-address", nsqd.tcp_address, *flags]

    with out.open("wb") as sink, log.open("rb") as source:
        limits = ["-n", str(count), "--exit-idle", "60s"]
        command = [*NSQ, "tail", *place, "-c", "c", *limits]
        tail = Popen(command, stdout=sink, stderr=PIPE, env=nsq_env)
        stats = partial(nsqd.channel_stats, "log", "c")
        wait_until(lambda: len(stats()["clients"]) == 1, what="a client", timeout_s=20)
        pub = run([*NSQ, "pub", *place], stdin=source, stdout=DEVNULL, stderr=PIPE, env=nsq_env)
        _, tail_said = tail.communicate(timeout=patience_s(100))

    assert pub.returncode == 0, pub.stderr.decode()
    assert pub.stderr.decode().startswith(f"nsq: {count} confirmed, 0 rejected")
    assert tail.returncode == 0, tail_said.decode()
    is_same = sorted_lines(out) == lines
    assert is_same  # pytest would take an hour to print the difference of such lists
