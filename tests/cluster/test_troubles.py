"""What is tried again every few seconds is reported when it changes, and not each time."""

from __future__ import annotations

import logging

import pytest

from nsqtools.client import discovery
from nsqtools.cluster.topics import Troubles
from nsqtools.errors import ConnectionFailed


def test_each_trouble_is_reported_when_it_begins_changes_and_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    troubles = Troubles()
    for _ in range(3):
        troubles.has("a:4161", "a:4161 refuses")
        troubles.has("b:4161", "b:4161 is slow")
    troubles.has("a:4161", "a:4161 is slow")
    troubles.only(["b:4161"], "{} answers again")
    troubles.over("a:4161", "never reported")
    troubles.over("b:4161")

    assert caplog.messages == [
        "a:4161 refuses",
        "b:4161 is slow",
        "a:4161 is slow",
        "a:4161 answers again",
    ]


def test_a_thousand_topics_report_an_nsqlookupd_that_is_away_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "_said", {})
    caplog.set_level(logging.INFO)
    for _ in range(1000):
        discovery._report_failure("http://a:4161", ConnectionFailed("refused"))
    discovery._report_failure("http://a:4161", ConnectionFailed("slow"))

    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warned == ["lookup failed: refused", "lookup failed: slow"]
