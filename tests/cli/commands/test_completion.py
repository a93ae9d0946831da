"""``nsq completion``: the scripts that the package brings, and what is said instead of one."""

from __future__ import annotations

from pathlib import Path

import pytest
from plugins.cli import RunNsq

COMPLETIONS = Path(__file__).parents[3] / "completions"


@pytest.mark.parametrize(
    ("shell", "file"), [("bash", "nsq.bash"), ("zsh", "_nsq"), ("fish", "nsq.fish")]
)
def test_it_prints_the_script_of_a_shell(run_nsq: RunNsq, shell: str, file: str) -> None:
    assert run_nsq(["completion", shell]) == (0, (COMPLETIONS / file).read_bytes(), "")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "missing shell: bash, zsh or fish"),
        (["tcsh"], "no completion for 'tcsh', only for bash, zsh or fish"),
        (["bash", "zsh"], "no completion for 'bash zsh', only for bash, zsh or fish"),
    ],
)
def test_another_shell_is_a_usage_error(
    run_nsq: RunNsq, arguments: list[str], complaint: str
) -> None:
    status, out, err = run_nsq(["completion", *arguments])

    assert (status, out) == (2, b"")
    assert err == f"nsq: error: {complaint}\nhint: See nsq completion --help.\n"
