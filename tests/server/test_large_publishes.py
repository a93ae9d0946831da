"""A publish of any number of messages arrives completely, and does not delay other clients."""

import struct
from collections.abc import Callable

import pytest
from plugins.daemons import MAX_TURN_S, EmbeddedNsqdProcess
from plugins.raw_client import TIMEOUT_S, RawClient, mpub, subscribed
from plugins.servers import DataPath, Serve

MB = 1 << 20


def http(method: str, target: str, body: bytes, fields: bytes = b"") -> bytes:
    head = f"{method} {target} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n".encode()
    return head + fields + b"\r\n" + body


def lines(size: int, length: int) -> bytes:
    return http("POST", "/mpub?topic=t", (b"x" * length + b"\n") * (size // (length + 1)))


def binary(size: int, length: int) -> bytes:
    command = mpub("t", [b"x" * length] * ((size - 4) // (length + 4)))
    return http("POST", "/mpub?topic=t&binary=true", command[command.index(b"\n") + 5 :])


def over_tcp(size: int, length: int) -> bytes:
    return b"  V2" + mpub("t", [b"x" * length] * ((size - 4) // (length + 4)))


def sized(line: bytes, body: bytes) -> bytes:
    return b"  V2" + line + struct.pack(">i", len(body)) + body


ADDRESSES = b"[" + b",".join([b'"127.0.0.1:1"'] * 2000) + b"]"
GET = b"GET /ping HTTP/1.1\r\nHost: x\r\n"
REQUESTS: dict[str, Callable[[int], bytes]] = {
    **{f"lines of {n} B": lambda size, n=n: lines(size, n) for n in (1, 10, 50, 200)},  # type: ignore[misc]
    **{f"binary, {n} B": lambda size, n=n: binary(size, n) for n in (1, 10, 50)},  # type: ignore[misc]
    **{f"MPUB, {n} B": lambda size, n=n: over_tcp(size, n) for n in (1, 10, 50)},  # type: ignore[misc]
    "chunks of 1 B": lambda size: (
        b"POST /mpub?topic=t HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"1\r\nx\r\n" * (size // 6)
        + b"0\r\n\r\n"
    ),
    "IDENTIFY": lambda size: sized(
        b"IDENTIFY\n", b"{%b}" % b",".join(b'"k%d":1' % n for n in range(size // 13))
    ),
    "AUTH": lambda size: sized(b"AUTH\n", b"x" * (size - 100)),
    "fields of one name": lambda size: GET + b"a:b\r\n" * 200_000 + b"\r\n",
    "a long target": lambda size: b"GET /?" + b"%41&" * 250_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "addresses": lambda size: http("PUT", "/config/nsqlookupd_tcp_addresses", ADDRESSES),
    "requests": lambda size: (GET + b"\r\n") * (size // 200),
}


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("flags", [(), ("-durable",)])
@pytest.mark.parametrize("request_name", REQUESTS)
def test_no_large_request_blocks_the_loop_or_needs_four_times_its_size(
    request_name: str, flags: tuple[str, ...], data_path: DataPath, serve: Serve
) -> None:
    request = REQUESTS[request_name](5 * MB)
    nsqd = serve(EmbeddedNsqdProcess(data_path(), "-mem-queue-size=10000", *flags))
    nsqd.create_channel("t", "c")
    status = f"/proc/{nsqd.pid}/status"

    def peak_mb() -> float:
        with open(status) as lines:
            return next(int(line.split()[1]) for line in lines if "VmHWM" in line) / 1024

    before_mb = peak_mb()
    is_tcp = request.startswith(b"  V2")
    address = nsqd.tcp_address if is_tcp else nsqd.http_address
    with RawClient(address, magic=b"") as client:
        client.socket.settimeout(10 * TIMEOUT_S)
        try:
            client.send(request)
            assert client.socket.recv(1 << 16)
        except (ConnectionResetError, BrokenPipeError):
            pass  # It was refused before it was read.
    assert nsqd.longest_turn_cpu_s() < 2.5 * MAX_TURN_S
    assert peak_mb() - before_mb < 4 * 5


@pytest.mark.parametrize("flags", [(), ("-durable",), ("-mem-queue-size=100000",)])
@pytest.mark.parametrize("channel", ["c", "c#ephemeral"])
def test_a_large_publish_arrives_completely_and_in_order(
    flags: tuple[str, ...], channel: str, data_path: DataPath, serve: Serve
) -> None:
    bodies = [b"%d" % number for number in range(1500)]
    packed = mpub("t", bodies)
    binary_body = packed[packed.index(b"\n") + 5 :]
    nsqd = serve(EmbeddedNsqdProcess(data_path(), "-mem-queue-size=2000", *flags))
    nsqd.create_channel("t", channel)
    with (
        subscribed(nsqd.tcp_address, "t", channel, ready=2000) as client,
        RawClient(nsqd.tcp_address) as publisher,
    ):
        ids = []
        for publish in (
            lambda: nsqd.post("/mpub", b"\n\n".join(bodies), topic="t"),
            lambda: nsqd.post("/mpub", binary_body, topic="t", binary="true"),
            lambda: publisher.ask(packed),
        ):
            publish()
            for body in bodies:
                message = client.read_message()
                assert message.body == body
                ids.append(message.id)
                client.finish([message])
        assert ids == sorted(set(ids))
        client.settle()
    assert nsqd.topic_stats("t")["message_count"] == 3 * len(bodies)
    assert nsqd.topic_stats("t")["message_bytes"] == 3 * sum(map(len, bodies))
