"""Bytes for an nsqd, to which the embedded one must answer what the Go one answered.

A case is what one client sends, in steps. After a step that names a number of frames the client
waits for them; at the end it stops sending and reads until the server closes, so that nothing
depends on time. Timestamps and ids that the server made are masked. ``TOPIC`` is a topic
of the case's own.
"""

from __future__ import annotations

import json
import re
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

from plugins.http_api import Nsqd
from plugins.raw_client import sized
from plugins.waiting import patience_s

TIMEOUT_S = patience_s(10.0)
MAGIC = b"  V2"
ID = b"0123456789abcdef"  # of no message

Frames = list[bytes]
Send = bytes | Callable[[Frames], bytes]


@dataclass(frozen=True, slots=True)
class Case:
    """``steps`` are (what to send, how many frames to wait for)."""

    name: str
    steps: tuple[tuple[Send, int], ...]
    flags: tuple[str, ...] = ()


def once(name: str, data: bytes, *flags: str) -> Case:
    """Send everything after the magic at once."""
    return Case(name, ((MAGIC + data, 0),), flags)


def steps(name: str, *parts: tuple[Send, int], flags: tuple[str, ...] = ()) -> Case:
    """Send the magic, then the parts, waiting for frames after each."""
    return Case(name, ((MAGIC, 0), *parts), flags)


def identify(**fields: object) -> bytes:
    return b"IDENTIFY\n" + sized(json.dumps({"feature_negotiation": True, **fields}).encode())


def raw_identify(body: str) -> bytes:
    return b"IDENTIFY\n" + sized(body.encode())


def mpub(*bodies: bytes, count: int | None = None, size: int | None = None) -> bytes:
    inner = struct.pack(">i", len(bodies) if count is None else count)
    inner += b"".join(map(sized, bodies))
    return b"MPUB TOPIC\n" + struct.pack(">i", len(inner) if size is None else size) + inner


def ids(frames: Frames) -> list[bytes]:
    return [frame[18:34] for frame in frames if frame[4:8] == b"\0\0\0\2"]


def answer(command: bytes, which: int = -1, tail: bytes = b"") -> Callable[[Frames], bytes]:
    """FIN, REQ or TOUCH one of the messages received so far."""
    return lambda frames: command + b" " + ids(frames)[which] + tail + b"\n"


PUB = b"PUB TOPIC\n" + sized(b"body")
SUB = b"SUB TOPIC ch\n"

LINES = [
    once("bad command", b"BAH\n"),
    once("empty line", b"\n"),
    once("leading blank", b" NOP\n"),
    once("lower case", b"nop\n"),
    once("two blanks", b"PUB  TOPIC\n"),
    once("carriage return", b"NOP\r\nBAH\r\n"),
    once("two carriage returns", b"BAH\r\r\n"),
    once("extra words", b"NOP a b\nBAH\n"),
    once("bytes that are no text", b"\xff\xfe\x00\n"),
    once("cut off line", b"PUB TOP"),
    once("longest line", b"B" * 16383 + b"\n"),
    once("line too long", b"B" * 16384),
    Case("bad magic", ((b"HELO", 0),)),
    Case("magic V1", ((b"  V1", 0),)),
    Case("half a magic", ((b"  ", 0),)),
    once("nothing", b""),
]

