"""The embedded nsqd as a library: start and stop, data, and failed starts."""

import gc
import json
import socket
import ssl
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from unittest.mock import Mock

import pytest
from plugins.certificates import Certificates
from plugins.clients import run_program
from plugins.ports import ReservedPort
from plugins.raw_client import RawClient, mpub, sized
from plugins.servers import AnyNsqd, EmbeddedServer, Serve
from plugins.waiting import wait_until

from nsqtools.server import EmbeddedNsqd, embedded
from nsqtools.server.client_connection import ClientConnection
from nsqtools.server.queues.disk_queue import DiskQueue
from nsqtools.server.queues.message_buffer import DiskHealth


def test_an_embedded_nsqd_serves_while_the_block_runs() -> None:
    for name in ("max_rdy_count", "lookupd_tcp_address", "log_level"):
        with pytest.raises(TypeError, match=f"{name} must be"):
            EmbeddedNsqd(**{name: 1.5})
    port = ReservedPort()  # No other program can listen there after it has stopped.
    with EmbeddedNsqd(tcp_address=f"127.0.0.1:{port.number}") as nsqd:
        address = nsqd.tcp_address
        path = Path(nsqd.data_path)
        with RawClient(address) as client:
            client.publish("t", b"body")
        assert (path / "nsqd.dat").exists()
        assert nsqd.https_address == ""

    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port.number))
    assert not path.exists()
    with pytest.raises(RuntimeError, match="not running"):
        _ = nsqd.tcp_address
    nsqd.stop()  # It does nothing after the block.
    nsqd.kill()
    with nsqd, EmbeddedNsqd() as second:
        assert nsqd.tcp_address == address != second.tcp_address
        with pytest.raises(RuntimeError, match="this nsqd is running"):
            nsqd.start()
        assert Path(nsqd.data_path).exists()
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda _: second.stop(), range(4)))


def test_a_forked_child_affects_neither_the_daemon_nor_its_restart() -> None:
    """A second child has copies of its sockets, as between fork and exec of a program that another
    thread starts."""
    program = """
        import os, sys, warnings
        from nsqtools.server import EmbeddedNsqd, EmbeddedNsqlookupd
        warnings.simplefilter("ignore", DeprecationWarning)
        a, b, c, d = (f"127.0.0.1:{port}" for port in sys.argv[1:])
        nsqd = EmbeddedNsqd(tcp_address=a, http_address=b)
        lookupd = EmbeddedNsqlookupd(tcp_address=c, http_address=d)
        reader, writer = os.pipe()
        with nsqd, lookupd:
            if not (child := os.fork()):
                sys.exit()
            assert os.waitpid(child, 0)[1] == 0
            assert os.path.exists(nsqd.data_path)
            if not (child := os.fork()):
                os.close(writer)
                os._exit(len(os.read(reader, 1)))
        with nsqd, lookupd:
            os.close(writer)
            os.waitpid(child, 0)
        """
    ports = [ReservedPort() for _ in range(4)]
    assert run_program(program, *(str(port.number) for port in ports)) == ""


