"""Servers that import the application before gevent patches threads and sockets."""

import http.client
import signal
import socket
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
from plugins.clients import TOPIC, Produce, run_program
from plugins.servers import GoNsqd, MakeNsqd
from plugins.waiting import patience_s, wait_until

APPLICATION = """
import os
from nsqtools import Producer, PublishError

producer = Producer(os.environ["NSQD"].split(), mode="round-robin", linger_s=0.005)
producer.publish("warm", b"before the fork")

def application(environ, start_response):
    try:
        producer.publish("clicks", environ["wsgi.input"].read(), timeout_s=5)
        status = "202 Accepted"
    except PublishError:
        status = "503 Service Unavailable"
    start_response(status, [("Content-Length", "0")])
    return []
"""


def post(port: int, count: int) -> set[int]:
    statuses = set()
    for _ in range(count):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=patience_s(10))
        connection.request("POST", "/", b"order")
        statuses.add(connection.getresponse().status)
        connection.close()
    return statuses


def test_gunicorn_with_gevent_publishes_from_a_preloaded_application(
    go_nsqd: MakeNsqd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nsqds = [go_nsqd(), go_nsqd()]
    (tmp_path / "shop.py").write_text(APPLICATION)
    monkeypatch.setenv("NSQD", " ".join(nsqd.tcp_address for nsqd in nsqds))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        command = [sys.executable, "-m", "gunicorn", "-k", "gevent", "--preload", "shop"]
        command += ["--chdir", str(tmp_path), "--bind", f"fd://{listener.fileno()}"]
        with subprocess.Popen(
            command, pass_fds=[listener.fileno()], stderr=subprocess.DEVNULL
        ) as server:
            try:
                with ThreadPoolExecutor(8) as pool:
                    statuses = set[int]().union(*pool.map(post, [port] * 8, [10] * 8))
                assert statuses == {202}
                server.send_signal(signal.SIGTERM)
                assert server.wait(patience_s(10)) == 0
            finally:
                server.kill()
    assert sum(nsqd.topic_stats(TOPIC)["message_count"] for nsqd in nsqds) == 80


def test_consumers_and_producers_work_in_greenlets_after_a_late_patch(go_nsqd: MakeNsqd) -> None:
    nsqds = [go_nsqd() for _ in range(3)]
    for nsqd in nsqds:
        nsqd.create_channel(TOPIC, "c")
    run_program(
        """
        import os, sys
        from nsqtools import Consumer, Producer
        producer = Producer(sys.argv[1:], mode="round-robin")
        import gevent.monkey
        gevent.monkey.patch_all()
        import gevent
        consumer = Consumer("clicks", "c", nsqd_tcp_addresses=sys.argv[1:])
        handled = []
        def handle(message):
            handled.append(message.body)
            if len(handled) == 30:
                consumer.begin_stop(drain=True)
        def publish():
            for _ in range(10):
                producer.publish("clicks", b"x", timeout_s=5)
        greenlets = [gevent.spawn(publish) for _ in range(3)]
        greenlets.append(gevent.spawn(consumer.run, handle, workers=2, signals=False))
        gevent.joinall(greenlets, timeout=20, raise_error=True)
        producer.stop()
        os._exit(len(handled) != 30)  # gevent complains of threads that it did not start
        """,
        *[nsqd.tcp_address for nsqd in nsqds],
    )


def test_a_failing_waiter_leaves_no_other_publication_unsettled(
    nsqd: GoNsqd, produce: Produce, caplog: pytest.LogCaptureFixture
) -> None:
    class BrokenWaiter:
        def add_result(self, publication: Future[Any]) -> None:
            raise SystemExit("broken")

        add_exception = add_result

    producer = produce(nsqd.tcp_address)
    nsqd.pause()
    publications = [producer.submit(TOPIC, [b"x"]) for _ in range(10)]
    for publication in publications[::2]:
        publication._waiters.append(BrokenWaiter())
    nsqd.resume()
    assert not wait(publications, patience_s(5)).not_done
    assert caplog.text.count("was not notified") == 5
    producer.publish(TOPIC, b"more")
    wait_until(lambda: nsqd.topic_stats(TOPIC)["message_count"] == 11, what="all are stored")
