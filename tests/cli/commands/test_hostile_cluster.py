"""No command lets a hostile cluster control the terminal or forge a line of output."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from plugins.cli import RunNsq, all_commands
from plugins.hostile_cluster import EVIL, HostileCluster, raw_marks
from pyarrow import Table, parquet

from nsqtools.protocol.frames import WireMessage
from nsqtools.records.envelope import encode_many

LOOKUP, HTTP, TCP, BOTH = "lookup", "http", "tcp", "both"

# For each command: the addresses that it gets, and the ways to run it.
RUNS: dict[str, tuple[str, list[str]]] = {
    "tail": (BOTH, ["{from} -n 2 --create --force", "{from} -n 2 --json"]),
    "peek": (BOTH, ["{from} -n 2 --force", "{from} -n 2 --json"]),
    "pub": (TCP, ["-t clicks --retry-timeout 0s -v"]),
    "to-file": (LOOKUP, ["{from} --for 300ms -v --output-dir {dir}/out"]),
    "to-nsq": (BOTH, ["{from} --create --for 300ms -v --no-loop-guard {to}"]),
    "to-http": (BOTH, ["{from} --create --for 300ms -v --post http://{node}/x"]),
    "stat": (
        HTTP,
        [f"--once {more}" for more in ("", "--json", "-o csv", "--show clients --json")]
        + [f"--once --show {view}" for view in ("nodes", "clients", "memory")],
    ),
    "archive verify": ("", ["{archive}", "{archive} --json"]),
    "archive repair": ("", ["{archive}"]),
    "archive cat": ("", ["{archive}", "{archive} --bodies", "{archive} --pretty"]),
    "archive info": ("", ["{archive}", "{archive} --json"]),
    "archive schema": ("", ["{archive}"]),
    "archive convert": ("", ["{archive} -o {dir}/lake"]),
    "archive compact": ("", ["{archive} -o {dir}/compacted --processes 1"]),
    "archive vacuum": ("", ["{archive} --dry-run"]),
    "archive erase": ("", ["{archive} --where .x", "{archive} --where false --dry-run"]),
    "replay": (TCP, ["{archive} --dry-run", "{archive} --yes --retry-timeout 0s"]),
    "redrive": (TCP, ["{dead} --dry-run", "{dead} --retry-timeout 0s"]),
    "topic list": (LOOKUP, ["", "--json"]),
    "topic info": (LOOKUP, ["clicks", "clicks --json", "missing"]),
    "topic create": (HTTP, ["new"]),
    "topic delete": (LOOKUP, ["* --dry-run", "* --dry-run --json", "* --yes", "*"]),
    "topic empty": (LOOKUP, ["* --yes --channels", "* --yes --json"]),
    **dict.fromkeys(("topic pause", "topic unpause"), (LOOKUP, ["*"])),
    "channel list": (LOOKUP, ["", "--json"]),
    "channel info": (LOOKUP, ["clicks archive", "clicks archive --json", "clicks missing"]),
    "channel create": (HTTP, ["clicks new"]),
    "channel delete": (LOOKUP, ["clicks * --dry-run", "clicks * --yes", "clicks *"]),
    "channel empty": (LOOKUP, ["clicks * --yes"]),
    **dict.fromkeys(("channel pause", "channel unpause"), (LOOKUP, ["clicks *"])),
    "nodes": (LOOKUP, ["", "--json"]),
    "lookup": (LOOKUP, ["clicks", "clicks --json", "missing"]),
    "ping": (LOOKUP, ["", "--json"]),
    "info": (LOOKUP, ["", "--json"]),
    "tombstone": (LOOKUP, ["clicks {node} --yes"]),
    "topology export": (LOOKUP, [""]),
    "topology plan": (LOOKUP, ["{topology}", "{topology} --json"]),
    "topology apply": (LOOKUP, ["{topology}", "{topology} --prune --idle 0s --yes"]),
    "check": (
        LOOKUP,
        [
            f"--window 0s --lake {{lake}} --max-lake-age 1s --format {form}"
            for form in ("text", "json", "nagios", "prometheus")
        ],
    ),
    "to-exec": (BOTH, ["{from} --create --for 300ms -v -- true"]),
    "drain": ("", ["{node} --to {node} --yes", "{node} --to {node} --dry-run"]),
    "config get": (HTTP, ["log_level", "log_level --json"]),
    "config set": (HTTP, ["log_level debug"]),
}

# These commands talk to no foreign cluster, or (Spark, bench) show only numbers of it. tests/web
# has the console, tests/schedule has hostile requests, and top has its own test below. queue
# reads names from files only, and authd reads its own file.
ELSEWHERE = re.compile(
    "__complete.*|authd .*|bench .*|compat|completion|config (profiles|show|use)|demo|mcp|"
    "nsqd|nsqlookupd|queue .*|schedule .*|schema|spark .*|top|web|work"
)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Messages of evil topics, and a damaged line."""
    path = tmp_path_factory.mktemp("archive") / "t\x1b]0;pwned\x07.log"
    evil = EVIL.encode("utf-8", "replace").decode()
    messages = [WireMessage(1, 1, b"\x1b" * 16, body) for body in (evil.encode(), b"\x9b\xff")]
    path.write_bytes(encode_many(evil, evil, messages) + evil.encode() + b"\n")
    [line, _] = encode_many(evil, evil, messages).splitlines()
    dead = json.loads(line) | {"error": evil, "failed_at": "2026-11-22T00:00:00Z"}
    path.with_name("dead.jsonl").write_text(json.dumps(dead) + "\n")
    return path


