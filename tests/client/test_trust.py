"""To whom the client goes, and to whom it shows its secret: an announcement is only a claim."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import pytest
from plugins.certificates import Certificates
from plugins.clients import CHANNEL, TOPIC, Consume, InBackground, Produce, take
from plugins.daemons import GoNsqd
from plugins.scripted_lookupd import ScriptedLookupd
from plugins.scripted_nsqd import ScriptedNsqd
from plugins.waiting import patience_s

import nsqtools
from nsqtools.client import connection
from nsqtools.client.connection import open_connection, tls_context
from nsqtools.client.options import ClientOptions
from nsqtools.errors import ConfigurationError, PublishRefused, RefusedError, TLSError
from nsqtools.http.http_api import HTTPAccess, NsqdHTTPClient
from nsqtools.protocol.names import parse_address

ScriptedLookupdFactory = Callable[[], ScriptedLookupd]

WARNING = "the auth secret goes in plain text to"


@pytest.fixture
def announced(
    scripted_lookupd: ScriptedLookupdFactory, scripted_nsqd: ScriptedNsqd
) -> ScriptedLookupd:
    """An nsqlookupd that announces the scripted nsqd."""
    lookupd = scripted_lookupd()
    lookupd.list_nsqd(scripted_nsqd.address)
    return lookupd


@pytest.fixture(autouse=True)
def nobody_was_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_exposed_to", [])


def test_an_announced_nsqd_gets_the_secret_in_plain_text_with_a_warning(
    announced: ScriptedLookupd,
    scripted_nsqd: ScriptedNsqd,
    consume: Consume,
    caplog: pytest.LogCaptureFixture,
) -> None:
    consume(lookupd=announced.address, auth_secret="hush")
    for _ in range(2):
        conn = scripted_nsqd.identified(auth_required=True)
        assert conn.expect("AUTH").body == b"hush"
        conn.close()

    assert [m for m in caplog.messages if WARNING in m] == [
        f"{WARNING} {scripted_nsqd.address}, which nsqlookupd announced; use TLS, or refuse this"
        " with auth_requires_tls"
    ]


def test_an_nsqd_that_was_given_gets_it_without_a_word(
    scripted_nsqd: ScriptedNsqd, consume: Consume, caplog: pytest.LogCaptureFixture
) -> None:
    consume(scripted_nsqd.address, auth_secret="hush")
    conn = scripted_nsqd.identified(auth_required=True)
    conn.expect("AUTH")

    assert WARNING not in caplog.text


def test_auth_requires_tls_keeps_the_secret_from_everybody_without_it(
    scripted_nsqd: ScriptedNsqd, produce: Produce, in_background: InBackground
) -> None:
    producer = produce(scripted_nsqd.address, auth_secret="hush", auth_requires_tls=True)
    publication = in_background(producer.publish, TOPIC, b"x")
    conn = scripted_nsqd.identified(auth_required=True)

    with pytest.raises(PublishRefused, match="would get the auth secret in plain text"):
        publication.result(patience_s(5))
    conn.expect_closed()
    assert all(b"hush" not in command.body for command in conn.commands)


def test_auth_requires_tls_keeps_the_token_from_an_nsqlookupd_over_http() -> None:
    access = HTTPAccess(bearer="hush", auth_requires_tls=True)

    with pytest.raises(RefusedError, match=r"http://lookup:4161 would get the auth secret"):
        access.nsqlookupd("http://lookup:4161")
    access.nsqlookupd("https://lookup:4161").close()


def test_only_nsqd_at_allowed_addresses_are_connected_to(
    announced: ScriptedLookupd,
    scripted_nsqd: ScriptedNsqd,
    consume: Consume,
    caplog: pytest.LogCaptureFixture,
) -> None:
    announced.list_nsqd(scripted_nsqd.address, "evil.example.org:4150")
    port = scripted_nsqd.address.rpartition(":")[2]

    consumer = consume(lookupd=announced.address, allow_announced=f"*.internal 127.*:{port}")
    scripted_nsqd.subscribed("RDY 1")

    assert consumer.connections == [scripted_nsqd.address]
    assert caplog.messages == [
        f"http://{announced.address} announces an nsqd at evil.example.org:4150, which"
        " allow_announced does not allow; left out"
    ]


def fingerprint(certificates: Certificates) -> str:
    der = ssl.PEM_cert_to_DER_cert(certificates.server.cert.read_text())
    return sha256(der).hexdigest()


def test_a_pinned_certificate_is_accepted_and_no_other(
    tls_nsqd: GoNsqd, certificates: Certificates
) -> None:
    pin = fingerprint(certificates)
    colons = ":".join(pin[at : at + 2] for at in range(0, 64, 2)).upper()
    for pins, trusted in (
        (f"{'0' * 64} {pin}", {"tls_root_ca_file": str(certificates.ca)}),
        (colons, {"tls_insecure_skip_verify": True}),  # a pin is all that is verified
    ):
        open_to(tls_nsqd, tls_pin_sha256=pins, **trusted).close()

    with pytest.raises(TLSError, match=f"its SHA-256 is {pin}, which is not pinned"):
        open_to(tls_nsqd, tls_pin_sha256="0" * 64, tls_insecure_skip_verify=True)
    with pytest.raises(TLSError, match="not acceptable"):  # the pin does not replace the rest
        open_to(tls_nsqd, tls_pin_sha256=pin)


def open_to(nsqd: GoNsqd, **options: Any) -> Any:
    settings = ClientOptions(tls_v1=True, **options)
    return open_connection(parse_address(nsqd.tcp_address), settings, tls_context(settings))


def test_a_pin_holds_over_https(tls_nsqd: GoNsqd, certificates: Certificates) -> None:
    url = f"https://{tls_nsqd.https_address}"
    for pin, is_right in ((fingerprint(certificates), True), ("0" * 64, False)):
        options = ClientOptions(
            tls_v1=True, tls_root_ca_file=str(certificates.ca), tls_pin_sha256=pin
        )
        with NsqdHTTPClient(url, tls=tls_context(options)) as nsqd:
            if is_right:
                nsqd.ping()
            else:
                with pytest.raises(TLSError, match="is not pinned"):
                    nsqd.ping()


def test_what_is_no_fingerprint_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="invalid SHA-256 fingerprint 'abc'"):
        ClientOptions(tls_pin_sha256="abc")


def own_context(certificates: Certificates) -> ssl.SSLContext:
    """One that no option can make: its authority is a text, not a file."""
    context = ssl.create_default_context(cadata=certificates.ca.read_text())
    context.load_cert_chain(certificates.client.cert, certificates.client.key)
    return context


def test_a_context_of_the_program_s_own_serves_all_clients(
    go_nsqd: Callable[..., GoNsqd], certificates: Certificates
) -> None:
    nsqd = go_nsqd(
        *certificates.server.nsqd_flags,
        f"-tls-root-ca-file={certificates.ca}",
        "-tls-client-auth-policy=require-verify",
        "-tls-required=tcp-https",
    )
    options = ClientOptions(ssl_context=own_context(certificates))
    with nsqtools.Producer(nsqd.tcp_address, options) as producer:
        producer.publish(TOPIC, b"1")
    with nsqtools.Consumer(
        TOPIC, CHANNEL, nsqd_tcp_addresses=nsqd.tcp_address, options=options
    ) as consumer:
        consumer.start(fail_fast=True)
        take(consumer, 1)[0].finish()


def test_a_context_means_tls_and_replaces_the_other_options(
    nsqd: GoNsqd, certificates: Certificates, produce: Produce
) -> None:
    context = own_context(certificates)
    with pytest.raises(PublishRefused, match="does not offer TLS"):
        produce(nsqd.tcp_address, ssl_context=context).publish(TOPIC, b"never in plain text")
    with pytest.raises(ConfigurationError, match="ssl_context replaces tls_root_ca_file"):
        ClientOptions(ssl_context=context, tls_root_ca_file=str(certificates.ca))
    with pytest.raises(ConfigurationError, match=r"'ca\.pem' is no ssl\.SSLContext"):
        ClientOptions(ssl_context="ca.pem")  # type: ignore[arg-type]
