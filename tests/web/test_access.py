"""Access to a running console: login, cross-site requests, guesses and proxies."""

import asyncio
import base64
import http.client
import re
import signal
import ssl
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock
from urllib.parse import urlencode, urljoin, urlsplit

import pytest
from plugins.certificates import Certificates
from plugins.cli import RunNsq, SpawnNsq
from plugins.console import Answer, MakeConsole, ask
from plugins.raw_client import RawClient
from plugins.waiting import patience_s, wait_until
from starlette.requests import Request

from nsqtools.authd.passwords import (
    FREE_FAILURES,
    FREE_FAILURES_OF_USER,
    LONGEST_WAIT_S,
    TooManyFailures,
    hash_password,
)
from nsqtools.web.access import (
    COOKIE,
    IDLE_S,
    ConsoleUser,
    Identities,
    PasswordFile,
    Sessions,
    WebSettings,
    basic_credentials,
    parse_networks,
)

NOBODY = "--nsqd-http-address=127.0.0.1:1"


@pytest.fixture
def users(tmp_path: Path) -> Callable[..., Path]:
    """``users(ann="one")`` writes the file of these users with their passwords."""

    def write(**passwords: str) -> Path:
        path = tmp_path / "users"
        lines = (f"{user}:{hash_password(word)}\n" for user, word in passwords.items())
        path.write_text("".join(lines))
        return path

    return write


def basic(user: str, password: str) -> dict[str, str]:
    pair = base64.b64encode(f"{user}:{password}".encode()).decode()
    return {"Authorization": f"Basic {pair}"}


def test_every_answer_has_security_headers(console: MakeConsole) -> None:
    running = console(NOBODY)

    answers = [running.get(path) for path in ("/", "/nothing", "/ping")]
    assert [answer.status for answer in answers] == [200, 404, 200]
    for answer in answers:
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-store"
    assert running.post("/ping", b"x" * (1 << 20) + b"x").status == 413


def test_foreign_hosts_and_cross_site_requests_are_refused(
    console: MakeConsole,
) -> None:
    options = ("--allowed-host", "Console.Example", "--base-path", "x/y/")
    running = console(NOBODY, "--allow-changes", *options)
    origin = running.url.removesuffix("/x/y")

    def status(method: str, **headers: str) -> int:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return ask(running.url + "/ping", method, headers=named).status

    assert status("GET", Host="evil.example") == 403
    assert status("GET", Host="console.example:4171") == 200
    assert status("GET", Host="evil.example", Sec_Fetch_Site="same-origin") == 403
    assert status("GET", Sec_Fetch_Site="cross-site") == 200
    assert status("POST", Sec_Fetch_Site="cross-site") == 403
    assert status("POST", Sec_Fetch_Site="same-origin") == 405  # /ping is only for GET
    assert status("POST", Origin=origin) == 405
    assert running.url.endswith("/x/y")
    assert running.get("/ping").text == "OK"
    assert ask(origin + "/ping").status == 404
    moved = ask(running.url)
    assert (moved.status, moved.headers["location"]) == (301, "/x/y/")
    assert running.get("/").status == 200


HOSTILE = {
    "GET /static/../app.py": 404,
    "GET /static/%2e%2e/%2e%2e/app.py": 404,
    "GET /static/..%2f..%2fapp.py": 404,
    "GET /static//etc/passwd": 404,
    "GET /static/%00": 404,
    "GET /topics/a%0d%0aSet-Cookie:x=1": 404,
    "GET /act?action=pause&topic=a%0d%0aSet-Cookie:x=1": 403,
    "GET http://evil.example/": 403,
    "GET /|Host: evil.example": 403,
    "GET /|Host: localhost@evil.example": 400,
    "GET /|Host: localhost|Host: evil.example": 400,
    "GET /|X-A:": 400,
    "POST /api/topics|Host: localhost|Content-Length: -1": 400,
    "POST /api/topics|Host: localhost|Content-Length: 3|Content-Length: 3": 400,
    "POST /api/topics|Host: localhost|Content-Length: 99999999999": 413,
    "POST /api/topics|Host: localhost|Content-Length: 5|Transfer-Encoding: chunked": 400,
    "PRI *": 400,
}


