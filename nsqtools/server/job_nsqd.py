"""An nsqd in this process that delivers the messages of one job, and accepts none from clients.

`nsqtools.one_channel` is its user. The job writes messages straight into the queues of channels,
with their ids, timestamps and attempts, where a client could only publish to a topic.

The data path is that of ``--durable``, with a file `MARK` that identifies it as a job's. After a
kill the next run on the same path delivers the remaining messages. A *note* records the progress of
the job: it is replaced in the transaction that stores messages, so that both are written or
neither. It is a row of queue 0, a number that no topic or channel gets.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from nsqtools.errors import ConfigurationError, ConnectionFailed, OutputError
from nsqtools.protocol.frames import MIN_MESSAGE_SIZE, WireMessage
from nsqtools.protocol.names import LOOKUPD_TCP_PORT, Address, parse_address
from nsqtools.server.daemon_log import DaemonLog
from nsqtools.server.durable_database import MessageRow
from nsqtools.server.durable_store import DurableBacklog, DurableStore
from nsqtools.server.embedded import DaemonThread
from nsqtools.server.go_flags import read_config
from nsqtools.server.nsqd_daemon import NsqdDaemon
from nsqtools.server.options import NsqdOptions
from nsqtools.server.queues.channel import Channel
from nsqtools.server.queues.data_path import lock_data_path
from nsqtools.server.queues.message_buffer import BackendError
from nsqtools.server.queues.queued_message import MessageIds, new_messages, with_attempts

MARK = "nsq-one-channel"
_REFUSAL = "this nsqd delivers the messages of a job to one channel, and takes none"
# A nsqlookupd answers within a round trip. A dead host must not delay the start of a job for long.
_CONNECT_S = 2.0
_MAX_NOTE_BYTES = 1 << 20  # the note has about 60 bytes for each topic of the job

R = TypeVar("R")


class JobChannel(NamedTuple):
    """The counts of a channel; ``unfinished`` includes messages in flight and deferred ones."""

    topic: str
    channel: str
    unfinished: int
    in_flight: int
    consumers: int


class JobNsqd(DaemonThread[NsqdDaemon]):
    """The nsqd of one job, running between `start` and `stop`.

    ``config`` is a file with flags of nsqd for TLS, auth and ports. ``broadcast_address`` is by
    default that of the file, or else the address from which this machine reaches nsqlookupd.

    The constructor raises `ConfigurationError` for the file and `ConnectionFailed` when it needs an
    nsqlookupd and cannot reach any.
    """

    def __init__(
        self,
        data_path: Path,
        lookupd_tcp_addresses: Sequence[str],
        *,
        broadcast_address: str = "",
        config: Path | None = None,
    ) -> None:
        flags = read_config(str(config), NsqdOptions) if config is not None else {}
        host = broadcast_address or flags.get("broadcast_address")
        host = host or _local_address(lookupd_tcp_addresses)
        bound = f"{Address(host, 0)}" if host in ("127.0.0.1", "::1", "localhost") else "0.0.0.0:0"
        defaults: dict[str, Any] = {
            "tcp_address": bound,
            "http_address": bound,
            "https_address": "",
            # The upper limits that an nsqd of the cluster may have. With a lower one this nsqd
            # would refuse consumers that ask for more than it allows.
            "max_msg_timeout": 86_400.0,
            "max_heartbeat_interval": 3600.0,
            "max_output_buffer_timeout": 3600.0,
            "max_output_buffer_size": 1 << 24,
        }
        fixed: dict[str, Any] = {
            "broadcast_address": host,
            "lookupd_tcp_address": tuple(lookupd_tcp_addresses),
            "data_path": str(data_path),
            "durable": True,
        }
        self.options = NsqdOptions(**{**defaults, **flags, **fixed})
        self.data_path = data_path
        log = DaemonLog(None, "", "error")
        super().__init__("nsqd", lambda: NsqdDaemon(self.options, log, refusal=_REFUSAL))

    def start(self) -> None:
        """Mark the data path and serve.

        Raises `OutputError`, and `ConfigurationError` for a directory with other files, in addition
        to the errors of `DaemonThread.start`.
        """
        _mark_data_path(self.data_path)
        super().start()
        written_ns = self._call(lambda daemon: _store(daemon).written_ns)
        self._ids = MessageIds(self.options.node_id, written_ns)

    @property
    def address(self) -> Address:
        """The TCP address to which consumers connect."""
        port = self.options.broadcast_tcp_port or parse_address(self.tcp_address).port
        return Address(self.options.broadcast_address, port)

    def _call(self, read: Callable[[NsqdDaemon], R]) -> R:
        """Return ``read(daemon)``, called in the daemon's loop: its queues have no locks."""

        async def read_in_loop(daemon: NsqdDaemon) -> R:
            return read(daemon)

        return self.do(read_in_loop)

    # -- channels --------------------------------------------------------------------------------

    def create_channels(self, topic: str, channels: Sequence[str]) -> None:
        """Create a topic with channels, which nsqd then registers with nsqlookupd."""

        def create(daemon: NsqdDaemon) -> None:
            created = daemon.nsqd.get_topic(topic)
            for channel in channels:
                created.get_channel(channel)

        self._call(create)

    def unfinished_channels(self) -> list[JobChannel]:
        """Return the counts of all channels that have messages."""

        def read(daemon: NsqdDaemon) -> list[JobChannel]:
            return [counts for counts in map(_counts, _channels(daemon)) if counts.unfinished]

        return self._call(read)

    def pause_channels(self) -> None:
        """Deliver no further messages. Consumers can still answer messages in flight."""

        def pause(daemon: NsqdDaemon) -> None:
            for channel in _channels(daemon):
                channel.set_paused(True)

        self._call(pause)

    def deregister(self) -> list[str]:
        """Disconnect from all nsqlookupd; return the topics that were registered."""

        def disconnect(daemon: NsqdDaemon) -> list[str]:
            daemon.nsqd.registry.set_addresses(())
            return list(daemon.nsqd.topics)

        return self._call(disconnect)

    def raise_msg_timeout(self, seconds: float) -> None:
        """Give consumers at least ``seconds`` to answer a message."""
        nsqd = self.daemon.nsqd
        msg_timeout = max(nsqd.options.msg_timeout, seconds)
        nsqd.options = replace(nsqd.options, msg_timeout=msg_timeout)

    # -- messages --------------------------------------------------------------------------------

    def new_ids(self, count: int) -> list[bytes]:
        """Return ids that no message in the data path has."""
        return self._ids.take(count, time.time_ns())

    def stored_timestamps(
        self, topic: str, channel: str, ids: Collection[bytes]
    ) -> dict[bytes, int]:
        """Return the timestamps of those messages of a channel whose id is in ``ids``, by id."""

        def read(daemon: NsqdDaemon) -> dict[bytes, int]:
            backlog = daemon.nsqd.topics[topic].channels[channel].backlog
            assert isinstance(backlog, DurableBacklog)
            return _store(daemon).database.timestamps(backlog.number, ids)

        return self._call(read)

    def put(
        self,
        topic: str,
        channel: str,
        messages: Sequence[WireMessage],
        *,
        delay_s: float = 0.0,
        note: tuple[int, int, bytes] | None = None,
    ) -> None:
        """Store messages in a channel, all or none. Raises `OutputError` when none are stored.

        Args:
            messages: Their ``attempts`` count the deliveries that they have had.
            delay_s: How long to defer the messages.
            note: The number of the note to replace (0 without one), the number of the new note,
                which must be larger, and its content.
        """
        frames = list(map(_frame, messages))
        old_number, number, content = note or (0, 0, b"")
        # A row is checked like a frame, and no frame is shorter than a message without a body.
        padded = content.ljust(MIN_MESSAGE_SIZE + 8)
        new_rows: list[MessageRow] = [(0, 0, number, 0, padded)] if note else []
        old_rows = [(0, 0, old_number)] if old_number else []

        async def store(daemon: NsqdDaemon) -> None:
            queue, durable = daemon.nsqd.topics[topic].channels[channel], _store(daemon)
            stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            def on_committed(error: BackendError | None) -> None:
                if error is not None:
                    stored.set_exception(error)
                    return
                queue.committed(len(frames), frames, delay_s)
                stored.set_result(None)

            due_ns = durable.due_ns(delay_s) if delay_s else 0
            durable.publish(
                [queue.backlog], frames, repeat(due_ns), on_committed, old_rows, new_rows
            )
            await stored

        try:
            self.do(store)
        except BackendError as exc:
            raise OutputError(f"{self.data_path}: {exc}") from exc

    def read_note(self) -> tuple[int, bytes]:
        """Return number and content of the last note of `put`; the number is 0 without one."""

        def read(daemon: NsqdDaemon) -> tuple[int, bytes]:
            database = _store(daemon).database
            number = database.aggregate("max(turn)", 0)
            if not number:
                return 0, b""
            return number, database.page(0, number - 1, 1, _MAX_NOTE_BYTES)[0][1]

        return self._call(read)

    # -- data path -------------------------------------------------------------------------------

    def remove_data_path(self) -> None:
        """Remove the files after `stop`, unless another run uses the directory by now."""
        with suppress(ConfigurationError), ExitStack() as stack:
            stack.callback(os.close, lock_data_path(self.data_path))
            self._remove_files()

    def _remove_files(self) -> None:
        # The mark goes last: after a kill in between, the next run takes the directory for a job's.
        for pattern in ("nsqd.dat", "nsqd.durable.*.db*", MARK):
            for path in self.data_path.glob(pattern):
                path.unlink()
        with suppress(OSError):
            self.data_path.rmdir()


