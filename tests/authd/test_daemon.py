"""The running auth server: requests of nsqd, the filter for users, and hostile requests."""

import asyncio
import base64
import http.client
import json
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from plugins.certificates import Certificates
from plugins.cli import RunNsq, SpawnNsq
from plugins.console import Answer, ask
from plugins.daemons import GoNsqlookupd
from plugins.http_server import MakeScripted, Serves
from plugins.servers import AnyNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools.authd import filter_api
from nsqtools.authd.auth_api import AnswerSettings
from nsqtools.authd.daemon import AuthDaemon, AuthdSettings
from nsqtools.authd.filter_api import Upstream
from nsqtools.authd.passwords import hash_password
from nsqtools.authd.users import hash_token
from nsqtools.cluster.directory import Cluster, ClusterAddresses
from nsqtools.http.http_api import HTTPAccess
from nsqtools.http.listen import listen

USERS = f"""\
[users.ann]
tokens = ["{hash_token("ann's")}"]
publish = ['orders\\..*']
subscribe = {{ 'orders\\..*' = ['billing'] }}

[users.bob]
tokens = ["{hash_token("bob's")}"]
password = "{hash_password("chosen")}"
subscribe = {{ 'orders\\.eu' = ['audit'] }}
"""
TTL_S = 2


class Authd:
    """A running daemon. ``users`` is its users file."""

    def __init__(self, daemon: AuthDaemon, users: Path, audit_log: Path) -> None:
        self.daemon = daemon
        self.users = users
        self.audit_log = audit_log
        self.address = daemon.url.partition("//")[2]
        self.filter_address = daemon.filter_url.partition("//")[2]

    def auth(self, query: str, **more: Any) -> Answer:
        return ask(f"{self.daemon.url}/auth?{query}", **more)

    def look(self, path: str, token: str) -> Any:
        headers = {"Authorization": f"Bearer {token}"}
        return ask(self.daemon.filter_url + path, headers=headers).json()


StartAuthd = Callable[..., Authd]


@pytest.fixture
def start_authd(tmp_path: Path) -> Iterator[StartAuthd]:
    """Run a daemon in a thread: ``start_authd(lookupd_address)``."""
    with ExitStack() as stack:

        def start(*lookupds: str, text: str = USERS, **settings: Any) -> Authd:
            users, audit_log = tmp_path / "users.toml", tmp_path / "audit.jsonl"
            users.write_text(text)
            users.chmod(0o600)
            answer = AnswerSettings(TTL_S, "http://people/{user}")
            access = HTTPAccess(timeout_s=0.5)
            addresses = ClusterAddresses(lookupd_http=lookupds)
            daemon = AuthDaemon(
                AuthdSettings(users=users, answer=answer, audit_log=audit_log, **settings),
                stack.enter_context(listen("127.0.0.1:0")),
                stack.enter_context(listen("127.0.0.1:0")),
                stack.enter_context(closing(Cluster(addresses, access))),
            )
            ready = threading.Event()
            thread = threading.Thread(target=daemon.run, args=(ready.set,))
            thread.start()
            stack.callback(thread.join)
            stack.callback(daemon.stop)
            assert ready.wait(patience_s(10))
            return Authd(daemon, users, audit_log)

        yield start


def test_nsqd_allows_a_client_what_its_secret_permits(
    start_authd: StartAuthd, any_nsqd: AnyNsqd, run_nsq: RunNsq, tmp_path: Path
) -> None:
    authd = start_authd()
    nsqd = any_nsqd(f"-auth-http-address={authd.address}")
    nsqd.create_channel("orders.eu", "audit")
    for name in ("ann", "bob", "eve"):
        (tmp_path / name).write_text(f"{name}'s")
        (tmp_path / name).chmod(0o600)

    def publish(topic: str, name: str) -> int:
        secret = f"--auth-secret-file={tmp_path / name}"
        return run_nsq(
            ["pub", "-t", topic, "-q", f"--nsqd-tcp-address={nsqd.tcp_address}", secret, "x"]
        ).status

    def consume(channel: str, name: str) -> tuple[int, bytes]:
        secret = f"--auth-secret-file={tmp_path / name}"
        done = run_nsq(["tail", "-t", "orders.eu", "-c", channel, "-n1", *nsqd.options, secret])
        return done.status, done.out

    assert publish("orders.eu", "ann") == 0
    assert publish("salaries", "ann") == 5
    assert publish("orders.eu", "bob") == 5
    assert publish("orders.eu", "eve") == 5
    assert consume("audit", "bob") == (0, b"x\n")
    assert consume("audit", "ann") == (5, b"")

    authd.users.write_text(USERS.replace("publish", "# publish"))
    wait_until(lambda: publish("orders.eu", "ann") == 5, what="the change acts", timeout_s=20)
    assert "eve%27s" not in nsqd.log


