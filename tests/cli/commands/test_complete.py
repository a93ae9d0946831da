"""Names for the completion of shells: from the cluster or none, and at once.

`test_complete_line` has what bash, zsh and fish make of them.
"""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from plugins.cli import RunNsq
from plugins.clusters import RunningCluster
from plugins.hostile_cluster import HostileCluster
from plugins.waiting import patience_s

from nsqtools.cli.commands import complete


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the second after which the command ends its process, which here runs the tests."""
    monkeypatch.setattr(complete, "TIMEOUT", f"{patience_s(10):g}s")
    monkeypatch.setattr(complete, "Timer", lambda *_: threading.Timer(0, int))


def offered(run_nsq: RunNsq, line: str) -> list[str]:
    """What can follow ``line`` in bash."""
    status, out, err = run_nsq(["__complete_line", "bash", line, ""])
    assert (status, err) == (0, "")
    head, *words = out.decode().splitlines()
    assert head == "words 0"
    return words


@pytest.mark.usefixtures("unhurried")
def test_names_come_from_nsqlookupd_also_when_no_nsqd_is_left(
    run_nsq: RunNsq, cluster: RunningCluster
) -> None:
    cluster.nsqds[0].create_channel("clicks", "arch")
    cluster.wait_for_topic("clicks", 1)
    at = " ".join(cluster.lookupd_options)
    nodes = offered(run_nsq, f"nsq tombstone {at} clicks ")
    for nsqd in cluster.nsqds:
        nsqd.kill()

    assert sorted(nodes) == sorted(nsqd.http_address for nsqd in cluster.nsqds)
    assert offered(run_nsq, f"nsq tail {at} -t ") == ["clicks"]
    assert offered(run_nsq, f"nsq tail {at} -t clicks -c ") == ["arch"]


@pytest.mark.usefixtures("unhurried")
def test_names_that_no_nsqd_takes_are_kept_from_command_lines(
    run_nsq: RunNsq, polite_cluster: HostileCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"topics": ["a", "$(reboot)", "b;c", "d\n"]}
    monkeypatch.setitem(polite_cluster.answers, "/topics", names)

    line = f"nsq tail --lookupd-http-address={polite_cluster.http_address} -t "

    assert offered(run_nsq, line) == ["a"]


def test_it_ends_after_a_second_when_name_resolution_hangs(nsq_env: dict[str, str]) -> None:
    code = (
        "import socket, time\n"
        "socket.getaddrinfo = lambda *a, **k: time.sleep(3600)\n"
        "from nsqtools.cli.main import main\n"
        "line = 'nsq tail --nsqd-http-address=nsqd.example:4151 -t '\n"
        "main(['__complete_line', 'bash', line, ''])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=nsq_env, capture_output=True, timeout=300, check=False
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
