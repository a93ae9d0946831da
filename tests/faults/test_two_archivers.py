"""Two archivers on one channel, as on two hosts: they share it, and no message is in both."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from plugins.archives import CHANNEL, TOPIC, ended, messages_of, to_file, wait_until_archived
from plugins.cli import SpawnNsq
from plugins.daemons import GoNsqd
from plugins.waiting import patience_s, wait_until

DEADLINE_S = patience_s(60.0)


@contextmanager
def publishing(nsqd: GoNsqd) -> Iterator[list[bytes]]:
    """Publish all the time, until this is left; what was published so far."""
    published: list[bytes] = []
    is_over = threading.Event()

    def publish() -> None:
        while not is_over.wait(0.005):
            bodies = [b"%06d" % (len(published) + number) for number in range(5)]
            nsqd.publish(TOPIC, *bodies)
            published.extend(bodies)

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield published
    finally:
        is_over.set()
        thread.join()


def finished_by_host(nsqd: GoNsqd) -> dict[str, int]:
    clients = nsqd.channel_stats(TOPIC, CHANNEL)["clients"] or []
    return {client["client_id"]: client["finish_count"] for client in clients}


def test_both_make_progress_one_may_end_and_nothing_is_lost_or_in_both(
    go_nsqd: Callable[..., GoNsqd], spawn_nsq: SpawnNsq, tmp_path: Path
) -> None:
    nsqd = go_nsqd("-msg-timeout=5m")  # an archiver that waits for the processor is not away
    nsqd.create_channel(TOPIC, CHANNEL)
    flags = ["--sync-interval", "20ms", "--create"]
    archivers = {
        host: spawn_nsq(
            to_file(nsqd.tcp_address, tmp_path / host, *flags, "-X", f"client_id={host}")
        )
        for host in ("one", "two")
    }
    with publishing(nsqd) as published:
        wait_until(
            lambda: sum(count > 50 for count in finished_by_host(nsqd).values()) == 2,
            what="both to write",
            timeout_s=DEADLINE_S,
        )
        ended(archivers["one"])  # in the midst of it
        before = finished_by_host(nsqd)["two"]
        wait_until(
            lambda: finished_by_host(nsqd)["two"] > before + 50,
            what="the other to go on",
            timeout_s=DEADLINE_S,
        )
    wait_until_archived(nsqd)
    ended(archivers["two"])

    found = {
        host: [message["body"] for message in messages_of(tmp_path / host)] for host in archivers
    }
    assert min(map(len, found.values())) > 50
    assert Counter(found["one"] + found["two"]) == Counter(published)
