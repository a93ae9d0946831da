"""/metrics, /health and the notifications of systemd, over real sockets."""

import http.client
import os
import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from plugins.console import ask
from plugins.waiting import patience_s, wait_until

from nsqtools.errors import ConfigurationError
from nsqtools.http import monitor
from nsqtools.http import service as service_module
from nsqtools.http.service import service
from nsqtools.records.prometheus import Metric

METRICS = [Metric("nsq_things_total", "counter", "Things.", [({"topic": 'a"b'}, 7)])]


def get(address: str, path: str, method: str = "GET") -> tuple[int, str, str]:
    answer = ask(f"http://{address}{path}", method)
    return answer.status, answer.headers.get("content-type", ""), answer.text


def is_healthy(address: str) -> bool:
    try:
        return get(address, "/health")[0] == 200
    except http.client.RemoteDisconnected:  # closed, as too many clients are connected
        return False


class Systemd(NamedTuple):
    """The socket that systemd listens on, and the variable that names it."""

    socket: socket.socket
    environ: dict[str, str]

    def is_silent(self) -> bool:
        return not select.select([self.socket], [], [], 0)[0]


@pytest.fixture(params=["path", "abstract"])
def systemd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Systemd]:
    name = str(tmp_path / "notify") if request.param == "path" else f"@nsqtools-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(name.replace("@", "\0"))
        listening.settimeout(patience_s(20))
        yield Systemd(listening, {"NOTIFY_SOCKET": name})


@pytest.mark.parametrize("listen", [":0", "[::1]:0"])
def test_metrics_and_health_are_served_on_loopback(listen: str) -> None:
    try:
        with service(listen, {}, metrics=lambda: METRICS, health=lambda: (True, "fine")) as running:
            running.ready()
            status, kind, text = get(running.address, "/metrics")
            assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
            assert 'nsq_things_total{topic="a\\"b"} 7\n' in text
            assert get(running.address, "/health?x=1") == (200, monitor.PLAIN, "fine\n")
            assert get(running.address, "/health", "HEAD") == (200, monitor.PLAIN, "")
            assert get(running.address, "/etc/passwd")[0] == 404
            assert get(running.address, "/metrics", "POST")[0] == 501
            assert running.address.startswith("[::1]" if "::1" in listen else "127.0.0.1:")
    except ConfigurationError as exc:
        if "::1" not in listen:
            raise
        pytest.skip(f"no IPv6 here: {exc}")


def test_health_is_503_before_the_start_after_a_failure_and_when_stuck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    health = iter([(True, "fine"), (False, "cannot write 1 topics: clicks"), (True, "fine")])
    with service("0", {}, metrics=list, health=lambda: next(health)) as running:
        assert get(running.address, "/health")[::2] == (503, "starting\n")
        assert get(running.address, "/live")[::2] == (200, "alive\n")
        running.ready()
        assert get(running.address, "/ready")[0] == 200
        assert get(running.address, "/health")[::2] == (503, "cannot write 1 topics: clicks\n")
        monkeypatch.setattr(service_module, "STUCK_AFTER_S", 0.05)
        time.sleep(0.1)
        status, _, text = get(running.address, "/health")
        assert (status, text.partition(" for ")[0]) == (503, "stuck: no progress")
        assert get(running.address, "/live")[0] == 503
        running.alive()
        monkeypatch.setattr(service_module, "STUCK_AFTER_S", 60)
        assert get(running.address, "/health")[0] == 200


def test_a_relative_metrics_file_stays_when_the_program_changes_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    settings: Any = {"metrics": list, "health": lambda: (True, "")}
    with service(None, {}, metrics_file=Path("metrics.prom"), **settings):
        monkeypatch.chdir(tmp_path / "elsewhere")
    assert (tmp_path / "metrics.prom").exists()


def test_an_unwritable_metrics_file_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.mkfifo(device := tmp_path / "device")  # like /dev/null, which root could replace
    for place in (tmp_path / "nowhere" / "metrics", device):
        settings: Any = {"metrics": list, "health": lambda: (True, ""), "metrics_file": place}
        with service(None, {}, **settings) as running:
            running.write_metrics()
    reasons = [text.partition(" (")[2] for text in caplog.messages]
    assert reasons == ["No such file or directory)", "not a regular file)"]
    assert device.is_fifo()


def test_silent_clients_do_not_block_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(monitor, "REQUEST_TIMEOUT_S", 0.3)
    with service("0", {}, metrics=list, health=lambda: (True, "fine")) as running:
        running.ready()
        host, _, port = running.address.rpartition(":")
        with ExitStack() as stack:
            connect = socket.create_connection
            silent = [stack.enter_context(connect((host, int(port)))) for _ in range(20)]
            assert [client.recv(1) for client in silent] == [b""] * 20  # all are closed eventually
            monkeypatch.undo()  # a busy machine may take 0.3 s to send a request
            wait_until(lambda: is_healthy(running.address), what="there is room for a request")


def test_systemd_is_notified_of_ready_alive_and_stopping(
    systemd: Systemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(service_module, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    environ = systemd.environ | {"WATCHDOG_USEC": "200000", "WATCHDOG_PID": str(os.getpid())}
    with service(None, environ, metrics=list, health=lambda: (True, "")) as running:
        assert running.address == ""
        running.ready()
        running.ready()
        assert systemd.socket.recv(1000) == b"READY=1"
        running.alive()
        running.alive()
        assert systemd.socket.recv(1000) == b"WATCHDOG=1"
        assert systemd.is_silent()  # not every time
        clock.now_s += 0.1
        running.alive()
        assert systemd.socket.recv(1000) == b"WATCHDOG=1"
        running.stopping()
        assert systemd.socket.recv(1000) == b"STOPPING=1"


def test_another_watchdog_is_not_fed_and_a_missing_socket_is_no_error(
    systemd: Systemd, tmp_path: Path
) -> None:
    environ = systemd.environ | {"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}
    with service(None, environ, metrics=list, health=lambda: (True, "")) as running:
        running.alive()
        assert systemd.is_silent()
    environ_without_listener = {"NOTIFY_SOCKET": str(tmp_path / "nobody")}
    with service(
        None, environ_without_listener, metrics=list, health=lambda: (True, "")
    ) as running:
        running.ready()
        running.stopping()
