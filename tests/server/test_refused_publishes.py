"""The embedded nsqd stores no refused message, even after a kill: publishers may send it again."""

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from plugins.daemons import EmbeddedNsqdProcess
from plugins.disks import fill
from plugins.raw_client import RawClient, mpub, sized, subscribed
from plugins.servers import AnyNsqd, EmbeddedServer, Serve
from plugins.waiting import patience_s, wait_until

from nsqtools.errors import OutputError
from nsqtools.server.daemon_log import DaemonLog


def publish(nsqd: EmbeddedServer, kind: str, bodies: list[bytes]) -> bool:
    """Publish by TCP or HTTP; return whether nsqd accepted it."""
    if kind.startswith("POST"):
        body = b"\n".join(bodies) if kind == "POST /mpub" else bodies[0]
        return nsqd.request("POST", f"{kind[5:]}?topic=t", body)[0] == 200
    with RawClient(nsqd.tcp_address) as client:
        client.send(mpub("t", bodies) if kind == "MPUB" else b"PUB t\n" + sized(bodies[0]))
        return client.read()[1] == b"OK"


def all_messages(nsqd: EmbeddedServer, channel: str, count: int) -> list[bytes]:
    """Consume everything; there must be ``count`` messages and no more."""
    with subscribed(nsqd.tcp_address, "t", channel, ready=2500) as client:
        messages = client.read_messages(count)
        client.finish(messages)
        client.settle()
    stats = nsqd.channel_stats("t", channel)
    assert (stats["depth"], stats["in_flight_count"], stats["deferred_count"]) == (0, 0, 0)
    return sorted(message.body for message in messages)


@pytest.mark.parametrize(
    ("kind", "end"),
    [("PUB", "stop"), ("POST /pub", "kill"), ("MPUB", "kill"), ("POST /mpub", "stop")],
)
def test_a_refused_publish_stores_nothing(
    tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch, kind: str, end: str
) -> None:
    """The disk accepts a part of a write, and then no more."""
    nsqd = serve(EmbeddedServer(tmp_path, "-mem-queue-size=0", "-max-bytes-per-file=2000"))
    for channel in ("a", "b"):
        nsqd.create_channel("t", channel)
    confirmed = [b"before %d" % number * 9 for number in range(30)]
    assert publish(nsqd, "MPUB", confirmed)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", a_part_of(os.pwrite))
        assert not publish(nsqd, kind, [b"refused %d" % number * 9 for number in range(30)])
    assert publish(nsqd, "PUB", [b"after"])
    confirmed.append(b"after")
    getattr(nsqd, end)()
    nsqd.start()
    for channel in ("a", "b"):
        assert all_messages(nsqd, channel, len(confirmed)) == sorted(confirmed)


@pytest.mark.parametrize("kind", ["PUB", "MPUB"])
def test_consecutive_publishes_are_stored_up_to_the_first_refused(
    any_nsqd: AnyNsqd, kind: str
) -> None:
    nsqd = any_nsqd("-max-msg-size=10")

    def command(body: bytes) -> bytes:
        return mpub("t", [body]) if kind == "MPUB" else b"PUB t\n" + sized(body)

    with RawClient(nsqd.tcp_address) as client:
        client.send(command(b"first"))  # It creates the topic.
        assert client.read()[1] == b"OK"
        commands = [command(body) for body in (b"a", b"b", b"too large a body", b"d")]
        client.send(b"".join(commands))
        answers = [client.read()[1] for _ in range(3)]
    assert answers[:2] == [b"OK", b"OK"]
    assert answers[2].startswith(b"E_BAD_MESSAGE %b message too big 16 > 10" % kind.encode())
    assert nsqd.topic_stats("t")["depth"] == 3


def test_publishes_alternate_between_topics_that_are_deleted(any_nsqd: AnyNsqd) -> None:
    nsqd = any_nsqd()
    with RawClient(nsqd.tcp_address) as client:
        for kept in (2, 1):
            client.publish("a", b"1", b"2")
            client.send(
                b"PUB a\n" + sized(b"x") + mpub("b", [b"x"] * 20) + b"PUB a\n" + sized(b"y")
            )
            assert [client.read()[1] for _ in range(3)] == [b"OK"] * 3
            depths = [nsqd.topic_stats(topic)["depth"] for topic in "ab"]
            assert depths == [4, 20 * (3 - kept)]
            nsqd.request("POST", "/topic/delete?topic=a")


