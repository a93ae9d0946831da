"""Publishing to real nsqd: every record has its outcome, and what is confirmed is there."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plugins.clients import InBackground, bodies_in
from plugins.daemons import GoNsqd
from plugins.network import ProxyTo
from plugins.power_cut import PowerCut
from plugins.servers import MakeNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools import ClientOptions
from nsqtools.client.connection_settings import PublishMode
from nsqtools.errors import ConfigurationError
from nsqtools.publish.input import RecordSource
from nsqtools.publish.publish_job import PublishJob, UnsentFiles
from nsqtools.publish.publisher import PublishCounts, Publisher, PublishOptions

FAST = ClientOptions(dial_timeout_s=1, publish_timeout_s=patience_s(5))


def publisher_to(
    *addresses: str, client: ClientOptions = FAST, rate: float = 0, **options: Any
) -> Publisher:
    return Publisher(addresses, client, PublishOptions(**{"retry_timeout_s": 5, **options}), rate)


def run_job(text: bytes, publisher: Publisher, tmp_path: Path, **more: Any) -> PublishCounts:
    path = tmp_path / "input"
    path.write_bytes(text)
    job = PublishJob[bytes](publisher, "events", **more)
    return job.run(RecordSource([str(path)], b"\n", job.is_over).batches())


@pytest.mark.parametrize("at_once", [5 << 20, 30], ids=["by default", "30 bytes"])
def test_all_arrives_but_what_is_too_long(go_nsqd: MakeNsqd, tmp_path: Path, at_once: int) -> None:
    nsqd = go_nsqd("-max-msg-size=1000000")
    records = [b"plain", b"\x00nul", b"\xff\xfe not UTF-8", b"x" * 1_000_000, b"cr\r", b"last"]
    text = b"\n".join([*records[:3], b"x" * 1_000_001, *records[3:]])
    options = replace(FAST, publish_max_body_size=at_once)
    counts = run_job(text, publisher_to(nsqd.tcp_address, client=options), tmp_path)
    assert counts == PublishCounts(confirmed=6, rejected=1)
    assert bodies_in(nsqd, "events", 6) == sorted(records)


def test_each_of_more_nsqd_than_batches_gets_its_share(go_nsqd: MakeNsqd, tmp_path: Path) -> None:
    three = [go_nsqd() for _ in range(3)]
    for nsqd in three:
        nsqd.create_channel("events", "check")
    addresses = [nsqd.tcp_address for nsqd in three]

    spread = publisher_to(*addresses, mode=PublishMode.ROUND_ROBIN, defer_s=3600)
    counts = run_job(b"1\n2\n3\n", spread, tmp_path)

    assert counts == PublishCounts(confirmed=3)
    for nsqd in three:
        wait_until(
            lambda nsqd=nsqd: nsqd.channel_stats("events", "check")["deferred_count"] == 1,
            what="a message for later",
        )


def test_the_input_of_an_absent_nsqd_stays_whole(unreachable_address: str, tmp_path: Path) -> None:
    count = 70_000  # more than the 64 batches of 1000 that may be outstanding at a time
    lines = [b"x" * 2_000_000 if n % 30_000 == 1 else b"%d" % n for n in range(count)]
    text = b"\n".join(lines) + b"\n"
    hasty = ClientOptions(dial_timeout_s=0.2)
    publisher = publisher_to(unreachable_address, client=hasty, retry_timeout_s=0.2)
    with UnsentFiles(tmp_path / "unsent", b"\n") as unsent:
        counts = run_job(text, publisher, tmp_path, unsent=unsent)

    assert counts == PublishCounts(unsent=count - 3, rejected=3)
    assert (tmp_path / "unsent").read_bytes() == text
    with pytest.raises(ConfigurationError, match="is read"):
        UnsentFiles(tmp_path / "unsent", b"\n", inputs=[str(tmp_path / "unsent")])


def test_a_cut_connection_loses_no_count(
    proxy_to: ProxyTo, nsqd: GoNsqd, in_background: InBackground, tmp_path: Path
) -> None:
    proxy = proxy_to(nsqd.tcp_address)
    lines = [b"%05d" % n + b"x" * 100 for n in range(30_000)]
    retrying = {"retry_timeout_s": 10, "retry_unknown": True}
    publisher = publisher_to(proxy.address, rate=30_000, **retrying)
    running = in_background(run_job, b"\n".join(lines), publisher, tmp_path)
    for goal in (3_000, 9_000, 15_000):
        wait_until(lambda goal=goal: publisher.counts.confirmed > goal, what="publishing")
        proxy.cut(reset=goal == 9_000)

    assert running.result(patience_s(30)) == PublishCounts(confirmed=30_000)
    assert nsqd.depth("events") >= 30_000


RECORDS = [b"record %d" % number for number in range(10)]


def test_what_was_kept_is_there_after_a_power_cut(tmp_path: Path) -> None:
    with PowerCut(tmp_path) as record:
        with UnsentFiles(tmp_path / "unsent", b"\n") as unsent:
            for number, each in enumerate(RECORDS):
                unsent.write(each)
                if number == 4:
                    unsent.sync()
                    record.note(*RECORDS[:5])
        record.note(*RECORDS[5:])

    cuts = list(record.cuts())
    assert [promised for promised, _ in cuts][-1] == RECORDS
    for promised, cut in cuts:
        assert set(promised) <= set(cut.files.get("unsent", b"").splitlines())


def test_a_file_that_was_taken_away_is_made_anew(tmp_path: Path) -> None:
    with UnsentFiles(tmp_path / "unsent", b"\n") as unsent:
        unsent.write(b"x" * 100_000)  # more than the buffer
        (tmp_path / "unsent").rename(tmp_path / "taken")
        unsent.write(b"2")
    assert (tmp_path / "unsent").read_bytes() == b"2\n"
    assert (tmp_path / "taken").stat().st_size == 100_001
    (tmp_path / "folder").mkdir()
    with UnsentFiles(tmp_path / "folder" / "unsent", b"\n") as unsent:
        (tmp_path / "folder").rename(tmp_path / "moved")
        unsent.write(b"3")
    assert (tmp_path / "moved" / "unsent").read_bytes() == b"3\n"


def test_a_link_and_a_pipe_are_written_through(tmp_path: Path, in_background: InBackground) -> None:
    """What a file had stays, and only its owner may read it."""
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    reading = in_background((tmp_path / "pipe").read_bytes)
    for name in ("link", "link", "pipe"):
        with UnsentFiles(tmp_path / name, b"\n") as unsent:
            unsent.write(b"record")

    assert (tmp_path / "file").read_bytes() == b"record\nrecord\n"
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    assert reading.result(patience_s(10)) == b"record\n"
