"""``nsq web --users``: each user sees, reads and changes what the users file allows."""

import base64
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from plugins.console import Answer, Console, MakeConsole
from plugins.daemons import GoNsqlookupd
from plugins.servers import AnyNsqd, Nsqd
from plugins.waiting import wait_until

from nsqtools.authd.users import hash_token
from nsqtools.web.pages import PAGES

ANN = f"""\
[users.ann]
tokens = ["{hash_token("ann's")}"]
publish = ['orders\\..*']
"""
BOB = f"""\
[users.bob]
tokens = ["{hash_token("bob's")}"]
subscribe = {{ 'orders\\.eu' = ['audit'] }}
"""


@pytest.fixture
def nsqd(any_nsqd: AnyNsqd, lookupd: GoNsqlookupd) -> Nsqd:
    """An nsqd with topics of ann, a channel of bob, and a topic that neither may see."""
    nsqd = any_nsqd(f"--lookupd-tcp-address={lookupd.tcp_address}")
    for topic, channel in (
        ("orders.eu", "audit"), ("orders.eu", "billing"), ("orders.us", "all"),
        ("payroll", "secret"),
    ):  # fmt: skip
        nsqd.create_channel(topic, channel)
    nsqd.publish("orders.eu", b"order 1")
    nsqd.publish("payroll", *[b"salary"] * 4321)
    lookupd.post("/channel/create", topic="payroll", channel="secret")
    wait_until(lambda: lookupd.producers("payroll"), what="nsqd is registered")
    return nsqd


@pytest.fixture
def served(nsqd: Nsqd, lookupd: GoNsqlookupd, console: MakeConsole, tmp_path: Path) -> Console:
    """The console of that cluster, which allows changes and messages."""
    users = tmp_path / "users.toml"
    users.write_text(ANN + BOB)
    users.chmod(0o600)
    started = console(
        f"--lookupd-http-address={lookupd.http_address}", f"--users={users}",
        "--allow-changes", "--show-messages", "--refresh=200ms",
    )  # fmt: skip
    for name in ("ann", "bob"):
        wait_until(
            lambda name=name: "orders.eu" in look(started, name, "/").text, what="a sample is taken"
        )
    return started


def look(console: Console, user: str, path: str, method: str = "GET", **more: Any) -> Answer:
    login = base64.b64encode(f"{user}:{user}'s".encode()).decode()
    headers = {"Authorization": f"Basic {login}", **more.pop("headers", {})}
    if method == "POST":
        return console.post(path, headers=headers, **more)
    return console.get(path, headers=headers, method=method, **more)


def form(console: Console, user: str, path: str, **fields: str) -> Answer:
    """Send the form of a page with its token."""
    page_of_form = look(console, user, path)
    token = re.search(r'name="csrf_token" value="([^"]+)"', page_of_form.text)
    if token is None:
        return page_of_form
    kind = {"Content-Type": "application/x-www-form-urlencoded"}
    body = urlencode({"csrf_token": token[1], **fields})
    return look(console, user, path, "POST", body=body, headers=kind)


def test_no_page_shows_topics_that_the_user_may_not_see(served: Console, nsqd: Nsqd) -> None:
    names = {"topic": "orders.eu", "channel": "audit", "node": nsqd.http_address}
    pages = [page.format(**names) for page in PAGES if page != "/consumer"]
    pages += ["/metrics", "/series", "/series?topic=orders.eu", "/messages?topic=orders.eu"]
    documents = ["topics", "topics?inactive=true", "topics/orders.eu", "nodes", "counter"]
    pages += [f"/api/{name}" for name in (*documents, f"nodes/{nsqd.http_address}")]

    answers = {page: look(served, "bob", page) for page in pages}

    for page, answer in answers.items():
        assert answer.status == 200, page
        assert not re.search("payroll|secret|billing|orders.us|4,?321", answer.text), page
    assert "orders.eu" in answers["/metrics"].text
    assert answers["/api/topics"].json()["topics"] == ["orders.eu"]


SAMPLE_TIME = re.compile(r"\d+\.\d+|\d\d:\d\d:\d\d")


def test_a_hidden_topic_answers_like_a_missing_one(served: Console) -> None:
    for path in ("/api/topics/{}", "/api/topics/{}/secret", "/topics/{}", "/topics/{}/secret"):
        hidden, missing = (
            look(served, "bob", path.format(topic)) for topic in ("payroll", "missing")
        )
        assert hidden.status == missing.status
        # another sample may have been taken meanwhile
        texts = (SAMPLE_TIME.sub("", answer.text) for answer in (hidden, missing))
        assert next(texts).replace("payroll", "missing") == next(texts)


def test_a_user_changes_only_what_the_file_allows(served: Console) -> None:
    for user, method, path, body, status in [
        ("ann", "POST", "/api/topics/orders.eu", '{"action": "pause"}', 200),
        ("ann", "POST", "/api/topics", '{"topic": "orders.new", "channel": "c"}', 200),
        ("ann", "POST", "/api/topics", '{"topic": "payroll"}', 403),
        ("ann", "DELETE", "/api/topics/payroll", None, 403),
        ("bob", "POST", "/api/topics/orders.eu/audit", '{"action": "empty"}', 200),
        ("bob", "POST", "/api/topics/orders.eu/billing", '{"action": "empty"}', 403),
        ("bob", "POST", "/api/topics/orders.eu", '{"action": "pause"}', 403),
        ("bob", "DELETE", "/api/topics/orders.eu", None, 403),
    ]:
        assert look(served, user, path, method, body=body).status == status, (user, method, path)


def test_a_form_for_a_change_that_is_not_allowed_shows_no_plan(served: Console) -> None:
    answer = look(served, "bob", "/act?action=delete&topic=payroll")
    assert answer.status == 403
    assert "secret" not in answer.text


def test_a_user_reads_only_messages_of_subscribable_channels(served: Console) -> None:
    read = form(served, "bob", "/messages?topic=orders.eu&channel=audit", count="1", for_s="2")
    assert "order 1" in read.text
    for user, place in (
        ("ann", "topic=orders.eu"),
        ("bob", "topic=orders.eu&channel=billing"),
        ("bob", "topic=payroll"),
    ):
        assert look(served, user, f"/messages?{place}").status == 403


def test_changes_of_the_users_file_apply_to_running_consoles(
    served: Console, tmp_path: Path
) -> None:
    (tmp_path / "users.toml").write_text(ANN.replace("orders", "carts"))
    wait_until(lambda: look(served, "bob", "/api/topics").status == 401, what="bob is refused")
    wait_until(
        lambda: look(served, "ann", "/api/topics").json()["topics"] == [], what="ann sees less"
    )


def test_without_a_login_nothing_is_shown(served: Console) -> None:
    for path in ("/", "/metrics", "/api/topics", "/series"):
        assert served.get(path).status == 401