def test_an_answer_to_nsqd_has_all_of_its_fields(start_authd: StartAuthd) -> None:
    authd = start_authd()
    form = "secret=bob%27s&tls=true&remote_ip=10.0.0.1&common_name="

    answers = [
        authd.auth(form),
        authd.auth("", method="POST", body=form),
        authd.auth("auth_secret=bob%27s"),
        authd.auth("secret=bob:chosen"),
    ]

    assert [answer.status for answer in answers] == [200] * 4
    for answer in answers:
        assert answer.json() == {
            "ttl": TTL_S,
            "identity": "bob",
            "identity_url": "http://people/bob",
            "authorizations": [
                {
                    "topic": "^(?:orders\\.eu)$",
                    "channels": ["^(?:audit)$"],
                    "permissions": ["subscribe"],
                }
            ],
        }
    assert authd.auth("secret=eve%27s").status == 401
    assert authd.auth("").status == 401


def test_the_url_of_a_page_has_the_name_of_its_user_encoded(start_authd: StartAuthd) -> None:
    authd = start_authd()
    authd.users.write_text(USERS.replace("[users.bob]", '[users."team/b&b"]'))
    wait_until(lambda: "b&b" in authd.auth("secret=bob%27s").json()["identity"], what="a reload")
    assert authd.auth("secret=bob%27s").json()["identity_url"] == "http://people/team%2Fb%26b"


def test_users_see_only_their_part_of_the_cluster(
    start_authd: StartAuthd,
    lookupd: GoNsqlookupd,
    any_nsqd: AnyNsqd,
    run_nsq: RunNsq,
    tmp_path: Path,
) -> None:
    authd = start_authd(lookupd.http_address)
    nsqd = any_nsqd(
        f"-lookupd-tcp-address={lookupd.tcp_address}", f"-auth-http-address={authd.address}"
    )
    for topic in ("orders.eu", "salaries"):
        for channel in ("audit", "billing"):
            nsqd.create_channel(topic, channel)
    nsqd.publish("orders.eu", b"1", b"2")
    nsqd.publish("salaries", b"1")
    wait_until(
        lambda: len(lookupd.json("/channels", topic="salaries")["channels"]) == 2,
        what="the channels at nsqlookupd",
    )
    wait_until(lambda: lookupd.producers("orders.eu"), what="it is registered")

    assert authd.look("/topics", "bob's") == {"topics": ["orders.eu"]}
    assert authd.look("/channels?topic=orders.eu", "bob's") == {"channels": ["audit"]}
    assert authd.look("/channels?topic=orders.eu", "ann's") == {"channels": ["audit", "billing"]}
    assert authd.look("/channels?topic=salaries", "bob's") == {"message": "TOPIC_NOT_FOUND"}
    lookup = authd.look("/lookup?topic=orders.eu", "bob's")
    assert lookup["channels"] == ["audit"]
    assert [node["tcp_port"] for node in lookup["producers"]] == [
        int(nsqd.tcp_address.rpartition(":")[2])
    ]
    assert [node["topics"] for node in authd.look("/nodes", "bob's")["producers"]] == [
        ["orders.eu"]
    ]

    def depths() -> Any:
        stats = authd.look("/stats?format=json&include_clients=false", "bob's")
        return {
            (topic["topic_name"], channel["channel_name"]): channel["depth"]
            for topic in stats["topics"]
            for channel in topic["channels"]
        }

    wait_until(lambda: depths() == {("orders.eu", "audit"): 2}, what="the depth")
    basic = base64.b64encode(b"bob:bob's").decode()
    page = ask(f"{authd.daemon.filter_url}/metrics", headers={"Authorization": f"Basic {basic}"})
    assert 'nsq_channel_depth{topic="orders.eu",channel="audit"} 2' in page.text
    assert "salaries" not in page.text
    assert "billing" not in page.text

    (tmp_path / "bob").write_text("bob's")
    through = [f"--lookupd-http-address={authd.filter_address}", "--lookupd-authorization"]
    through += [f"--auth-secret-file={tmp_path / 'bob'}"]
    listed = run_nsq(["topic", "list", *through, "--columns", "topic"])
    assert (listed.status, listed.out) == (0, b"topic\norders.eu\n")
    done = run_nsq(["tail", "-t", "orders.eu", "-c", "audit", "-n2", *through])
    assert (done.status, sorted(done.out.split())) == (0, [b"1", b"2"])
    assert run_nsq(["topic", "list", through[0]]).status == 5


