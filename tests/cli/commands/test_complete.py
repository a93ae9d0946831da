"""``nsq __complete``: names for shells: from the cluster, from the last time, or none, and at once.

The daemon of the last tests answers only when it is let: what TAB offers before and after that
shows who waited for it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from plugins.cli import RunNsq
from plugins.clusters import RunningCluster
from plugins.daemons import GoNsqd
from plugins.hostile_cluster import HostileCluster
from plugins.http_api import Nsqd
from plugins.waiting import patience_s, wait_until

from nsqtools.cli.commands import complete
from nsqtools.cli.commands import complete as name_cache


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the second after which the command ends its process, which here runs the tests."""
    monkeypatch.setattr(complete, "TIMEOUT", f"{patience_s(10):g}s")
    monkeypatch.setattr(complete, "Timer", lambda *_: threading.Timer(0, int))


@pytest.fixture
def cache(nsq_env: dict[str, str]) -> Path:
    return Path(nsq_env["HOME"]) / ".cache/nsqtools"


@pytest.mark.usefixtures("unhurried")
def test_names_come_from_nsqd(run_nsq: RunNsq, any_nsqd: Callable[..., Nsqd], cache: Path) -> None:
    nsqd = any_nsqd()
    nsqd.create_channel("views", "live")
    nsqd.create_channel("clicks", "arch")
    env = {"NSQ_NSQD_HTTP_ADDRESS": nsqd.http_address, "NSQ_AUTH_SECRET": "open sesame"}

    assert run_nsq(["__complete", "topics"], env=env) == (0, b"clicks\nviews\n", "")
    assert run_nsq(["__complete", "channels"], env=env) == (0, b"arch\nlive\n", "")
    assert run_nsq(["__complete", "channels", "-t", "views"], env=env) == (0, b"live\n", "")
    # what is kept belongs to this cluster, and holds no secret
    kept = [each.read_text() for each in cache.iterdir()]
    assert (any("clicks" in each for each in kept), "sesame" in "".join(kept)) == (True, False)
    elsewhere = {"NSQ_NSQD_HTTP_ADDRESS": "127.0.0.1:1"}
    assert run_nsq(["__complete", "topics"], env=elsewhere).out == b""


@pytest.mark.usefixtures("unhurried")
def test_names_come_from_nsqlookupd_also_when_no_nsqd_is_left(
    run_nsq: RunNsq, cluster: RunningCluster
) -> None:
    cluster.nsqds[0].create_channel("clicks", "arch")
    cluster.wait_for_topic("clicks", 1)
    nodes = run_nsq(["__complete", "nodes", *cluster.lookupd_options])
    for nsqd in cluster.nsqds:
        nsqd.kill()

    topics = run_nsq(["__complete", "topics", *cluster.lookupd_options])
    channels = run_nsq(["__complete", "channels", "-t", "clicks", *cluster.lookupd_options])

    assert sorted(nodes.out.decode().split()) == sorted(n.http_address for n in cluster.nsqds)
    assert (topics.out, channels.out) == (b"clicks\n", b"arch\n")


@pytest.mark.usefixtures("unhurried")
def test_names_that_no_nsqd_takes_are_kept_from_command_lines(
    run_nsq: RunNsq, polite_cluster: HostileCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"topics": ["a", "$(reboot)", "b;c", "d\n"]}
    monkeypatch.setitem(polite_cluster.answers, "/topics", names)

    said = run_nsq(
        ["__complete", "topics", f"--lookupd-http-address={polite_cluster.http_address}"]
    )

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


# a slow cluster


def test_it_ends_and_is_silent_when_nobody_answers(run_nsq: RunNsq, deaf_address: str) -> None:
    for place in (f"--nsqd-http-address={deaf_address}", "--lookupd-http-address=127.0.0.1:1"):
        assert run_nsq(["__complete", "topics", place], own_process=True) == (0, b"", "")


def test_it_ends_after_a_second_when_name_resolution_hangs(nsq_env: dict[str, str]) -> None:
    code = (
        "import socket, time\n"
        "socket.getaddrinfo = lambda *a, **k: time.sleep(3600)\n"
        "from nsqtools.cli.main import main\n"
        "main(['__complete', 'topics', '--nsqd-http-address=nsqd.example:4151'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=nsq_env, capture_output=True, timeout=300, check=False
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.usefixtures("unhurried")
def test_names_are_answered_from_the_cache_and_found_again_behind_the_scenes(
    run_nsq: RunNsq, nsqd: GoNsqd, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawn, pids = os.posix_spawn, []

    def spawn_and_note(*arguments: Any, **options: Any) -> int:
        pids.append(spawn(*arguments, **options))
        return pids[-1]

    def age(seconds: float) -> None:
        for file in cache.iterdir():
            os.utime(file, (time.time() - seconds,) * 2)

    monkeypatch.setattr(os, "posix_spawn", spawn_and_note)
    ask = ["__complete_line", "bash", f"nsq tail --nsqd-http-address={nsqd.http_address} -t ", ""]
    nsqd.create_topic("clicks")
    first = run_nsq(ask)
    nsqd.create_topic("views")
    kept = run_nsq(ask)
    age(name_cache.FRESH_S + 1)
    stale = run_nsq(ask)

    assert first.out == kept.out == stale.out == b"words 0\nclicks\n"
    for pid in pids:  # a late one would write old names
        os.waitpid(pid, 0)
    assert run_nsq(ask).out == b"words 0\nclicks\nviews\n"
    age(name_cache.STALE_S + 1)
    nsqd.create_topic("orders")
    assert run_nsq(ask).out == b"words 0\nclicks\norders\nviews\n"


class SlowNsqd(ThreadingHTTPServer):
    """The HTTP API of an nsqd that answers once ``may_answer`` is set."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.may_answer = threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.may_answer.set()
        self.shutdown()
        self.server_close()


class Answer(BaseHTTPRequestHandler):
    server: SlowNsqd

    def do_GET(self) -> None:
        self.server.may_answer.wait()
        topic = {"topic_name": "clicks", "channels": [], "depth": 0, "message_count": 0}
        stats = {"version": "1.3.0", "health": "OK", "start_time": 1, "topics": [topic]}
        try:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(stats).encode())
        except OSError:
            pass  # who asked is gone

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def slow_nsqd() -> Iterator[SlowNsqd]:
    nsqd = SlowNsqd()
    yield nsqd
    nsqd.close()


def test_names_that_came_too_late_are_there_for_the_next_tab_and_need_no_daemon_then(
    slow_nsqd: SlowNsqd, run_nsq: RunNsq, cache: Path
) -> None:
    place = f"--nsqd-http-address=127.0.0.1:{slow_nsqd.server_port}"
    ask = ["__complete_line", "bash", f"nsq tail {place} -t ", ""]

    first = run_nsq(ask, own_process=True)  # it ends, although nobody answers
    slow_nsqd.may_answer.set()
    wait_until(
        lambda: any("clicks" in each.read_text() for each in cache.glob("names-????????")),
        what="the names that a process in the background asked for",
        timeout_s=30,
    )
    slow_nsqd.close()
    kept = run_nsq(ask, own_process=True)

    assert (first.status, first.out.count(b"clicks"), first.err) == (0, 0, "")
    assert (kept.status, kept.out) == (0, b"words 0\nclicks\n")
