"""The Go programs work with the embedded daemons, and our programs with the Go daemons."""

import json
import subprocess
from pathlib import Path

import pytest
from plugins.archives import unfinished
from plugins.certificates import Certificates
from plugins.daemons import Daemon, EmbeddedLookupServer, GoNsqlookupd, Nsqd, Nsqlookupd
from plugins.servers import AnyNsqd, DataPath, EmbeddedServer, GoNsqd, GoProgram, Serve
from plugins.waiting import patience_s, wait_until

TIMEOUT_S = patience_s(30.0)
LINES = [f"line {number}" for number in range(1000)]


def run(command: list[str | Path], stdin: str = "") -> str:
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("option", ["snappy,true", "deflate,true", "tls_v1,true"])
def test_nsq_to_file_archives_messages_of_to_nsq_through_every_layer(
    embedded_nsqd: AnyNsqd,
    go_program: GoProgram,
    certificates: Certificates,
    tmp_path: Path,
    option: str,
) -> None:
    nsqd = embedded_nsqd(*certificates.server.nsqd_flags)
    nsqd.create_channel("t", "ch")
    place = ["-topic=t", f"-nsqd-tcp-address={nsqd.tcp_address}"]
    run([go_program("to_nsq"), *place], "\n".join(LINES) + "\n")
    place += ["-channel=ch", f"-output-dir={tmp_path}", "-sync-interval=200ms"]
    place += ["-max-in-flight=200", f"-consumer-opt={option}"]
    place += [f"-consumer-opt=tls_root_ca_file,{certificates.ca}"] * option.startswith("tls")
    command = [go_program("nsq_to_file"), *place]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as archiver:
        try:
            wait_until(lambda: not unfinished(nsqd, "t", "ch"), what="all archived", timeout_s=30)
        finally:
            archiver.terminate()
            archiver.wait(TIMEOUT_S)

    [file] = tmp_path.glob("*.log")
    assert sorted(file.read_text().splitlines()) == sorted(LINES)


Joined = tuple[Nsqd, Nsqlookupd]


@pytest.fixture(
    params=[
        pytest.param((GoNsqd, EmbeddedLookupServer), id="Go nsqd", marks=pytest.mark.real_nsqd),
        pytest.param((EmbeddedServer, GoNsqlookupd), id="Go lookupd", marks=pytest.mark.real_nsqd),
        pytest.param((EmbeddedServer, EmbeddedLookupServer), id="both embedded"),
    ]
)
def joined(request: pytest.FixtureRequest, data_path: DataPath, serve: Serve) -> Joined:
    nsqd_kind, lookupd_kind = request.param
    lookupd = serve(lookupd_kind())
    flags = (f"-lookupd-tcp-address={lookupd.tcp_address}", "-broadcast-address=127.0.0.1")
    nsqd = serve(nsqd_kind(data_path(), *flags))
    wait_until(lambda: lookupd.json("/nodes")["producers"], what="nsqd to say who it is")
    return nsqd, lookupd


def test_registrations_survive_a_restart_of_either_daemon(joined: Joined) -> None:
    nsqd, lookupd = joined
    [node] = lookupd.json("/nodes")["producers"]
    info = json.loads(nsqd.get("/info"))
    for key in ("broadcast_address", "hostname", "tcp_port", "http_port", "version"):
        assert node[key] == info[key]
    assert node["remote_address"].startswith("127.0.0.1:")
    assert (node["topics"], node["tombstones"]) == ([], [])

    def is_announced() -> bool:
        channels = lookupd.json("/channels", topic="clicks")["channels"]
        announced = [lookupd.producers("clicks"), lookupd.producers("empty"), channels]
        return announced == [[nsqd.tcp_address], [nsqd.tcp_address], ["archive"]]

    def nodes() -> list[object]:
        return lookupd.json("/nodes")["producers"]

    nsqd.create_channel("clicks", "archive")
    nsqd.create_topic("empty")
    wait_until(is_announced, what="all to be announced")
    for places in ([], [lookupd.tcp_address]):
        answer = nsqd.request(
            "PUT", "/config/nsqlookupd_tcp_addresses", json.dumps(places).encode()
        )
        assert (answer[0], json.loads(answer[1])) == (200, places)
        wait_until(lambda: len(nodes()) == len(places), what="it leaves, or joins")  # noqa: B023
    wait_until(is_announced, what="all to be announced again")
    nsqd.stop()
    wait_until(lambda: not nodes(), what="nsqd to be gone")
    assert lookupd.producers("clicks") == []
    nsqd.start()
    wait_until(is_announced, what="all to be announced after a restart of nsqd")
    lookupd.kill()
    lookupd.start()
    # The Go nsqd notices with the next command, and connects again for the one after it.
    nsqd.create_topic("first")
    nsqd.create_topic("second")
    wait_until(is_announced, what="all to be announced after a restart of nsqlookupd")
    for topic in ("clicks", "empty", "first", "second"):
        nsqd.post("/topic/delete", topic=topic)
    wait_until(lambda: set(lookupd.json("/debug")) == {"client::"}, what="all to be taken back")


def test_nsq_stat_and_nsqadmin_work_with_the_embedded_daemons(
    embedded_nsqd: AnyNsqd, serve: Serve, go_program: GoProgram
) -> None:
    lookupd = serve(EmbeddedLookupServer())
    flags = (f"-lookupd-tcp-address={lookupd.tcp_address}", "-broadcast-address=127.0.0.1")
    registered = embedded_nsqd(*flags)
    registered.create_channel("clicks", "ch")
    registered.publish("clicks", b"one", b"two", b"three")
    wait_until(lambda: lookupd.json("/channels", topic="clicks")["channels"], what="the channel")
    place = f"-lookupd-http-address={lookupd.http_address}"
    stat = [go_program("nsq_stat"), "-topic=clicks", "-channel=ch", "-count=1", "-interval=100ms"]
    output = subprocess.check_output([*stat, place], timeout=patience_s(10))
    assert b"3" in output.splitlines()[2].split()
    admin = serve(Daemon("nsqadmin", [place], listeners={"HTTP": "http_address"}))
    topic = json.loads(admin.get("/api/topics/clicks"))
    assert (topic["message_count"], topic["channels"][0]["depth"]) == (3, 3)
    admin.post("/api/topics/clicks/ch", b'{"action": "pause"}')
    assert registered.channel_stats("clicks", "ch")["paused"] is True

    assert json.loads(admin.get("/api/topics"))["topics"] == ["clicks"]
    [node] = json.loads(admin.get("/api/nodes"))["nodes"]
    assert node["broadcast_address"] == "127.0.0.1"
    assert [topic["topic"] for topic in node["topics"]] == ["clicks"]
    assert (node["version"], node["out_of_date"]) == ("1.3.0", False)

    admin.post("/api/topics", json.dumps({"topic": "errors", "channel": "alert"}).encode())
    assert lookupd.json("/channels", topic="errors") == {"channels": ["alert"]}
    admin.request("DELETE", "/api/topics/errors/alert")
    assert lookupd.json("/channels", topic="errors") == {"channels": []}
    admin.request("DELETE", "/api/topics/errors")
    assert lookupd.json("/topics") == {"topics": ["clicks"]}

    tombstone = json.dumps({"topic": "clicks"}).encode()
    status, _ = admin.request("DELETE", f"/api/nodes/{registered.http_address}", tombstone)
    assert status == 200
    assert lookupd.producers("clicks") == []
    assert "setting tombstone for producer" in lookupd.log
