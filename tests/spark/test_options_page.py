"""nsq-spark(7) has every option of every source and sink, and no other."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

import nsqtools
from nsqtools.client.options import ClientOptions, option_name
from nsqtools.spark.archive_format import PUSHDOWN
from nsqtools.spark.archives.read_settings import archive_settings, stream_settings
from nsqtools.spark.format_options import Options
from nsqtools.spark.publishing.sink_plan import sink_settings
from nsqtools.spark.topic_stream import topic_settings

PAGE = Path(nsqtools.__file__).parents[1] / "man" / "nsq-spark.7.md"


def known_options(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What the code asks for, of all uses of both formats."""
    known: set[str] = set()

    def end(options: Options) -> None:
        known.update(options._known.values())

    monkeypatch.setattr(Options, "end", end)
    options = Options("nsq-archive", {"path": "/archive"})
    archive_settings(options), stream_settings(options)
    options.flag(PUSHDOWN, default=False)
    options.end()
    spool = {"channel": "spark", "spoolDir": "/spool"}
    topic_settings({"topic": "clicks", **spool}, {})
    topic_settings({"topicPattern": "c", "lookupdHttpAddress": "l:4161", **spool}, {})
    sink_settings({"topic": "clicks"}, {"body": "binary"}, {})
    of_clients = {option_name(field) for field in fields(ClientOptions)}  # nsq-options(7) has them
    return {name for name in known - of_clients if "_" not in name}


def test_the_page_has_all_options_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    if not PAGE.exists():
        pytest.skip("an installed package has no sources of its pages")
    text = PAGE.read_text("utf-8")
    section = text[text.index("## Options") : text.index("### Beside Spark's")]
    rows = [
        row.partition("|")[2].partition("|")[0] for row in section.splitlines() if row[:1] == "|"
    ]
    named = set(re.findall(r"`([A-Za-z]+)`", "".join(rows)))
    anywhere = set(re.findall(r"`([A-Za-z]+)`", section))

    known = known_options(monkeypatch)

    assert sorted(known - anywhere) == []
    assert sorted(named - known - {"body"}) == []
