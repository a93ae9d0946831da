"""The stream over a real socket, blocking and non-blocking, and its errors."""

import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack

import pytest
from plugins.certificates import Certificates
from plugins.clients import InBackground
from plugins.waiting import patience_s

from nsqtools.errors import ConnectionFailed, ConnectionLost, DeadlineExceeded, TLSError
from nsqtools.protocol.names import Address, parse_address
from nsqtools.transport.stream import Deadline, Stream, TLSOptions, connect, make_context


@pytest.fixture
def pair() -> Iterator[tuple[Stream, socket.socket]]:
    """A connected stream and its peer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stream = connect(Address(*listener.getsockname()), Deadline(5))
        peer, _ = listener.accept()
        with peer:
            yield stream, peer
        stream.close()


def receive(stream: Stream) -> bytes | None:
    """Wait for bytes, and return them."""
    buffer = memoryview(bytearray(100))
    assert select.select([stream], [], [], 5)[0]
    return stream.receive_ready(buffer)


def test_a_blocking_stream_sends_and_receives_in_time(pair: tuple[Stream, socket.socket]) -> None:
    stream, peer = pair
    stream.send_all(b"ping", Deadline(5))
    assert peer.recv(10) == b"ping"
    peer.sendall(b"pong")
    assert stream.receive(Deadline(5)) == b"pong"
    with pytest.raises(DeadlineExceeded, match=f"{stream.address}: no answer in time"):
        stream.receive(Deadline(0.01))
    peer.sendall(b"more")  # without end
    with pytest.raises(DeadlineExceeded):
        stream.receive(Deadline(-1))
    with pytest.raises(DeadlineExceeded):
        stream.send_all(bytes(1 << 25), Deadline(0.05))


def test_receive_ready_distinguishes_bytes_nothing_and_the_end(
    pair: tuple[Stream, socket.socket],
) -> None:
    stream, peer = pair
    stream.set_nonblocking()
    assert stream.receive_ready(memoryview(bytearray(100))) is None
    peer.sendall(b"abc")
    assert receive(stream) == b"abc"
    peer.sendall(b"x" * 150)
    received = (receive(stream) or b"") + (receive(stream) or b"")
    assert received == b"x" * 150
    stream.shutdown_write()
    assert peer.recv(10) == b""
    peer.sendall(b"last")
    assert receive(stream) == b"last"
    peer.close()
    assert receive(stream) == b""


def test_full_sockets_take_nothing_and_lost_ones_fail(pair: tuple[Stream, socket.socket]) -> None:
    stream, peer = pair
    stream.set_nonblocking()
    while stream.send_ready(bytes(1 << 20)):
        pass
    assert stream.send_ready(b"x") == 0
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()  # with a reset
    with pytest.raises(ConnectionLost, match=str(stream.address)):
        receive(stream)
    with pytest.raises(ConnectionLost, match=str(stream.address)):
        stream.send_ready(b"x")
    stream.shutdown_write()
    stream.close()
    stream.close()


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 300, "nul\0host"])
def test_a_name_that_cannot_be_resolved_is_named(host: str) -> None:
    with pytest.raises(ConnectionFailed, match="cannot connect to") as caught:
        connect(Address(host, 4150), Deadline(5))
    assert caught.value.hint == "Check the host name."


def test_the_local_address_is_used_and_no_name_server_waited_for(silent_name_server: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stream = connect(Address(*listener.getsockname()), Deadline(5), "127.0.0.2")
        peer, (host, _) = listener.accept()
        with peer:
            assert host == "127.0.0.2"
        stream.close()
    with pytest.raises(DeadlineExceeded, match=r"nsqd-1:4150 \(the name server"):
        connect(Address("nsqd-1", 4150), Deadline(0.1))


@pytest.mark.parametrize("local_address", ["192.0.2.1", "no-such-host.invalid"])
def test_a_local_address_that_cannot_be_used_is_named(local_address: str) -> None:
    with pytest.raises(ConnectionFailed, match=f"127.0.0.1:4150 from {local_address} ") as caught:
        connect(Address("127.0.0.1", 4150), Deadline(5), local_address)
    assert "local_addr" in caught.value.hint


@pytest.mark.alone
def test_a_first_address_that_drops_packets_costs_a_quarter_of_a_second(
    monkeypatch: pytest.MonkeyPatch, unreachable_address: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        silent, answers = tuple(parse_address(unreachable_address)), server.getsockname()
        targets = (silent, silent, answers)
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", target) for target in targets]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found)
        began = time.monotonic()
        stream = connect(Address("two-addresses", 4150), Deadline(5))
        took_s = time.monotonic() - began
        stream.close()
    assert 0.45 < took_s < 2


Serve = Callable[..., tuple[Stream, "Future[ssl.SSLSocket]"]]


@pytest.fixture
def tls_server(certificates: Certificates, in_background: InBackground) -> Iterator[Serve]:
    """``tls_server(version)``: a connected stream, and the server's end once TLS is up."""
    with ExitStack() as stack:

        def serve(version: ssl.TLSVersion) -> tuple[Stream, Future[ssl.SSLSocket]]:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificates.server.cert, certificates.server.key)
            context.minimum_version = context.maximum_version = version
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            stream = connect(Address(*listener.getsockname()), Deadline(5))
            stack.callback(stream.close)
            accepted, _ = listener.accept()
            return stream, in_background(context.wrap_socket, accepted, server_side=True)

        yield serve


def read_all(stream: Stream, size: int, buffer_size: int) -> bytes:
    """Read as the I/O loop does: only when the selector says so."""
    buffer = memoryview(bytearray(buffer_size))
    received = b""
    while len(received) < size:
        assert select.select([stream], [], [], 2)[0], f"{len(received)} of {size} bytes"
        received += stream.receive_ready(buffer) or b""
    return received


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("buffer_size", [100, 20_000, 1 << 18])
def test_bytes_that_are_decrypted_already_do_not_wait_for_the_selector(
    certificates: Certificates, tls_server: Serve, version: ssl.TLSVersion, buffer_size: int
) -> None:
    stream, server = tls_server(version)
    stream.start_tls(make_context(TLSOptions(ca_file=str(certificates.ca))), Deadline(5))
    stream.set_nonblocking()
    with server.result(patience_s(5)) as peer:
        peer.sendall(b"x" * 100_000)
        assert read_all(stream, 100_000, buffer_size) == b"x" * 100_000
        stream.shutdown_write()
        peer.sendall(b"still readable")
        assert read_all(stream, 14, buffer_size) == b"still readable"


def test_the_lowest_version_is_kept(certificates: Certificates, tls_server: Serve) -> None:
    stream, _ = tls_server(ssl.TLSVersion.TLSv1_2)
    options = TLSOptions(ca_file=str(certificates.ca), min_version="tls1.3")
    with pytest.raises(TLSError, match=f"{stream.address}: TLS failed"):
        stream.start_tls(make_context(options), Deadline(5))
    for old in ("tls1.0", "ssl3.0"):
        assert make_context(TLSOptions(min_version=old)).minimum_version == ssl.TLSVersion.TLSv1_2
