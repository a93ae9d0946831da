"""``nsq pub --at`` and its siblings: the request that nsqd gets, and wrong command lines."""

import json
import time

import pytest
from plugins.cli import RunNsq
from plugins.clients import bodies_in
from plugins.servers import AnyNsqd

from nsqtools.cli.commands import pub
from nsqtools.protocol.names import parse_address
from nsqtools.protocol.schedule_request import SCHEDULE_TOPIC
from nsqtools.records.units import parse_time

S = 1_000_000_000


def test_pub_sends_one_request_per_message_and_warns_without_scheduler(
    any_nsqd: AnyNsqd, run_nsq: RunNsq, monkeypatch: pytest.MonkeyPatch
) -> None:
    nsqd = any_nsqd()
    tcp, http = parse_address(nsqd.tcp_address), parse_address(nsqd.http_address)
    # By convention HTTP has the next port, which a test cannot rely on.
    monkeypatch.setattr(pub, "HTTP_PORT_OFFSET", http.port - tcp.port)
    words = ["pub", "-t", "orders", "--nsqd-tcp-address", nsqd.tcp_address, "--in", "36h"]
    before_ns = time.time_ns()
    result = run_nsq([*words, "one", "two"])
    assert result.status == 0
    assert f"warning: topic nsq.schedule has no channel on {nsqd.tcp_address}" in result.err
    nsqd.create_channel(SCHEDULE_TOPIC, "check")
    assert "warning" not in run_nsq([*words, "--key", "k", "three"]).err

    requests = sorted(map(json.loads, bodies_in(nsqd, SCHEDULE_TOPIC, 3)), key=lambda r: r["body"])
    assert [request["body"] for request in requests] == ["one", "three", "two"]
    assert [request.get("key") for request in requests] == [None, "k", None]
    for request in requests:
        assert request["topic"] == "orders"
        assert 0 <= parse_time(request["at"], now_ns=0) - before_ns - 36 * 3600 * S < 60 * S


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--at", "+1h", "--in", "1h"], "give either --at or --in"),
        (["--every", "1h", "--cron", "* * * * *"], "give either --every or --cron"),
        (["--every", "1ms"], "shorter than 1s"),
        (["--cron", "* * *"], "does not have five fields"),
        (["--cron", "* * * * *", "--timezone", "Mars"], "time zone 'Mars' does not exist"),
        (["--at", "+1h", "--catch-up", "all"], "--catch-up is for --every and --cron"),
        (["--key", "k"], "need --at, --in, --every or --cron"),
        (["--in", "1h", "--defer", "1m"], "--defer excludes"),
        (["--in", "1h", "--key", "k", "another"], "--key is for one message"),
        (["--in", "1h", "--key", "k", "--repeat", "2"], "--key is for one message"),
        (["--in", "1h", "--key", "\udcff"], "key is not UTF-8"),
        (["--cron", "\udcff * * * *"], "surrogates not allowed"),
        (["--in", "1h", "--schedule-topic", "no topic"], "invalid topic name 'no topic'"),
        (["--in", "1h", "--channel", "c"], "--channel excludes"),
    ],
)
def test_contradictory_schedule_options_are_refused(
    run_nsq: RunNsq, words: list[str], error: str
) -> None:
    result = run_nsq(["pub", "-t", "orders", "-m", "x", *words])
    assert result.status == 2
    assert error in result.err