def test_the_audit_log_and_the_metrics_have_no_secret(start_authd: StartAuthd) -> None:
    authd = start_authd()
    authd.auth("secret=bob:chosen&remote_ip=10.0.0.7&common_name=c&tls=true")
    authd.auth("secret=hunter2&remote_ip=10.0.0.8")
    authd.auth("secret=hunter2:guess")
    authd.look("/topics", "hunter2")

    lines = [json.loads(line) for line in authd.audit_log.read_text().splitlines()]
    short = [(line["request"], line["result"], line["user"], line["method"]) for line in lines]
    assert short == [
        ("auth", "allowed", "bob", "password"),
        ("auth", "refused", None, None),
        ("auth", "refused", None, None),
        ("topics", "refused", None, None),
    ]
    assert (lines[0]["remote"], lines[0]["common_name"], lines[0]["tls"]) == ("10.0.0.7", "c", True)
    metrics = ask(f"{authd.daemon.url}/metrics").text
    assert 'nsq_authd_requests_total{request="auth",result="refused"} 2' in metrics
    assert "nsq_authd_users 2" in metrics
    for text in (metrics, authd.audit_log.read_text()):
        assert "hunter2" not in text
        assert "chosen" not in text


def test_a_broken_file_is_reported_by_health_and_the_old_users_stay(
    start_authd: StartAuthd,
) -> None:
    authd = start_authd()
    health = f"{authd.daemon.url}/health"
    assert ask(health).status == 200

    authd.users.write_text(USERS + "[users.eve]\n")

    wait_until(lambda: ask(health).status == 503, what="it is refused", timeout_s=20)
    assert "line 10: user eve needs" in ask(health).text
    assert "nsq_authd_users_file_current 0" in ask(f"{authd.daemon.url}/metrics").text
    assert authd.auth("secret=bob%27s").status == 200
    authd.users.write_text(USERS + "[users.eve]\njwt = true\n")
    wait_until(lambda: ask(health).status == 200, what="it is read", timeout_s=20)


def test_both_addresses_speak_tls_with_a_certificate(
    start_authd: StartAuthd, certificates: Certificates
) -> None:
    server = certificates.server
    authd = start_authd(tls_cert=server.cert, tls_key=server.key)
    tls = ssl.create_default_context(cafile=str(certificates.ca))

    assert authd.auth("secret=bob%27s", tls=tls).status == 200
    assert ask(f"{authd.daemon.filter_url}/ping", tls=tls).text == "OK"
    line = {"Authorization": "Bearer bob's"}
    assert ask(f"{authd.daemon.filter_url}/topics", headers=line, tls=tls).status == 200
    assert json.loads(authd.audit_log.read_text().splitlines()[-1])["tls"] is True


def test_a_client_certificate_names_a_user_of_the_filter(
    start_authd: StartAuthd, certificates: Certificates
) -> None:
    server = certificates.server
    authd = start_authd(
        text="[users.carl]\ncommon_name = 'client'\npublish = ['carl']\n",
        tls_cert=server.cert,
        tls_key=server.key,
        tls_client_ca=certificates.ca,
    )
    tls = ssl.create_default_context(cafile=str(certificates.ca))
    assert ask(f"{authd.daemon.filter_url}/topics", tls=tls).status == 401
    tls.load_cert_chain(certificates.client.cert, certificates.client.key)
    assert ask(f"{authd.daemon.filter_url}/topics", tls=tls).status == 200


NAMES = "secret", "auth_secret", "remote_ip", "tls", "common_name"
HOSTILE_VALUES = (
    "%00",
    "%ff%fe",
    "%ed%b2%80",
    "a" * 60_000,
    "." * 10_000,
    "eyJ" + "W" * 5000 + ".W1tb.x",
    ":" * 5000,
    "%0d%0aX:%20y",
)
REFUSALS = b"400", b"401", b"404", b"405", b"413", b"429"
HOSTILE_REQUESTS = [
    *(
        f"GET /auth?{name}={value} HTTP/1.1\r\nHost: x\r\n\r\n"
        for name, value in zip(NAMES * 8, HOSTILE_VALUES * 5, strict=True)
    ),
    "GET /auth?%zz HTTP/1.1\r\nHost: x\r\n\r\n",
    "GET /auth?a;b HTTP/1.1\r\nHost: x\r\n\r\n",
    "POST /auth HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n\xff\xfe%z",
    "POST /auth HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n",
    "POST /auth HTTP/1.1\r\nHost: x\r\nContent-Length: 400\r\n\r\n" + "a=1&" * 100,
    "GET /lookup?topic="
    + "x" * 500
    + " HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer bob's\r\n\r\n",
    "GET /stats HTTP/1.1\r\nHost: x\r\nAuthorization: Basic ////\r\n\r\n",
    "GET /stats?%zz HTTP/1.1\r\nHost: x\r\n\r\n",
    "DELETE /auth HTTP/1.1\r\nHost: x\r\n\r\n",
    "\x16\x03\x01\x02\x00\x01\x00",
]


