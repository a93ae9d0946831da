"""TLS, compression and AUTH, on the Go nsqd and on the embedded one."""

import io
import json
import os
import socket
import ssl
import sys
import time
from contextlib import suppress
from itertools import product
from pathlib import Path
from urllib.request import urlopen

import httpx
import pytest
from plugins.certificates import Certificates
from plugins.http_server import AuthServer
from plugins.raw_client import RawClient, sized
from plugins.servers import AnyNsqd, Nsqd
from plugins.waiting import wait_until

from nsqtools.errors import ProtocolError
from nsqtools.server import EmbeddedNsqd
from nsqtools.server.auth import AuthFailed, compile_pattern


@pytest.fixture
def tls_nsqd(any_nsqd: AnyNsqd, certificates: Certificates) -> AnyNsqd:
    return lambda *flags: any_nsqd(*certificates.server.nsqd_flags, *flags)


@pytest.fixture
def auth_nsqd(any_nsqd: AnyNsqd, auth_server: AuthServer) -> Nsqd:
    return any_nsqd(f"-auth-http-address={auth_server.address}")


def auth(client: RawClient, secret: bytes = b"secret") -> bytes:
    """The answer to AUTH, response or error."""
    client.send(b"AUTH\n" + sized(secret))
    return client.read()[1]


def trusting(certificates: Certificates) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificates.ca))


def test_messages_pass_tls_and_compression(tls_nsqd: AnyNsqd, certificates: Certificates) -> None:
    nsqd = tls_nsqd()
    # The bodies compress well, badly, and not at all.
    bodies = [b"x" * 300_000, bytes(range(256)) * 10, b"y"]
    for codec, with_tls in product(("", "snappy", "deflate"), (False, True)):
        topic = f"{codec or 'plain'}.{with_tls}"
        with RawClient(nsqd.tcp_address) as client:
            client.negotiate(codec, trusting(certificates) if with_tls else None)
            client.subscribe(topic, "ch")
            client.publish(topic, *bodies)
            client.send(b"RDY 10\n")
            received = client.read_messages(3)
            assert [message.body for message in received] == bodies
            client.finish(received)
            client.settle()
            channel = nsqd.channel_stats(topic, "ch")

        assert channel["in_flight_count"] == 0
        [stats] = channel["clients"]
        layers = [name for name in ("tls", "snappy", "deflate") if stats[name]]
        assert layers == [name for name in ("tls" if with_tls else "", codec) if name]
        assert stats["tls_version"] == ("TLS1.3" if with_tls else "")
        assert bool(stats["tls_cipher_suite"]) == with_tls


