"""Redriving dead letters from the console: with a plan, and without loss."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from plugins.browser import ServePages
from plugins.console import Answer, ask
from plugins.servers import AnyNsqd, Nsqd
from plugins.waiting import wait_until

from nsqtools.authd.authority import AuditFile
from nsqtools.errors import OutputError

Redrive = Callable[..., Answer]
FORM = {"Content-Type": "application/x-www-form-urlencoded"}


@pytest.fixture
def nsqd(any_nsqd: AnyNsqd) -> Nsqd:
    nsqd = any_nsqd()
    nsqd.create_channel("clicks", "billing")
    nsqd.create_channel("clicks.dead", "review")
    nsqd.publish("clicks.dead", b"1", b"2", b"3")
    return nsqd


@pytest.fixture
def redrive(nsqd: Nsqd, serve_pages: ServePages, tmp_path: Path) -> Redrive:
    url = serve_pages(
        nsqd_http=[nsqd.http_address], allow_changes=True, audit_log=tmp_path / "audit"
    )

    def redrive(is_confirmed: bool = False, **query: str) -> Answer:
        names = {"topic": "clicks.dead", "channel": "review", **query}
        page = f"{url}/redrive?{urlencode(names)}"
        answer = ask(page)
        if not is_confirmed:
            return answer
        token = re.search('name="csrf_token" value="([^"]+)"', answer.text)
        fields = {"csrf_token": token[1] if token else ""}
        return ask(page, "POST", headers=FORM, body=urlencode(fields))

    return redrive


def test_one_or_many_dead_letters_are_redriven_by_a_plan(
    redrive: Redrive, nsqd: Nsqd, tmp_path: Path
) -> None:
    assert 'name="to" required' in (form := redrive().text)
    assert 'value="clicks"' in form
    assert "Take one message of the 3 waiting" in redrive(to="clicks", count="1").text
    assert nsqd.depth("clicks.dead", "review") == 3

    one = redrive(is_confirmed=True, to="clicks", count="1").text
    assert "<b>1 message</b> published" in one
    wait_until(lambda: nsqd.depth("clicks", "billing") == 1, what="one is there")
    wait_until(lambda: nsqd.depth("clicks.dead", "review") == 2, what="the others are requeued")
    assert "<b>2 messages</b> published" in redrive(is_confirmed=True, to="clicks", count="10").text
    wait_until(lambda: nsqd.depth("clicks", "billing") == 3, what="all are there")
    stats = nsqd.channel_stats("clicks.dead", "review")
    assert (stats["depth"], stats["in_flight_count"]) == (0, 0)
    lines = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]
    assert [(line["state"], line.get("messages")) for line in lines] == [
        ("begun", None),
        ("done", 1),
        ("begun", None),
        ("done", 2),
    ]


def test_a_full_disk_of_the_audit_log_does_not_hide_what_was_published(
    redrive: Redrive, nsqd: Nsqd, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = AuditFile.write

    def write_first(self: AuditFile, **fields: Any) -> None:
        if fields["state"] != "begun":
            raise OutputError("cannot write the audit log (No space left on device)")
        write(self, **fields)

    monkeypatch.setattr(AuditFile, "write", write_first)
    published = redrive(is_confirmed=True, to="clicks", count="1")
    assert (published.status, "<b>1 message</b> published" in published.text) == (200, True)


def test_an_impossible_redrive_is_refused_and_messages_stay(redrive: Redrive, nsqd: Nsqd) -> None:
    for to, reason in (
        ("clicks.dead", "in this topic already"),
        ("nosuch", "The topic nosuch does not exist"),
        ("a b", "invalid topic name"),
    ):
        refused = redrive(to=to)
        assert (refused.status, reason in refused.text) == (400, True)
    assert redrive(channel="nosuch", to="clicks").status == 404
    assert nsqd.depth("clicks.dead", "review") == 3
    assert "nosuch" not in nsqd.topics()
