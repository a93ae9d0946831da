"""TLS contexts, and the TLS stream against a server that does as the test says."""

from __future__ import annotations

import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from plugins.certificates import Certificates
from plugins.waiting import patience_s

from nsqtools.errors import TLSError
from nsqtools.protocol.names import Address
from nsqtools.transport.stream import Deadline, Stream, TLSOptions, connect, make_context

Serve = Callable[..., tuple[Stream, "Callable[[], ssl.SSLSocket]"]]


@pytest.fixture
def tls_server(certificates: Certificates) -> Iterator[Serve]:
    """``tls_server(version)``: a connected stream, and the server's end once TLS is up."""
    with ExitStack() as stack:

        def serve(version: ssl.TLSVersion) -> tuple[Stream, Callable[[], ssl.SSLSocket]]:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificates.server.cert, certificates.server.key)
            context.minimum_version = context.maximum_version = version
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            stream = connect(Address(*listener.getsockname()), Deadline(5))
            stack.callback(stream.close)
            accepted, _ = listener.accept()
            ends: list[ssl.SSLSocket] = []

            def shake_hands() -> None:
                try:
                    ends.append(context.wrap_socket(accepted, server_side=True))
                except OSError:
                    accepted.close()  # the client did not like it

            thread = threading.Thread(target=shake_hands)
            thread.start()

            def end() -> ssl.SSLSocket:
                thread.join(patience_s(5))
                return stack.enter_context(ends[0])

            stack.callback(thread.join)
            return stream, end

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
    with server() as peer:
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


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("tls1.3", ssl.TLSVersion.TLSv1_3),
        ("tls1.2", ssl.TLSVersion.TLSv1_2),
        ("tls1.0", ssl.TLSVersion.TLSv1),
        ("ssl3.0", ssl.TLSVersion.TLSv1),
    ],
)
def test_every_name_of_a_version_is_a_version(name: str, version: ssl.TLSVersion) -> None:
    assert make_context(TLSOptions(min_version=name)).minimum_version == version
