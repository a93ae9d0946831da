"""Each certificate is wrong in the one way its name says, and in no other."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from plugins.certificates import Certificates, Credentials
from plugins.daemons import GoNsqd


def handshake(nsqd: GoNsqd, ca: Path, client: Credentials | None = None) -> Mapping[str, object]:
    """The certificate of nsqd's HTTPS side, once we and nsqd have accepted each other."""
    context = ssl.create_default_context(cafile=str(ca))
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    if client:
        context.load_cert_chain(client.cert, client.key)
    host, port = nsqd.https_address.split(":")
    with (
        socket.create_connection((host, int(port)), timeout=5) as sock,
        context.wrap_socket(sock, server_hostname=host) as stream,
    ):
        # Under TLS 1.3 nsqd's opinion of our certificate is known only when it answers.
        stream.sendall(b"GET /ping HTTP/1.0\r\n\r\n")
        assert stream.recv(100).startswith(b"HTTP/1.0 200")
        return stream.getpeercert() or {}


def test_the_good_server_is_trusted(
    go_nsqd: Callable[..., GoNsqd], certificates: Certificates
) -> None:
    nsqd = go_nsqd(*certificates.server.nsqd_flags)
    assert handshake(nsqd, certificates.ca)["subjectAltName"] == (
        ("DNS", "localhost"),
        ("IP Address", "127.0.0.1"),
    )
    with pytest.raises(ssl.SSLCertVerificationError, match="unable to get local issuer"):
        handshake(nsqd, certificates.other_ca)


@pytest.mark.parametrize(
    ("server", "complaint"),
    [("expired_server", "certificate has expired"), ("wrong_host_server", "IP address mismatch")],
)
def test_the_bad_servers_are_refused(
    go_nsqd: Callable[..., GoNsqd], certificates: Certificates, server: str, complaint: str
) -> None:
    nsqd = go_nsqd(*getattr(certificates, server).nsqd_flags)
    with pytest.raises(ssl.SSLCertVerificationError, match=complaint):
        handshake(nsqd, certificates.ca)


def test_nsqd_accepts_the_client_certificate(
    go_nsqd: Callable[..., GoNsqd], certificates: Certificates
) -> None:
    nsqd = go_nsqd(
        *certificates.server.nsqd_flags,
        f"-tls-root-ca-file={certificates.ca}",
        "-tls-client-auth-policy=require-verify",
    )
    handshake(nsqd, certificates.ca, certificates.client)
    # A reset may overtake nsqd's alert, as it closes with our request unread.
    with pytest.raises(OSError, match=r"(?i)certificate.required|reset"):
        handshake(nsqd, certificates.ca)
