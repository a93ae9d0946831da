"""``nsq demo``, the first command of the README."""

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from plugins.cli import NSQ, SpawnNsq
from plugins.waiting import patience_s, wait_until

from nsqtools import demo
from nsqtools.cli.running.runtime import exit_on_signals
from nsqtools.demo import DemoFailed, StopRequest, demo_stage


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        (signal.SIGINT, "Start nsqlookupd"),
        (signal.SIGTERM, "Publish a log"),
        (signal.SIGHUP, "Publish a log"),
        pytest.param(signal.SIGINT, "Archive all", marks=pytest.mark.slow),
    ],
)
def test_a_signal_at_any_step_leaves_no_files_or_processes(
    spawn_nsq: SpawnNsq, tmp_path: Path, number: int, moment: str
) -> None:
    process = spawn_nsq(["demo"], env={"TMPDIR": str(tmp_path)})
    for line in process.stdout:
        if line.startswith(moment.encode()):
            break  # this step has begun

    out, err = process.end(number, 30)

    assert (process.returncode, err) == (128 + number, b"")
    assert b"Everything was there" not in out
    assert os.listdir(tmp_path) == []

    def users() -> list[str]:
        """Return processes whose working directory is, or was, inside the temporary directory."""
        used = []
        for cwd in Path("/proc").glob("[0-9]*/cwd"):
            with suppress(OSError):  # ended meanwhile, or another user's
                used += [str(cwd)] * os.readlink(cwd).startswith(str(tmp_path))
        return used

    wait_until(lambda: not users(), what="no process is left in the directory")


def test_commands_run_the_package_of_the_demonstration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout that is not installed, for example."""
    (package := tmp_path / "nsqtools").mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("print('the same package')")
    monkeypatch.setattr(demo, "__file__", str(package / "demo.py"))
    with demo_stage(os.environ, StopRequest()) as stage:
        assert stage.run("stat").out == b"the same package\n"


@pytest.mark.parametrize("moment", ["before", "started"])
def test_a_signal_while_a_command_starts_ends_that_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            if moment == "before":
                os.kill(os.getpid(), signal.SIGTERM)
            super().__init__(*arguments, **more)
            started.append(self)
            if moment == "started":
                os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    stop_request = StopRequest()
    with demo_stage(os.environ, stop_request) as stage, exit_on_signals(stop_request.on_signal):
        monkeypatch.setattr("subprocess.Popen", Interrupted)
        with pytest.raises(SystemExit):
            stage.run("tail", "-t", "clicks", "--create")
        assert [process.poll() for process in started] == [-signal.SIGKILL]


def test_a_closed_pipe_leaves_no_files(nsq_env: dict[str, str], tmp_path: Path) -> None:
    command = ["sh", "-c", f"{' '.join(NSQ)} demo | head -n 1"]
    env = {**nsq_env, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, timeout=patience_s(60))

    assert done.stdout.startswith(b"Start nsqlookupd")
    wait_until(lambda: os.listdir(tmp_path) == [], what="the directory is gone", timeout_s=20)
    assert done.stderr == b""


def test_a_step_that_fails_or_hangs_is_named_and_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    with demo_stage(os.environ, StopRequest()) as stage:
        with pytest.raises(DemoFailed) as caught:
            stage.run("tail", "-t", "nothing", "--lookupd-http-address", stage.lookupd.http_address)
        monkeypatch.setattr("nsqtools.demo.TIMEOUT_S", 0.5)
        with pytest.raises(DemoFailed, match=r"took over 0\.5 s"):
            stage.run("tail", "-t", "clicks", "--create")

    failed = "nsq tail -t nothing --lookupd-http-address 127.0.0.1:4161 ended with status 3"
    assert failed in str(caught.value)
    assert "topic nothing does not exist" in str(caught.value)
    assert os.listdir(tmp_path) == []
