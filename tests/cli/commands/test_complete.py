"""``nsq __complete``: names for shells, quick, and silent when there is nobody to ask."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from plugins.cli import RunNsq
from plugins.clusters import RunningCluster
from plugins.http_api import Nsqd
from plugins.waiting import patience_s, wait_until

from nsqtools.cli.commands import complete


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the second after which the command ends its process, which here runs the tests."""
    monkeypatch.setattr(complete, "TIMEOUT", f"{patience_s(10):g}s")
    monkeypatch.setattr(complete, "Timer", lambda *_: threading.Timer(0, int))


@pytest.mark.usefixtures("unhurried")
def test_names_come_from_nsqd(run_nsq: RunNsq, any_nsqd: Callable[..., Nsqd]) -> None:
    nsqd = any_nsqd()
    nsqd.create_channel("views", "live")
    nsqd.create_channel("clicks", "arch")
    env = {"NSQ_NSQD_HTTP_ADDRESS": nsqd.http_address}

    assert run_nsq(["__complete", "topics"], env=env) == (0, b"clicks\nviews\n", "")
    assert run_nsq(["__complete", "channels"], env=env) == (0, b"arch\nlive\n", "")
    assert run_nsq(["__complete", "channels", "-t", "views"], env=env) == (0, b"live\n", "")


@pytest.mark.usefixtures("unhurried")
def test_names_come_from_nsqlookupd_also_when_no_nsqd_is_left(
    run_nsq: RunNsq, cluster: RunningCluster
) -> None:
    cluster.nsqds[0].create_channel("clicks", "arch")
    for lookupd in cluster.lookupds:
        wait_until(
            lambda lookupd=lookupd: lookupd.json("/channels", topic="clicks")["channels"],
            what="the channel is registered",
        )
    for nsqd in cluster.nsqds:
        nsqd.kill()

    topics = run_nsq(["__complete", "topics", *cluster.lookupd_options])
    channels = run_nsq(["__complete", "channels", "-t", "clicks", *cluster.lookupd_options])

    assert (topics.out, channels.out) == (b"clicks\n", b"arch\n")


def test_it_is_silent_and_quick_when_nobody_answers(run_nsq: RunNsq, deaf_address: str) -> None:
    began_s = time.monotonic()
    deaf = run_nsq(
        ["__complete", "topics", f"--nsqd-http-address={deaf_address}"], own_process=True
    )
    took_s = time.monotonic() - began_s
    nobody = run_nsq(
        ["__complete", "channels", "--lookupd-http-address=127.0.0.1:1"], own_process=True
    )

    assert deaf == nobody == (0, b"", "")
    assert took_s < patience_s(
        5
    )  # the time-out is one second; the rest is Python on a busy machine


def test_it_ends_after_a_second_when_name_resolution_hangs(nsq_env: dict[str, str]) -> None:
    code = (
        "import socket, time\n"
        "socket.getaddrinfo = lambda *a, **k: time.sleep(60)\n"
        "from nsqtools.cli.main import main\n"
        "main(['__complete', 'topics', '--nsqd-http-address=nsqd.example:4151'])"
    )
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], env=nsq_env, capture_output=True, timeout=30, check=False
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert time.monotonic() - began_s < patience_s(10)


@pytest.mark.usefixtures("unhurried")
def test_names_that_no_nsqd_takes_are_kept_from_command_lines(run_nsq: RunNsq) -> None:
    class Hostile(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"topics": ["a", "$(reboot)", "b;c", "d\n"]}).encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Hostile) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            address = f"127.0.0.1:{server.server_port}"
            said = run_nsq(["__complete", "topics", f"--lookupd-http-address={address}"])
        finally:
            server.shutdown()

    assert said == (0, b"a\n", "")


@pytest.mark.usefixtures("unhurried")
def test_profiles_come_from_the_configuration_file(run_nsq: RunNsq, tmp_path: Path) -> None:
    config = tmp_path / ".config/nsqtools/config.toml"
    config.parent.mkdir(parents=True)

    def profiles(text: str) -> tuple[int, bytes]:
        config.write_text(text)
        return run_nsq(["__complete", "profiles"])[:2]

    assert run_nsq(["__complete", "profiles"]) == (0, b"", "")
    assert profiles("[profiles.b]\n[profiles.a]\ntls = true\n") == (0, b"a\nb\n")
    assert profiles("tls = true\n") == (0, b"")
    assert profiles("not toml") == (2, b"")


@pytest.mark.usefixtures("unhurried")
def test_no_list_of_commands_shows_it(run_nsq: RunNsq) -> None:
    assert b"__complete" not in run_nsq(["--help"]).out
    assert "__complete" not in run_nsq(["__complet"]).err.splitlines()[-1]