DAMAGE = {
    "plain": ("", b"NONSENSE\n"),
    "snappy": ("snappy", b"\x07\xff\xff\xff" * 20),
    "deflate": ("deflate", b"\x07\xff\xff\xff" * 20),
    "end of deflate": ("deflate", b"\x03\x00"),
    "tls": ("", b"\x17\x03\x03\x00\x20" + b"x" * 32),
    "snappy in tls": ("snappy", b"\x17\x03\x03\x00\x20" + b"x" * 32),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_commands_before_damage_in_the_same_read_are_executed(
    case: str, tls_nsqd: AnyNsqd, certificates: Certificates
) -> None:
    nsqd, count = tls_nsqd(), 5000
    codec, damage = DAMAGE[case]
    with RawClient(nsqd.tcp_address) as client:
        client.negotiate(codec, trusting(certificates) if "tls" in case else None)
        with socket.socket(fileno=os.dup(client.socket.fileno())) as below_tls:
            below_tls.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
            client.send(b"PUB t\n\0\0\0\1x" * count)
            below_tls.sendall(damage)
        client.socket.settimeout(1.0)
        with suppress(OSError, EOFError, ProtocolError):
            for _ in range(count + 1):
                client.read_frame()
    wait_until(lambda: nsqd.topic_stats("t")["depth"] == count, what="all are published")


def test_a_failed_handshake_is_reported_in_plain_text(
    tls_nsqd: AnyNsqd, certificates: Certificates
) -> None:
    nsqd = tls_nsqd("-tls-min-version=tls1.3")
    with RawClient(nsqd.tcp_address) as client:
        client.negotiate(tls=trusting(certificates))
        assert isinstance(client.socket, ssl.SSLSocket)
        with pytest.raises(ssl.SSLEOFError):  # asyncio also waits for the end of the connection.
            client.socket.unwrap()
    with RawClient(nsqd.tcp_address) as client:
        client.identify(tls_v1=True)
        client.send(b"this is no TLS handshake\n")
        error = b"E_IDENTIFY_FAILED IDENTIFY failed tls: first record does not look like"
        received = b""
        while error not in received:
            received += client.socket.recv(1000) or pytest.fail(f"{received!r}")
    context = trusting(certificates)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with RawClient(nsqd.tcp_address) as client, pytest.raises(ssl.SSLError):
        client.negotiate(tls=context)


@pytest.mark.parametrize("required", ["true", "tcp-https"])
def test_tls_is_required(tls_nsqd: AnyNsqd, certificates: Certificates, required: str) -> None:
    nsqd = tls_nsqd(f"-tls-required={required}")
    with RawClient(nsqd.tcp_address) as client:
        client.send(b"SUB t ch\n")
        assert client.read_error() == b"E_INVALID cannot SUB in current state (TLS required)"
    with RawClient(nsqd.tcp_address) as client:
        client.negotiate(tls=trusting(certificates))
        client.publish("t", b"a", b"b")
        client.subscribe("t", "ch")
    with RawClient(nsqd.tcp_address) as client:
        client.send(b"PUB t\n" + sized(b"c"))
        assert client.read_error() == b"E_INVALID cannot PUB in current state (TLS required)"

    status, body = nsqd.request("GET", "/ping")
    https_port = int(nsqd.https_address.rpartition(":")[2])
    refusal = b'{"message": "TLS_REQUIRED", "https_port": %d}' % https_port
    assert (status, body) == ((403, refusal) if required == "true" else (200, b"OK"))


def test_the_auth_server_gets_the_name_of_a_verified_certificate(
    tls_nsqd: AnyNsqd, certificates: Certificates, auth_server: AuthServer
) -> None:
    auth_server.allow("secret")
    flags = ("-tls-client-auth-policy=require-verify", f"-tls-root-ca-file={certificates.ca}")
    nsqd = tls_nsqd(*flags, f"-auth-http-address={auth_server.address}")
    with RawClient(nsqd.tcp_address) as client:
        context = trusting(certificates)
        context.load_cert_chain(certificates.client.cert, certificates.client.key)
        client.negotiate(tls=context)
        auth(client)
    [question] = auth_server.questions
    assert (question["common_name"], question["tls"]) == ("client", "true")
    refusal = pytest.raises((OSError, EOFError, AssertionError))  # read, with TLS 1.3
    with RawClient(nsqd.tcp_address) as client, refusal:
        client.negotiate(tls=trusting(certificates))


def test_neither_log_nor_configuration_shows_a_secret_or_a_password(
    auth_server: AuthServer, caplog: pytest.LogCaptureFixture
) -> None:
    log = io.StringIO()
    place = auth_server.address
    with (
        caplog.at_level("DEBUG"),
        EmbeddedNsqd(auth_http_address=f"http://u:p4ss@{place}/auth", log=log) as nsqd,
        RawClient(nsqd.tcp_address) as client,
        urlopen(f"http://{nsqd.http_address}/config/auth_http_addresses") as answer,
    ):
        assert auth(client, b"s3cret") == b"E_AUTH_FAILED AUTH failed"
        assert json.loads(answer.read()) == [f"http://{place}/auth"]
        httpx.get(f"http://{nsqd.http_address}/ping?secret=of-the-program", trust_env=False)
    assert f"failed auth request to http://{place}/auth - got response 401" in log.getvalue()
    assert "s3cret" not in caplog.text
    assert "secret=of-the-program" in caplog.text
    assert auth_server.requests[0].headers["Authorization"] == "Basic dTpwNHNz"  # u:p4ss


def test_the_permissions_of_a_secret_are_applied(auth_nsqd: Nsqd, auth_server: AuthServer) -> None:
    auth_server.allow("s3 cret&", topic="^t$", channels=["^ch$", ""], identity="a<b>")
    with RawClient(auth_nsqd.tcp_address) as client:
        client.identify()
        reply = auth(client, b"s3 cret&")
        client.publish("t", b"body")
        client.subscribe("t", "ch", ready=1)
        client.finish([client.read_message()])
        client.send(b"PUB other\n" + sized(b"x"))
        refused = client.read_error()

    assert reply == b'{"identity":"a\\u003cb\\u003e","identity_url":"","permission_count":1}'
    assert refused == b'E_UNAUTHORIZED AUTH failed for PUB on "other" ""'
    question = auth_server.questions[0]
    assert question["secret"] == "s3 cret&"
    assert (question["remote_ip"], question["tls"]) == ("127.0.0.1", "false")
    auth_server.allow("secret", channels=["^mine$"], permissions=["subscribe"])
    with RawClient(auth_nsqd.tcp_address) as client:
        auth(client)
        client.send(b"SUB t other\n")
        assert client.read_error() == b'E_UNAUTHORIZED AUTH failed for SUB on "t" "other"'


def test_a_pattern_matches_as_in_go(auth_nsqd: Nsqd, auth_server: AuthServer) -> None:
    """A line has a pattern, a name, and whether it is allowed; null if the answer is refused."""
    lines = Path(__file__).with_name("patterns.jsonl").read_text("utf-8").splitlines()
    patterns = [json.loads(line) for line in lines]
    outcomes: list[list[object]] = []
    for number, (pattern, name, _) in enumerate(patterns):
        secret = str(number)
        auth_server.allow(secret, topic="^t$", channels=[pattern])
        with RawClient(auth_nsqd.tcp_address) as client:
            outcome = None
            if auth(client, secret.encode()) != b"E_AUTH_FAILED AUTH failed":
                client.send(f"SUB t {name}\n".encode())
                outcome = client.read()[1] == b"OK"
        outcomes.append([pattern, name, outcome])
    assert outcomes == patterns


RULE = b'{"ttl":1,"authorizations":[{"topic":"%b","channels":["%b"],"permissions":["%b"]}]}'
ANSWERS = {
    b'{"ttl":60,"authorizations":[]}': b"E_UNAUTHORIZED AUTH no authorizations found",
    b'{"TTL":9,"Authorizations":[{"Topic":"t","Channels":[],"Permissions":["publish"]}]}': (
        b'{"identity":"","identity_url":"","permission_count":1}'
    ),
    RULE[:-1] % (b"", b"", b"publish") + b',"identity":"\xff"}': (
        '{"identity":"\N{REPLACEMENT CHARACTER}","identity_url":"","permission_count":1}'.encode()
    ),
    **dict.fromkeys(
        [
            *(b"", b"{}", b"[]", b'{"ttl":0,"authorizations":[]}', b"null", b" " * 2_000_000),
            *(b"[" * 200_000, b'{"ttl":1,"authorizations":' + b'{"a":' * 100_000),
            *(b'{"ttl":1' + b"0" * zeros + b',"authorizations":[]}' for zeros in (30, 400)),
            b"\xef\xbb\xbf" + RULE % (b"", b"", b"publish"),
            (RULE % (b"", b"", b"publish")).decode().encode("utf-16"),
            b'{"ttl":1,"authorizations":{"a":1},"identity":1}',
            b'{"ttl":1,"authorizations":[{"topic":"","channels":7,"permissions":[[]]}]}',
            b'{"ttl":1,"authorizations":[{"channels":"^c","permissions":["subscribe"]}]}',
            b'{"ttl":1.5,"authorizations":[]}',
            b'{"ttl":1,"authorizations":{}}',
            b'{"ttl":1,"authorizations":[],"identity":0}',
            *(RULE % (b"(", b"", b""), RULE % (b"", b"(", b""), RULE % (b"", b"", b"rule")),
        ],
        b"E_AUTH_FAILED AUTH failed",
    ),
}


def test_an_auth_answer_is_read_as_in_go(auth_nsqd: Nsqd, auth_server: AuthServer) -> None:
    for answer, expected in ANSWERS.items():
        auth_server.answer("secret", 200, answer)
        with RawClient(auth_nsqd.tcp_address) as client:
            assert auth(client) == expected, answer


def test_a_slow_auth_server_disconnects_no_client(
    any_nsqd: AnyNsqd, auth_server: AuthServer
) -> None:
    auth_server.allow("secret", after_s=3.5)
    times = ("-http-client-connect-timeout=0s", "-http-client-request-timeout=0s")  # unlimited
    nsqd = any_nsqd(f"-auth-http-address={auth_server.address}", *times)
    with RawClient(nsqd.tcp_address) as client:
        client.identify(heartbeat_interval=1000)
        client.send(b"AUTH\n" + sized(b"secret"))
        assert b"permission_count" in client.read_response()


def test_an_expired_auth_answer_is_requested_again(
    auth_nsqd: Nsqd, auth_server: AuthServer
) -> None:
    auth_server.allow("secret", ttl_s=1)
    with RawClient(auth_nsqd.tcp_address) as client:
        asked_s = time.monotonic()
        auth(client)

        def is_asked_again() -> bool:
            client.publish("t", b"x")
            return len(auth_server.questions) > 1

        wait_until(is_asked_again, what="the second question")
        assert time.monotonic() - asked_s >= 1
        assert len(auth_server.questions) == 2
        auth_server.answer("secret", 403, b"")

        def refusal() -> bytes | None:
            client.send(b"PUB t\n" + sized(b"x"))
            answer = client.read()[1]
            return None if answer == b"OK" else answer

        assert wait_until(refusal, what="a refusal") == b"E_AUTH_FAILED AUTH failed"


# -- the embedded nsqd alone: the cost of a pattern ----------------------------------------------


# The first four were measured with 0.3.0 on names that almost match.
SLOW_WITH_BACKTRACKING = [r"^(a+)+$", r"^(\w+\.?)+$", r"^([a-z]+)*\.prod$", "(x+x+)+y"]
SLOW_WITH_BACKTRACKING += ["^(([a-z])+.)+[A-Z]([a-z])+$", "(a*)*b", "(.*.*.*.*.*)*="]


@pytest.fixture(params=["re2", "plain"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "plain":
        monkeypatch.setitem(sys.modules, "re2", None)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("pattern", ["((a{99}){99}){9}", r"\pL{1000}", "(" * 9999 + ")" * 9999])
def test_an_oversized_pattern_is_refused_and_named(pattern: str) -> None:
    with pytest.raises(AuthFailed, match=r"^unable to compile channel '.+' - .+"):
        compile_pattern("channel", pattern)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("pattern", SLOW_WITH_BACKTRACKING)
def test_no_name_is_slow_to_match(pattern: str) -> None:
    matches = compile_pattern("topic", pattern)
    for letter in "ax":
        times_s = []
        for _ in range(5):
            started_s = time.thread_time()
            assert not matches(letter * 63 + "-")
            times_s.append(time.thread_time() - started_s)
        assert min(times_s) < 0.001


def test_without_re2_an_uncommon_pattern_is_refused_with_the_name_of_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, auth_server: AuthServer
) -> None:
    monkeypatch.setitem(sys.modules, "re2", None)
    nsqd = EmbeddedNsqd(auth_http_address=(auth_server.address,), data_path=str(tmp_path))
    with nsqd, RawClient(nsqd.tcp_address) as client:
        auth_server.allow("secret", topic=r"^(a+)+\.b$")
        assert auth(client).startswith(b"{")
        client.publish("aaa.b", b"x")
    with pytest.raises(AuthFailed, match=r"pip install 'nsqtools\[auth-regex\]'$"):
        compile_pattern("topic", "[[:alpha:]]+")
