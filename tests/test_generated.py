"""Manual pages and guides are what the command tree says, and well-formed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from manual.documents import documents, stale_documents
from plugins.waiting import patience_s

CHECKOUT = Path(__file__).parents[1]
GUIDES = sorted((CHECKOUT / "man").glob("*.md"))
MAN_PAGES = sorted((CHECKOUT / "man").glob("man?/*"))

CHECKS = ["bash -n nsq.bash", "shellcheck nsq.bash", "zsh -n _nsq", "fish --no-execute nsq.fish"]


@pytest.fixture(scope="module")
def rendered() -> dict[str, str]:
    return documents(CHECKOUT)


def run(command: list[str], env: dict[str, str] | None = None) -> str:
    """What a checker says, on either stream; skips where it is not there."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=patience_s(30))
    said = done.stdout + done.stderr
    return said or ("" if done.returncode == 0 else f"status {done.returncode}")


def test_what_is_committed_is_a_fresh_rendering(rendered: dict[str, str]) -> None:
    stale = list(stale_documents(CHECKOUT, rendered))

    assert not stale, (
        f"{', '.join(stale)}: not what the commands say.\n"
        "Run in the top directory: python .ci/manual"
    )


def test_a_rendering_says_nothing_of_the_machine(rendered: dict[str, str]) -> None:
    import socket

    assert len(rendered) == len(MAN_PAGES) + len(GUIDES)
    for path, text in rendered.items():
        for trace in (str(Path.home()) + "/", str(CHECKOUT), f'"{socket.gethostname()}"'):
            assert trace not in text, path


@pytest.mark.parametrize("check", CHECKS)
def test_the_scripts_are_well_formed(check: str) -> None:
    *command, name = check.split()
    assert run([*command, str(CHECKOUT / "completions" / name)]) == ""


def test_mandoc_has_nothing_against_the_manual_not_even_its_style() -> None:
    assert run(["mandoc", "-Tlint", "-Wstyle", *map(str, MAN_PAGES)]) == ""


def test_groff_has_nothing_against_the_manual() -> None:
    """But that a row of a table, just one, ends where a sheet ends: tbl takes it for too tall."""
    said = run(["groff", "-t", "-man", "-ww", "-Z", "-Tutf8", *map(str, MAN_PAGES)])
    warnings = re.findall(r"^(?:troff: .*)?warning\b.*", said, re.MULTILINE)
    assert len(warnings) == said.count("table text block will not fit on one page") <= 2, warnings


def test_man_shows_the_pages() -> None:
    env = {"PATH": "/usr/bin:/bin", "MANWIDTH": "90", "LANG": "C.UTF-8", "MANPAGER": "cat"}
    for page, words in {
        "1 nsq-tail": ["-t, --topic TOPIC", "EXIT STATUS", r"--format '{timestamp:%H:%M:%S}"],
        "1 nsq-nsqd": ["-data-path string", "SEE ALSO"],
        "5 nsq-config": ["[profiles.staging]", "msg_timeout"],
        "7 nsq-options": ["--lookupd-http-address HOST:PORT", "Bounds: 10ms to 5m."],
        "7 nsq-migration": ["-topic-pattern, -topic-refresh  ", "(required)"],
    }.items():
        shown = run(["man", "-M", str(CHECKOUT / "man"), *page.split()], env)
        for each in words:
            assert each in shown, page


def test_the_guides_have_all_the_lists() -> None:
    text = "".join(guide.read_text("utf-8") for guide in GUIDES)

    for name in ("options", "client-options", "exit-status", "profile-keys"):
        assert f"<!-- {name}:begin -->\n- `" in text
