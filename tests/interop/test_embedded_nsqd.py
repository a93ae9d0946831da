"""The Go programs and pynsq against the embedded nsqd: they cannot tell it from the real one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from plugins.archives import unfinished
from plugins.certificates import Certificates
from plugins.embedded import EmbeddedServer
from plugins.servers import DataPath, GoProgram, MakeLookupd, Serve
from plugins.waiting import patience_s, wait_until

TIMEOUT_S = patience_s(30.0)
LINES = [f"line {number}" for number in range(1000)]

Embedded = Callable[..., EmbeddedServer]


@pytest.fixture
def embedded(data_path: DataPath, serve: Serve) -> Embedded:
    return lambda *flags: serve(EmbeddedServer(data_path(), *flags))


def run(command: list[str | Path], stdin: str = "") -> str:
    done = subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("option", ["snappy,true", "deflate,true", "tls_v1,true"])
def test_nsq_to_file_archives_what_to_nsq_publishes_through_every_layer(
    embedded: Embedded,
    go_program: GoProgram,
    certificates: Certificates,
    tmp_path: Path,
    option: str,
) -> None:
    nsqd = embedded(*certificates.server.nsqd_flags)
    nsqd.create_channel("t", "ch")
    place = ["-topic=t", f"-nsqd-tcp-address={nsqd.tcp_address}"]
    run([go_program("to_nsq"), *place], "\n".join(LINES) + "\n")
    place += ["-channel=ch", f"-output-dir={tmp_path}", "-sync-interval=200ms"]
    place += ["-max-in-flight=200", f"-consumer-opt={option}"]
    place += [f"-consumer-opt=tls_root_ca_file,{certificates.ca}"] * option.startswith("tls")
    command = [go_program("nsq_to_file"), *place]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as archiver:
        try:
            wait_until(lambda: not unfinished(nsqd, "t", "ch"), what="all archived", timeout_s=30)
        finally:
            archiver.terminate()
            archiver.wait(TIMEOUT_S)

    [file] = tmp_path.glob("*.log")
    assert sorted(file.read_text().splitlines()) == sorted(LINES)


def test_lookupds_can_be_changed_while_it_runs(embedded: Embedded, nsqlookupd: MakeLookupd) -> None:
    lookupd = nsqlookupd()
    nsqd = embedded("-broadcast-address=127.0.0.1")
    nsqd.create_topic("t")
    addresses = json.dumps([lookupd.tcp_address]).encode()
    status, answer = nsqd.request("PUT", "/config/nsqlookupd_tcp_addresses", addresses)

    assert (status, json.loads(answer)) == (200, [lookupd.tcp_address])
    wait_until(lambda: b'"t"' in lookupd.get("/topics"), what="the topic is registered")


PYNSQ = """
import sys, nsq, tornado.ioloop
address, options = sys.argv[1], eval(sys.argv[2])
loop, received = tornado.ioloop.IOLoop.current(), []
def handler(message):
    received.append(message.body)
    if message.attempts == 1 and message.body == b"again":
        message.requeue(delay=0, backoff=False)
    else:
        message.finish()
    if len(received) == 12:
        loop.call_later(0.1, loop.stop)
def publish():
    if not writer.conns:
        loop.call_later(0.05, publish)
        return
    writer.mpub("t", [b"body %d" % number for number in range(10)])
    writer.pub("t", b"again")
reader = nsq.Reader("t", "ch", message_handler=lambda m: (m.enable_async(), handler(m))[1],
    nsqd_tcp_addresses=[address], max_in_flight=5, **options)
writer = nsq.Writer([address], **options)
loop.call_later(0.3, publish)
nsq.run()
print(len(received), received.count(b"again"))
"""


@pytest.mark.parametrize(
    "options", ["{'snappy': True}", "{'deflate': True}", "{'heartbeat_interval': 1}"]
)
def test_pynsq_publishes_and_consumes(embedded: Embedded, options: str) -> None:
    nsqd = embedded()

    printed = run([sys.executable, "-W", "ignore", "-c", PYNSQ, nsqd.tcp_address, options])

    assert printed.split() == ["12", "2"]
    assert nsqd.channel_stats("t", "ch")["requeue_count"] == 1
