"""``nsq topic`` and ``nsq channel`` as processes: what they show, ask, change and refuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from plugins.cli import RunNsq, TerminalNsq
from plugins.clusters import RunningCluster, ValidJson
from plugins.http_api import Nsqd


@pytest.fixture
def nsqd(any_nsqd: Callable[..., Nsqd]) -> Nsqd:
    """An nsqd with two messages in clicks/arch, and an empty topic views."""
    nsqd = any_nsqd()
    nsqd.create_channel("clicks", "arch")
    nsqd.publish("clicks", b"a", b"b")
    nsqd.create_topic("views")
    return nsqd


def topics(nsqd: Nsqd) -> list[str]:
    return [topic["topic_name"] for topic in nsqd.stats()["topics"]]


def at(nsqd: Nsqd, *arguments: str) -> list[str]:
    return [*arguments, f"--nsqd-http-address={nsqd.http_address}"]


def test_listings_are_plain_columns_and_json(
    run_nsq: RunNsq, nsqd: Nsqd, valid_json: ValidJson
) -> None:
    def columns(*arguments: str) -> list[str]:
        out = run_nsq(at(nsqd, *arguments)).out.decode()
        return out.replace("\t", " ").replace(nsqd.http_address, "HERE").splitlines()

    assert columns("topic", "list") == [
        "topic nodes channels depth waiting messages paused",
        "clicks 1 1 0 2 2 no",
        "views 1 0 0 0 0 no",
    ]
    assert columns("channel", "list", "cl*") == [
        "topic channel nodes depth in_flight deferred clients paused",
        "clicks arch 1 2 0 0 0 no",
    ]
    assert columns("topic", "info", "clicks") == [
        "node channel depth disk in_flight messages clients paused",
        "HERE - 0 0 - 2 - no",
        "HERE arch 2 0 0 2 0 no",
    ]
    assert columns("channel", "info", "clicks", "arch") == [
        "node depth disk in_flight deferred requeued timed_out messages clients paused",
        "HERE 2 0 0 0 0 0 2 0 no",
    ]
    for schema, arguments in {
        "topic-list": ["topic", "list"],
        "channel-list": ["channel", "list"],
        "topic-info": ["topic", "info", "clicks"],
        "channel-info": ["channel", "info", "clicks", "arch"],
    }.items():
        assert valid_json(schema, run_nsq(at(nsqd, *arguments, "--json")).out)


def test_a_terminal_gets_tables(nsq_on_a_terminal: TerminalNsq, nsqd: Nsqd) -> None:
    shown = nsq_on_a_terminal(at(nsqd, "topic", "list"), env={"TERM": "dumb"}).read()

    assert [line.rstrip() for line in shown.splitlines()] == [
        "topic   nodes  channels  depth  waiting  messages  paused",
        "clicks      1         1      0        2         2  no",
        "views       1         0      0        0         0  no",
    ]


def test_topics_only_nsqlookupd_knows_are_listed(
    run_nsq: RunNsq, cluster: RunningCluster, valid_json: ValidJson
) -> None:
    created = run_nsq(["topic", "create", "clicks", "--json", *cluster.lookupd_options])
    listed = run_nsq(["topic", "list", *cluster.lookupd_options])
    options = cluster.lookupd_options
    shown = [
        run_nsq([*command, *options])
        for command in (
            ["topic", "info", "clicks"],
            ["lookup", "clicks"],
            ["stat", "--once", "-t", "clicks"],
        )
    ]
    deleted = run_nsq(["topic", "delete", "clicks", "--yes", *cluster.lookupd_options])

    assert len(valid_json("changes", created.out)) == 2
    assert listed.out.decode().splitlines()[1] == "clicks\t0\t0\t0\t0\t0\tno"
    assert [each.status for each in shown] == [0, 0, 3]
    assert all("clicks is registered with nsqlookupd, but no nsqd has it" in s.err for s in shown)
    assert deleted.err == "nsq: delete topic clicks: done on 2 nsqlookupd\n"
    assert run_nsq(["topic", "list", *cluster.lookupd_options]).out.count(b"\n") == 1


def test_a_dry_run_shows_the_plan_and_does_nothing(
    run_nsq: RunNsq, nsqd: Nsqd, valid_json: ValidJson
) -> None:
    shown = run_nsq(at(nsqd, "topic", "delete", "*", "--dry-run"))
    plan = valid_json(
        "changes", run_nsq(at(nsqd, "topic", "delete", "*", "--dry-run", "--json")).out
    )

    assert (shown.status, shown.err) == (0, "")
    assert shown.out.decode().splitlines()[1] == (
        f"nsqd\t{nsqd.http_address}\tdelete\tclicks\t-\t2\t0"
    )
    assert [(step["topic"], step["messages"]) for step in plan] == [("clicks", 2), ("views", 0)]
    assert topics(nsqd) == ["clicks", "views"]


def test_without_a_terminal_what_destroys_needs_yes(run_nsq: RunNsq, nsqd: Nsqd) -> None:
    refused = run_nsq(at(nsqd, "channel", "empty", "clicks", "arch"), stdin=b"y\n")
    done = run_nsq(at(nsqd, "channel", "empty", "clicks", "arch", "--yes"))

    assert refused.status == 2
    assert "there is no terminal to ask on" in refused.err
    assert "--yes" in refused.err
    assert (done.status, done.out) == (0, b"")
    assert done.err == "nsq: empty channel clicks/arch: done on 1 nsqd\n"
    assert nsqd.depth("clicks", "arch") == 0


@pytest.mark.parametrize(("answer", "status", "left"), [("", 1, 2), ("n", 1, 2), ("y", 0, 1)])
def test_a_terminal_is_asked_and_no_is_the_default(
    nsq_on_a_terminal: TerminalNsq, nsqd: Nsqd, answer: str, status: int, left: int
) -> None:
    terminal = nsq_on_a_terminal(at(nsqd, "topic", "delete", "clicks"), columns=120)
    terminal.expect_exact("Go on? [y/N] ")
    plan = terminal.before
    terminal.sendline(answer)
    terminal.read()
    terminal.close()

    assert f"delete topic clicks on nsqd {nsqd.http_address}, 2 messages are lost" in plan
    assert terminal.exitstatus == status
    assert len(topics(nsqd)) == left


def test_pausing_asks_nobody(run_nsq: RunNsq, nsqd: Nsqd) -> None:
    for command, paused in (("pause", True), ("unpause", False)):
        assert run_nsq(at(nsqd, "topic", command, "clicks")).status == 0
        assert run_nsq(at(nsqd, "channel", command, "clicks", "arch")).status == 0
        assert nsqd.topic_stats("clicks")["paused"] is paused
        assert nsqd.channel_stats("clicks", "arch")["paused"] is paused


def test_what_is_partly_done_is_reported_node_by_node(
    run_nsq: RunNsq, cluster: RunningCluster
) -> None:
    first, second = cluster.nsqds
    second.create_topic("clicks")
    first.kill()

    result = run_nsq(["topic", "pause", "clicks", *cluster.nsqd_options])

    assert result.status == 6
    assert f"left out: cannot connect to http://{first.http_address}" in result.err
    assert "nsq: pause topic clicks: done on 1 nsqd" in result.err
    assert second.topic_stats("clicks")["paused"]


@pytest.mark.parametrize(
    ("arguments", "status", "line"),
    [
        (["topic", "delete", "click", "--yes"], 3, "topic click does not exist"),
        (["topic", "info", "web.*"], 3, "no topic matches web.*"),
        (["channel", "info", "clicks", "arhc"], 3, "channel arhc does not exist"),
        (["channel", "create", "nothing", "arch"], 3, "topic nothing does not exist"),
        (["topic", "create", "a b"], 2, "invalid topic name 'a b'"),
        (["topic", "delete"], 2, "missing argument"),
        (["topic", "destroy"], 2, "no such command"),
    ],
)
def test_bad_input_is_one_line_and_the_documented_status(
    run_nsq: RunNsq, nsqd: Nsqd, arguments: list[str], status: int, line: str
) -> None:
    result = run_nsq(at(nsqd, *arguments))

    assert (result.status, result.out) == (status, b"")
    assert result.err.lower().startswith(f"nsq: error: {line}")
    assert topics(nsqd) == ["clicks", "views"]
