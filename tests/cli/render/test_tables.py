"""The tables of the commands that list things, as a terminal shows them, on both kinds of daemons.

Addresses, times and the name of the machine are masked, and with them the widths of columns.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable

import pytest
from plugins.cli import TerminalNsq
from plugins.http_api import Nsqd, Nsqlookupd
from plugins.waiting import wait_until

TABLES = {
    "topic list NODE": [
        "topic  nodes  channels  depth  waiting  messages  paused",
        "clicks  1  1  0  2  2  no",
        "views  1  0  0  0  0  yes",
    ],
    "topic info clicks NODE": [
        "node  channel  depth  disk  in_flight  messages  clients  paused",
        "HTTP  -  0  0  -  2  -  no",
        "HTTP  archive  2  0  0  2  0  no",
    ],
    "channel list clicks NODE": [
        "topic  channel  nodes  depth  in_flight  deferred  clients  paused",
        "clicks  archive  1  2  0  0  0  no",
    ],
    "channel info clicks archive NODE": [
        "node  depth  disk  in_flight  deferred  requeued  timed_out  messages  clients  paused",
        "HTTP  2  0  0  0  0  0  2  0  no",
    ],
    "nodes LOOKUP": [
        "node  nsqd  hostname  version  topics  tombstoned  lookupds  state",
        "HTTP  TCP  HOST  1.3.0  2  0  1  ok",
    ],
    "lookup clicks LOOKUP": ["nsqd  node  lookupds", "TCP  HTTP  1"],
    "ping NODE LOOKUP": [
        "daemon  address  latency_ms  state",
        "nsqlookupd  LOOKUPD  MS  ok",
        "nsqd  HTTP  MS  ok",
    ],
    "info NODE": [
        "node  version  hostname  broadcast_address  tcp_port  http_port  start_time",
        "HTTP  1.3.0  HOST  127.0.0.1  PORT  PORT  TIME",
    ],
    "config get log_level NODE": ["node  option  value", "HTTP  log_level  2"],
    "stat --once -t clicks NODE": [
        "topic  channel  depth  memory  disk  in_flight  deferred  ingress  egress  finish  requeue"
        "  requeued  timed_out  messages  clients  paused  e2e_ms",
        "clicks  -  0  0  0  0  0  -  -  -  -  0  0  2  0  no  -",
        "clicks  archive  2  2  0  0  0  -  -  -  -  0  0  2  0  no  -",
    ],
    "topic delete clicks --dry-run NODE": [
        "daemon  address  action  topic  channel  messages  clients",
        "nsqd  HTTP  delete  clicks  -  2  0",
    ],
}


@pytest.mark.parametrize("command", TABLES)
def test_a_terminal_shows_this_table(
    command: str,
    any_nsqd: Callable[..., Nsqd],
    any_nsqlookupd: Callable[..., Nsqlookupd],
    nsq_on_a_terminal: TerminalNsq,
) -> None:
    arguments, names = on_a_cluster(any_nsqd, any_nsqlookupd)

    shown = nsq_on_a_terminal(arguments(command), env={"TERM": "dumb"}, columns=200).read()

    assert [masked(line, names) for line in shown.splitlines()] == TABLES[command]


@pytest.mark.parametrize("width", [80, 100, 140])
def test_on_a_narrow_terminal_columns_are_left_out_by_name_and_no_value_is_cut(
    width: int,
    go_nsqd: Callable[..., Nsqd],
    nsqlookupd: Callable[..., Nsqlookupd],
    nsq_on_a_terminal: TerminalNsq,
) -> None:
    arguments, names = on_a_cluster(go_nsqd, nsqlookupd)
    said = []
    for command, (whole, *rows) in TABLES.items():
        terminal = nsq_on_a_terminal(arguments(command), env={"TERM": "dumb"}, columns=width)
        lines = terminal.read().splitlines()
        text = " ".join(lines)
        left_out = re.search(r"left out on this narrow terminal: (.*); see -o wide", text)
        dropped = left_out[1].split(", ") if left_out else []
        columns = whole.split("  ")
        kept = [number for number, column in enumerate(columns) if column not in dropped]
        assert len(kept) + len(dropped) == len(columns), command
        table = ["  ".join(row.split("  ")[number] for number in kept) for row in (whole, *rows)]
        assert [masked(line, names) for line in lines[: len(table)]] == table
        assert max(len(line.rstrip()) for line in lines[: len(table)]) <= width
        said += dropped
    assert "e2e_ms" in said, "the table of stat is wider than all of these"


def on_a_cluster(
    start_nsqd: Callable[..., Nsqd], start_nsqlookupd: Callable[..., Nsqlookupd]
) -> tuple[Callable[[str], list[str]], dict[str, str]]:
    """What is in `TABLES`, on daemons of its own: how to ask them, and what to call them."""
    lookupd = start_nsqlookupd()
    nsqd = start_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}")
    nsqd.create_channel("clicks", "archive")
    nsqd.publish("clicks", b"one", b"two")
    nsqd.create_topic("views")
    nsqd.post("/topic/pause", topic="views")
    wait_until(lambda: nsqd.depth("clicks", "archive") == 2, what="the channel has both")
    wait_until(lambda: b"views" in lookupd.get("/topics"), what="nsqd has registered its topics")
    places = {
        "NODE": ["--nsqd-http-address", nsqd.http_address],
        "LOOKUP": ["--lookupd-http-address", lookupd.http_address],
    }
    names = {
        nsqd.http_address: "HTTP",
        nsqd.tcp_address: "TCP",
        lookupd.http_address: "LOOKUPD",
    }
    return lambda command: [p for w in command.split() for p in places.get(w, [w])], names


def masked(line: str, names: dict[str, str]) -> str:
    """The line with what differs from run to run replaced, and its columns two blanks apart."""
    for address, name in names.items():
        line = line.replace(address, name)
    line = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "HOST", line)
    line = re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "TIME", line)
    line = re.sub(r"(?<![\d.])\d+\.\d(?![\d.])", "MS", line)
    line = re.sub(r"(?<= )\d{4,5}(?= |$)", "PORT", line)
    return re.sub(r" {2,}", "  ", line.rstrip())
