"""TLS, compression and AUTH, and the order in which a connection gets them.

nsqd allows five seconds for the handshake, which starts immediately, so there is no state to test.
"""

import logging
import random
import socket
import ssl
import struct
import threading
import zlib
from contextlib import nullcontext
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest
import snappy
from plugins.certificates import Certificates
from plugins.clients import (
    CHANNEL,
    OPTIONS,
    TOPIC,
    Consume,
    Dialog,
    Handle,
    InBackground,
    Produce,
    fill,
    take,
)
from plugins.http_server import AuthServer, MakeScripted
from plugins.scripted_nsqd import ScriptedNsqd
from plugins.servers import AnyNsqd, GoNsqd, MakeNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools import ClientOptions, Consumer, errors
from nsqtools.client import connection
from nsqtools.client.connection import MIN_HANDSHAKE_S, Connection, open_connection, tls_context
from nsqtools.http.http_api import HTTPAccess, NsqdHTTPClient
from nsqtools.protocol.names import parse_address
from nsqtools.transport.stream import Stream

OK_FRAME = struct.pack(">II", 6, 0) + b"OK"

COMPRESSION = [{}, {"snappy": True}, {"deflate": True}]
MODES = [{**compression, "tls_v1": tls} for tls in (False, True) for compression in COMPRESSION]


def open_to(address: str, **options: Any) -> Connection:
    settled = replace(OPTIONS, **options)
    return open_connection(parse_address(address), settled)


