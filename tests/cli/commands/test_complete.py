"""What can follow a command line: words that are known before, and names of the cluster, at once.

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

from nsqtools.cli.commands import complete_line


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the second after which the command ends its process, which here runs the tests."""
    monkeypatch.setattr(complete_line, "TIMEOUT_S", patience_s(10))
    monkeypatch.setattr(complete_line, "Timer", lambda *_: threading.Timer(0, int))


def offered(run_nsq: RunNsq, line: str) -> list[str]:
    """What can follow ``line`` in bash."""
    status, out, err = run_nsq(["__complete_line", "bash", line, ""])
    head, *words = out.decode().splitlines()
    assert (status, err, head) == (0, "", "words 0")
    return words


@pytest.mark.usefixtures("unhurried")
def test_names_come_from_nsqd_and_from_nsqlookupd_also_when_no_nsqd_is_left(
    run_nsq: RunNsq, cluster: RunningCluster
) -> None:
    cluster.nsqds[0].create_channel("views", "live")
    cluster.nsqds[0].create_channel("clicks", "arch")
    cluster.wait_for_topic("clicks", 1)
    cluster.wait_for_topic("views", 1)
    nsqd = f"--nsqd-http-address={cluster.nsqds[0].http_address}"
    lookup = " ".join(cluster.lookupd_options)

    def expect(*lines: tuple[str, list[str]]) -> None:
        for line, names in lines:
            assert sorted(offered(run_nsq, line)) == names, line

    expect(
        (f"nsq tail {nsqd.replace('=', ' ')} --topic c", ["clicks"]),
        (f"nsq tail --no-such {nsqd} --topic c", ["clicks"]),
        (f"nsq topic pause {nsqd} clicks ", ["clicks", "views"]),
        (f"nsq tail {nsqd} --topic=views --channel ", ["live"]),
        (f"nsq tail {nsqd} -tclicks -c ", ["arch"]),
        (f"nsq channel pause {nsqd} clicks ", ["arch"]),
        ("nsq tail --nsqd-http-address=127.0.0.1:1 -t ", []),
        (
            f"nsq tombstone {lookup} clicks ",
            sorted(each.http_address for each in cluster.nsqds),
        ),
    )
    for each in cluster.nsqds:
        each.kill()
    expect(
        (f"nsq tail {lookup} -t ", ["clicks", "views"]),
        (f"nsq tail {lookup} -t clicks -c ", ["arch"]),
    )
    env = {"NSQ_LOOKUPD_HTTP_ADDRESS": cluster.lookupds[0].http_address}
    asked = run_nsq(["__complete_line", "bash", "nsq tail -t cl", ""], env=env)
    assert asked.out == b"words 0\nclicks\n"


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
        [sys.executable, "-c", code],
        env=nsq_env,
        capture_output=True,
        timeout=patience_s(100),
        check=False,
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
