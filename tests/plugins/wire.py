"""The bytes of NSQ, built and cut without nsqtools.protocol, which is on trial."""

import json
import struct
from dataclasses import dataclass

MAGIC = b"  V2"

RESPONSE, ERROR, MESSAGE = 0, 1, 2

COMMANDS_WITH_BODY = {"IDENTIFY", "AUTH", "PUB", "MPUB", "DPUB"}


def frame(frame_type: int, data: bytes) -> bytes:
    return struct.pack(">Ii", len(data) + 4, frame_type) + data


def message_frame(body: bytes, message_id: str, *, attempts: int, timestamp_ns: int) -> bytes:
    header = struct.pack(">qH", timestamp_ns, attempts)
    return frame(MESSAGE, header + message_id.encode() + body)


@dataclass(frozen=True, slots=True)
class Command:
    """One command as the client sent it; `body` is what follows the line, without its length."""

    line: str
    body: bytes
    read: int

    @property
    def json(self) -> dict[str, object]:
        document: dict[str, object] = json.loads(self.body)
        return document


def split_commands(data: bytes, read: int) -> tuple[list[Command], bytes]:
    """The complete commands that `data` begins with, and the rest."""
    commands = []
    start = 0
    while (line_end := data.find(b"\n", start)) >= 0:
        line, end, body = data[start:line_end].decode("latin-1"), line_end + 1, b""
        if line.split(" ")[0] in COMMANDS_WITH_BODY:
            body_start = end + 4
            end = body_start + int.from_bytes(data[end:body_start], "big")
            if len(data) < max(end, body_start):
                break
            body = data[body_start:end]
        commands.append(Command(line, body, read))
        start = end
    return commands, data[start:]