def test_hostile_requests_are_refused(console: MakeConsole) -> None:
    address = urlsplit(console(NOBODY).url).netloc
    for request, status in HOSTILE.items():
        line, *fields = request.split("|")
        head = "\r\n".join([f"{line} HTTP/1.1", *(fields or ["Host: localhost"]), "", ""])
        with RawClient(address, magic=b"") as client:
            client.send(head.encode())
            answer = client.socket.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 %d" % status), (request, answer)
        assert b"\r\nSet-Cookie" not in answer, request


def test_a_password_is_required_and_guesses_are_limited(
    console: MakeConsole, run_nsq: RunNsq, tmp_path: Path
) -> None:
    users = tmp_path / "users"
    line = run_nsq(["web", "--print", "password"], stdin=b"ann:s3cret: too\n")
    users.write_bytes(b"# users\n\n" + line.out)
    running = console(NOBODY, "--auth", str(users))

    anonymous = running.get("/")
    assert anonymous.status == 401
    assert anonymous.headers["www-authenticate"].startswith("Basic ")
    assert running.get("/ping").status == 200
    # the refusal of a method is plain text: a page would show parts of the cluster
    posted = running.post("/ping", b"")
    assert (posted.status, posted.text) == (405, "Method Not Allowed\n")
    assert running.get("/", headers=basic("ann", "s3cret: too")).status == 200
    assert running.get("/", headers={"Authorization": "Basic =="}).status == 401
    statuses = [401]  # requests of a busy machine may take longer than the first waits
    while statuses[-1] == 401 and len(statuses) < 20:
        statuses.append(running.get("/", headers=basic("ann", "wrong")).status)
    assert statuses[-1] == 429
    assert len(statuses) > FREE_FAILURES
    # guesses from the same address do not lock out a user with the right password
    assert running.get("/", headers=basic("ann", "s3cret: too")).status == 200


def test_a_line_of_a_user_is_utf8_in_every_locale(spawn_nsq: SpawnNsq) -> None:
    """As the file of --auth has to be."""
    process = spawn_nsq(["web", "--print", "password"], env={"PYTHONIOENCODING": "latin-1"})
    out, _ = process.communicate("josé:s3cret\n".encode("latin-1"))
    assert out.decode().startswith("josé:scrypt$")


def test_a_browser_logs_in_and_out_by_forms(
    console: MakeConsole, users: Callable[..., Path]
) -> None:
    running = console(NOBODY, "--auth", str(users(ann="s3cret", bob="x")), "--base-path", "/nsq")
    page = {"Accept": "text/html,*/*"}

    redirect = running.get("/?q=a%20b", headers=page)
    assert (redirect.status, redirect.headers["location"]) == (
        303,
        "/nsq/login?next=%2Fnsq%2F%3Fq%3Da%2520b",
    )
    form = ask(urljoin(running.url, redirect.headers["location"]))
    assert (form.status, 'value="/nsq/?q=a%20b"' in form.text) == (200, True)
    assert "www-authenticate" not in {**redirect.headers, **form.headers}
    assert running.get("/static/console.css").status == 200
    expired = running.post("/act?action=delete", "x=y", headers=page)
    assert (expired.status, expired.headers["location"]) == (303, "/nsq/login")

    def log_in(password: str, target: str = "/nsq/?q=a%20b") -> Answer:
        return running.post(
            "/login", urlencode({"user": "ann", "password": password, "next": target})
        )

    wrong = log_in("wrong")
    assert (wrong.status, "set-cookie" in wrong.headers) == (401, False)
    assert ('value="ann"' in wrong.text, "s3cret" in wrong.text) == (True, False)
    wait_until(lambda: "refused 'ann' at 127.0.0.1: POST /nsq/login" in running.log, what="log")
    for target in ("https://evil.example/", "//evil.example", "/\\evil.example", ""):
        assert log_in("s3cret", target).headers["location"] == "/nsq/"
    right = log_in("s3cret")
    assert (right.status, right.headers["location"]) == (303, "/nsq/?q=a%20b")
    cookie = right.headers["set-cookie"]
    assert {"HttpOnly", "Path=/nsq/", "SameSite=lax"} < set(cookie.split("; "))
    session = {"Cookie": cookie.partition(";")[0]}
    assert (shown := running.get("/", headers=session | page)).status == 200
    assert 'action="/nsq/logout"' in shown.text
    assert (
        running.post("/logout", headers=session | {"Origin": "http://evil.example"}).status == 403
    )

    assert running.get("/", headers=session).status == 200
    out = running.post("/logout", headers=session)
    assert (out.status, out.headers["location"]) == (303, "/nsq/login")
    assert running.get("/", headers=session).status == 401


