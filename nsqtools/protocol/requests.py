"""The receiving side of protocol V2: commands parsed from bytes, and refused with nsqd's texts.

nsqd checks a command in steps and sends some refusals before its body has arrived. A reader
therefore takes the buffer and a position. It returns a value with the position after it, raises
`RequestError` (the error frame to send), or raises `Incomplete` with the number of bytes to wait
for. The caller keeps the bytes and parses the command again, so no reader has side effects.

The order of the checks and the texts are nsqd's (nsqd/protocol_v2.go); clients match on them.

Protocol V1, between nsqd and nsqlookupd, is implemented for both sides: lines to nsqlookupd, sized
responses back. A response has no frame type: ``int32 size | data``. Errors are responses whose data
begins with ``E_``; they end the connection.

The readers of nsqlookupd follow the same contract, with nsqlookupd's texts. Traps: nsqlookupd trims
a line before it splits it at single blanks, writes names in single quotes, and accepts any size of
IDENTIFY. Sizes that no nsqd sends are refused here.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from nsqtools.errors import ProtocolError
from nsqtools.protocol.frames import ID_LENGTH, RequestError
from nsqtools.protocol.names import is_valid_name
from nsqtools.protocol.text import INT64, go_json, go_members, quote

MAX_IDENTIFY_SIZE = 1 << 16  # Clients send up to 1,000 bytes, and nsqd sends nsqlookupd 150.
MAX_LINE_LENGTH = 16384  # The size of nsqd's read buffer, into which a line must fit.

_SIZE = struct.Struct(">i")
_UINT64 = 1 << 64
_ANSWERS = re.compile(
    rb"(?:FIN \S{16}\n){1,500}+|(?:TOUCH \S{16}\n){1,500}+|(?:REQ \S{16} \d{1,9}\n){1,500}+"
)


class Incomplete(Exception):
    """The command is incomplete: keep the bytes from ``position`` until there are ``needed`` ones.

    ``error`` is the answer if they never come; None for no answer.
    """

    def __init__(self, position: int, needed: int, error: RequestError | None = None) -> None:
        super().__init__(position, needed)
        self.position = position
        self.needed = needed
        self.error = error


class LineTooLong(Exception):
    """A line without a newline in its first 16384 bytes: nsqd closes without an answer."""


class CommandLine(NamedTuple):
    """A command line, and the position in ``data`` where its body would begin."""

    words: list[bytes]
    data: bytes
    position: int  # after the line
    start: int  # of the line


def read_request(data: bytes, position: int) -> CommandLine:
    """Split the command line at ``position`` into words, including empty words."""
    newline = data.find(b"\n", position, position + MAX_LINE_LENGTH)
    if newline < 0:
        have = len(data) - position
        if have >= MAX_LINE_LENGTH:
            raise LineTooLong
        raise Incomplete(position, have + 1)
    end = newline - 1 if newline > position and data[newline - 1] == 13 else newline
    return CommandLine(data[position:end].split(b" "), data, newline + 1, position)


class AnswerRun(NamedTuple):
    """Consecutive lines of one command: FIN, TOUCH or REQ."""

    command: bytes
    ids: list[bytes]
    delays: list[bytes]  # of REQ, in milliseconds
    position: int  # after the run


def read_answers(data: bytes, position: int) -> AnswerRun | None:
    """Parse up to 500 consecutive FIN, TOUCH or REQ lines; None if the next line is no such one.

    A regular expression takes all of them in one call, because consumers send them by the hundred.
    """
    run = _ANSWERS.match(data, position)
    if run is None:
        return None
    words = run.group().split()
    if words[0] == b"REQ":
        return AnswerRun(b"REQ", words[1::3], words[2::3], run.end())
    return AnswerRun(words[0], words[1::2], [], run.end())


def read_size(data: bytes, position: int, start: int, unreadable: RequestError) -> tuple[int, int]:
    """Read a signed size; ``start`` is the position of the command."""
    after = position + 4
    if len(data) < after:
        raise Incomplete(start, after - start, unreadable)
    return _SIZE.unpack_from(data, position)[0], after


def read_sized_body(
    request: CommandLine, command: str, max_body_size: int, min_body_size: int = 1
) -> tuple[bytes, int]:
    """Read the sized body of IDENTIFY or AUTH.

    Any client may send them, and parsing JSON of 5 MB takes 0.2 s, so `MAX_IDENTIFY_SIZE` bounds
    them as well.
    """
    unreadable = RequestError("E_BAD_BODY", f"{command} failed to read body size")
    size, _ = read_size(request.data, request.position, request.start, unreadable)
    for limit in (max_body_size, MAX_IDENTIFY_SIZE):
        if size > limit:
            raise RequestError("E_BAD_BODY", f"{command} body too big {size} > {limit}")
    if size < min_body_size:
        raise RequestError("E_BAD_BODY", f"{command} invalid body size {size}")
    return _take(request, size, "E_BAD_BODY", f"{command} failed to read body")


def read_message(request: CommandLine, command: str, max_msg_size: int) -> tuple[bytes, int]:
    """Read the sized message of PUB or DPUB."""
    _, data, position, start = request
    after = position + 4
    if len(data) < after:
        text = f"{command} failed to read message body size"
        raise Incomplete(start, after - start, RequestError("E_BAD_MESSAGE", text))
    size = _SIZE.unpack_from(data, position)[0]
    if size <= 0:
        raise RequestError("E_BAD_MESSAGE", f"{command} invalid message body size {size}")
    if size > max_msg_size:
        raise RequestError("E_BAD_MESSAGE", f"{command} message too big {size} > {max_msg_size}")
    return _take(request, size, "E_BAD_MESSAGE", f"{command} failed to read message body")


def _take(request: CommandLine, size: int, code: str, text: str) -> tuple[bytes, int]:
    _, data, position, start = request
    after = position + 4 + size
    if len(data) < after:
        raise Incomplete(start, after - start, RequestError(code, text))
    return data[position + 4 : after], after


def read_publishes(
    data: bytes, position: int, line: bytes, max_msg_size: int
) -> tuple[list[bytes], int]:
    """Read consecutive complete PUBs with the same line, at most `LARGE_COUNT`.

    Return the messages and the position of the first other input.
    """
    bodies: list[bytes] = []
    append, head_size, end = bodies.append, len(line) + 4, len(data)
    while data.startswith(line, position) and len(bodies) < LARGE_COUNT:
        body_at = position + head_size
        size = int.from_bytes(data[body_at - 4 : body_at], "big")
        after = body_at + size
        if not 0 < size <= max_msg_size or after > end:
            break
        append(data[body_at:after])
        position = after
    return bodies, position


_MANY = 16  # below it, a loop over the messages is as fast


def check_multi_publish(
    data: bytes, position: int, max_body_size: int, max_msg_size: int
) -> tuple[int, int]:
    """Check the body of a complete, valid MPUB of at most `LARGE_COUNT` messages.

    Return the number of messages and the position after them; they begin 8 bytes after
    ``position``. For any other input, which `BodiesReader` continues to read or refuses, return 0.
    """
    after = position + 8
    size = int.from_bytes(data[position : position + 4], "big")
    count = int.from_bytes(data[position + 4 : after], "big")
    is_whole = after <= position + 4 + size <= len(data) and size <= max_body_size
    if not is_whole or not 0 < count <= LARGE_COUNT:
        return 0, position
    unpack = _SIZE.unpack_from
    # Messages of one size are frequent. Comparing all size fields at once takes a tenth of the
    # time of the loop below.
    step, rest = divmod(size - 4, count)
    if (
        count >= _MANY
        and not rest
        and unpack(data, after)[0] == step - 4 in range(1, max_msg_size + 1)
    ):
        end = after + count * step
        if all(data[at:end:step] == data[at : at + 1] * count for at in range(after, after + 4)):
            return count, end
    try:
        for _ in range(count):
            size = unpack(data, after)[0]
            if not 0 < size <= max_msg_size:
                return 0, position
            after += 4 + size
    except struct.error:  # a size field beyond the end
        return 0, position
    return (count, after) if after <= len(data) else (0, position)


def sized_bodies(data: bytes, count: int) -> list[bytes]:
    """Return the first ``count`` of sized bodies that were checked."""
    bodies: list[bytes] = []
    append, unpack, after = bodies.append, _SIZE.unpack_from, 0
    for _ in range(count):
        body_at = after + 4
        after = body_at + unpack(data, after)[0]
        append(data[body_at:after])
    return bodies


LARGE_COUNT = 1000  # A publish of more messages is handled in batches.
# An object of bytes takes about 40 bytes in addition to its content. Below this average size that
# overhead matters, and the messages stay in the bytes of the request.
_SMALL_BYTES = 64

Batches = Callable[[], Iterable[list[bytes]]]
"""Returns an iterator over the messages of a large publish, in batches."""


class BodiesReader:
    """Reads a count and N sized messages, the body of MPUB and of HTTP's binary /mpub.

    A body of 5 MB arrives in many reads. `read` keeps the messages that it has parsed, so that no
    byte is parsed or stored twice. After `Incomplete`, call it again with the bytes from its
    position on. Up to `LARGE_COUNT` messages are in ``bodies``; larger publishes are only in
    `batches`. A million small objects would take ten times the memory of the request, so small
    messages stay in the received bytes. ``count`` and ``size`` are the totals.
    """

    def __init__(self, max_msg_size: int, max_body_size: int) -> None:
        self.bodies: list[bytes] = []
        self.count = self.size = 0
        self._max_msg_size = max_msg_size
        self._max_count = (max_body_size - 4) // 5  # A message takes at least 5 bytes.
        self._read_count = 0
        # The messages of a large publish: a list, or the received bytes with their sizes.
        self._pieces: list[list[bytes] | bytes] = []

    @property
    def is_large(self) -> bool:
        """Whether the messages are in `batches` only."""
        return self.count > LARGE_COUNT

    def read(self, data: bytes, position: int) -> int:
        """Take messages and return the position after the last one."""
        if not self.count:
            unreadable = RequestError("E_BAD_BODY", "MPUB failed to read message count")
            count, position = read_size(data, position, position, unreadable)
            if count <= 0 or count > self._max_count:
                raise RequestError("E_BAD_BODY", f"MPUB invalid message count {count}")
            self.count = count
        bodies = [] if self.is_large else self.bodies
        append = bodies.append
        limit = self._max_msg_size
        unpack = _SIZE.unpack_from
        have = len(data)
        last_size_at = have - 4
        start = position
        number = self._read_count
        try:
            for number in range(self._read_count, self.count):
                if position > last_size_at:
                    text = f"MPUB failed to read message({number}) body size"
                    raise Incomplete(position, 4, RequestError("E_BAD_MESSAGE", text))
                size = unpack(data, position)[0]
                after = position + 4 + size
                if not 0 < size <= limit or after > have:
                    raise self._fault(position, size, number)
                append(data[position + 4 : after])
                position = after
            number = self.count
        finally:
            count = number - self._read_count
            if self.is_large and count:
                is_small = position - start < _SMALL_BYTES * count
                self._pieces.append(data[start:position] if is_small else bodies)
            self.size += position - start - 4 * count
            self._read_count = number
        return position

    def batches(self) -> Iterator[list[bytes]]:
        """Yield the messages, about `LARGE_COUNT` at a time."""
        for piece in self._pieces or [self.bodies]:
            if isinstance(piece, list):
                yield piece
                continue
            position = 0
            while position < len(piece):
                batch: list[bytes] = []
                while position < len(piece) and len(batch) < LARGE_COUNT:
                    after = position + 4 + _SIZE.unpack_from(piece, position)[0]
                    batch.append(piece[position + 4 : after])
                    position = after
                yield batch

    def _fault(self, position: int, size: int, number: int) -> RequestError | Incomplete:
        text = "MPUB failed to read message body"
        if size <= 0:
            text = f"MPUB invalid message({number}) body size {size}"
        elif size > self._max_msg_size:
            text = f"MPUB message too big {size} > {self._max_msg_size}"
        error = RequestError("E_BAD_MESSAGE", text)
        is_cut = 0 < size <= self._max_msg_size
        return Incomplete(position, size + 4, error) if is_cut else error


def read_multi_publish_size(request: CommandLine, max_body_size: int) -> int:
    """Check the outer size of MPUB's body and return the position after it.

    nsqd only checks this size: the count and the sizes of the messages determine where the body
    ends.
    """
    unreadable = RequestError("E_BAD_BODY", "MPUB failed to read body size")
    size, position = read_size(request.data, request.position, request.start, unreadable)
    if size <= 0:
        raise RequestError("E_BAD_BODY", f"MPUB invalid body size {size}")
    if size > max_body_size:
        raise RequestError("E_BAD_BODY", f"MPUB body too big {size} > {max_body_size}")
    return position


def parse_uint64(word: bytes, complaint: bytes) -> int:
    """Read ASCII digits as nsqd does: empty text is 0, and the arithmetic wraps."""
    try:
        if word and not word.isdigit():
            raise ValueError
        return int(word or b"0") % _UINT64
    except ValueError:  # Python's int refuses texts of more than 4,300 digits as well.
        raise RequestError("E_INVALID", complaint + b" " + word) from None


def as_int64(value: int) -> int:
    """Return the value of a Go int64 after ``value`` was converted to it."""
    value %= _UINT64
    return value - _UINT64 if value >= _UINT64 >> 1 else value


def topic_name(command: str, word: bytes) -> str:
    """Check the topic of a command."""
    return _name("E_BAD_TOPIC", f"{command} topic name", word)


def channel_name(command: str, word: bytes) -> str:
    """Check the channel of a command."""
    return _name("E_BAD_CHANNEL", f"{command} channel name", word)


def _name(code: str, what: str, word: bytes) -> str:
    name = word.decode("latin-1")
    if not is_valid_name(name):
        raise RequestError(code, what.encode() + b" " + quote(word) + b" is not valid")
    return name


def message_id(words: list[bytes], minimum: int = 2) -> bytes:
    """Check the parameters of FIN, REQ and TOUCH and return the id."""
    if len(words) < minimum:
        raise RequestError("E_INVALID", words[0] + b" insufficient number of params")
    if len(words[1]) != ID_LENGTH:
        raise RequestError("E_INVALID", "invalid message ID")
    return words[1]


MAGIC_V1 = b"  V1"
PING = b"PING\n"


class PeerInfo(NamedTuple):
    """A daemon's description of itself; the fields of the JSON in Go's order."""

    broadcast_address: str = ""
    hostname: str = ""
    http_port: int = 0
    tcp_port: int = 0
    version: str = ""

    def encode(self) -> bytes:
        """Return the JSON: the body of IDENTIFY, and nsqlookupd's answer to it."""
        return go_json(self._asdict())


