"""Clients die at every point of the protocol, and no other client notices.

Another consumer has to get its messages all the time. Whatever a client's death raises in the
daemon ends that client, with one line of log.
"""

import itertools
import os
import random
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from plugins.certificates import Certificates
from plugins.daemons import EmbeddedNsqdProcess
from plugins.examples import slow
from plugins.raw_client import RawClient, mpub, sized, subscribed
from plugins.servers import AnyNsqd, DataPath, Serve
from plugins.waiting import wait_until

from nsqtools.server.client_connection import ClientConnection
from nsqtools.server.negotiation import TLSLayer
from nsqtools.server.protocol_v2 import ProtocolV2
from nsqtools.server.queues.channel import Channel, ChannelSubscription
from nsqtools.server.queues.message_buffer import QueueBacklog
from nsqtools.server.queues.topic import Topic

BROKEN_RECORD = b"\x17\x03\x03\x00\x20" + b"x" * 32
LAYERS = ("", "tls_v1", "snappy", "deflate")


@contextmanager
def quiet_consumer(address: str) -> Iterator[Callable[[], None]]:
    """Return a function that publishes one message and waits until the consumer has it."""
    numbers = itertools.count()
    with subscribed(address, "quiet", "ch", ready=1) as consumer, RawClient(address) as publisher:

        def get_a_message() -> None:
            body = b"%d" % next(numbers)
            publisher.publish("quiet", body)
            message = consumer.read_message()
            assert message.body == body
            consumer.finish([message])
            consumer.settle()

        yield get_a_message


@pytest.fixture
def nsqd(data_path: DataPath, serve: Serve, certificates: Certificates) -> EmbeddedNsqdProcess:
    return serve(EmbeddedNsqdProcess(data_path(), *certificates.server.nsqd_flags))


@contextmanager
def connected(address: str, layer: str) -> Iterator[RawClient]:
    with RawClient(address) as client:
        if layer == "tls_v1":
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            client.negotiate(tls=context)
        elif layer:
            client.negotiate(layer)
        yield client


PUB = b"PUB dying#ephemeral\n"
CUT_OFF = PUB + b"\0\0\x10\0abc"
MANY = mpub("dying#ephemeral", [b"x"] * 900)
SUB = b"SUB dying#ephemeral ch#ephemeral\nRDY 10\n"
ID = b"0123456789abcdef"
STATES = {
    "says nothing but its magic": b"",
    "stops in a command": b"PUB dyi",
    "stops in IDENTIFY": b"IDENTIFY\n" + sized(b'{"feature_negotiation":true}')[:-5],
    "stops in a message": CUT_OFF,
    "stops in a message after much work": b"NOP\n" * 15_000 + CUT_OFF,
    "stops in many messages": MANY[:-7],
    "waits for no answer": (PUB + sized(b"x")) * 50,
    "is refused": b"NONSENSE\n" + b"NOP\n" * 1000,
    "consumes": SUB + b"RDY 1000\n" + (PUB + sized(b"x" * 100)) * 50,
    "stops in an answer": SUB + PUB + sized(b"x") + b"REQ %b 0\nTOUCH %b\nFIN 01234" % (ID, ID),
    "leaves": SUB + b"CLS\n" + b"FIN %b\n" % ID * 10,
}


DEATHS = ("closes", "is reset", "breaks its layer")


def die(address: str, layer: str, sent: bytes, how: str) -> None:
    with connected(address, layer) as client, suppress(OSError):  # the daemon was faster
        client.send(sent)
        if how == "is reset":
            no_linger = struct.pack("ii", 1, 0)
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_linger)
        elif how == "breaks its layer":
            os.write(client.socket.fileno(), BROKEN_RECORD)  # bypasses TLS and compression


