"""Each budget against a peer that exceeds it: the time and memory that the command needs."""

import gzip
import json
import socket
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, repeat
from typing import NamedTuple

import pytest
from plugins.http_server import Serves, http
from plugins.raw_client import RESPONSE, frame, message_frame
from plugins.scripted_nsqd import IDENTIFY_REPLY
from plugins.waiting import patience_s

MOST_MB = 150
TRIES = 3
MB = 1 << 20


COST = "cost: "

# Runs ``nsq`` in a separate process and prints its cost as the last line of stderr. The time is
# that of the command, without the start of the interpreter, which is slow on a busy machine.
_RUNNER = """
import json, os, sys, threading, time
from contextlib import suppress
from nsqtools.cli.main import main

most = {"threads": 0, "descriptors": 0}

def watch():
    while True:
        most["threads"] = max(most["threads"], threading.active_count() - 1)
        most["descriptors"] = max(most["descriptors"], len(os.listdir("/proc/self/fd")))
        time.sleep(0.02)

def peak_mb():
    with open("/proc/self/status") as status:
        [line] = [line for line in status if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1000

def starved():  # seconds that threads were ready and waited for a processor
    waited_ns = 0
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):  # a thread that has ended meanwhile
            with open(f"/proc/self/task/{task}/schedstat") as schedstat:
                waited_ns += int(schedstat.read().split()[1])
    return waited_ns / 1e9

threading.Thread(target=watch, daemon=True).start()
began = time.monotonic() - starved()
status = main(sys.argv[1:])
sys.stdout.flush()
seconds = time.monotonic() - starved() - began
cost = {"seconds": seconds, "peak_mb": peak_mb(), "status": status, **most}
sys.stderr.write("\\ncost: " + json.dumps(cost) + "\\n")
sys.stderr.flush()
os._exit(status)
"""


class Cost(NamedTuple):
    """The end of a run and its peak usage. Megabytes are RSS; ``seconds`` exclude the time in which
    other programs had the processors."""

    status: int
    err: str
    seconds: float
    peak_mb: float
    threads: int
    descriptors: int


RunMeasured = Callable[[Sequence[str]], Cost]


@pytest.fixture
def run_measured(nsq_env: dict[str, str]) -> RunMeasured:
    """Run ``nsq ARGS`` to its end: ``run_measured(["tail", ...]).peak_mb``."""

    def run(arguments: Sequence[str]) -> Cost:
        command, limit_s = [sys.executable, "-c", _RUNNER, *arguments], patience_s(60)
        result = subprocess.run(command, capture_output=True, env=nsq_env, timeout=limit_s)
        lines = result.stderr.decode().splitlines()
        # A thread may still log while the process ends.
        costs = [line for line in lines if line.startswith(COST)]
        assert len(costs) == 1, result.stderr.decode()
        [cost] = costs
        lines.remove(cost)
        return Cost(err="\n".join(lines), **json.loads(cost.removeprefix(COST)))

    return run


OK_FRAME = frame(RESPONSE, b"OK")


def deflating_nsqd(block: bytes, times: int) -> Callable[[socket.socket], None]:
    """Send a block many times after RDY, compressed in advance."""
    codec = zlib.compressobj(1, zlib.DEFLATED, -15)

    def compressed(data: bytes) -> bytes:
        return codec.compress(data) + codec.flush(zlib.Z_SYNC_FLUSH)

    first, second = compressed(OK_FRAME), compressed(OK_FRAME)
    return nsqd([compressed(block) for _ in range(times)], first, second, deflate=True)


def nsqd(
    after_ready: Iterable[bytes],
    after_identify: bytes = b"",
    after_subscribe: bytes = OK_FRAME,
    **granted: object,
) -> Callable[[socket.socket], None]:
    """Grant the features, accept SUB, and send the pieces after RDY."""

    def talk(accepted: socket.socket) -> None:
        accepted.recv(10_000)
        reply = json.dumps(IDENTIFY_REPLY | granted).encode()
        accepted.sendall(frame(RESPONSE, reply) + after_identify)
        accepted.recv(10_000)  # SUB
        accepted.sendall(after_subscribe)
        accepted.recv(10_000)  # RDY
        for piece in after_ready:
            accepted.sendall(piece)
        accepted.recv(10_000)

    return talk


def tail(address: str, *options: str) -> list[str]:
    where = ["--nsqd-tcp-address", address, "--create", "-t", "t", "-c", "c", "--for", "1s"]
    return ["tail", *where, *options]


def affordable(run: Callable[[], Cost], *, timeout_s: float = 1.0) -> Cost:
    """Bound the memory of each run, and the time of the fastest: other programs run as well."""
    for _ in range(TRIES):
        cost = run()
        assert cost.peak_mb < MOST_MB, cost
        assert "This is a bug" not in cost.err, cost
        assert "Traceback" not in cost.err, cost
        if cost.seconds < timeout_s + 1:
            return cost
    raise AssertionError(f"longer than {timeout_s} s and one more: {cost}")