def decode_peer_info(data: bytes) -> PeerInfo:
    """Read a daemon's description of itself. Raises `ProtocolError`."""
    try:
        return _peer_info(data)
    except ValueError as exc:
        raise ProtocolError(f"no description of a daemon: {data[:60]!r}") from exc


def _peer_info(data: bytes) -> PeerInfo:
    """Read a daemon's JSON as Go does. Raises ``ValueError``."""
    members = go_members(data, _KINDS)
    members.pop("remote_address", None)
    return PeerInfo(**members)


def encode_register(topic: str, channel: str = "") -> bytes:
    """Return the command that announces a topic or a channel."""
    return f"REGISTER {topic} {channel}".rstrip().encode() + b"\n"


def encode_unregister(topic: str, channel: str = "") -> bytes:
    """Return the command that withdraws a topic or a channel."""
    return b"UN" + encode_register(topic, channel)


_KINDS: dict[str, type | range] = {
    "remote_address": str,  # nsqlookupd parses it and replaces it by the real address.
    "hostname": str,
    "broadcast_address": str,
    "tcp_port": INT64,
    "http_port": INT64,
    "version": str,
}


def read_trimmed_request(data: bytes, position: int) -> CommandLine:
    """Read the command line at ``position`` as nsqlookupd does."""
    request = read_request(data, position)
    return request._replace(words=b" ".join(request.words).strip().split(b" "))


