"""``nsq-NAME`` on PATH is ``nsq NAME``, as for git and kubectl."""

import subprocess
from pathlib import Path

import pytest
from plugins.cli import NSQ, RunNsq


@pytest.mark.parametrize("name", ["hello", "tail"])
def test_a_program_on_path_is_a_command_unless_built_in(name: str, tmp_path: Path) -> None:
    program = tmp_path / f"nsq-{name}"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\nexit 9\n')
    program.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        [*NSQ, name, "a b", "--help"], env=environ, capture_output=True, text=True, timeout=60
    )

    if name == "hello":
        assert (done.returncode, done.stdout) == (9, "a b\n--help\n")
    else:
        assert (done.returncode, "Usage: nsq tail" in done.stdout) == (0, True)


def test_a_path_or_an_option_is_not_a_plugin(
    run_nsq: RunNsq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nsq-x").write_text("#!/bin/sh\n")
    (tmp_path / "nsq-x").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    for word in ("/../x", "./x", "-x", "x"):
        assert run_nsq([word]).status == 2