HEAD = struct.pack(">II", 0x7FFFFFFF, 2)
BIG = message_frame(b"x" * 2000, "0" * 16, attempts=1, timestamp_ns=1)
SAME = message_frame(b"x" * 1000, "0" * 16, attempts=1, timestamp_ns=1) * 1000
HOSTILE_NSQD: dict[str, tuple[Callable[[], Callable[[socket.socket], None]], str, str]] = {
    "two gigabytes": (lambda: nsqd([HEAD, *[bytes(MB)] * 2048]), "", "size 2147483647 is above"),
    "above max_msg_size": (lambda: nsqd([BIG]), "-X max_msg_size=1000", "size 2030 is above"),
    "a bomb of zeros": (lambda: deflating_nsqd(bytes(MB) * 16, 16), "--deflate", "0 is below 4"),
    "a bomb of messages": (lambda: deflating_nsqd(SAME * 16, 16), "--deflate", "in flight"),
    "deflate unasked": (lambda: nsqd([], deflate=True), "", "deflate, which was not requested"),
    "snappy unasked": (lambda: nsqd([], snappy=True), "", "snappy, which was not requested"),
}


@pytest.mark.parametrize("case", HOSTILE_NSQD)
def test_responses_of_nsqd_have_a_budget(
    case: str, serves: Serves, run_measured: RunMeasured
) -> None:
    talk, options, complaint = HOSTILE_NSQD[case]
    address = serves(talk())
    cost = affordable(lambda: run_measured(tail(address, *options.split())))
    assert complaint in cost.err
    assert (cost.status == 1) == ("unasked" in case)


OK = b"HTTP/1.1 200 OK\r\n"


def slowly(pieces: Iterable[bytes]) -> Iterator[bytes]:
    for piece in pieces:
        yield piece
        time.sleep(0.1)


def sized(body: bytes, head: bytes = b"") -> list[bytes]:
    return [OK + head + b"Content-Length: %d\r\n\r\n" % len(body), body]


GZIP, CHUNKED = b"Content-Encoding: gzip\r\n", b"Transfer-Encoding: chunked\r\n\r\n"
ODD, LATE = "does not answer like NSQ", "no answer in time"
MANY = json.dumps({"producers": [{"broadcast_address": "["}] * 30_000}).encode()
HOSTILE_HTTP: dict[str, tuple[Callable[[], Iterable[bytes]], str]] = {
    "endless body": (lambda: chain([OK + b"\r\n"], repeat(b" " * MB)), "is longer than"),
    "endless head": (lambda: chain([OK], repeat(b"X: " + b"b" * 1000 + b"\r\n")), "not speak HTTP"),
    "compressed body": (lambda: sized(gzip.compress(bytes(64 * MB)), GZIP), "is compressed"),
    "slow head": (lambda: slowly([OK, *[b"X-A: b\r\n"] * 100]), LATE),
    "slow body": (lambda: slowly([OK + b"Content-Length: 100\r\n\r\n", *[b" "] * 100]), LATE),
    "slow chunks": (lambda: slowly([OK + CHUNKED, *[b"1\r\n \r\n"] * 100]), LATE),
    "nested": (lambda: sized(b"[" * 500_000), ODD),
    "many values": (lambda: sized(b"[" + b"[]," * (8 * MB) + b"1]"), ODD),
    "many nsqd": (lambda: sized(MANY), "drawn at random"),
}
SLOW = [case for case in HOSTILE_HTTP if case.startswith("slow")]


@pytest.mark.parametrize("cases", [SLOW, *([case] for case in HOSTILE_HTTP if case not in SLOW)])
def test_http_responses_have_a_budget(
    cases: list[str], serves: Serves, run_measured: RunMeasured
) -> None:
    def complain(case: str) -> str:
        def run() -> Cost:
            where = ["--lookupd-http-address", serves(http(HOSTILE_HTTP[case][0]()))]
            # The excess arrives within this time even on a busy machine.
            timeout_s = 1 if case in SLOW else patience_s(2)
            return run_measured(["nodes", *where, "--timeout", f"{timeout_s:g}s"])

        return affordable(run).err

    with ThreadPoolExecutor() as pool:  # The slow cases wait at the same time.
        for case, error in zip(cases, pool.map(complain, cases), strict=True):
            assert HOSTILE_HTTP[case][1] in error, case


@pytest.fixture
def silent_nsqd() -> Iterator[list[dict[str, object]]]:
    """2,000 local addresses: the system accepts connections, and no program responds."""
    with socket.create_server(("0.0.0.0", 0), backlog=4096) as listener:
        port = listener.getsockname()[1]
        yield [
            {"broadcast_address": f"127.0.{n >> 8}.{n & 255}", "tcp_port": port, "http_port": port}
            for n in range(1, 2001)
        ]


@pytest.mark.parametrize(
    ("command", "timeout_s", "status"),
    [
        ("stat --once", 2, 4),  # Requests go to nsqlookupd, and then to all nsqd.
        ("tail -t t -c c --for 1s --create", 3, 0),  # The same, and then it consumes.
    ],
)
def test_thousands_of_silent_nsqd_cost_seconds_and_few_threads(
    silent_nsqd: list[dict[str, object]],
    serves: Serves,
    run_measured: RunMeasured,
    command: str,
    timeout_s: float,
    status: int,
) -> None:
    body = json.dumps({"channels": [], "producers": silent_nsqd}).encode()
    where = ["--lookupd-http-address", serves(http(sized(body))), "--timeout", "1s"]
    cost = affordable(lambda: run_measured([*command.split(), *where]), timeout_s=timeout_s)
    assert cost.status == status
    assert "1000 of them, drawn at random, are believed" in cost.err
    assert cost.threads < 150
    assert cost.descriptors < 400