def test_hostile_requests_are_refused_without_a_traceback_or_a_delay(
    start_authd: StartAuthd, capfd: pytest.CaptureFixture[str]
) -> None:
    authd = start_authd("127.0.0.1:1")
    with ExitStack() as stack:
        for host, _, port in (
            authd.address.rpartition(":"),
            authd.filter_address.rpartition(":"),
        ):
            silent = stack.enter_context(socket.create_connection((host, int(port))))
            silent.sendall(b"GET /auth HT")  # and never completed
            for request in HOSTILE_REQUESTS:
                with socket.create_connection((host, int(port)), patience_s(5)) as client:
                    client.sendall(request.encode("latin-1"))
                    status = client.recv(100).partition(b" ")[2][:3]
                    assert status in (
                        b"400",
                        b"401",
                        b"403",
                        b"404",
                        b"405",
                        b"413",
                        b"429",
                        b"502",
                    )
        assert authd.auth("secret=bob%27s").status == 200
    output = capfd.readouterr()
    assert "Traceback" not in output.err + output.out
    assert "panic" not in output.err


def test_the_filter_forgets_an_nsqd_that_has_left(
    embedded_nsqd: AnyNsqd, scripted_lookupd: MakeScripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filter_api, "FRESH_S", 0.0)
    lookupd, nsqds = scripted_lookupd(), [embedded_nsqd(), embedded_nsqd()]

    async def ask(upstream: Upstream) -> None:
        for nsqd in nsqds:
            host, _, port = nsqd.http_address.rpartition(":")
            node = {"broadcast_address": host, "tcp_port": 1, "http_port": int(port)}
            lookupd.answer = {"producers": [node]}
            assert len(await upstream.nsqds()) == 1

    with Cluster(ClusterAddresses(lookupd_http=[lookupd.address])) as cluster:
        asyncio.run(ask(Upstream(cluster)))
        assert cluster.names.keys() == {nsqds[1].http_address}


def test_a_hung_daemon_delays_neither_nsqd_nor_other_users(
    start_authd: StartAuthd, serves: Serves
) -> None:
    asked, release = threading.Event(), threading.Event()

    def hang(client: socket.socket) -> None:
        asked.set()
        release.wait(patience_s(30))

    authd = start_authd(serves(hang))
    statuses: list[Any] = []
    looking = threading.Thread(target=lambda: statuses.append(authd.look("/topics", "bob's")))
    looking.start()
    try:
        assert asked.wait(patience_s(10))
        assert authd.auth("secret=bob%27s").status == 200
        looking.join(patience_s(20))
    finally:
        release.set()
    assert statuses == [{"message": "UPSTREAM_FAILED"}]


def test_hup_ends_no_auth_server(spawn_nsq: SpawnNsq, tmp_path: Path) -> None:
    users = tmp_path / "users.toml"
    users.write_text(USERS)
    users.chmod(0o600)
    process = spawn_nsq(["authd", "serve", "--users", str(users), "--listen", "127.0.0.1:0"])
    url = process.stderr.readline().decode().split()[-1]

    process.send_signal(signal.SIGHUP)
    assert ask(f"{url}?secret=ann%27s&tls=false&remote_ip=10.0.0.1").status == 200
    process.send_signal(signal.SIGTERM)
    assert process.wait(patience_s(20)) == 143


@pytest.mark.alone
def test_two_thousand_tokens_a_second_take_one_core(spawn_nsq: SpawnNsq, tmp_path: Path) -> None:
    users = tmp_path / "users.toml"
    users.write_text(USERS)
    users.chmod(0o600)
    process = spawn_nsq(["authd", "serve", "--users", str(users), "--listen", "127.0.0.1:0"])
    line = process.stderr.readline().decode()
    address = line.split("//")[1].split("/")[0]
    least_cpu_s = 60.0
    with closing(http.client.HTTPConnection(address, timeout=patience_s(10))) as client:
        for _ in range(4):
            before_s = cpu_s(process.pid)
            for _ in range(500):
                client.request("GET", "/auth?secret=ann%27s&tls=false&remote_ip=10.0.0.1")
                response = client.getresponse()
                assert response.status == 200
                response.read()
            least_cpu_s = min(least_cpu_s, cpu_s(process.pid) - before_s)
    assert least_cpu_s < 500 / 2000


def cpu_s(pid: int) -> float:
    """Return the processor time of a process, in steps of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100