@pytest.fixture
def tls_nsqd(go_nsqd: MakeNsqd, certificates: Certificates) -> GoNsqd:
    return go_nsqd(*certificates.server.nsqd_flags)


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every socket accept only a few bytes at a time."""
    plain = socket.socket.connect

    def connect(self: socket.socket, address: Any) -> None:
        self.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        plain(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect)


# -- bytes behind the response to IDENTIFY ------------------------------------------------------


def compressed_ok(compression: str) -> bytes:
    if compression == "snappy":
        compressed: bytes = snappy.StreamCompressor().add_chunk(OK_FRAME)
        return compressed
    compressor = zlib.compressobj(6, zlib.DEFLATED, -15)
    return compressor.compress(OK_FRAME) + compressor.flush(zlib.Z_SYNC_FLUSH)


@pytest.mark.parametrize("compression", ["snappy", "deflate"])
def test_compressed_bytes_after_the_reply_are_not_lost(
    scripted_nsqd: ScriptedNsqd, in_background: InBackground, compression: str
) -> None:
    glued = compressed_ok(compression)
    for cut in range(len(glued) + 1):
        opening = in_background(open_to, scripted_nsqd.address, **{compression: True})
        conn = scripted_nsqd.accept()
        identify = conn.expect("IDENTIFY")
        assert identify.read == 0  # magic and IDENTIFY in one write, and nothing after them
        assert conn.not_yet_expected == []
        conn.reply_identify(glued=glued[:cut], **{compression: True})
        conn.send(glued[cut:])
        opening.result(patience_s(5)).close()


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_large_publishes_in_small_pieces(
    tls_nsqd: GoNsqd,
    certificates: Certificates,
    produce: Produce,
    consume: Consume,
    mode: dict[str, bool],
) -> None:
    """After a short write, bytes offered to TLS and compressed bytes never change."""
    body = random.Random(1).randbytes(1 << 20)
    tls_nsqd.create_channel(TOPIC, CHANNEL)
    producer = produce(tls_nsqd.tcp_address, tls_root_ca_file=str(certificates.ca), **mode)
    publications = [producer.submit(TOPIC, [body]) for _ in range(3)]
    publications += [producer.submit(TOPIC, [b"small"]) for _ in range(10)]
    for publication in publications:
        publication.wait(patience_s(10))
    consumer = consume(tls_nsqd.tcp_address, tls_root_ca_file=str(certificates.ca), **mode)
    received: list[bytes] = []
    while len(received) < 13:
        for message in take(consumer, 1):  # RDY changes and FINs while others wait to be sent
            received.append(message.body)
            message.touch()
            message.finish()
    assert sorted(received) == sorted([body] * 3 + [b"small"] * 10)
    assert consumer.stats.late == 0


def test_sockets_are_read_and_written_by_one_thread(
    tls_nsqd: GoNsqd,
    certificates: Certificates,
    consume: Consume,
    handle: Handle,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used: set[tuple[str, str]] = set()

    def watch(name: str) -> None:
        original = getattr(Stream, name)

        def watched(self: Stream, data: Any) -> Any:
            used.add((name, threading.current_thread().name))
            return original(self, data)

        monkeypatch.setattr(Stream, name, watched)

    watch("send_ready")
    watch("receive_ready")
    fill(tls_nsqd, 500)
    ca_file = str(certificates.ca)
    consumer = consume(tls_nsqd.tcp_address, tls_v1=True, tls_root_ca_file=ca_file)
    handle(consumer, lambda message: message.touch() and None, workers=3)
    wait_until(lambda: consumer.stats.finished == 500, what="500 messages")
    assert used == {("send_ready", "nsq-io"), ("receive_ready", "nsq-io")}


# -- TLS that must be refused -------------------------------------------------------------------


def test_a_required_client_certificate(
    go_nsqd: MakeNsqd, certificates: Certificates, produce: Produce, consume: Consume
) -> None:
    required = ("-tls-client-auth-policy=require-verify", f"-tls-root-ca-file={certificates.ca}")
    nsqd = go_nsqd(*certificates.server.nsqd_flags, *required)
    files: dict[str, Any] = {"tls_v1": True, "tls_root_ca_file": str(certificates.ca)}
    old = ssl.create_default_context(cafile=certificates.ca)
    old.maximum_version = ssl.TLSVersion.TLSv1_2  # TLS 1.2 has no alert for it
    for options, reason in ((files, "certificate"), ({"ssl_context": old}, "handshake failure")):
        with pytest.raises(errors.TLSError, match=reason) as caught:
            open_to(nsqd.tcp_address, **options)
        assert "--tls-cert" in caught.value.hint
        assert nsqd.tcp_address in str(caught.value)
    client = certificates.client
    open_to(nsqd.tcp_address, **files, tls_cert=str(client.cert), tls_key=str(client.key)).close()
    context = {"ssl_context": own_context(certificates)}
    produce(nsqd.tcp_address, **context).publish(TOPIC, b"1")
    take(consume(nsqd.tcp_address, fail_fast=True, **context), 1)[0].finish()


@pytest.mark.parametrize("wrong", ["host", "expired", "ca", "system"])
def test_an_unverified_certificate_is_refused(
    go_nsqd: MakeNsqd, certificates: Certificates, wrong: str
) -> None:
    servers = {"host": certificates.wrong_host_server, "expired": certificates.expired_server}
    nsqd = go_nsqd(*servers.get(wrong, certificates.server).nsqd_flags)
    trusted = {"ca": str(certificates.other_ca), "system": ""}
    ca_file = trusted.get(wrong, str(certificates.ca))
    with pytest.raises(errors.TLSError, match="certificate is not acceptable") as caught:
        open_to(nsqd.tcp_address, tls_v1=True, tls_root_ca_file=ca_file, auth_secret="hush")
    assert nsqd.tcp_address in str(caught.value)
    assert "--tls-ca-file" in caught.value.hint
    open_to(nsqd.tcp_address, tls_v1=True, tls_insecure_skip_verify=True).close()


def test_the_secret_is_not_sent_without_tls(
    scripted_nsqd: ScriptedNsqd, in_background: InBackground
) -> None:
    opening = in_background(open_to, scripted_nsqd.address, tls_v1=True, auth_secret="hush")
    conn = scripted_nsqd.accept()
    identify = conn.expect("IDENTIFY")
    assert identify.json["tls_v1"] is True
    conn.reply_identify(tls_v1=False, auth_required=True)
    with pytest.raises(errors.TLSError, match="does not offer TLS"):
        opening.result(patience_s(5))
    conn.expect_closed()
    assert all(b"hush" not in command.body for command in conn.commands)


@pytest.mark.parametrize("glued", [OK_FRAME, b""], ids=["clear text", "an error"])
def test_a_failed_handshake_is_a_tls_error(
    scripted_nsqd: ScriptedNsqd, in_background: InBackground, glued: bytes
) -> None:
    opening = in_background(open_to, scripted_nsqd.address, tls_v1=True)
    conn = scripted_nsqd.identified(tls_v1=True, glued=glued)
    if not glued:
        conn.error("E_IDENTIFY_FAILED upgrade failed")
    with pytest.raises(errors.NsqError, match=scripted_nsqd.address):
        opening.result(patience_s(5))


def test_features_that_nsqd_lacks_are_not_used(
    dialog: Dialog, caplog: pytest.LogCaptureFixture
) -> None:
    consumer, conn = dialog("RDY 1", snappy=True, auth_secret="hush")
    assert f"{consumer.connections[0]} does not offer snappy" in caplog.text
    assert [c.line for c in conn.commands if c.line == "AUTH"] == []


def test_a_real_nsqd_with_auth(
    go_nsqd: MakeNsqd, auth_server: AuthServer, certificates: Certificates, produce: Produce
) -> None:
    auth_server.allow("s3cret", topic=TOPIC)
    nsqd = go_nsqd(f"-auth-http-address={auth_server.address}", *certificates.server.nsqd_flags)
    mode: dict[str, Any] = {"tls_v1": True, "tls_root_ca_file": str(certificates.ca)}
    with pytest.raises(errors.RefusedError, match="requires authentication") as caught:
        open_to(nsqd.tcp_address, **mode)
    assert "--auth-secret-file" in caught.value.hint
    with pytest.raises(errors.ServerRefused, match="E_AUTH_FAILED"):
        open_to(nsqd.tcp_address, auth_secret="wrong", **mode)
    producer = produce(nsqd.tcp_address, auth_secret="s3cret", **mode)
    producer.publish(TOPIC, b"x")
    with pytest.raises(errors.NsqError, match="E_UNAUTHORIZED") as refused:
        producer.publish("other", b"x")
    assert refused.value.category == "refused"
    producer.publish(TOPIC, b"x")


def test_auth_servers_may_hang_until_one_answers(
    go_nsqd: MakeNsqd, auth_server: AuthServer, consume: Consume
) -> None:
    auth_server.allow("s3cret", after_s=MIN_HANDSHAKE_S + 1)
    slow = ["-http-client-request-timeout=1m", f"-auth-http-address={auth_server.address}"]
    options: dict[str, Any] = {"auth_secret": "s3cret", "dial_timeout_s": 0.9, "fail_fast": True}
    assert consume(go_nsqd(*slow).tcp_address, **options).connections


# -- trust: an announcement is only a claim --------------------------------------------------------


WARNING = "the auth secret goes in plain text to"


def test_a_secret_in_plain_text_to_an_announced_nsqd_is_logged(
    scripted_lookupd: MakeScripted,
    scripted_nsqd: ScriptedNsqd,
    consume: Consume,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "_exposed_to", [])
    with ScriptedNsqd() as configured:
        consume(configured.address, auth_secret="hush")
        configured.identified(auth_required=True).expect("AUTH")
    lookupd = scripted_lookupd()
    lookupd.list_nsqd(scripted_nsqd.address)
    consume(lookupd=lookupd.address, auth_secret="hush")
    for _ in range(2):
        conn = scripted_nsqd.identified(auth_required=True)
        assert conn.expect("AUTH").body == b"hush"
        conn.close()
    assert [m for m in caplog.messages if WARNING in m] == [
        f"{WARNING} {scripted_nsqd.address}, which nsqlookupd announced; use TLS, or refuse this"
        " with auth_requires_tls"
    ]


def test_a_secret_that_is_not_utf_8_is_sent_as_its_bytes(
    scripted_nsqd: ScriptedNsqd, consume: Consume
) -> None:
    consume(scripted_nsqd.address, auth_secret="\udcff")  # as os.environ has it
    assert scripted_nsqd.identified(auth_required=True).expect("AUTH").body == b"\xff"


def test_auth_requires_tls_sends_no_secret_in_plain_text(
    scripted_nsqd: ScriptedNsqd, produce: Produce, in_background: InBackground
) -> None:
    producer = produce(scripted_nsqd.address, auth_secret="hush", auth_requires_tls=True)
    publication = in_background(producer.publish, TOPIC, b"x")
    conn = scripted_nsqd.identified(auth_required=True)
    with pytest.raises(errors.PublishRefused, match="would get the auth secret in plain text"):
        publication.result(patience_s(5))
    conn.expect_closed()
    assert all(b"hush" not in command.body for command in conn.commands)
    access = HTTPAccess(bearer="hush", auth_requires_tls=True)
    with pytest.raises(errors.RefusedError, match=r"http://lookup:4161 would get the auth secret"):
        access.nsqlookupd("http://lookup:4161")
    access.nsqlookupd("https://lookup:4161").close()


def test_only_nsqd_at_allowed_addresses_are_connected_to(
    scripted_lookupd: MakeScripted,
    scripted_nsqd: ScriptedNsqd,
    consume: Consume,
    caplog: pytest.LogCaptureFixture,
) -> None:
    lookupd = scripted_lookupd()
    lookupd.list_nsqd(scripted_nsqd.address, "evil.example.org:4150")
    port = scripted_nsqd.address.rpartition(":")[2]
    consumer = consume(lookupd=lookupd.address, allow_announced=f"*.internal 127.*:{port}")
    scripted_nsqd.subscribed("RDY 1")
    assert consumer.connections == [scripted_nsqd.address]
    assert caplog.messages == [
        f"http://{lookupd.address} announces an nsqd at evil.example.org:4150, which"
        " allow_announced does not allow; left out"
    ]


def test_only_pinned_certificates_are_accepted(
    tls_nsqd: GoNsqd, certificates: Certificates
) -> None:
    address, trusted = tls_nsqd.tcp_address, {"tls_root_ca_file": str(certificates.ca)}
    der = ssl.PEM_cert_to_DER_cert(certificates.server.cert.read_text())
    pin, wrong_pin = sha256(der).hexdigest(), "0" * 64
    colons = ":".join(pin[at : at + 2] for at in range(0, 64, 2)).upper()
    open_to(address, tls_v1=True, tls_pin_sha256=f"{wrong_pin} {pin}", **trusted).close()
    unverified: dict[str, Any] = {"tls_v1": True, "tls_insecure_skip_verify": True}
    open_to(address, tls_pin_sha256=colons, **unverified).close()  # only the pin is verified
    with pytest.raises(errors.TLSError, match=f"its SHA-256 is {pin}, which is not pinned"):
        open_to(address, tls_pin_sha256=wrong_pin, **unverified)
    with pytest.raises(errors.TLSError, match="not acceptable"):  # a pin replaces no verification
        open_to(address, tls_v1=True, tls_pin_sha256=pin)
    url = f"https://{tls_nsqd.https_address}"
    refusal = pytest.raises(errors.TLSError, match="is not pinned")
    for pinned, outcome in ((pin, nullcontext()), (wrong_pin, refusal)):
        options = ClientOptions(tls_v1=True, tls_pin_sha256=pinned, **trusted)
        with NsqdHTTPClient(url, HTTPAccess(tls=tls_context(options))) as nsqd, outcome:
            nsqd.ping()


def own_context(certificates: Certificates) -> ssl.SSLContext:
    """A context that options cannot make, because its authority is not a file."""
    context = ssl.create_default_context(cadata=certificates.ca.read_text())
    context.load_cert_chain(certificates.client.cert, certificates.client.key)
    return context


def test_an_ssl_context_replaces_the_tls_options(
    nsqd: GoNsqd, certificates: Certificates, produce: Produce
) -> None:
    context = own_context(certificates)
    with pytest.raises(errors.PublishRefused, match="does not offer TLS"):
        produce(nsqd.tcp_address, ssl_context=context).publish(TOPIC, b"never in plain text")
    with pytest.raises(errors.ConfigurationError, match="ssl_context replaces tls_root_ca_file"):
        ClientOptions(ssl_context=context, tls_root_ca_file=str(certificates.ca))


@pytest.mark.parametrize("is_set", [False, True])
def test_a_refused_default_output_buffer_timeout_is_dropped(
    any_nsqd: AnyNsqd, is_set: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "nsqtools")
    address = parse_address(any_nsqd("--min-output-buffer-timeout=100ms").tcp_address)
    if is_set:
        with pytest.raises(errors.ServerError, match=r"\(25\) is invalid: output_buffer_timeout"):
            open_connection(address, ClientOptions(output_buffer_timeout_s=0.025))
    else:
        for _ in range(2):
            open_connection(address, ClientOptions()).close()
        assert caplog.text.count("using its own default") == 1


def test_a_consumer_reports_the_option_that_nsqd_refuses(any_nsqd: AnyNsqd) -> None:
    nsqd = any_nsqd("--min-output-buffer-timeout=100ms")
    options = ClientOptions(output_buffer_timeout_s=0.025)
    consumer = Consumer(TOPIC, "c", nsqd_tcp_addresses=[nsqd.tcp_address], options=options)
    with pytest.raises(errors.ServerError, match="output_buffer_timeout is out of nsqd's bounds"):
        consumer.start(fail_fast=True)
    consumer.stop()