IDENTIFIES = [
    once("plain", b"IDENTIFY\n" + sized(b"{}")),
    once("negotiated", identify()),
    once("null", raw_identify("null")),
    once("array", raw_identify("[]")),
    once("scalar", raw_identify("1")),
    once("garbage", raw_identify("{")),
    once("trailing garbage", raw_identify("{} x")),
    once("trailing blanks", raw_identify("{} \n")),
    once("NaN", raw_identify('{"a":NaN}')),
    once("unknown keys", identify(short_id="a", nonsense={"x": [1.5]})),
    once("other case", raw_identify('{"FEATURE_negotiation":true,"Msg_Timeout":2000}')),
    once(
        "duplicates", raw_identify('{"feature_negotiation":true,"sample_rate":1,"sample_rate":2}')
    ),
    once("null member", raw_identify('{"feature_negotiation":true,"msg_timeout":null}')),
    once("fraction", identify(msg_timeout=1000.5)),
    once("exponent", raw_identify('{"msg_timeout":1e3}')),
    once("number as text", identify(msg_timeout="1000")),
    once("text as number", identify(client_id=5)),
    once("bool as number", identify(snappy=1)),
    once("number too large", raw_identify('{"msg_timeout":99999999999999999999}')),
    once("sample rate beyond int32", raw_identify('{"sample_rate":2147483648}')),
    once("no body", b"IDENTIFY\n"),
    once("half a size", b"IDENTIFY\n\0\0"),
    once("size 0", b"IDENTIFY\n\0\0\0\0"),
    once("size -1", b"IDENTIFY\n\xff\xff\xff\xff"),
    once("size too big", b"IDENTIFY\n\x7f\xff\xff\xff"),
    once("short body", b"IDENTIFY\n\0\0\0\x05{}"),
    once("twice", identify() + identify(msg_timeout=1000)),
    once("after SUB", SUB + identify()),
    *(
        once(f"{key} {value}", identify(**{key: value}))
        for key, values in {
            "heartbeat_interval": (-2, -1, 0, 1, 999, 1000, 60000, 60001),
            "output_buffer_size": (-2, -1, 0, 1, 63, 64, 65536, 65537),
            "output_buffer_timeout": (-2, -1, 0, 1, 24, 25, 30000, 30001),
            "sample_rate": (-1, 0, 50, 99, 100),
            "msg_timeout": (-1, 0, 1, 999, 1000, 900000, 900001),
        }.items()
        for value in values
    ),
    once("deflate level not asked", identify(deflate_level=3)),
    once("snappy and deflate", identify(snappy=True, deflate=True)),
    once("snappy refused", identify(snappy=True), "-snappy=false"),
    once("deflate refused", identify(deflate=True), "-deflate=false"),
    once("both, one refused", identify(deflate=True), "-deflate=false"),
    once("TLS not offered", identify(tls_v1=True)),
    once("no negotiation, no features", raw_identify('{"snappy":true,"tls_v1":true}') + b"NOP\n"),
    once("max deflate level", identify(deflate_level=9), "-max-deflate-level=3"),
    once("several bounds", identify(heartbeat_interval=1, msg_timeout=1)),
]

SUBSCRIPTIONS = [
    once("ok", SUB),
    once("no channel", b"SUB TOPIC\n"),
    once("no topic", b"SUB\n"),
    once("bad topic", b"SUB bad*topic ch\n"),
    once("empty topic", b"SUB  ch\n"),
    once("bad channel", b"SUB TOPIC ch%\n"),
    once("quoted", b'SUB a"b\\\t\x01\xff\xc3\xa9\xe2\x80\xa8 ch\n'),
    once("ephemeral alone", b"SUB #ephemeral ch\n"),
    once("64 characters", b"SUB TOPIC " + b"c" * 64 + b"\n"),
    once("65 characters", b"SUB TOPIC " + b"c" * 65 + b"\n"),
    once("64 with suffix", b"SUB TOPIC " + b"c" * 54 + b"#ephemeral\n"),
    once("65 with suffix", b"SUB TOPIC " + b"c" * 55 + b"#ephemeral\n"),
    once("twice", SUB + SUB),
    once("without heartbeats", identify(heartbeat_interval=-1) + SUB),
]

READIES = [
    once("before SUB", b"RDY 1\n"),
    once("zero", SUB + b"RDY 0\nBAH\n"),
    once("no count", SUB + b"RDY\nBAH\n"),
    once("empty count", SUB + b"RDY \nBAH\n"),
    once("leading zeros", SUB + b"RDY 0001\nBAH\n"),
    once("maximum", SUB + b"RDY 2500\nBAH\n"),
    once("beyond", SUB + b"RDY 2501\n"),
    once("negative", SUB + b"RDY -1\n"),
    once("signed", SUB + b"RDY +1\n"),
    once("word", SUB + b"RDY abc\n"),
    once("superscript", SUB + b"RDY \xb2\n"),
    once("wraps to -1", SUB + b"RDY 18446744073709551615\n"),
    once("wraps to 1", SUB + b"RDY 18446744073709551617\nBAH\n"),
    once("after CLS", SUB + b"CLS\nRDY abc\nBAH\n"),
    once("lower maximum", SUB + b"RDY 6\n", "-max-rdy-count=5"),
]

ANSWERS = [
    *(
        once(f"{command.decode()} {what}", prefix + command + rest)
        for command in (b"FIN", b"REQ", b"TOUCH")
        for what, prefix, rest in (
            ("before SUB", b"", b" " + ID + b" 0\n"),
            ("without parameters", SUB, b"\n"),
            ("with a short id", SUB, b" 123 0\n"),
            ("with a long id", SUB, b" " + ID + b"0 0\n"),
            ("with an unknown id", SUB, b" " + ID + b" 0\nBAH\n"),
            ("with strange bytes", SUB, b" " + b"\xff" * 16 + b" 0\nBAH\n"),
            ("with a carriage return", SUB, b" " + ID + b" 0\r\nBAH\n"),
        )
    ),
    once("FINs in a row", SUB + (b"FIN " + ID + b"\n") * 3 + b"BAH\n"),
    once("FIN and a carriage return", SUB + b"FIN " + ID[:-1] + b"\r\nBAH\n"),
    once("REQ without delay", SUB + b"REQ " + ID + b"\n"),
    once("REQ bad delay", SUB + b"REQ " + ID + b" x\n"),
    once("REQ empty delay", SUB + b"REQ " + ID + b" \nBAH\n"),
    once("REQ huge delay", SUB + b"REQ " + ID + b" 99999999999999999999\nBAH\n"),
    once("CLS before SUB", b"CLS\n"),
    once("CLS twice", SUB + b"CLS\nCLS\n"),
    once("SUB after CLS", SUB + b"CLS\n" + SUB),
    once("PUB after CLS", SUB + b"CLS\n" + PUB),
    once("AUTH after CLS", SUB + b"CLS\nAUTH\n" + sized(b"x")),
]

