"""Two archivers on one channel, as on two hosts: they share it, and no message is in both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from plugins.archives import (
    CHANNEL,
    TOPIC,
    assert_each_once,
    ended,
    messages_of,
    to_file,
    wait_until_archived,
)
from plugins.cli import SpawnNsq
from plugins.daemons import GoNsqd
from plugins.waiting import wait_until


def test_both_make_progress_one_may_end_and_nothing_is_lost_or_in_both(
    go_nsqd: Callable[..., GoNsqd], spawn_nsq: SpawnNsq, tmp_path: Path
) -> None:
    nsqd = go_nsqd("-msg-timeout=5m")  # an archiver that waits for the processor is not away
    nsqd.create_channel(TOPIC, CHANNEL)

    def finished() -> list[int]:
        clients = nsqd.channel_stats(TOPIC, CHANNEL)["clients"] or []
        return [client["finish_count"] for client in clients]

    slowly = ["--sync-interval", "20ms", "--max-in-flight", "5"]
    one, two = (
        spawn_nsq(to_file(nsqd.tcp_address, tmp_path / host, *slowly)) for host in ("one", "two")
    )
    wait_until(lambda: len(finished()) == 2, what="both", timeout_s=60)
    published = [b"%06d" % number for number in range(3000)]
    nsqd.publish(TOPIC, *published)
    wait_until(lambda: min(finished()) > 50, what="both to write", timeout_s=60)
    ended(one)  # in the midst of it
    more = [b"%06d" % number for number in range(3000, 3100)]
    nsqd.publish(TOPIC, *more)
    wait_until_archived(nsqd)
    ended(two)

    found = [[each["body"] for each in messages_of(tmp_path / host)] for host in ("one", "two")]
    assert min(map(len, found)) > 50
    assert_each_once([*found[0], *found[1]], [*published, *more])
