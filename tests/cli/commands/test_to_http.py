"""``nsq to-http`` to real HTTP servers: the requests, and the outcome of each response."""

import base64
import hashlib
import hmac
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from plugins.archives import unfinished
from plugins.certificates import Certificates
from plugins.cli import Result, RunNsq, SpawnNsq
from plugins.http_server import MakeServer, Request, Serves
from plugins.ports import ReservedPort
from plugins.servers import AnyNsqd, Nsqd
from plugins.waiting import patience_s, wait_until

TOPIC, CHANNEL = "clicks", "hook"
BODIES = [b"one", b'{"user": "a/b"}', b"\xff\x00"]
ALL = ("-n", "3")
A_MOMENT = ("--for", f"{patience_s(0.4):g}s")  # time for at least one attempt
LETTERS = ("--dead-letter-topic", "dead")

Forward = Callable[..., Result]


@pytest.fixture
def source(embedded_nsqd: AnyNsqd) -> Nsqd:
    nsqd = embedded_nsqd()
    nsqd.create_channel(TOPIC, CHANNEL)
    nsqd.publish(TOPIC, *BODIES)
    return nsqd


def args(nsqd: Nsqd, *more: str) -> list[str]:
    return ["to-http", "-t", TOPIC, "-c", CHANNEL, *nsqd.options, *more]


@pytest.fixture(params=["libcurl", "httpcore"])
def engine(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
    nsq_env: dict[str, str],
) -> str:
    """Hide pycurl for httpcore, also from child processes."""
    engine: str = request.param
    if engine == "httpcore":
        hidden = tmp_path_factory.mktemp("without")
        (hidden / "pycurl.py").write_text("raise ImportError('hidden')")
        nsq_env["PYTHONPATH"] = os.pathsep.join([str(hidden), nsq_env["PYTHONPATH"]])
        monkeypatch.setitem(sys.modules, "nsqtools.forward.curl_pool", None)
    return engine


with_both_engines = pytest.mark.usefixtures("engine")


@pytest.fixture
def forward(run_nsq: RunNsq, source: Nsqd) -> Forward:
    """Run the command to its end."""
    return lambda *more, **options: run_nsq(args(source, *more), **options)


def test_messages_are_posted_over_few_connections_and_no_proxy(
    forward: Forward, source: Nsqd, http_server: MakeServer, engine: str
) -> None:
    server, proxy = http_server(), http_server()
    env = dict.fromkeys(("http_proxy", "all_proxy", "ALL_PROXY"), proxy.url)
    bodies = [*BODIES, *(b"%d" % n for n in range(200))]
    source.publish(TOPIC, *bodies[3:])
    url = f"{server.url}?of={{topic}}/x"  # a query without a path
    result = forward("-n", "203", "-v", "--concurrency", "4", "--post", url, env=env)

    assert (result.status, result.err.splitlines()[-1]) == (0, "nsq: 203 delivered")
    assert f"sending with {engine} " in result.err
    assert ("pip install 'nsqtools[http]'" in result.err) is (engine == "httpcore")
    assert server.bodies == sorted(bodies)
    assert server.connections <= 8
    assert proxy.requests == []
    assert unfinished(source, TOPIC, CHANNEL) == 0
    for request in server.requests:
        assert (request.method, request.target) == ("POST", "/?of=clicks/x")
        headers = request.headers
        assert headers["Content-Type"] == "application/octet-stream"
        assert headers["X-Nsq-Topic"] == TOPIC
        assert headers["X-Nsq-Attempts"] == "1"
        identity = f"{TOPIC}/{source.tcp_address}/{headers['X-Nsq-Message-Id']}"
        assert headers["Idempotency-Key"] == identity
        assert int(headers["X-Nsq-Timestamp"]) > 1.6e18