def read_identify(request: CommandLine) -> tuple[PeerInfo, int]:
    """Read the body of IDENTIFY, and return the position after it."""
    body, position = read_sized_body(request, "IDENTIFY", MAX_IDENTIFY_SIZE, 0)
    try:
        info = _peer_info(body)
    except ValueError as exc:
        raise RequestError("E_BAD_BODY", "IDENTIFY failed to decode JSON body") from exc
    if not (info.broadcast_address and info.http_port and info.tcp_port and info.version):
        raise RequestError("E_BAD_BODY", "IDENTIFY missing fields")
    return info, position


def topic_and_channel(request: CommandLine) -> tuple[str, str]:
    """Check the parameters of REGISTER and UNREGISTER; the channel may be ``""``."""
    words, *_ = request
    command = words[0]
    if len(words) < 2:
        raise RequestError("E_INVALID", command + b" insufficient number of params")
    names = [word.decode("latin-1") for word in (*words[1:3], b"")]
    for kind, name in zip((b"topic", b"channel"), names, strict=False):
        if not is_valid_name(name) and (name or kind == b"topic"):
            text = b"%b %b name '%b' is not valid" % (command, kind, name.encode("latin-1"))
            raise RequestError(f"E_BAD_{kind.decode().upper()}", text)
    return names[0], names[1]
