"""Processes of our own run the program, and nothing of the directory that one happens to be in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from plugins.http_api import Nsqd
from plugins.servers import AnyNsqd
from plugins.waiting import patience_s

from nsqtools.demo.story import DemoStage

NSQ = Path(sys.executable).with_name("nsq")
TAKEN = ("nsqtools/__init__", "nsqtools/__main__", "nsqtools/bench/__init__", "json", "logging")


def plant(here: Path) -> Path:
    """Put modules of our names there, which note in a file that they were run; return the file."""
    ran = here / "ran"
    for name in (*TAKEN, "pickle", "signal", "typing", "zlib"):
        module = here / f"{name}.py"
        module.parent.mkdir(parents=True, exist_ok=True)
        module.write_text(f"open({str(ran)!r}, 'a').write(__file__ + '\\n')\n")
    return ran


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a process writes that runs the modules of the current directory."""
    (here := tmp_path / "cloned").mkdir()
    monkeypatch.chdir(here)
    return plant(here)


@pytest.fixture
def nsqd(any_nsqd: AnyNsqd) -> Nsqd:
    started = any_nsqd()
    started.create_topic("clicks")
    return started


def test_the_workers_of_a_measurement_run_nothing_of_the_current_directory(
    ran: Path, nsqd: Nsqd, nsq_env: dict[str, str]
) -> None:
    address = f"--nsqd-tcp-address={nsqd.tcp_address}"
    done = subprocess.run(
        [NSQ, "bench", "pub", "-t", "clicks", "-n", "100", address],
        env=nsq_env,
        capture_output=True,
        timeout=patience_s(60),
    )

    assert (done.returncode, ran.exists()) == (0, False), done.stderr


def test_the_commands_of_a_demonstration_run_nothing_of_their_directory(
    nsq_env: dict[str, str],
) -> None:
    with DemoStage(nsq_env) as stage:
        ran = plant(stage.directory)

        assert b"0." in stage.run("--version").out
        assert not ran.exists()