PUBLISHING = [
    once("PUB", PUB),
    once("PUB many", PUB * 200),
    once("PUB without topic", b"PUB\n"),
    once("PUB bad topic", b"PUB bad%topic\n" + sized(b"x")),
    once("PUB no size", b"PUB TOPIC\n"),
    once("PUB size 0", b"PUB TOPIC\n\0\0\0\0"),
    once("PUB size -1", b"PUB TOPIC\n\xff\xff\xff\xff"),
    once("PUB too big", b"PUB TOPIC\n\x00\x10\x00\x01"),
    once("PUB short body", b"PUB TOPIC\n\0\0\0\x05abc"),
    once("PUB limit", b"PUB TOPIC\n" + sized(b"x" * 100), "-max-msg-size=100"),
    once("PUB beyond limit", b"PUB TOPIC\n" + sized(b"x" * 101), "-max-msg-size=100"),
    once("DPUB", b"DPUB TOPIC 1000\n" + sized(b"x")),
    once("DPUB without delay", b"DPUB TOPIC\n"),
    once("DPUB 0", b"DPUB TOPIC 0\n" + sized(b"x")),
    once("DPUB bad delay", b"DPUB TOPIC x\n" + sized(b"x")),
    once("DPUB longest", b"DPUB TOPIC 3600000\n" + sized(b"x")),
    once("DPUB too long", b"DPUB TOPIC 3600001\n" + sized(b"x")),
    once("DPUB wraps", b"DPUB TOPIC 18446744073709551615\n" + sized(b"x")),
    once("DPUB bad topic", b"DPUB bad%topic 1\n" + sized(b"x")),
    once("DPUB size 0", b"DPUB TOPIC 1\n\0\0\0\0"),
    once("DPUB short body", b"DPUB TOPIC 1\n\0\0\0\x05abc"),
    once("MPUB", mpub(b"a", b"bc")),
    once("MPUB without topic", b"MPUB\n"),
    once("MPUB bad topic", b"MPUB bad%topic\n"),
    once("MPUB no size", b"MPUB TOPIC\n"),
    once("MPUB size 0", b"MPUB TOPIC\n\0\0\0\0"),
    once("MPUB size too big", b"MPUB TOPIC\n\x7f\xff\xff\xff"),
    once("MPUB no count", b"MPUB TOPIC\n\0\0\0\x04"),
    once("MPUB count 0", mpub()),
    once("MPUB count -1", mpub(b"a", count=-1)),
    once("MPUB count too large", mpub(b"a", count=1048576 * 2)),
    once("MPUB count lies", mpub(b"a", count=2)),
    once("MPUB outer size too small", mpub(b"a", b"b", size=1) + b"BAH\n"),
    once("MPUB outer size too large", mpub(b"a", b"b", size=1000) + b"BAH\n"),
    once("MPUB rest is commands", mpub(b"a", b"NOP\n", count=1) + b"BAH\n"),
    once("MPUB message size 0", mpub(b"a", b"")),
    once("MPUB message size -1", b"MPUB TOPIC\n\0\0\0\x10\0\0\0\1\xff\xff\xff\xff"),
    once("MPUB message too big", mpub(b"a", b"x" * 101), "-max-msg-size=100"),
    once("MPUB cut off message", mpub(b"a", b"bcd")[:-1]),
    once("MPUB body limit", mpub(*[b"x" * 12] * 6), "-max-body-size=100"),
    once("MPUB beyond body limit", mpub(*[b"x" * 13] * 6), "-max-body-size=100"),
    once("heartbeats off", identify(heartbeat_interval=-1) + PUB),
]

