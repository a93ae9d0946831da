"""The manual: what its pages are made of, and that the two written by hand say what is so."""

from __future__ import annotations

import gzip
import re
import subprocess
from pathlib import Path

import pytest
from plugins.cli import RunNsq
from plugins.http_api import Nsqd

from nsqtools.cli.docs import roff
from nsqtools.cli.docs.archive_page import PAGES
from nsqtools.cli.docs.config_page import render_config_page
from nsqtools.cli.docs.man import render_man
from nsqtools.cli.docs.tree import Page, read_tree
from nsqtools.cli.options.connection import profile_keys
from nsqtools.cli.running.exit_status import ExitStatus


@pytest.fixture(scope="module")
def tree() -> Page:
    return read_tree()


def page_of(tree: Page, words: str) -> str:
    [page] = [each for each in tree.walk() if each.path == words]
    return render_man(page, tree)


def sections(page: str) -> list[str]:
    return re.findall(r"^\.SH (.*)$", page, re.MULTILINE)


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("--tls-key", r"\-\-tls\-key"),
        (r"'\n'", r"\(aq\en\(aq"),
        (".NAME.index", r"\&.NAME.index"),
        ("a `b` ~/c ^d", r"a \(gab\(ga \(ti/c \(had"),
    ],
)
def test_every_character_is_shown_as_it_is(text: str, escaped: str) -> None:
    assert roff.escape(text) == escaped


def test_long_lines_are_broken_but_not_in_examples() -> None:
    words = "word " * 30 + ".index"

    page = roff.page([".SH X", words.replace("word .index", "word " * 3 + ".index"), ".EX", words])

    *text, begin, example = page.splitlines()
    assert (begin, example) == (".EX", words)
    assert max(map(len, text)) <= roff.LONGEST_LINE
    assert [line for line in text if line.startswith(".")] == [".SH X"]


def test_the_markup_of_pages_written_by_hand() -> None:
    text = (
        "# NAME\n\nx - `y`\n\n## Sub\n\nOne *two*.\n\nThree\nfour.\n\n"
        "`a`::\n  Is\n  this.\nb::\n  That.\n\n    $ code 'x'\n\n{more}"
    )

    assert roff.page(roff.prose(text, {"more": ["rendered"]})).splitlines() == [
        ".SH NAME",
        r"x \- \fBy\fR",
        ".SS Sub",
        r"One \fItwo\fR\&.",
        ".PP",
        "Three four.",
        ".TP",
        r"\fBa\fR",
        "Is this.",
        ".TP",
        "b",
        "That.",
        ".PP",
        ".RS 4",
        ".EX",
        r"$ code \(aqx\(aq",
        ".EE",
        ".RE",
        "rendered",
    ]


def test_a_page_has_all_sections_in_the_usual_order(tree: Page) -> None:
    assert sections(page_of(tree, "nsq pub")) == [
        "NAME",
        "SYNOPSIS",
        "DESCRIPTION",
        "ARGUMENTS",
        "OPTIONS",
        "ENVIRONMENT",
        "FILES",
        "EXIT STATUS",
        "EXAMPLES",
        "SEE ALSO",
    ]
    for page in tree.walk():
        wanted = {"NAME", "SYNOPSIS", "OPTIONS", "ENVIRONMENT", "EXIT STATUS", "EXAMPLES"}
        assert wanted <= set(sections(render_man(page, tree))), page.path


def test_every_option_of_a_command_is_in_its_page(tree: Page) -> None:
    for page in tree.walk():
        text = render_man(page, tree)
        for option in page.options:
            for name in option.spellings:
                assert rf"\fB{roff.escape(name)}\fR" in text, (page.path, name)


def test_a_page_names_the_statuses_and_variables_of_its_command(tree: Page) -> None:
    tail, nsqd = page_of(tree, "nsq tail"), page_of(tree, "nsq nsqd")

    for status in ExitStatus:
        assert rf".TP{chr(10)}\fB{int(status)}\fR{chr(10)}" in tail
    assert r"\fB141\fR" not in nsqd
    for variable in ("NSQ_NSQD_TCP_ADDRESS", "NSQ_PROFILE", "NSQ_AUTH_SECRET", "NO_COLOR"):
        assert rf"\fB{variable}\fR" in tail
    assert "NSQ_AUTH_SECRET" not in page_of(tree, "nsq topic list")
    assert "NSQ_AUTH_SECRET" in page_of(tree, "nsq")


def test_pages_name_only_pages_that_exist(tree: Page) -> None:
    names = {"-".join(page.words) for page in tree.walk()}

    assert set(PAGES) <= names
    for page in tree.walk():
        named = re.findall(r"\\fB([^ ]+?)\\fR\(1\)", render_man(page, tree))
        assert {each.replace(r"\-", "-") for each in named} <= names, page.path


def test_every_key_of_the_configuration_file_is_explained(tree: Page) -> None:
    page = render_config_page(tree)

    for key in profile_keys():
        assert rf"\fB{roff.escape(key.replace('_', '-'))}\fR = " in page


def test_an_archive_is_as_its_page_says(run_nsq: RunNsq, nsqd: Nsqd, tmp_path: Path) -> None:
    bodies = [f"message {number}".encode() for number in range(6)]
    for part in (bodies[:3], bodies[3:]):
        for body in part:
            nsqd.publish("clicks", body)
        where = ["--nsqd-tcp-address", nsqd.tcp_address, "--output-dir", str(tmp_path)]
        form = ["--gzip", "--sync-count=2"]
        done = run_nsq(["to-file", "-t", "clicks", *where, *form, "--until-empty"])
        assert done.status == 0, done.err

    files = [file for file in tmp_path.iterdir() if not file.name.startswith(".")]
    assert files
    for file in files:
        head, *members = (tmp_path / f".{file.name}.index").read_text().splitlines()
        assert re.fullmatch(r"writer [0-9a-f]{32} \d+", head)
        for member in members:
            offset, length, count, low, high = map(int, member.split())
            assert low <= high
            # tail -c +N FILE | head -c LENGTH | zcat
            cut = file.read_bytes()[offset : offset + length]
            assert len(gzip.decompress(cut).splitlines()) == count
        assert offset + length == file.stat().st_size
    read = subprocess.run(
        "zcat *.log.gz | wc -l", shell=True, cwd=tmp_path, capture_output=True, check=True
    )
    assert int(read.stdout) == len(bodies)
    assert len(list(tmp_path.glob(".clicks@nsq_to_file.lock"))) == 1