@with_both_engines
def test_get_puts_the_body_in_the_url(forward: Forward, http_server: MakeServer) -> None:
    server = http_server()
    url = f"{server.url}/x%20y/{{topic}}?m={{body:url}}&u={{.user:url}}"
    result = forward("-n", "3", "--get", url)

    assert result.status == 0, result.err
    assert sorted(request.target for request in server.requests) == [
        "/x%20y/clicks?m=%7B%22user%22%3A%20%22a%2Fb%22%7D&u=a%2Fb",
        "/x%20y/clicks?m=%FF%00&u=",
        "/x%20y/clicks?m=one&u=",
    ]
    assert {request.method for request in server.requests} == {"GET"}


@pytest.mark.parametrize("how", [["--post"], ["--get"], ["--batch", "5", "--post"]])
def test_a_body_changes_neither_the_path_nor_the_parameters(
    forward: Forward, source: Nsqd, http_server: MakeServer, how: list[str]
) -> None:
    """A field of only dots is refused as a path segment."""
    server = http_server()
    source.post("/channel/empty", topic=TOPIC, channel=CHANNEL)
    values = ["../../etc", "a b?x=1#f&y=%2e", "..", "."]
    source.publish(TOPIC, *(json.dumps({"p": value}).encode() for value in values))

    url = f"{server.url}/in/{{.p}}/q?r={{.p}}"
    result = forward("-n", "4", *LETTERS, *how, url)

    assert (
        "no URL can be made of its body (a field of it is a step in the path: /in/.." in result.err
    )
    assert "2 delivered, 2 dead letters" in result.err
    assert sorted(request.target for request in server.requests) == [
        "/in/..%2F..%2Fetc/q?r=..%2F..%2Fetc",
        "/in/a%20b%3Fx%3D1%23f%26y%3D%252e/q?r=a%20b%3Fx%3D1%23f%26y%3D%252e",
    ]


VERBS = ["?q=%s", "/%d/{topic}", "?a=%20&q=%-10v", "?q={body:url}&r=%x"]


@pytest.mark.parametrize("path", ["", "?q=1", "/{{body}}", "?q=%20", "#{body}", *VERBS])
def test_a_get_without_a_message_field_is_refused_with_an_example(
    forward: Forward, source: Nsqd, http_server: MakeServer, path: str
) -> None:
    server = http_server()
    result = forward(*A_MOMENT, "--get", server.url + path)

    assert result.status == 2
    reason = "which is not replaced" if path in VERBS else "has no field of the message"
    assert reason in result.err
    assert "{body:url}" in result.err.partition("hint: ")[2]
    assert (server.requests, unfinished(source, TOPIC, CHANNEL)) == ([], 3)


def test_a_get_whose_fields_cannot_be_read_is_not_sent(
    forward: Forward, source: Nsqd, http_server: MakeServer
) -> None:
    server = http_server()
    result = forward(*ALL, *LETTERS, "--get", f"{server.url}?user={{.user}}")

    assert "1 delivered, 2 dead letters" in result.err
    assert [request.target for request in server.requests] == ["/?user=a%2Fb"]
    header = ("--header", "X-Body: {body:base64}")  # a header may carry the body instead
    source.publish(TOPIC, b"one")
    assert forward("-n", "1", *header, "--get", server.url).status == 0