AUTHENTICATION = [
    once("AUTH not enabled", b"AUTH\n" + sized(b"secret")),
    once("AUTH with a parameter", b"AUTH x\n" + sized(b"secret")),
    once("AUTH no size", b"AUTH\n"),
    once("AUTH size 0", b"AUTH\n\0\0\0\0"),
    once("AUTH size -1", b"AUTH\n\xff\xff\xff\xff"),
    once("AUTH too big", b"AUTH\n\x7f\xff\xff\xff"),
    once("AUTH short body", b"AUTH\n\0\0\0\x05abc"),
    once("AUTH after SUB", SUB + b"AUTH\n" + sized(b"secret")),
    once("PUB before AUTH", PUB, "-auth-http-address=127.0.0.1:1"),
    once("DPUB before AUTH", b"DPUB TOPIC 1\n" + sized(b"x"), "-auth-http-address=127.0.0.1:1"),
    once("MPUB before AUTH", b"MPUB TOPIC\n", "-auth-http-address=127.0.0.1:1"),
    once("SUB before AUTH", SUB, "-auth-http-address=127.0.0.1:1"),
    once("auth required", identify(), "-auth-http-address=127.0.0.1:1"),
    once("AUTH unreachable", b"AUTH\n" + sized(b"x"), "-auth-http-address=127.0.0.1:1"),
]

DELIVERY = [
    steps("deliver and finish", (PUB + SUB, 2), (b"RDY 1\n", 1), (answer(b"FIN"), 0)),
    steps(
        "finish twice",
        (PUB + SUB + b"RDY 1\n", 3),
        (answer(b"FIN"), 0),
        (answer(b"FIN"), 1),
    ),
    steps(
        "requeue at once counts attempts",
        (PUB + SUB + b"RDY 1\n", 3),
        (answer(b"REQ", tail=b" 0"), 1),
        (answer(b"REQ", tail=b" 0"), 1),
        (answer(b"FIN"), 0),
    ),
    steps(
        "touch, then finish",
        (PUB + SUB + b"RDY 1\n", 3),
        (answer(b"TOUCH"), 0),
        (answer(b"FIN"), 0),
    ),
    steps("order of MPUB", (mpub(b"a", b"b", b"c") + SUB + b"RDY 1\n", 3), (answer(b"FIN"), 1)),
    steps(
        "RDY is a ceiling", (mpub(b"a", b"b", b"c") + SUB + b"RDY 2\n", 4), (answer(b"FIN", 0), 1)
    ),
    steps("nothing after CLS", (PUB + SUB + b"RDY 1\n", 3), (b"CLS\n", 1), (answer(b"FIN"), 0)),
    steps("raised RDY", (mpub(b"a", b"b") + SUB + b"RDY 1\n", 3), (b"RDY 2\n", 1)),
    steps(
        "deferred publish waits for its time",
        # a message may come before the answer to its PUB
        (SUB + b"DPUB TOPIC 300\n" + sized(b"late") + PUB, 3),
        (b"RDY 2\n", 2),
    ),
]

TABLES = {
    "lines": LINES,
    "identify": IDENTIFIES,
    "subscribe": SUBSCRIPTIONS,
    "ready": READIES,
    "answers": ANSWERS,
    "publishing": PUBLISHING,
    "authentication": AUTHENTICATION,
    "delivery": DELIVERY,
}


def play(server: Nsqd, case: Case) -> list[str]:
    """The type and the data of each frame that came back."""
    topic = re.sub(r"[^a-zA-Z0-9]", "_", case.name).encode()
    return [
        f"{int.from_bytes(frame[4:8], 'big')} {masked(frame).decode('latin-1')}"
        for frame in exchange(server, case, topic)
    ]


def exchange(server: Nsqd, case: Case, topic: bytes) -> Frames:
    """Play the case and return the frames that came back, whole and raw."""
    host, _, port = server.tcp_address.rpartition(":")
    frames: Frames = []
    with (
        socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection,
        connection.makefile("rb") as stream,
    ):
        for data, wait_for in case.steps:
            send = data if isinstance(data, bytes) else data(frames)
            connection.sendall(send.replace(b"TOPIC", topic))
            for _ in range(wait_for):
                frames.append(read_frame(stream))
        try:
            connection.shutdown(socket.SHUT_WR)
            while frame := read_frame(stream):
                frames.append(frame)
        except TimeoutError:
            raise
        except OSError:
            pass  # a reset is an end, too: the Go nsqd closes with input unread
    return frames


def read_frame(stream: BinaryIO) -> bytes:
    head = stream.read(4)
    return head + stream.read(int.from_bytes(head, "big")) if head else b""


def masked(frame: bytes) -> bytes:
    """The data of a frame without the timestamp and the id of a message."""
    if frame[4:8] == b"\0\0\0\2":
        return b"TIME" + frame[16:18] + b"ID" + frame[34:]
    return re.sub(rb"[0-9a-f]{16} failed", b"ID failed", frame[8:])