def test_a_session_ends_when_unused_or_its_user_is_removed(users: Callable[..., Path]) -> None:
    clock = Mock(return_value=0.0)
    sessions = Sessions(clock)
    token = sessions.begin("Basic x")
    clock.return_value += IDLE_S
    assert (sessions.authorization(token), sessions.authorization("")) == ("Basic x", "")
    clock.return_value += IDLE_S + 1
    assert sessions.authorization(token) == ""

    identities = Identities(WebSettings(auth_file=users(ann="one", bob="two")))
    token = identities.sessions.begin(basic("ann", "one")["Authorization"])
    scope = {"type": "http", "headers": [(b"cookie", f"{COOKIE}={token}".encode())]}
    request = Request(scope | {"client": ("127.0.0.1", 1), "nsq.peer": "127.0.0.1"})
    assert asyncio.run(identities.authenticate(request)) == ConsoleUser("ann")
    users(bob="two")
    assert asyncio.run(identities.authenticate(request)) is None


class Guesser:
    """Check passwords against a file, with a clock that the test moves."""

    def __init__(self, path: Path) -> None:
        self.now_s = 0.0
        self.passwords = PasswordFile(path, lambda: self.now_s)

    def check(self, user: str, password: str, address: str) -> bool:
        return asyncio.run(self.passwords.is_right(user, password, address))

    def fail(self, count: int, user: str, address: str) -> None:
        for number in range(count):
            assert not self.check(user, "wrong", address.format(number))


@pytest.fixture
def guesser(users: Callable[..., Path]) -> Guesser:
    return Guesser(users(ann="right", bob="right"))


def test_a_byte_order_mark_before_the_first_user_is_ignored(users: Callable[..., Path]) -> None:
    path = users(ann="right")
    path.write_text(f"\ufeff{path.read_text()}")

    assert Guesser(path).check("ann", "right", "127.0.0.1")


@pytest.mark.parametrize("password", ["right", "wrong"])
def test_concurrent_guesses_are_counted_together(guesser: Guesser, password: str) -> None:
    async def gather() -> list[bool | BaseException]:
        checks = (
            guesser.passwords.is_right("ann", password, "10.0.0.1")
            for _ in range(FREE_FAILURES + 3)
        )
        return await asyncio.gather(*checks, return_exceptions=True)

    results = asyncio.run(gather())
    refused = [result for result in results if isinstance(result, TooManyFailures)]
    assert len(refused) == (0 if password == "right" else 3)


@pytest.mark.parametrize(
    ("address", "refused", "allowed"),
    [
        ("10.0.0.5", "10.0.0.5", "10.0.0.6"),
        ("2001:db8::{}", "2001:db8::ffff", "2001:db8:0:1::1"),  # a machine has a whole /64
    ],
)
def test_guesses_of_an_address_are_limited(
    guesser: Guesser, address: str, refused: str, allowed: str
) -> None:
    guesser.fail(FREE_FAILURES, "nobody", address)
    with pytest.raises(TooManyFailures):
        guesser.check("bob", "right", refused)
    assert guesser.check("bob", "right", allowed)
    guesser.now_s += LONGEST_WAIT_S
    assert not guesser.check("ann", "wrong", refused)


def test_guesses_of_a_user_are_limited_whatever_their_address(guesser: Guesser) -> None:
    assert guesser.check("ann", "right", "10.1.0.1")
    guesser.fail(FREE_FAILURES_OF_USER, "ann", "10.0.0.{}")
    with pytest.raises(TooManyFailures):
        guesser.check("ann", "guess", "10.1.0.2")
    assert guesser.check("ann", "right", "10.1.0.3")  # has logged in before
    assert guesser.check("bob", "right", "10.1.0.2")


def test_the_address_behind_a_proxy_is_that_of_the_client() -> None:
    headers = ["", "Bearer abc", "Basic YQ", "basic YTpiOmM="]
    assert [basic_credentials(header) for header in headers] == [None, None, None, ("a", "b:c")]
    settings = WebSettings(trusted_proxies=parse_networks(["10.0.0.0/8"]))
    real = Identities(settings).real_address

    assert real("10.0.0.1", "192.0.2.7") == "192.0.2.7"
    assert real("10.0.0.1", "203.0.113.1, 192.0.2.7, 10.0.0.2") == "192.0.2.7"
    assert real("10.0.0.1", "[2001:db8::1]:99") == "2001:db8::1"
    assert real("10.0.0.1", "2001:db8::1:2") == "2001:db8::1:2"
    assert real("10.0.0.1", "192.0.2.7:4711") == "192.0.2.7"
    assert real("10.0.0.1", "") == "10.0.0.1"
    assert real("10.0.0.1", "nonsense") == "10.0.0.1"
    assert real("192.0.2.1", "192.0.2.7") == "192.0.2.1"  # not from a trusted proxy


