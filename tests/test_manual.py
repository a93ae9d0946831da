"""The manual: its pages name what there is, and what the guides say about files is true.

What the pages say is committed in ``man/``; `test_generated` holds it against a fresh rendering.
"""

from __future__ import annotations

import gzip
import re
import subprocess
from pathlib import Path

import pytest
from manual.man import render_man
from manual.markdown import to_roff
from manual.tables import fill_lists
from manual.tree import Page, read_tree
from plugins.archives import finished_files, to_file
from plugins.cli import RunNsq
from plugins.http_api import Nsqd

from nsqtools.cli.options.connection import REPEATABLE

GUIDES = sorted((Path(__file__).parents[1] / "man").glob("*.md"))


@pytest.fixture(scope="module")
def tree() -> Page:
    return read_tree()


def test_pages_name_only_pages_that_exist(tree: Page) -> None:
    names = {("-".join(page.words), "1") for page in tree.walk()}
    names |= {tuple(path.stem.split(".")) for path in GUIDES}
    texts = {page.path: render_man(page, tree) for page in tree.walk()}
    texts |= {path.name: "\n".join(to_roff(path.read_text("utf-8"))) for path in GUIDES}

    for where, text in texts.items():
        named = re.findall(r"\\fB(nsq[^ ]*?)\\fR\((\d)\)", text)
        assert {(name.replace(r"\-", "-"), section) for name, section in named} <= names, where


def test_every_key_of_the_configuration_file_is_explained(tree: Page) -> None:
    [page] = [path.read_text("utf-8") for path in GUIDES if path.name == "nsq-config.5.md"]

    for key in REPEATABLE:
        assert f"- `{key.replace('_', '-')} = " in fill_lists(page, tree)


def test_an_archive_is_as_its_page_says(run_nsq: RunNsq, nsqd: Nsqd, tmp_path: Path) -> None:
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