@with_both_engines
def test_headers_secrets_and_signature(
    forward: Forward, source: Nsqd, http_server: MakeServer, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("whsec_" + base64.b64encode(b"secret").decode() + "\n")
    (tmp_path / "auth").write_text("user:pass word\n")
    server = http_server()
    source.publish(TOPIC, b'{"user": "x\\r\\nEvil: 1"}')
    secrets = [f"--sign-key-file={tmp_path / 'key'}", f"--basic-auth-file={tmp_path / 'auth'}"]
    headers = ["--header", "X-User: {.user}", "--header", "x-all:{topic} {attempts}"]
    options = [*secrets, *headers, "--content-type", "text/plain"]
    result = forward("-n", "4", "--post", server.url, *options)

    assert result.status == 0, result.err
    for request in server.requests:
        headers = {name.lower(): value for name, value in request.headers.items()}
        assert headers["content-type"] == "text/plain"
        assert headers["authorization"] == "Basic " + base64.b64encode(b"user:pass word").decode()
        assert headers["x-all"] == "clicks 1"
        assert "evil" not in headers
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + request.body
        digest = hmac.new(b"secret", signed, hashlib.sha256).digest()
        assert headers["webhook-signature"] == "v1," + base64.b64encode(digest).decode()
    users = {request.headers.get("X-User") for request in server.requests}
    assert users == {None, "a/b", "x Evil: 1"}


@with_both_engines
@pytest.mark.parametrize("trouble", ["an error", "slow", "refused", "broken"])
def test_another_endpoint_is_tried_before_a_requeue(
    forward: Forward, source: Nsqd, http_server: MakeServer, trouble: str
) -> None:
    bad, good = http_server(), http_server()
    mode = "failover" if trouble in ("refused", "broken") else "round-robin"
    release = threading.Event()
    answers = {"broken": lambda _: 0, "slow": lambda _: 200 + release.wait(patience_s(20))}
    bad.answer = answers.get(trouble, lambda _: 500)
    first = "http://127.0.0.1:1/" if trouble == "refused" else bad.url
    within = f"{patience_s(0.5):g}s"  # enough for the other endpoint on a busy machine
    urls = ["--mode", mode, "--post", first, "--post", good.url]
    result = forward(*ALL, *urls, "--http-client-request-timeout", within)
    release.set()

    assert result.status == 0, result.err
    assert "nsq: 3 delivered" in result.err
    assert good.bodies == sorted(BODIES)
    assert source.channel_stats(TOPIC, CHANNEL)["requeue_count"] == 0
    assert ("perhaps doubled" in result.err) is (trouble in ("broken", "slow"))
    if trouble == "broken":
        assert "3 sent again and perhaps doubled" in result.err


@with_both_engines
def test_retry_after_is_obeyed(forward: Forward, http_server: MakeServer) -> None:
    strange = {"Retry-After": f"Thu, 01 Jan 2020 00:00:00 +{10**20}"}
    server = http_server((429, strange), *[(429, {"Retry-After": "1"})] * 2)
    began = time.monotonic()
    result = forward("-n", "6", "--post", server.url)

    assert time.monotonic() - began > 1
    assert "3 delivered, 3 requeued" in result.err
    assert server.bodies == sorted(BODIES * 2)
    assert len({request.headers["Idempotency-Key"] for request in server.requests}) == 3
    assert {request.headers["X-Nsq-Attempts"] for request in server.requests[3:]} == {"2"}


@with_both_engines
def test_an_outage_requeues_no_message(spawn_nsq: SpawnNsq, embedded_nsqd: AnyNsqd) -> None:
    def accept_once() -> None:
        with listener:
            listener.accept()[0].close()

    port = ReservedPort()
    listener = socket.create_server(("127.0.0.1", port.number))
    dead_address = f"127.0.0.1:{port.number}"
    check_at_start = threading.Thread(target=accept_once, daemon=True)
    check_at_start.start()
    source = embedded_nsqd()
    source.create_channel(TOPIC, CHANNEL)
    process = spawn_nsq(args(source, "-n", "3", "--post", f"http://{dead_address}"))
    # A request before the listener is closed would be reset, which is a failed attempt.
    check_at_start.join(patience_s(15))
    source.publish(TOPIC, *BODIES)
    refused = f"cannot connect to {dead_address} (Connection refused)"
    assert refused.encode() in process.stderr.readline()
    assert source.channel_stats(TOPIC, CHANNEL)["requeue_count"] == 0
    process.end(signal.SIGTERM)

    assert process.returncode == 143
    wait_until(lambda: source.depth(TOPIC, CHANNEL) == 3, what="all are given back")


@with_both_engines
def test_a_stop_requeues_unanswered_messages(
    spawn_nsq: SpawnNsq, source: Nsqd, http_server: MakeServer
) -> None:
    """A stop is not a failed attempt: there are no dead letters."""
    server, over = http_server(), threading.Event()
    server.answer = lambda _: 200 + over.wait(patience_s(20))
    options = ["-X", "drain_timeout=200ms", "--max-in-flight", "1", "--max-attempts", "1", *LETTERS]
    process = spawn_nsq(args(source, "--post", server.url, *options))
    wait_until(lambda: server.requests, what="a request", timeout_s=15)
    _, stderr = process.end(signal.SIGTERM, 20)
    over.set()

    assert (process.returncode, b"dead letter" in stderr) == (143, False)
    assert stderr.endswith(b"nsq: 0 delivered, 1 requeued\n")
    wait_until(lambda: source.depth(TOPIC, CHANNEL) == 3, what="all are given back")


def test_mode_all_delivers_to_each_endpoint_independently(
    forward: Forward, source: Nsqd, http_server: MakeServer
) -> None:
    """One endpoint rejects the message "one" of a batch, and one is late for a moment."""
    picky, good = http_server(), http_server()
    late = http_server((503, {"Retry-After": "0"}))
    picky.answer = lambda request: 400 if b"one" in request.body else 200
    urls = [word for server in (late, picky, good) for word in ("--post", server.url)]
    batch = ["--mode", "all", "--batch", "3", "--linger", "100ms", "--on-status"]
    quickly = ["--exit-idle", f"{patience_s(0.3):g}s"]  # nsqd needs that on a busy machine
    result = forward(*quickly, *batch, "4xx=drop", *urls)

    assert "nsq: 2 delivered, 1 dropped" in result.err
    del late.requests[0]  # the request that it refused
    for server in (late, good):
        assert sorted(b"".join(server.bodies).splitlines()) == sorted(BODIES)
        server.requests.clear()

    source.publish(TOPIC, *BODIES)
    result = forward("-n", "3", *batch, "4xx=dead-letter", *LETTERS, *urls)
    assert "nsq: 2 delivered, 1 dead letter" in result.err
    for server in (late, good):
        assert sorted(b"".join(server.bodies).splitlines()) == sorted(BODIES)


@pytest.mark.parametrize("batch", ["1", "10"])
def test_a_key_always_goes_to_the_same_endpoint(
    forward: Forward, source: Nsqd, http_server: MakeServer, batch: str
) -> None:
    servers = [http_server(), http_server()]
    source.post("/channel/empty", topic=TOPIC, channel=CHANNEL)
    source.publish(TOPIC, *(b'{"user": %d, "n": %d}' % (n % 7, n) for n in range(42)))
    urls = [word for server in servers for word in ("--post", server.url)]
    key = ["--mode", "hash", "--key", "{.user}", "--batch", batch]
    result = forward("-n", "42", *key, *urls)

    assert result.status == 0, result.err
    lines = [b"\n".join(server.bodies).split(b"\n") for server in servers]
    users = [{json.loads(line)["user"] for line in records if line} for records in lines]
    assert all(users)
    assert users[0].isdisjoint(users[1])
    assert users[0] | users[1] == set(range(7))


def test_batches_are_sent_as_lines_or_as_an_array(
    forward: Forward, source: Nsqd, http_server: MakeServer
) -> None:
    server = http_server()
    source.post("/channel/empty", topic=TOPIC, channel=CHANNEL)
    for form in ("ndjson", "json"):
        source.publish(TOPIC, *(b'{"n":\n%d}' % n for n in range(20)))
        batch = ["--batch", "8", "--batch-format", form, "--linger", "50ms"]
        result = forward("-n", "20", *batch, "--post", f"{server.url}/{form}")
        assert result.status == 0, result.err

    lines = [request for request in server.requests if request.target == "/ndjson"]
    arrays = [request for request in server.requests if request.target == "/json"]
    assert len(lines) < 20
    assert max(request.body.count(b"\n") for request in lines) <= 8
    assert {request.headers["Content-Type"] for request in lines} == {"application/x-ndjson"}
    for received in (
        [json.loads(line) for request in lines for line in request.body.splitlines()],
        [record for request in arrays for record in json.loads(request.body)],
    ):
        assert sorted(record["n"] for record in received) == list(range(20))


def test_messages_of_a_batch_have_the_same_url_and_headers(
    forward: Forward, source: Nsqd, http_server: MakeServer
) -> None:
    server = http_server()
    source.create_channel("views", CHANNEL)
    source.publish("views", b"view", b'{"user": "a/b"}')
    url, user = f"{server.url}/{{topic}}", "X-User: {.user}"
    batch = ["--batch", "10", "--linger", "1h", "--header", user]
    result = forward("-n", "5", "-t", "views", *batch, "--post", url)

    assert result.status == 0, result.err
    sent = {
        (request.target, request.headers.get("X-User"), line)
        for request in server.requests
        for line in request.body.splitlines()
    }
    assert sent == {
        ("/clicks", None, b"one"),
        ("/clicks", None, b"\xff\x00"),
        ("/clicks", "a/b", b'{"user": "a/b"}'),
        ("/views", None, b"view"),
        ("/views", "a/b", b'{"user": "a/b"}'),
    }


@with_both_engines
def test_an_unresponsive_address_leaves_time_for_the_next(
    forward: Forward, http_server: MakeServer
) -> None:
    server = http_server()
    port = server.server_port
    with ExitStack() as stack:
        hung = stack.enter_context(socket.socket(socket.AF_INET6))
        try:
            hung.bind(("::1", port))
        except OSError:
            pytest.skip("no IPv6 here, or somebody has the port")
        hung.listen(0)
        for _ in range(3):  # fill its queue, so that further connects wait
            client = stack.enter_context(socket.socket(socket.AF_INET6))
            client.setblocking(False)
            client.connect_ex(("::1", port))
        result = forward(*ALL, "--post", f"http://localhost:{port}/")

    assert (result.status, result.err) == (0, "nsq: 3 delivered\n")


@with_both_engines
def test_a_body_without_an_end_does_not_change_the_outcome(
    forward: Forward, serves: Serves
) -> None:
    """The same holds for a body that is too long, with a Content-Length or chunked."""
    heads = [
        b"Content-Length: 99999999\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n" + b"80000\r\n" + b"x" * 0x80000 + b"\r\n",
        b"\r\n",
    ]
    over = threading.Event()

    def answer(client: socket.socket) -> None:
        if client.recv(1 << 16):  # a request, not just a probe of the connection
            client.sendall(b"HTTP/1.1 200 OK\r\n" + heads.pop())
            over.wait(patience_s(20))

    within = ["--http-client-request-timeout", f"{patience_s(0.4):g}s"]
    result = forward(*ALL, "--concurrency", "1", *within, "--post", f"http://{serves(answer)}")
    over.set()

    assert (result.status, result.err, heads) == (0, "nsq: 3 delivered\n", [])


@with_both_engines
def test_a_head_that_is_too_long_is_an_error_with_a_reason(
    forward: Forward, serves: Serves
) -> None:
    def answer(client: socket.socket) -> None:
        if client.recv(1 << 16):
            with suppress(OSError):  # it is closed meanwhile
                client.sendall(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200_000 + b"\r\n\r\n")

    result = forward(*A_MOMENT, "--post", f"http://{serves(answer)}")
    assert re.search(r"is requeued: \S+: \w+", result.err), result.err


@with_both_engines
def test_certificates_are_verified(
    forward: Forward, http_server: MakeServer, certificates: Certificates
) -> None:
    server = http_server(credentials=certificates.server)
    post = ["--post", server.url]
    result = forward(*A_MOMENT, *post)
    assert "0 delivered" in result.err
    assert "cannot connect to" in result.err
    assert "certificate" in result.err

    result = forward("-n", "3", *post, "--http-ca-file", str(certificates.ca))
    assert (result.status, server.bodies) == (0, sorted(BODIES)), result.err


@pytest.mark.parametrize("option", ["--batch-format=json", "--batch-bytes=1MiB", "--linger=0s"])
def test_options_of_batches_need_batches(forward: Forward, option: str) -> None:
    result = forward("--post", "http://127.0.0.1:1", option)
    assert result.status == 2
    assert "is for --batch" in result.err


@pytest.mark.parametrize("option", ["--http-ca-file=ca.pem", "--http-insecure"])
def test_options_of_tls_are_refused_for_plain_http(forward: Forward, option: str) -> None:
    result = forward("--post", "http://127.0.0.1:1", option)
    assert result.status == 2
    assert "are for https URLs" in result.err


@with_both_engines
def test_redirects_are_followed_only_where_that_is_allowed(
    forward: Forward, source: Nsqd, http_server: MakeServer
) -> None:
    server = http_server()

    def lead(request: Request) -> tuple[int, dict[str, str]] | int:
        return (307, {"Location": "/there"}) if request.target == "/" else 200

    server.answer = lead
    options = [*ALL, *LETTERS, "--post", server.url]
    assert "0 delivered, 3 dead letters" in forward(*options).err
    assert {request.target for request in server.requests} == {"/"}

    source.publish(TOPIC, *BODIES)
    assert "3 delivered" in forward(*options, "--redirects", "same-host").err
    assert "/there" in {request.target for request in server.requests}

    # The host cannot exist, and the braces of a Location are not a template.
    server.answer = lambda request: (307, {"Location": "http://a..b/"})
    source.publish(TOPIC, *BODIES)
    begin = time.monotonic()
    result = forward("--for", "0.5s", *options, "--redirects", "follow")
    assert "cannot connect to a..b:80 (" in result.err
    assert result.status == 7  # --for ended it, although -n was reached
    assert time.monotonic() - begin < patience_s(10)  # well before the request times out
    server.answer = lambda request: (302, {"Location": "/{id}"})  # would change the method
    moved = ("--redirects", "same-host", "--on-status", "302=drop")
    assert "3 dropped" in forward(*options, *moved).err
    source.publish(TOPIC, *BODIES)
    server.answer = lambda request: (307, {"Location": "/{id}"}) if request.target == "/" else 200
    forward(*options, "--redirects", "same-host")
    assert "/%7Bid%7D" in {request.target for request in server.requests}

    source.publish(TOPIC, *BODIES)
    aside = (307, {"Location": "there"})
    server.answer = lambda request: aside if request.target.endswith("/in") else 200
    long = ("--http-client-request-timeout", "2000000h")
    forward(*ALL, *long, "--redirects", "same-host", "--post", f"{server.url}/{{topic}}/in")
    assert "/clicks/there" in {request.target for request in server.requests}


@with_both_engines
def test_a_redirect_never_leads_into_a_private_network(
    forward: Forward, spawn_nsq: SpawnNsq, source: Nsqd, http_server: MakeServer
) -> None:
    inside, outside = http_server(), http_server()
    outside.answer = lambda request: (307, {"Location": f"{inside.url}/admin"})
    result = forward(*ALL, "--redirects", "follow", "--post", outside.url)

    assert "a private address, which is not allowed" in result.err
    assert "holding messages" not in result.err  # redirects of other messages may lead elsewhere
    assert inside.requests == []

    source.publish(TOPIC, b"one")  # the others are redelivered in a second
    process = spawn_nsq(args(source, "--no-private-addresses", "--post", inside.url))
    assert process.stderr is not None
    assert b"a private address, which is not allowed" in process.stderr.readline()
    assert inside.requests == []