def test_refusals_are_logged_and_changes_of_the_users_file_apply(
    console: MakeConsole, users: Callable[..., Path]
) -> None:
    file = users(ann="one")
    options = ("--trusted-proxy", "127.0.0.1", "--refresh", "100ms")
    running = console(NOBODY, "--auth", str(file), *options)
    ann, bob = basic("ann", "one"), basic("bob", "two")

    running.get("/")  # a browser's first request, before the login
    running.get("/nodes", headers=basic("ann", "s3cret\n") | {"X-Forwarded-For": "192.0.2.7"})
    running.get("/ping", headers={"Host": "evil.example"})
    running.post("/api/topics", b"{}", headers=ann)
    running.get("/messages?topic=t", headers=ann)

    wait_until(lambda: "GET /messages" in running.log, what="the last line of log")
    assert re.findall(r"warning: (refused .*)", running.log) == [
        "refused 'ann' at 192.0.2.7: GET /nodes (wrong user or password)",
        "refused 127.0.0.1: GET /ping (the host 'evil.example' is not one of this console"
        " (--allowed-host))",
        "refused 'ann' at 127.0.0.1: POST /api/topics (not allowed)",
        "refused 'ann' at 127.0.0.1: GET /messages (not allowed)",
    ]
    assert "s3cret" not in running.log

    assert running.get("/", headers=ann).status == 200
    assert running.get("/", headers=bob).status == 401
    connection = http.client.HTTPConnection(urlsplit(running.url).netloc, timeout=patience_s(20))
    connection.request("GET", "/?live=1", headers=ann)
    stream = connection.getresponse()
    assert stream.read(1)

    users(bob="two")

    stream.read()  # the stream would not end without the removal of its user
    connection.close()
    assert running.get("/", headers=ann).status == 401
    assert running.get("/", headers=bob).status == 200
    file.write_text("broken\n")
    assert running.get("/", headers=bob).status == 200
    wait_until(lambda: "not USER:HASH; using the previous content" in running.log, what="a line")


def test_unsafe_settings_are_reported_at_the_start(
    console: MakeConsole, certificates: Certificates, users: Callable[..., Path], tmp_path: Path
) -> None:
    file, key = users(ann="one"), tmp_path / "key.pem"
    file.chmod(0o644)
    key.write_bytes(certificates.server.key.read_bytes())
    key.chmod(0o604)

    everywhere = (NOBODY, "--listen", "0.0.0.0:0")
    plain = console(*everywhere, "--auth", str(file))
    assert "passwords come to 0.0.0.0:0 in plain text" in plain.log
    assert f"others can read the secret in {file} (mode 0644)" in plain.log
    cert = f"--listen-tls-cert={certificates.server.cert}"
    safe = console(*everywhere, cert, f"--listen-tls-key={key}")
    assert "plain text" not in safe.log
    assert f"others can read the secret in {key} (mode 0604)" in safe.log


def test_a_replaced_certificate_is_served_and_hup_ends_nothing(
    console: MakeConsole, certificates: Certificates, tmp_path: Path
) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    for file, source in ((cert, certificates.server.cert), (key, certificates.server.key)):
        file.write_bytes(source.read_bytes())
        file.chmod(0o600)
    running = console(NOBODY, "--listen-tls-cert", str(cert), "--listen-tls-key", str(key))
    at = urlsplit(running.url)

    def served() -> str:
        address = at.hostname or "", at.port or 0
        return ssl.get_server_certificate(address, timeout=patience_s(20))

    trusted = ssl.create_default_context(cafile=certificates.ca)
    assert running.get("/ping", tls=trusted).text == "OK"
    first_certificate = served()
    cert.write_bytes(certificates.client.cert.read_bytes())  # without its key, it is ignored
    wait_until(lambda: "using the previous content" in running.log, what="it says so")
    assert served() == first_certificate
    key.write_bytes(certificates.client.key.read_bytes())
    running.process.send_signal(signal.SIGHUP)

    wait_until(lambda: served() != first_certificate, what="the new certificate")
    assert running.process.poll() is None
