"""New connections use replaced certificates and secrets."""

import shutil
from functools import partial
from pathlib import Path

import pytest
from plugins.archives import unfinished
from plugins.certificates import LOOPBACK, Authority, Credentials
from plugins.cli import SpawnNsq
from plugins.clients import CHANNEL, TOPIC, Consume, Produce, fill, take
from plugins.http_server import AuthServer, MakeScripted, MakeServer, PlannedServer
from plugins.servers import MakeNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.cluster import sampling
from nsqtools.cluster.directory import open_cluster
from nsqtools.errors import ConfigurationError
from nsqtools.transport.stream import RenewedContext, TLSOptions, make_context

NAMES = ("ca.pem", "server.pem", "server.key", "client.pem", "client.key")


class Place:
    """The files of a server and its clients, signed by the old or the new authority."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "in-use"
        self.directory.mkdir()
        self._issued = []
        for number in range(2):
            folder = directory / str(number)
            folder.mkdir()
            authority = Authority(folder, "ca")
            authority.issue("server", *LOOPBACK)
            authority.issue("client", "client.example.org")
            self._issued.append(folder)
        self.rotate(0)

    def rotate(self, number: int, *names: str) -> None:
        for name in names or NAMES:
            beside = self.directory / f"{name}.new"
            shutil.copy(self._issued[number] / name, beside)
            beside.replace(self.directory / name)

    def path(self, name: str) -> str:
        return str(self.directory / name)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_clients_reconnect_with_renewed_certificates_and_secret(
    place: Place,
    go_nsqd: MakeNsqd,
    auth_server: AuthServer,
    consume: Consume,
    produce: Produce,
    tmp_path: Path,
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("old\n")
    auth_server.allow("old")
    nsqd = go_nsqd(
        f"-tls-cert={place.path('server.pem')}",
        f"-tls-key={place.path('server.key')}",
        f"-tls-root-ca-file={place.path('ca.pem')}",
        "-tls-client-auth-policy=require-verify",
        "-tls-required=tcp-https",
        f"-auth-http-address={auth_server.address}",
    )
    files = {"root_ca_file": "ca.pem", "cert": "client.pem", "key": "client.key"}
    options = {f"tls_{option}": place.path(name) for option, name in files.items()}
    options |= {"tls_v1": True, "auth_secret_file": str(secret)}
    consumer = consume(nsqd.tcp_address, **options)
    producer = produce(nsqd.tcp_address, **options)
    for body in (b"before", b"after"):
        producer.publish(TOPIC, body, timeout_s=patience_s(10))
        [message] = take(consumer, 1)
        assert message.body == body
        message.finish()
        wait_until(lambda: not unfinished(nsqd, TOPIC, CHANNEL), what="its FIN at nsqd")
        if body == b"before":
            nsqd.stop()
            place.rotate(1)
            secret.write_text("new\n")
            auth_server.answer("old", 401, b"{}")
            auth_server.allow("new")
            nsqd.start()


def test_the_earlier_secret_is_used_while_its_file_is_missing(
    go_nsqd: MakeNsqd,
    auth_server: AuthServer,
    produce: Produce,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    auth_server.allow("known")
    nsqd = go_nsqd(f"-auth-http-address={auth_server.address}")
    missing = str(tmp_path / "missing")
    produce(nsqd.tcp_address, auth_secret="known", auth_secret_file=missing).publish(TOPIC, b"x")
    assert f"cannot read the auth secret from {missing}" in caplog.text
    assert "using the earlier one" in caplog.text


def test_a_certificate_waits_for_its_key(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    files = [place.path(name) for name in ("ca.pem", "client.pem", "client.key")]
    renewed = RenewedContext(files, lambda: make_context(TLSOptions(*files)))
    context = renewed.get()
    assert renewed.get() is context
    place.rotate(1, "client.pem")
    assert renewed.get() is context
    assert "cannot use the client certificate and key" in caplog.text
    with pytest.raises(ConfigurationError):
        renewed.check()
    place.rotate(1, "client.key")
    assert renewed.get() is not context


def test_lookups_use_renewed_certificates(
    place: Place, http_server: MakeServer, consume: Consume, tmp_path: Path
) -> None:
    folders = [tmp_path / str(number) for number in range(2)]
    issued = [Credentials(folder / "server.pem", folder / "server.key") for folder in folders]
    servers = [http_server(credentials=credentials) for credentials in issued]
    options = {"tls_root_ca_file": place.path("ca.pem"), "lookupd_poll_interval_s": 0.05}
    consume(lookupd=[server.url for server in servers], **options)
    wait_until(lambda: len(servers[0].requests) > 1, what="lookups with the old authority")
    assert not servers[1].requests
    place.rotate(1)
    wait_until(lambda: bool(servers[1].requests), what="a lookup with the new authority")


def test_lookups_use_a_secret_whose_file_appears_after_the_start(
    scripted_lookupd: MakeScripted, consume: Consume, tmp_path: Path
) -> None:
    lookupd, secret = scripted_lookupd(), tmp_path / "secret"
    consume(lookupd=lookupd.address, auth_secret_file=str(secret), lookupd_authorization=True)
    wait_until(lambda: lookupd.requests, what="a lookup without a secret")
    assert "Authorization" not in lookupd.requests[0].headers
    (tmp_path / "written").write_text("hush")
    (tmp_path / "written").rename(secret)
    wait_until(
        lambda: lookupd.requests[-1].headers.get("Authorization") == "Bearer hush",
        what="a lookup with the secret",
    )


def test_sampling_uses_renewed_certificates(
    place: Place,
    http_server: MakeServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(sampling, "LOOKUP_S", 0.0)
    lookupd, nsqd = (
        http_server(credentials=Credentials(folder / "server.pem", folder / "server.key"))
        for folder in (tmp_path / "0", tmp_path / "1")
    )
    (secret := tmp_path / "secret").write_text("s3cret")
    options = {"tls_root_ca_file": place.path("ca.pem"), "lookupd_authorization": "true"}
    options["auth_secret_file"] = str(secret)
    with open_cluster(ConnectionSettings((), (lookupd.url,), (nsqd.url,), options)) as cluster:
        sampler = sampling.Sampler(cluster, sampling.SampleFilter(), required=False)

        def targets(server: PlannedServer) -> list[str]:
            sampler.sample()
            return [request.target.partition("?")[0] for request in server.requests]

        wait_until(lambda: "/nodes" in targets(lookupd), what="a look with the old authority")
        assert not nsqd.requests
        place.rotate(1)
        wait_until(lambda: "/stats" in targets(nsqd), what="a look with the new authority")
        secret.unlink()
        for _ in range(3):
            sampler.sample()
        assert caplog.text.count("cannot read the auth secret") == 1


def test_to_http_uses_renewed_certificates_and_token(
    place: Place, go_nsqd: MakeNsqd, http_server: MakeServer, spawn_nsq: SpawnNsq, tmp_path: Path
) -> None:
    issued = tmp_path / "1"
    server = http_server(credentials=Credentials(issued / "server.pem", issued / "server.key"))
    token = tmp_path / "token"
    token.write_text("old")
    nsqd = go_nsqd()
    fill(nsqd, 1)
    args = f"to-http -t {TOPIC} -c {CHANNEL} --nsqd-tcp-address {nsqd.tcp_address} --create -n 1"
    args += f" --post {server.url} --http-ca-file {place.path('ca.pem')}"
    process = spawn_nsq([*args.split(), "--bearer-token-file", str(token)])
    stats = partial(nsqd.channel_stats, TOPIC, CHANNEL)
    # by then it has read its files, with which it cannot connect
    wait_until(lambda: stats()["in_flight_count"] == 1, what="a message held", timeout_s=20)
    token.write_text("new")
    tried = server.connections  # the current attempt may still use the old files
    wait_until(lambda: server.connections > tried, what="another attempt", timeout_s=20)
    assert not server.requests
    place.rotate(1)
    _, stderr = process.communicate(timeout=patience_s(30))
    assert process.returncode == 0, stderr.decode()
    [request] = server.requests
    assert (request.body, request.headers["Authorization"]) == (b"0", "Bearer new")
