"""Publishing to real nsqd: every record has its outcome, and what is confirmed is there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plugins.clients import bodies_in
from plugins.daemons import GoNsqd
from plugins.network import Proxy
from plugins.scripted_nsqd import ScriptedNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools import ClientOptions
from nsqtools.client.connection_settings import PublishMode
from nsqtools.publish.input import RecordSource
from nsqtools.publish.publish_job import PublishJob, UnsentFiles
from nsqtools.publish.publisher import PublishCounts, Publisher, PublishOptions

FAST = ClientOptions(dial_timeout_s=1, publish_timeout_s=patience_s(5))
HASTY = ClientOptions(dial_timeout_s=0.2)  # where nobody is there


@pytest.fixture
def write_input(tmp_path: Path) -> Callable[[bytes], str]:
    def write(text: bytes) -> str:
        path = tmp_path / "input"
        path.write_bytes(text)
        return str(path)

    return write


RETRYING = PublishOptions(retry_timeout_s=5)


def publisher_to(
    *addresses: str,
    options: PublishOptions = RETRYING,
    client_options: ClientOptions = FAST,
    rate: float = 0,
) -> Publisher:
    return Publisher(addresses, client_options, options, rate)


def run_job(path: str, publisher: Publisher, **more: Any) -> PublishCounts:
    job = PublishJob[bytes](publisher, "events", **more)
    return job.run(RecordSource([path], b"\n", job.is_over).batches())


def test_every_record_arrives_whole(nsqd: GoNsqd, write_input: Callable[[bytes], str]) -> None:
    records = [b"plain", b"\x00nul", b"\xff\xfe not UTF-8", b"x" * 1_000_000, b"cr\r", b"last"]

    counts = run_job(write_input(b"\n".join(records)), publisher_to(nsqd.tcp_address))

    assert counts == PublishCounts(confirmed=6)
    assert bodies_in(nsqd, "events", 6) == sorted(records)


def test_a_record_that_only_nsqd_finds_too_long_does_not_take_its_neighbours_along(
    go_nsqd: Callable[..., GoNsqd], write_input: Callable[[bytes], str]
) -> None:
    nsqd = go_nsqd("-max-msg-size=100")
    records = [b"%d" % n for n in range(40)]
    records[17] = b"x" * 101

    counts = run_job(write_input(b"\n".join(records)), publisher_to(nsqd.tcp_address))

    assert counts == PublishCounts(confirmed=39, rejected=1)
    assert bodies_in(nsqd, "events", 39) == sorted(records[:17] + records[18:])


def test_deferred_messages_come_later(nsqd: GoNsqd, write_input: Callable[[bytes], str]) -> None:
    nsqd.create_channel("events", "check")

    counts = run_job(
        write_input(b"a\nb\n"),
        publisher_to(nsqd.tcp_address, options=PublishOptions(defer_s=3600)),
    )

    assert counts == PublishCounts(confirmed=2)
    wait_until(
        lambda: nsqd.channel_stats("events", "check")["deferred_count"] == 2,
        what="both messages are deferred",
    )


def test_each_of_more_nsqd_than_batches_gets_its_share(
    go_nsqd: Callable[..., GoNsqd], write_input: Callable[[bytes], str]
) -> None:
    three = [go_nsqd() for _ in range(3)]
    addresses = [nsqd.tcp_address for nsqd in three]

    spread = publisher_to(*addresses, options=PublishOptions(PublishMode.ROUND_ROBIN))
    run_job(write_input(b"1\n2\n3\n"), spread)

    assert [nsqd.depth("events") for nsqd in three] == [1, 1, 1]


@pytest.mark.parametrize(
    ("retry_unknown", "expected"),
    [(False, PublishCounts(unknown=1)), (True, PublishCounts(confirmed=1))],
)
def test_what_was_sent_and_not_answered_is_unknown_unless_it_may_be_doubled(
    retry_unknown: bool,
    expected: PublishCounts,
    scripted_nsqd: ScriptedNsqd,
    write_input: Callable[[bytes], str],
) -> None:
    options = PublishOptions(retry_timeout_s=5, retry_unknown=retry_unknown)
    publisher = publisher_to(scripted_nsqd.address, options=options)
    worker = threading.Thread(target=run_job, args=(write_input(b"lonely"), publisher))
    worker.start()
    for answers in (False, True) if retry_unknown else (False,):
        connection = scripted_nsqd.accept()
        connection.expect("IDENTIFY")
        connection.reply_identify()
        connection.expect("PUB events")
        if answers:
            connection.ok()
        else:
            connection.close()
    worker.join(patience_s(10))

    assert publisher.counts == expected


def test_when_nsqd_stays_away_the_whole_input_goes_to_the_unsent_file_in_its_order(
    write_input: Callable[[bytes], str], unreachable_address: str, tmp_path: Path
) -> None:
    count = 70_000  # more than the 64 batches of 1000 that may be outstanding at a time
    lines = [b"x" * 2_000_000 if n % 30_000 == 1 else b"%d" % n for n in range(count)]
    text = b"\n".join(lines) + b"\n"
    with UnsentFiles(tmp_path / "unsent", b"\n") as unsent:
        counts = run_job(
            write_input(text),
            publisher_to(
                unreachable_address,
                options=PublishOptions(retry_timeout_s=0.2),
                client_options=HASTY,
            ),
            unsent=unsent,
        )

    assert counts == PublishCounts(unsent=count - 3, rejected=3)
    assert (tmp_path / "unsent").read_bytes() == text


def test_mode_all_counts_by_nsqd_and_keeps_for_each_what_it_lacks(
    nsqd: GoNsqd,
    write_input: Callable[[bytes], str],
    unreachable_address: str,
    tmp_path: Path,
) -> None:
    lines = [b"1", b"2", b"x" * 2_000_000, b"3"]
    addresses = [nsqd.tcp_address, unreachable_address]
    with UnsentFiles(tmp_path / "unsent", b"\n", addresses) as unsent:
        publisher = publisher_to(*addresses, options=PublishOptions(retry_timeout_s=0.3))
        run_job(write_input(b"\n".join(lines)), publisher, unsent=unsent)

    assert publisher.counts == PublishCounts(rejected=1, unsent=3)
    assert publisher.counts_by_nsqd == {
        nsqd.tcp_address: PublishCounts(confirmed=3, rejected=1),
        unreachable_address: PublishCounts(rejected=1, unsent=3),
    }
    assert nsqd.depth("events") == 3
    kept = {address: tmp_path / f"unsent.{address}" for address in addresses}
    assert kept[nsqd.tcp_address].read_bytes().splitlines() == [lines[2]]
    assert kept[unreachable_address].read_bytes().splitlines() == lines
    assert not (tmp_path / "unsent").exists()


def test_a_cut_connection_loses_no_count(
    proxy_to: Callable[[str], Proxy], nsqd: GoNsqd, write_input: Callable[[bytes], str]
) -> None:
    proxy = proxy_to(nsqd.tcp_address)
    lines = [b"%05d" % n + b"x" * 100 for n in range(30_000)]
    options = PublishOptions(retry_timeout_s=10, retry_unknown=True)
    publisher = publisher_to(proxy.address, options=options, rate=30_000)
    worker = threading.Thread(target=run_job, args=(write_input(b"\n".join(lines)), publisher))
    worker.start()
    for goal in (3_000, 9_000, 15_000):
        wait_until(
            lambda goal=goal: publisher.counts.confirmed > goal, what="publishing is under way"
        )
        proxy.cut(reset=goal == 9_000)
    worker.join(patience_s(30))

    assert publisher.counts == PublishCounts(confirmed=30_000)
    assert nsqd.depth("events") >= 30_000


def test_stopping_settles_what_is_under_way_and_leaves_the_rest(
    nsqd: GoNsqd, write_input: Callable[[bytes], str]
) -> None:
    path = write_input(b"\n".join(b"%d" % n for n in range(100_000)))
    publisher = publisher_to(nsqd.tcp_address, rate=5_000)
    worker = threading.Thread(target=run_job, args=(path, publisher))
    worker.start()
    wait_until(lambda: publisher.counts.confirmed > 100, what="publishing is under way")
    publisher.stop()
    worker.join(patience_s(10))

    assert not worker.is_alive()
    assert publisher.counts.confirmed == nsqd.depth("events")
    assert publisher.counts.unknown == 0