def _mark_data_path(data_path: Path) -> None:
    """Create the directory and its mark. Raises `ConfigurationError` if it has other files."""
    try:
        data_path.mkdir(0o700, parents=True, exist_ok=True)
        mark = data_path / MARK
        if mark.exists():
            return
        if any(data_path.iterdir()):
            raise ConfigurationError(
                f"{data_path} has files that are not of a run with --channel",
                hint="Give an empty directory with --data-path.",
            )
        mark.write_text(f"{_REFUSAL}\n", encoding="utf-8")
    except OSError as exc:
        raise OutputError(f"cannot write in {data_path} ({exc.strerror})") from exc


def _frame(message: WireMessage) -> bytes:
    [frame] = new_messages([message.body], [message.id], message.timestamp_ns)
    return with_attempts(frame, message.attempts)


def _store(daemon: NsqdDaemon) -> DurableStore:
    assert daemon.nsqd.durable is not None
    return daemon.nsqd.durable


def _channels(daemon: NsqdDaemon) -> list[Channel]:
    topics = daemon.nsqd.topics.values()
    return [channel for topic in topics for channel in topic.channels.values()]


def _counts(channel: Channel) -> JobChannel:
    in_flight = channel.in_flight_count
    unfinished = len(channel.backlog) + channel.backlog.deferred_count + in_flight
    consumers = len(channel.consumers)
    return JobChannel(channel.topic_name, channel.name, unfinished, in_flight, consumers)


def _local_address(lookupd_tcp_addresses: Sequence[str]) -> str:
    """Return the address of this machine from which it reaches the first nsqlookupd that answers.

    Raises `ConnectionFailed` when none does.
    """
    problem = ""
    for text in lookupd_tcp_addresses:
        address = parse_address(text, LOOKUPD_TCP_PORT)
        try:
            with socket.create_connection((address.host, address.port), _CONNECT_S) as connection:
                return str(connection.getsockname()[0])
        except OSError as exc:
            problem = f"cannot connect to nsqlookupd {address} ({exc.strerror or exc})"
    raise ConnectionFailed(problem, hint="Give --lookupd-tcp-address.")