def test_a_nearly_full_disk_refuses_and_counts_publishes(
    tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    nsqd = serve(EmbeddedServer(tmp_path, f"-min-disk-free={1 << 60}"))
    with RawClient(nsqd.tcp_address) as client:
        with monkeypatch.context() as patch:
            patch.setattr(DiskHealth, "free_bytes", lambda _: 1 << 60)
            wait_until(lambda: nsqd.request("GET", "/ping")[0] == 200, what="room")
            client.publish("t", b"x")
        wait_until(lambda: nsqd.request("GET", "/ping")[0] == 500, what="none")
        client.send(b"PUB t\n" + sized(b"x"))
        error = client.read_error()
    status, text = nsqd.request("GET", "/ping")
    assert (status, error) == (500, text.replace(b"NOK - ", b"E_PUB_FAILED PUB failed "))
    assert error.endswith(
        b" bytes free on the disk, fewer than the %d of --min-disk-free" % (1 << 60)
    )
    assert b"\nnsqd_refused_total 1\n" in nsqd.get("/metrics")


def test_input_is_freed_with_its_client(
    request: pytest.FixtureRequest, certificates: Certificates
) -> None:
    """Until the next garbage collection, each client that died in a publish took 4 MB."""
    gc.disable()
    request.addfinalizer(gc.enable)
    cert, key = map(str, certificates.server)
    context = ssl.create_default_context(cafile=certificates.ca)
    with EmbeddedNsqd(tls_cert=cert, tls_key=key) as nsqd:
        with RawClient(nsqd.tcp_address) as client:
            client.negotiate(tls=context)  # The layers of its protocol are freed as well.
            client.subscribe("t", "ch")
            client.send(mpub("t", [b"body"])[:-1])
            address = "{}:{}".format(*client.socket.getsockname())
            connections = (o for o in gc.get_objects() if isinstance(o, ClientConnection))
            references = [weakref.ref(o) for o in connections if o.remote_address == address]
        assert len(references) == 1
        wait_until(lambda: references[0]() is None, what="it has gone")


@pytest.mark.parametrize("failure", [MemoryError(), ValueError("a fault of ours")])
def test_a_queue_that_fails_to_close_does_not_affect_others(
    tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    nsqd = serve(EmbeddedServer(tmp_path, "-mem-queue-size=1"))
    for topic in ("a", "b", "c"):
        nsqd.publish(topic, b"in memory", b"on disk")
    put, failed = DiskQueue.put, list[DiskQueue]()

    def fail(self: DiskQueue, records: Sequence[bytes]) -> None:
        if self.name == "a":
            failed.append(self)
            raise failure
        put(self, records)

    monkeypatch.setattr(DiskQueue, "put", fail)
    nsqd.stop()

    assert "TOPIC(a): failed to close" in nsqd.log
    assert {path.name[0] for path in tmp_path.glob("*.diskqueue.meta.dat")} == {"a", "b", "c"}
    assert [disk._writer for disk in failed] == [-1]
    nsqd.start()
    assert [nsqd.depth(topic) for topic in "abc"] == [1, 2, 2]


def test_invalid_names_in_nsqd_dat_are_skipped(any_nsqd: AnyNsqd) -> None:
    nsqd = any_nsqd()
    nsqd.stop()
    listed = {"a:b": ["c"], "a:c": [], "t": ["c:d", "ch"], "": []}
    topics = [
        {"name": name, "channels": [{"name": channel} for channel in channels]}
        for name, channels in listed.items()
    ]
    (nsqd.data_path / "nsqd.dat").write_text(json.dumps({"topics": topics}))
    nsqd.start()

    [topic] = nsqd.stats()["topics"]
    names = [topic["topic_name"], *(channel["channel_name"] for channel in topic["channels"])]
    assert names == ["t", "ch"]
    for invalid in ("topic a:b", "topic a:c", "channel c:d", "topic "):
        assert f"skipping creation of invalid {invalid}\n" in nsqd.log


def test_a_damaged_nsqd_dat_is_restored_from_previous_and_queue_files(
    tmp_path: Path, serve: Serve
) -> None:
    nsqd = serve(EmbeddedServer(tmp_path))
    nsqd.create_channel("a", "ch")
    nsqd.post("/channel/pause", topic="a", channel="ch")
    nsqd.publish("a", b"in the channel")
    nsqd.post("/topic/pause", topic="a")
    nsqd.stop()
    [queue] = tmp_path.glob("a:ch.diskqueue.0*.dat")
    for name in ("o", "o:other"):  # not in nsqd.dat
        queue.with_name(queue.name.replace("a:ch", name)).write_bytes(queue.read_bytes())
    (tmp_path / "nsqd.dat").write_bytes((tmp_path / "nsqd.dat").read_bytes()[:40])
    nsqd.start()

    assert nsqd.topic_stats("a")["paused"]
    assert nsqd.channel_stats("a", "ch")["paused"]
    assert nsqd.depth("a", "ch") == 1
    wait_until(lambda: nsqd.depth("o", "other") == 2, what="the topic's own is in the channel")
    assert "failed to parse metadata" in nsqd.log
    assert (tmp_path / "nsqd.dat.broken").stat().st_size == 40
    nsqd.stop()  # It waits for the removals.
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("missing", ["nsqd-disk", "nsqd-durable", "loop"])
def test_without_threads_an_nsqd_fails_to_start_and_releases_the_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    def refuse(thread: Thread, start: Callable[[Thread], None] = Thread.start) -> None:
        if thread.name.startswith(missing):
            raise RuntimeError("can't start new thread")
        start(thread)

    address = f"127.0.0.1:{ReservedPort().number}"
    nsqd = EmbeddedNsqd(data_path=str(tmp_path), durable=True, tcp_address=address)
    with monkeypatch.context() as patch:
        patch.setattr(Thread, "start", refuse)
        if missing == "loop":  # as when descriptors run out
            fault = RuntimeError("can't start new thread")
            patch.setattr(embedded, "MeteredLoop", Mock(side_effect=fault))
        with pytest.raises(RuntimeError, match="start new thread"):
            nsqd.start()
    with nsqd, RawClient(address) as client:
        client.publish("t", b"x")