@pytest.mark.parametrize("rounds", [1, slow(16)])
def test_a_consumer_is_served_while_other_clients_die(
    nsqd: EmbeddedNsqdProcess, rounds: int
) -> None:
    cases = [
        (layer, sent, how)
        for (turn, layer), (at, sent), how in itertools.product(
            enumerate(LAYERS), enumerate(STATES.values()), DEATHS
        )
        # the short form: each death in each state with TLS, one death for each state elsewhere
        if rounds > 1 or layer == "tls_v1" or how == DEATHS[(turn + at) % len(DEATHS)]
    ] * rounds
    random.Random(rounds).shuffle(cases)
    descriptors = Path(f"/proc/{nsqd.pid}/fd")
    with quiet_consumer(nsqd.tcp_address) as get_a_message:
        get_a_message()
        open_count = len(os.listdir(descriptors))
        for case in cases:  # 66, or 2,112
            die(nsqd.tcp_address, *case)
            get_a_message()
        wait_until(
            lambda: len(os.listdir(descriptors)) <= open_count, what="their sockets are closed"
        )
    assert "Exception in callback" not in nsqd.log
    assert "Fatal error" not in nsqd.log


def is_closed(client: RawClient) -> bool:
    try:
        return not client.socket.recv(1 << 16)
    except OSError:
        return True


@pytest.mark.parametrize("tries", [20, slow(200)])
def test_a_broken_tls_record_stops_no_other_client(nsqd: EmbeddedNsqdProcess, tries: int) -> None:
    with quiet_consumer(nsqd.tcp_address) as get_a_message:
        for number in range(tries):
            with connected(nsqd.tcp_address, "tls_v1") as client:
                client.subscribe("own#ephemeral", f"ch{number}#ephemeral", ready=1000)
                for _ in range(2):
                    client.send(b"NOP\n" * 15_000 + b"PUB own#ephemeral\n" + sized(b"m"))
                os.write(client.socket.fileno(), BROKEN_RECORD)
                get_a_message()
                wait_until(lambda: is_closed(client), what="the daemon closes it")
    wait_until(lambda: nsqd.log.count("broken TLS record") == tries, what="each is logged once")
    assert "Exception in callback" not in nsqd.log


FAULTS = [
    (ProtocolV2, "execute"),
    (ClientConnection, "_close_if_done"),
    (TLSLayer, "encrypt"),
    (ChannelSubscription, "_on_tick"),
    (ChannelSubscription, "deliver"),
    (Channel, "_deliver"),
    (Channel, "_requeue_due"),
    (QueueBacklog, "put"),
    (Topic, "_copy"),
    (Topic, "consumers_left"),
]


@pytest.mark.parametrize(("owner", "name"), FAULTS)
def test_one_exception_stops_no_other_client(
    embedded_nsqd: AnyNsqd,
    certificates: Certificates,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
) -> None:
    nsqd = embedded_nsqd(*certificates.server.nsqd_flags, "-msg-timeout=1s")
    real = getattr(owner, name)
    is_armed, has_raised = threading.Event(), threading.Event()
    published: set[bytes] = set()

    def fail_once(*arguments: object, **named: object) -> object:
        if is_armed.is_set() and not has_raised.is_set():
            has_raised.set()
            raise ZeroDivisionError("the fault")
        return real(*arguments, **named)

    def publish() -> None:
        body = b"%d" % len(published)
        nsqd.publish("busy", body)
        published.add(body)

    def be_busy() -> bool:
        with (
            suppress(OSError, EOFError),  # its own end
            connected(nsqd.tcp_address, "tls_v1") as client,
        ):
            client.socket.settimeout(1)  # the awaited response may have failed
            client.subscribe("busy", "ch", ready=3)
            for _ in range(2):
                publish()
                client.send(b"REQ %b 1\n" % client.read_message().id)
        return has_raised.is_set()

    monkeypatch.setattr(owner, name, fail_once)
    with quiet_consumer(nsqd.tcp_address) as get_a_message:
        get_a_message()
        publish()  # the message waits in the topic
        nsqd.stats()  # its iteration has ended
        is_armed.set()
        wait_until(be_busy, what=f"{name} raises")
        for _ in range(3):
            get_a_message()
        with subscribed(nsqd.tcp_address, "busy", "ch", ready=5) as client:
            while published:
                message = client.read_message()
                published.discard(message.body)
                client.finish([message])
    assert nsqd.log.count("the fault") == 1
