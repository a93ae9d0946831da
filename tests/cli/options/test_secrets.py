"""Who else sees a secret or changes the settings: files, the list of processes, other programs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from plugins.cli import GivenCommand, RunNsq

from nsqtools.cli.options.connection import ConsumerConnection
from nsqtools.cli.running.runtime import Session


@pytest.fixture
def show_secret(given_command: GivenCommand) -> None:
    """The command ``given`` prints its secret, and that in the environment of a program."""
    script = "import os; print(os.environ.get('NSQ_AUTH_SECRET', 'nothing'), flush=True)"

    def show(*, connection: ConsumerConnection, runtime: Session) -> None:
        secret = connection.options.get("auth_secret", "")
        runtime.stdout.write(f"{secret} ")
        runtime.stdout.flush()
        subprocess.run([sys.executable, "-c", script], check=True)

    given_command(show)


@pytest.mark.usefixtures("show_secret")
def test_a_program_that_is_started_does_not_inherit_the_secret(run_nsq: RunNsq) -> None:
    assert run_nsq(["given"], env={"NSQ_AUTH_SECRET": "hush"}).out == b"hush nothing\n"


@pytest.mark.usefixtures("show_secret")
def test_what_others_can_see_of_a_secret_brings_a_warning(run_nsq: RunNsq, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("hush\n")
    path.chmod(0o600)
    assert run_nsq(["given", "--auth-secret-file", str(path)]) == (0, b"hush nothing\n", "")
    path = path.rename(tmp_path / "open")
    path.chmod(0o604)
    done = run_nsq(["given", "--auth-secret-file", str(path)])
    assert f" warning: others can read the secret in {path} (mode 0604): chmod 600" in done.err
    done = run_nsq(["given", "-X", "auth_secret=hush"])
    assert done.out.startswith(b"hush")
    assert done.err.startswith("nsq: warning: the list of processes shows the secret")
    assert run_nsq(["given", "-X", "max_attempts=3"]).err == ""
    path = write_config(tmp_path, 'consumer-opt = { auth_secret = "hush" }\n', 0o644)
    assert f"others can read the secret in {path}" in run_nsq(["given"]).err


@pytest.mark.usefixtures("show_secret")
def test_a_configuration_file_that_others_can_change_is_named(
    run_nsq: RunNsq, tmp_path: Path
) -> None:
    path = write_config(tmp_path, "tls = false\n", 0o644)
    assert run_nsq(["given"]).err == ""
    path.chmod(0o666)
    warning = f"nsq: warning: {path} can be changed by every user (mode 0666); it decides"
    assert run_nsq(["given"]).err.startswith(warning)


@pytest.mark.usefixtures("show_secret")
def test_the_trust_policy_can_stand_in_a_profile(
    given_command: GivenCommand, run_nsq: RunNsq, tmp_path: Path
) -> None:
    def show(*, connection: ConsumerConnection, runtime: Session) -> None:
        options = connection.client_options()
        runtime.stdout.write(f"{options.allow_announced}|{options.auth_requires_tls}")

    given_command(show)
    profile = '[profiles.p]\nallow-announced = ["*.a:1", "b"]\nauth-requires-tls = true\n'
    write_config(tmp_path, profile, 0o600)

    assert run_nsq(["given", "-P", "p"]).out == b"*.a:1 b|True"
    flags = ["--allow-announced", "c", "--allow-announced", "d", "--no-auth-requires-tls"]
    assert run_nsq(["given", "-P", "p", *flags]).out == b"c d|False"


def write_config(home: Path, text: str, mode: int) -> Path:
    path = home / ".config/nsqtools/config.toml"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    path.chmod(mode)
    return path