def test_every_command_is_covered() -> None:
    assert {name for name in all_commands() if not ELSEWHERE.fullmatch(name)} == set(RUNS)


@pytest.mark.parametrize("command", RUNS)
def test_a_hostile_cluster_sends_no_control_characters_to_the_terminal(
    command: str, hostile_cluster: HostileCluster, run_nsq: RunNsq, archive: Path, tmp_path: Path
) -> None:
    for arguments in lines(command, hostile_cluster, archive, tmp_path):
        on_screen = run_nsq(arguments, terminal=True, stdin=b"n\n").out
        assert not raw_marks(on_screen, is_one_line=False), (arguments, on_screen)
        assert b"This is a bug" not in on_screen, (arguments, on_screen)

        piped = run_nsq(arguments, stdin=b"a line\n")
        assert not raw_marks(piped.err.encode()), (arguments, piped.err)
        # bodies and metrics go into a pipe as they are
        if command not in {"tail", "peek", "archive cat", "stat"}:
            assert "a forged line" not in raw_marks(piped.out), (arguments, piped.out)


def lines(command: str, cluster: HostileCluster, archive: Path, directory: Path) -> list[list[str]]:
    way, runs = RUNS[command]
    tcp = f"--nsqd-tcp-address={cluster.tcp_address}"
    http = f"--nsqd-http-address={cluster.http_address}"
    lookup = f"--lookupd-http-address={cluster.http_address}"
    where = {LOOKUP: [lookup], HTTP: [http], TCP: [tcp], BOTH: [tcp, http], "": []}[way]
    (directory / "topology").write_text('topics.clicks.channels = ["new"]\n')
    names: dict[str, object] = {"archive": archive, "dir": directory, "node": cluster.http_address}
    names |= {"topology": directory / "topology", "dead": archive.with_name("dead.jsonl")}
    names["lake"] = evil_lake(directory) if command == "check" else ""
    names |= {"from": "-t clicks -c archive", "to": tcp.replace("--", "--destination-")}
    return [[*command.split(), *where, *run.format(**names).split()] for run in runs]


def evil_lake(directory: Path) -> Path:
    """Write a Parquet table with a misfit; its topic and path have control characters."""
    lake = directory / "lake\x1b]0;pwned\x07"
    folder = lake / "topic=t%1B%5D0%3Bpwned%07" / "date=2026-11-29"
    if not folder.exists():
        folder.mkdir(parents=True)
        row = {"ts_ns": time.time_ns(), "body": "x", "_error": "n is not int64"}
        parquet.write_table(Table.from_pylist([row]), folder / "a.parquet")
    return lake


TEMPLATE = "--format={topic} {nsqd} {id} {body}\\n"


@pytest.mark.parametrize(
    "option", [TEMPLATE, "--format={body:json}\\n", "--log-format=json", "--debug"]
)
def test_tail_escapes_messages_in_every_format(
    option: str, hostile_cluster: HostileCluster, run_nsq: RunNsq, tmp_path: Path
) -> None:
    [arguments, _] = lines("tail", hostile_cluster, tmp_path, tmp_path)

    on_screen = run_nsq([*arguments, option, "-vv"], terminal=True)
    piped = run_nsq([*arguments, option, "-vv"])

    assert b"pwned" in on_screen.out
    assert not raw_marks(on_screen.out, is_one_line=False)
    assert not raw_marks(piped.err.encode())


def test_top_shows_no_control_characters_of_a_hostile_cluster(
    hostile_cluster: HostileCluster, nsq_on_a_screen: Callable[..., object]
) -> None:
    here = f"--nsqd-http-address={hostile_cluster.http_address}"
    top = nsq_on_a_screen(["top", here, "--allow-changes"], columns=200)
    top.wait_for("pwned")
    top.press("d")
    top.wait_for("not a name that NSQ allows")
    top.press("jd")  # clicks: the plan names its consumers, and the refusal is evil
    top.wait_for("type clicks", "connected, may create it again", "pwned")
    top.press("clicks\r")
    top.wait_for("failed: ", "pwned")
    top.press("\x1b")
    top.wait_for("? help", gone="failed")
    top.press("2")
    top.wait_for("state", hostile_cluster.http_address, "pwned")
    top.press("3")
    top.wait_for("client_id", "archive", "pwned")
    top.press("1/nsq\r")
    top.wait_for("filter: nsq", "pwned", gone="clicks")
    top.press("\r")
    top.wait_for("topics > ", "archive")
    top.press("q")
    top.wait_for_end()

    pointer = b"\x1b]22;default\x07"  # textual's own, of the mouse
    assert not raw_marks(top.raw.replace(pointer, b""), is_one_line=False)