def a_part_of(pwrite: Callable[..., int]) -> Callable[..., int]:
    """A disk that fills up with the next write."""
    is_full = False

    def write(descriptor: int, data: bytes, position: int) -> int:
        nonlocal is_full
        if not position and len(data) < 50:  # The file of positions needs no new block.
            return pwrite(descriptor, data, position)
        if is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        is_full = True
        return pwrite(descriptor, data[: len(data) * 2 // 3], position)

    return write


@pytest.mark.parametrize("what", [r"TOPIC\(t\): failed to close", "failed to persist metadata"])
def test_a_stop_that_cannot_flush_memory_ends_with_status_1(
    small_disk: Path, serve: Serve, what: str
) -> None:
    nsqd = serve(EmbeddedNsqdProcess(small_disk))
    if "close" in what:
        nsqd.publish("t", bytes(100 << 10))
    else:
        fill(small_disk / "of others")
        nsqd.create_topic("t")
    process = nsqd._process
    process.terminate()
    assert process.wait(patience_s(20)) == 1
    nsqd.wait_for_log(rf"ERROR: {what} - .*No space left on device")


def test_a_log_on_a_full_disk_continues_when_it_has_room(small_disk: Path) -> None:
    with (small_disk / "log").open("w") as stream:
        log = DaemonLog(stream, "")
        fill(small_disk / "of others")
        for _ in range(20):
            log.info("x" * 1000)
        (small_disk / "of others").unlink()
        log.info("again")
        assert (small_disk / "log").read_text().endswith(" INFO: again\n")


@pytest.mark.parametrize("small_disk", ["600k"], indirect=True)
def test_a_durable_nsqd_starts_or_reports_the_reason(small_disk: Path, serve: Serve) -> None:
    nsqd = EmbeddedServer(small_disk, "-durable", "-min-disk-free=1")
    for number in range(2):
        fill(small_disk / "of others")
        with pytest.raises(OutputError, match=r"cannot be used: .*, with \d+ bytes free"):
            nsqd.start()
        (small_disk / "of others").unlink()
        serve(nsqd)
        nsqd.publish("t", b"x")
        assert nsqd.depth("t") == number + 1
        nsqd.stop()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(OSError, match="Read-only file system"):
        nsqd.start()


@pytest.mark.parametrize("small_disk", ["3m"], indirect=True)
@pytest.mark.parametrize("is_filled_by_others", [False, True])
def test_a_durable_nsqd_on_a_full_disk_accepts_publishes_after_consuming(
    small_disk: Path, serve: Serve, is_filled_by_others: bool
) -> None:
    nsqd = serve(EmbeddedServer(small_disk, "-durable", f"-min-disk-free={1 << 20}"))
    nsqd.create_channel("t", "a")
    filling = small_disk / "of others"
    confirmed: list[bytes] = []
    refused = 0
    while refused < 20:
        bodies = [b"%d " % (len(confirmed) + n) + b"x" * 1000 for n in range(20)]
        if publish(nsqd, "MPUB", bodies):
            confirmed += bodies
        else:
            refused += 1
    assert confirmed
    if is_filled_by_others:
        fill(filling)
    with subscribed(nsqd.tcp_address, "t", "a", ready=2500) as client:
        messages = client.read_messages(len(confirmed))
        client.finish(messages)
        filling.unlink(missing_ok=True)  # as an operator would
        wait_until(lambda: publish(nsqd, "PUB", [b"again"]), what="there is room")
        again = client.read_message()
    assert sorted(message.body for message in messages) == sorted(confirmed)
    nsqd.kill()
    nsqd.start()
    assert all_messages(nsqd, "a", 1) == [again.body]


@pytest.mark.parametrize("small_disk", ["3m"], indirect=True)
@pytest.mark.parametrize("min_disk_free", [1, 1 << 20])
def test_a_busy_durable_nsqd_truncates_its_log_when_the_disk_is_full(
    small_disk: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch, min_disk_free: int
) -> None:
    # So that it never counts as idle.
    monkeypatch.setattr("nsqtools.server.durable_store._SHRINK_PAUSE_S", 3600)
    nsqd = serve(EmbeddedServer(small_disk, "-durable", f"-min-disk-free={min_disk_free}"))
    with subscribed(nsqd.tcp_address, "t", "a", ready=1) as client:
        while log_size(small_disk) < 1 << 20:
            nsqd.publish("t", b"x" * 1000)
            client.finish([client.read_message()])
    filling = small_disk / "of others"
    fill(filling)
    # The pages by which the file has grown since it was made need room until the log is truncated.
    os.truncate(filling, filling.stat().st_size - (128 << 10))
    wait_until(
        lambda: publish(nsqd, "PUB", [b"again"]) and log_size(small_disk) < 1 << 19,
        what="the log has made room",
    )


@pytest.mark.parametrize("small_disk", ["3m"], indirect=True)
def test_the_log_of_a_durable_nsqd_leaves_most_of_a_small_disk_to_messages(
    small_disk: Path, serve: Serve
) -> None:
    nsqd = serve(EmbeddedServer(small_disk, "-durable", "-min-disk-free=1"))
    nsqd.create_channel("t", "a")
    count = 0
    while publish(nsqd, "MPUB", [bytes(1000)] * 20):
        count += 20
    assert count * 1000 > 3 << 19  # half of the disk


def log_size(directory: Path) -> int:
    """The bytes of the database's write-ahead log."""
    return sum(path.stat().st_size for path in directory.glob("*-wal"))
