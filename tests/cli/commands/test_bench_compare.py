"""``nsq bench compare``: settings and programs in turns, counted at a real nsqd."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from plugins.cli import RunNsq, SpawnNsq, TerminalNsq
from plugins.clusters import ValidJson
from plugins.daemons import GO_PROGRAMS, GoNsqd
from plugins.http_api import Nsqd
from plugins.waiting import wait_until

SETTINGS = ["pub --batch 10 -n 300 --warm-up 0s", "pub --batch 100 -n 300 --warm-up 0s"]
OURS = f"{sys.executable} -m nsqtools"
PROGRAMS = {
    "pub": (
        f"pub {OURS} pub -t {{topic}} --nsqd-tcp-address {{nsqd}}",
        f"pub {GO_PROGRAMS}/to_nsq -topic {{topic}} -nsqd-tcp-address {{nsqd}}",
    ),
    "sub": (
        f"sub {OURS} tail -t {{topic}} -c {{channel}} -n {{count}} --nsqd-tcp-address {{nsqd}}",
        f"sub {GO_PROGRAMS}/nsq_tail -topic {{topic}} -channel {{channel}} "
        "-nsqd-tcp-address {nsqd}",
    ),
}


def compare(nsqd: Nsqd, *arguments: str) -> list[str]:
    place = [f"--nsqd-tcp-address={nsqd.tcp_address}", f"--nsqd-http-address={nsqd.http_address}"]
    return ["bench", "compare", *arguments, *place]


def topics(nsqd: Nsqd) -> list[str]:
    return [topic["topic_name"] for topic in nsqd.stats()["topics"] or []]


def test_settings_are_measured_in_turns_and_leave_nothing(
    nsqd: GoNsqd, run_nsq: RunNsq, valid_json: ValidJson, tmp_path: Path
) -> None:
    page = tmp_path / "report.html"

    result = run_nsq(compare(nsqd, *SETTINGS, "--rounds=2", "--json", f"--html={page}"))

    assert result.status == 0, result.err
    document = valid_json("bench compare", result.out)
    assert (document["mode"], document["rounds"]) == ("pub", 2)
    for side, what, commands in (("a", SETTINGS[0], 30), ("b", SETTINGS[1], 3)):
        found = document[side]
        assert (found["what"], found["program"], found["nsqds"]) == (
            what,
            False,
            [nsqd.tcp_address],
        )
        assert [each["messages"] for each in found["rounds"]] == [300, 300]
        assert all(each["cpu_us_per_message"] > 0 for each in found["rounds"])
        assert found["latency_ms"]["count"] == 2 * commands
    assert [each["is_noise"] for each in document["differences"]] == [None] * 5
    wait_until(lambda: topics(nsqd) == [], what="the topics are gone")
    assert page.read_text().count("<svg") == 6


@pytest.mark.parametrize("mode", PROGRAMS)
def test_programs_are_counted_at_nsqd_and_their_processor_time_by_the_system(
    nsqd: GoNsqd, run_nsq: RunNsq, valid_json: ValidJson, mode: str
) -> None:
    result = run_nsq(compare(nsqd, *PROGRAMS[mode], "--rounds=1", "--count=2000", "--json"))

    assert result.status == 0, result.err
    document = valid_json("bench compare", result.out)
    for side in (document["a"], document["b"]):
        [only] = side["rounds"]
        assert (side["program"], only["messages"], side["latency_ms"]) == (True, 2000, None)
        assert only["seconds"] > 0
        assert only["cpu_us_per_message"] > 0
    # Python alone needs 10 ms to start, and that is counted
    assert document["a"]["rounds"][0]["cpu_us_per_message"] * 2000 > 10_000
    assert topics(nsqd) == []


def test_two_nsqd_are_compared_by_addresses_of_the_sides(
    nsqd: GoNsqd, run_nsq: RunNsq, valid_json: ValidJson
) -> None:
    sides = ["sub --embedded -n 500", f"sub -n 500 --nsqd-tcp-address {nsqd.tcp_address}"]
    sides[1] += f" --nsqd-http-address {nsqd.http_address}"

    result = run_nsq(
        ["bench", "compare", *sides, "--rounds=1", "--json", "--nsqd-tcp-address=127.0.0.1:1"]
    )

    assert result.status == 0, result.err
    document = valid_json("bench compare", result.out)
    assert document["b"]["nsqds"] == [nsqd.tcp_address] != document["a"]["nsqds"]
    assert topics(nsqd) == []


def test_on_a_terminal_it_shows_both_sides_and_in_a_pipe_rows(
    nsqd: GoNsqd, run_nsq: RunNsq, nsq_on_a_terminal: TerminalNsq
) -> None:
    shown = nsq_on_a_terminal(
        compare(nsqd, *SETTINGS, "--rounds=1"), env={"NO_COLOR": "1"}, columns=100
    ).read()
    piped = run_nsq(compare(nsqd, *SETTINGS, "--rounds=1"))

    for words in ("round 1 of 1, B: ", "A  pub --batch 10 ", "messages/s", "too few rounds", "█"):
        assert words in shown
    head, *rows = piped.out.decode().splitlines()
    assert head.split("\t")[:2] == ["figure", "a_median"]
    assert [row.split("\t")[0] for row in rows][:3] == [
        *("messages_per_s", "bytes_per_s", "cpu_us_per_message")
    ]


@pytest.mark.parametrize(
    ("sides", "status", "complaint"),
    [
        (["pub", "sub"], 2, "pub and sub cannot be compared"),
        (["pub --bach 1", "pub"], 2, "no such option: --bach"),
        (["clicks", "pub"], 2, "'clicks' is not a side to compare"),
        (["pub 'x", "pub"], 2, "cannot be split into words"),
        (["pub nsq pub -t mine", "pub"], 2, "the command line of nsq has no {topic}"),
        (["e2e nsq {topic} {channel}", "e2e"], 2, "a program cannot be measured by e2e"),
        (["pub nosuch {topic}", "pub"], 2, "A: cannot run nosuch (No such file or directory)"),
        (["pub sh -c 'echo why >&2; exit 9' {topic}", "pub"], 1, "A: sh ended with status 9"),
    ],
)
def test_what_cannot_be_compared_is_said(
    nsqd: GoNsqd, run_nsq: RunNsq, sides: list[str], status: int, complaint: str
) -> None:
    result = run_nsq(compare(nsqd, *sides, "--count=10", "--json"))

    error = json.loads(result.err)
    assert (result.status, error["status"], result.out) == (status, status, b"")
    assert complaint in error["message"]
    if "why" in sides[0]:
        assert error["hint"] == "It said: why"
    assert topics(nsqd) == []


def test_an_interrupt_ends_it_with_the_rounds_that_are_complete(
    nsqd: GoNsqd, spawn_nsq: SpawnNsq, valid_json: ValidJson
) -> None:
    process = spawn_nsq(
        compare(nsqd, "pub -n 100 --warm-up 0s", "pub -n 100", "--rounds=100000", "--json")
    )
    seen: set[str] = set()  # each round has a topic of its own

    def new_topics() -> int:
        seen.update(topics(nsqd))
        return len(seen)

    wait_until(lambda: new_topics() > 4, what="two rounds of each")

    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)

    assert process.returncode == 130
    document = valid_json("bench compare", out)
    assert document["interrupted"]
    wait_until(lambda: topics(nsqd) == [], what="the topics are gone")


def test_a_report_of_one_measurement_is_a_page_too(
    nsqd: GoNsqd, run_nsq: RunNsq, tmp_path: Path
) -> None:
    page, nowhere = tmp_path / "report.html", tmp_path / "missing" / "report.html"
    place = [f"--nsqd-tcp-address={nsqd.tcp_address}"]

    done = run_nsq(["bench", "pub", "-n", "200", "--warm-up=0s", f"--html={page}", *place])
    refused = run_nsq(["bench", "pub", f"--html={nowhere}", *place])

    assert (done.status, refused.status) == (0, 3)
    body = page.read_text().partition("<body>")[2].partition("</html>")[0]
    assert ElementTree.fromstring(f"<body>{body}").find("h1") is not None
    assert body.count("<svg") == 1
    assert f"directory {nowhere.parent} for report.html does not exist" in refused.err
