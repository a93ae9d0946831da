"""Manual pages and guides match the command tree, and are well-formed and correct."""

import gzip
import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from manual.documents import documents, stale_documents
from manual.man import render_man
from manual.markdown import to_roff
from manual.tables import fill_lists
from manual.tree import Page, read_tree
from plugins.archives import finished_files, to_file
from plugins.cli import RunNsq
from plugins.daemons import Nsqd
from plugins.waiting import patience_s

from nsqtools.cli.options.connection import REPEATABLE

CHECKOUT = Path(__file__).parents[1]
GUIDES = sorted((CHECKOUT / "man").glob("*.md"))
MAN_PAGES = sorted((CHECKOUT / "man").glob("man?/*"))

CHECKS = ["bash -n nsq.bash", "shellcheck nsq.bash", "zsh -n _nsq", "fish --no-execute nsq.fish"]


def run(command: list[str], env: dict[str, str] | None = None) -> str:
    """The output of a checker on both streams; skip the test if it is not installed."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=patience_s(30))
    output = done.stdout + done.stderr
    return output or ("" if done.returncode == 0 else f"status {done.returncode}")


def test_committed_pages_are_up_to_date_and_machine_independent() -> None:
    rendered = documents(CHECKOUT)
    stale = list(stale_documents(CHECKOUT, rendered))

    assert not stale, (
        f"{', '.join(stale)}: not what the commands say.\n"
        "Run in the top directory: python .ci/manual"
    )
    assert len(rendered) == len(MAN_PAGES) + len(GUIDES)
    for path, text in rendered.items():
        for trace in (str(Path.home()) + "/", str(CHECKOUT), f'"{socket.gethostname()}"'):
            assert trace not in text, path


@pytest.mark.parametrize("check", CHECKS)
def test_the_scripts_are_well_formed(check: str) -> None:
    *command, name = check.split()
    assert run([*command, str(CHECKOUT / "completions" / name)]) == ""


def test_mandoc_accepts_the_manual_and_its_style() -> None:
    assert run(["mandoc", "-Tlint", "-Wstyle", *map(str, MAN_PAGES)]) == ""


def test_groff_accepts_the_manual(tmp_path: Path) -> None:
    """Use one long sheet, because tbl warns of rows that end at the end of a sheet."""
    one_sheet = tmp_path / "one_sheet"
    one_sheet.write_text(".pl 20000i\n")
    pages = map(str, (one_sheet, *MAN_PAGES))
    output = run(["groff", "-t", "-man", "-ww", "-Z", "-Tutf8", *pages])
    assert re.findall(r"^(?:troff: .*)?(?:warning|error)\b.*", output, re.MULTILINE) == []


def test_man_shows_the_pages() -> None:
    env = {"PATH": "/usr/bin:/bin", "MANWIDTH": "90", "LANG": "C.UTF-8", "MANPAGER": "cat"}
    for page, words in {
        "1 nsq-tail": ["-t, --topic TOPIC", "EXIT STATUS", r"--format '{timestamp:%H:%M:%S}"],
        "1 nsq-nsqd": ["-data-path string", "SEE ALSO"],
        "5 nsq-config": ["[profiles.staging]", "msg_timeout"],
        "7 nsq-options": ["--lookupd-http-address HOST:PORT", "Bounds: 10ms to 5m."],
        "7 nsq-migration": ["-topic-pattern, -topic-refresh  ", "(required)"],
    }.items():
        rendered = run(["man", "-M", str(CHECKOUT / "man"), *page.split()], env)
        for word in words:
            assert word in rendered, page


def test_the_guides_have_all_the_lists() -> None:
    text = "".join(guide.read_text("utf-8") for guide in GUIDES)

    for name in ("options", "client-options", "exit-status", "profile-keys"):
        assert f"<!-- {name}:begin -->\n- `" in text


# -- the references of the pages, and the guides about files


@pytest.fixture(scope="module")
def tree() -> Page:
    return read_tree()


def test_pages_refer_only_to_existing_pages(tree: Page) -> None:
    names = {("-".join(page.words), "1") for page in tree.walk()}
    names |= {tuple(path.stem.split(".")) for path in GUIDES}
    texts = {page.path: render_man(page, tree) for page in tree.walk()}
    texts |= {path.name: "\n".join(to_roff(path.read_text("utf-8"))) for path in GUIDES}

    for document, text in texts.items():
        named = re.findall(r"\\fB(nsq[^ ]*?)\\fR\((\d)\)", text)
        assert {(name.replace(r"\-", "-"), section) for name, section in named} <= names, document


def test_every_key_of_the_configuration_file_is_explained(tree: Page) -> None:
    [page] = [path.read_text("utf-8") for path in GUIDES if path.name == "nsq-config.5.md"]

    for key in REPEATABLE:
        assert f"- `{key.replace('_', '-')} = " in fill_lists(page, tree)


def test_an_archive_matches_its_page(run_nsq: RunNsq, nsqd: Nsqd, tmp_path: Path) -> None:
    bodies = [f"message {number}".encode() for number in range(6)]
    for part in (bodies[:3], bodies[3:]):
        for body in part:
            nsqd.publish("clicks", body)
        done = run_nsq(to_file(nsqd.tcp_address, tmp_path, "--gzip", "--sync-count=2", "-n", "3"))
        assert done.status == 0, done.err

    files = finished_files(tmp_path)
    assert files
    for file in files:
        head, *members, total = (tmp_path / f".{file.name}.index").read_text().splitlines()
        assert re.fullmatch(r"writer [0-9a-f]{32} \d+", head)
        first, last = members[0].split(), members[-1].split()
        count = sum(int(member.split()[2]) for member in members)
        size = file.stat().st_size
        assert total == f"total {len(members)} {count} {size} {first[3]} {last[4]}"
        for member in members:
            offset, length, count, low, high = map(int, member.split())
            assert low <= high
            # tail -c +N FILE | head -c LENGTH | zcat
            cut = file.read_bytes()[offset : offset + length]
            assert len(gzip.decompress(cut).splitlines()) == count
        assert offset + length == size
    read = subprocess.check_output("zcat *.log.gz | wc -l", shell=True, cwd=tmp_path)
    assert int(read) == len(bodies)
    assert (tmp_path / ".clicks@archive.lock").exists()
