"""An nsqd in this process that joins a cluster until its messages are consumed.

It registers at all nsqlookupd with the topic and all channels that the topic has elsewhere, so that
consumers of each of them connect to it as to any nsqd and find what they subscribe to. Messages go
into the queue of a single channel. It takes none from clients: producers find it, too.

Its data path is that of ``--durable``, with a file that marks it as ours. Whatever ends this
process, the next run on that path serves what is left; when nothing is left the path is removed. A
*note* of the filler is replaced in the transaction that stores messages: it is a row of queue 0,
which no topic has.

It leaves in this order: no delivery, nothing in flight, no registration, no connection. A consumer
that finds its nsqd by nsqlookupd asks there when a connection ends, and does not come back.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cache
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar
from urllib.parse import urlsplit

from nsqtools.cluster.directory import Cluster
from nsqtools.cluster.inventory import lookup_topic
from nsqtools.cluster.topics import not_found_error
from nsqtools.errors import ConfigurationError, ConnectionFailed, NsqError, OutputError
from nsqtools.protocol.commands import MAGIC_V2, IdentifyReply, decode_identify_reply, identify
from nsqtools.protocol.frames import MIN_MESSAGE_SIZE
from nsqtools.protocol.names import LOOKUPD_TCP_PORT, Address, is_ephemeral, parse_address
from nsqtools.server.daemon_log import DaemonLog
from nsqtools.server.durable_database import Row
from nsqtools.server.durable_store import DurableBacklog, DurableStore
from nsqtools.server.embedded import DaemonThread
from nsqtools.server.go_flags import read_config
from nsqtools.server.nsqd_daemon import NsqdDaemon
from nsqtools.server.options import NsqdOptions
from nsqtools.server.queues.channel import Channel
from nsqtools.server.queues.data_path import lock_data_path
from nsqtools.server.queues.message_buffer import BackendError
from nsqtools.server.queues.queued_message import MessageIds

REFUSAL = "this nsqd delivers the messages of a job to one channel, and takes none"
MARK = "nsq-one-channel"
Found = TypeVar("Found")
_CONNECT_S = 2.0
_REGISTERED_S = 10.0  # until nsqlookupd shows it, or no longer
_SETTLE_S = 10.0  # for what is in flight at a stop
_POLL_S = 0.1
_REPLY_BYTES = 1 << 16


class QueueState(NamedTuple):
    """A channel: ``left`` are its messages, those in flight and deferred included."""

    topic: str
    channel: str
    left: int
    in_flight: int
    consumers: int


class TemporaryNsqd:
    """A context manager. Raises `NsqError`, ``OSError``.

    ``lookupd_tcp_addresses`` are taken from the cluster's nsqlookupd where none is given: the port
    below that of HTTP. ``config`` is a file with flags of nsqd: TLS, auth, ports. ``tell`` gets
    what a user should know. ``shown_by`` are the nsqlookupd that show it, as far as was looked: one
    that once did not is not waited for again. After `leave`, ``left`` counts the messages in the
    data path, and ``is_kept`` tells whether that is there still.
    """

    def __init__(
        self,
        data_path: Path,
        cluster: Cluster,
        *,
        lookupd_tcp_addresses: Sequence[str] = (),
        broadcast_address: str = "",
        config: Path | None = None,
        tell: Callable[[str], None],
    ) -> None:
        if not cluster.lookupds:
            raise ConfigurationError(
                "consumers find a temporary nsqd by nsqlookupd",
                hint="Give --lookupd-http-address.",
            )
        self.data_path = data_path
        self._cluster = cluster
        self.shown_by = list(cluster.lookupds)
        self._tell = cache(tell)  # say once what holds for each topic
        self._lookupds = tuple(lookupd_tcp_addresses) or tuple(
            _tcp_beside(client.url) for client in cluster.lookupds.values()
        )
        given = read_config(str(config), NsqdOptions) if config is not None else {}
        host = broadcast_address or given.get("broadcast_address") or _own_address(self._lookupds)
        bound = f"{Address(host, 0)}" if host in ("127.0.0.1", "::1", "localhost") else "0.0.0.0:0"
        here: dict[str, Any] = {"tcp_address": bound, "http_address": bound, "https_address": ""}
        # what any nsqd of the cluster may allow: it would refuse consumers that ask for it
        here |= {"max_msg_timeout": 86_400.0, "max_heartbeat_interval": 3600.0}
        here |= {"max_output_buffer_timeout": 3600.0, "max_output_buffer_size": 1 << 24}
        fixed: dict[str, Any] = {
            "broadcast_address": host,
            "lookupd_tcp_address": self._lookupds,
            "data_path": str(data_path),
            "durable": True,
        }
        options = NsqdOptions(**{**here, **given, **fixed})
        log = DaemonLog(None, "", "error")
        self._thread = DaemonThread("nsqd", lambda: NsqdDaemon(options, log, refusal=REFUSAL))
        self._options = options
        self._has_left = self.is_kept = False
        self.left = 0

    def __enter__(self) -> Self:
        self._mark()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def _mark(self) -> None:
        """Make the directory ours, or see that it is. Raises `ConfigurationError`."""
        try:
            self.data_path.mkdir(0o700, parents=True, exist_ok=True)
            mark = self.data_path / MARK
            if mark.exists():
                return
            if any(self.data_path.iterdir()):
                raise ConfigurationError(
                    f"{self.data_path} has files that are not of a run with --channel",
                    hint="Give an empty directory with --data-path.",
                )
            mark.write_text(f"{REFUSAL}\n", encoding="utf-8")
        except OSError as exc:
            raise OutputError(f"cannot write in {self.data_path} ({exc.strerror})") from exc

    # what is in it

    def _ask(self, look: Callable[[NsqdDaemon], Found]) -> Found:
        async def asked(daemon: NsqdDaemon) -> Found:
            return look(daemon)

        return self._thread.do(asked)

    def states(self) -> list[QueueState]:
        """Return all channels that have messages."""
        return self._ask(lambda daemon: [s for s in map(_state, _channels(daemon)) if s.left])

    def state(self, topic: str, channel: str) -> QueueState:
        """Return one channel that `join` has opened."""
        return self._ask(lambda daemon: _state(daemon.nsqd.topics[topic].channels[channel]))

    def join(self, topic: str, channel: str) -> None:
        """Have the topic, with all its channels, registered and delivered.

        Raises `NotFoundError` when the cluster has no such topic or channel, `ConnectionFailed`
        when no nsqlookupd shows this nsqd, and `ConfigurationError` when the other nsqd ask for
        a secret, and this one does not.
        """
        if is_ephemeral(channel) or is_ephemeral(topic):
            raise ConfigurationError(f"{topic}/{channel} is ephemeral, and keeps no messages")
        found = lookup_topic(self._cluster, topic)
        if channel not in found.channels:
            raise not_found_error("channel", channel, found.channels)
        self._compare_access([tcp for tcp, _, _ in found.nodes])
        names = [name for name in found.channels if not is_ephemeral(name)]

        def create(daemon: NsqdDaemon) -> None:
            opened = daemon.nsqd.get_topic(topic)
            for name in names:
                opened.get_channel(name)

        self._ask(create)
        self._see_registration(topic)

    def put(
        self,
        topic: str,
        channel: str,
        messages: Sequence[bytes],
        *,
        delay_s: float = 0.0,
        note: tuple[int, int, bytes] | None = None,
    ) -> None:
        """Store messages, as frames, in the channel. Raises `OutputError` when nothing is stored.

        ``note`` is (number of the one that it replaces, own number, content): numbers grow from 1.
        """
        before, number, content = note or (0, 0, b"")
        adds: list[Row] = [(0, 0, number, 0, content.ljust(MIN_MESSAGE_SIZE + 8))] if note else []
        takes = [(0, 0, before)] if before else []

        async def store(daemon: NsqdDaemon) -> None:
            opened, durable = daemon.nsqd.topics[topic].channels[channel], _store(daemon)
            stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            def done(error: BackendError | None) -> None:
                if error is not None:
                    stored.set_exception(error)
                    return
                opened.committed(len(messages), list(messages), delay_s)
                stored.set_result(None)

            due_ns = durable.due_ns(delay_s) if delay_s else 0
            durable.publish([opened.backlog], messages, repeat(due_ns), done, takes, adds)
            await stored

        try:
            self._thread.do(store)
        except BackendError as exc:
            raise OutputError(f"{self.data_path}: {exc}") from exc

    def note(self) -> tuple[int, bytes]:
        """Return number and content of the last note of `put`; 0 without one."""

        def read(daemon: NsqdDaemon) -> tuple[int, bytes]:
            database = _store(daemon).database
            number = database.number("max(turn)", 0)
            return number, database.page(0, number - 1, 1, 1 << 20)[0][1] if number else b""

        return self._ask(read)

    def held(self, topic: str, channel: str, ids: Collection[bytes]) -> dict[bytes, int]:
        """Return those of some ids that messages of the channel have, with their times in ns."""

        def look(daemon: NsqdDaemon) -> dict[bytes, int]:
            backlog = daemon.nsqd.topics[topic].channels[channel].backlog
            assert isinstance(backlog, DurableBacklog)
            return _store(daemon).database.held(backlog.number, ids)

        return self._ask(look)

    def new_ids(self) -> MessageIds:
        """Return ids that no message in the data path has."""
        written_ns = self._ask(lambda daemon: _store(daemon).written_ns)
        return MessageIds(self._options.node_id, written_ns)

    # the cluster

    def _compare_access(self, nsqds: Iterable[str]) -> None:
        """Ask the first nsqd that answers what it wants of consumers, and how long they have."""
        for each in nsqds:
            try:
                reply = _identify(self._cluster.reachable(parse_address(each)))
            except (OSError, NsqError):
                continue
            if reply.auth_required and not self._options.auth_http_address:
                raise ConfigurationError(
                    f"nsqd {each} asks an auth server about consumers, and this nsqd would not",
                    hint="Give --nsqd-config FILE with auth_http_addresses, and TLS as there.",
                )
            if reply.tls_v1 and not self._options.has_tls:
                self._tell(
                    f"warning: nsqd {each} has TLS and this nsqd has not: consumers that want it "
                    "cannot connect; give --nsqd-config FILE with tls_cert and tls_key"
                )
            nsqd = self._thread.daemon.nsqd
            longest_s = max(nsqd.options.msg_timeout, reply.msg_timeout / 1000)
            nsqd.options = replace(nsqd.options, msg_timeout=longest_s)
            break

    def _see_registration(self, topic: str) -> None:
        unseen = self._wait_for_nodes([topic], shown=True)
        if len(unseen) == len(self.shown_by):
            raise ConnectionFailed(
                f"nsqlookupd {', '.join(unseen)} does not show the nsqd that registered at "
                f"{', '.join(self._lookupds)}",
                hint="Give the TCP address of nsqlookupd with --lookupd-tcp-address.",
            )
        for address in unseen:
            self.shown_by.remove(address)
            self._tell(f"nsqlookupd {address} does not show this nsqd: its consumers will not come")

    def _wait_for_nodes(self, topics: Iterable[str], *, shown: bool) -> list[str]:
        """Wait until each nsqlookupd shows this nsqd, or none does; return those that differ.

        It counts as shown when it is with one of the topics.
        """
        ends_s = time.monotonic() + _REGISTERED_S
        tcp, asked = self.address, self.shown_by if shown else self._cluster.lookupds
        while True:
            answers, _ = self._cluster.fetch_nodes()
            seen = {
                address: [
                    each
                    for each in nodes
                    if each.node.tcp == tcp and not each.topics.isdisjoint(topics)
                ]
                for address, nodes in answers.items()
            }
            differ = [each for each in asked if bool(seen.get(each)) != shown]
            if not differ or time.monotonic() >= ends_s:
                break
            time.sleep(_POLL_S)
        for address, nodes in seen.items():
            for known in nodes if shown else ():
                self._compare(address, known.remote_address)
        return differ

    def _compare(self, lookupd: str, remote: str) -> None:
        """Say when nsqlookupd sees this machine at another address than consumers are told."""
        told, seen = self._options.broadcast_address, remote.rpartition(":")[0].strip("[]")
        try:
            addresses = {str(each[4][0]) for each in socket.getaddrinfo(told, None)}
        except OSError:
            addresses = set()
        if seen and seen not in addresses:
            self._tell(
                f"warning: nsqlookupd {lookupd} sees this machine at {seen}, and consumers are "
                f"told {told}; --broadcast-address changes that"
            )

    @property
    def address(self) -> Address:
        """Where consumers are told to connect to."""
        port = parse_address(self._thread.daemon.tcp_address).port
        options = self._options
        return Address(options.broadcast_address, options.broadcast_tcp_port or port)

    # the end

    def leave(self, *, is_over: bool = False) -> None:
        """Leave the cluster and stop. What is in flight has some seconds to be answered.

        The data path is removed when it has no messages, and no note that the next run needs:
        ``is_over`` tells that there is nothing more to put.
        """
        if self._has_left:
            return
        self._has_left = True
        self._ask(_pause_all)
        ends_s = time.monotonic() + _SETTLE_S
        while any(each.in_flight for each in self.states()) and time.monotonic() < ends_s:
            time.sleep(_POLL_S)
        self.left = sum(each.left for each in self.states())
        self.is_kept = bool(self.left or (self.note()[0] and not is_over))
        self._wait_for_nodes(self._ask(_deregister), shown=False)
        self._thread.end(lambda daemon: daemon.stop())
        if not self.is_kept:
            with suppress(ConfigurationError), ExitStack() as stack:  # another run has it already
                stack.callback(os.close, lock_data_path(self.data_path))
                self._remove()

    def _remove(self) -> None:
        # a kill in between leaves what the next run takes for an empty data path
        for pattern in ("nsqd.dat", "nsqd.durable.*.db*", MARK):
            for path in self.data_path.glob(pattern):
                path.unlink()
        with suppress(OSError):
            self.data_path.rmdir()


def _store(daemon: NsqdDaemon) -> DurableStore:
    assert daemon.nsqd.durable is not None
    return daemon.nsqd.durable


def _channels(daemon: NsqdDaemon) -> Iterable[Channel]:
    return [each for topic in daemon.nsqd.topics.values() for each in topic.channels.values()]


def _state(channel: Channel) -> QueueState:
    in_flight = channel.in_flight_count
    left = len(channel.backlog) + channel.backlog.deferred_count + in_flight
    return QueueState(channel.topic_name, channel.name, left, in_flight, len(channel.consumers))


def _pause_all(daemon: NsqdDaemon) -> None:
    for channel in _channels(daemon):
        channel.set_paused(True)


def _deregister(daemon: NsqdDaemon) -> list[str]:
    daemon.nsqd.registry.set_addresses(())
    return list(daemon.nsqd.topics)


def _identify(address: Address) -> IdentifyReply:
    """Return what an nsqd offers a client that has no secret. Raises `NsqError`, ``OSError``."""
    request = identify(b'{"feature_negotiation":true,"tls_v1":true}')
    with socket.create_connection((address.host, address.port), _CONNECT_S) as connection:
        connection.sendall(MAGIC_V2 + request)
        with connection.makefile("rb") as stream:
            size = int.from_bytes(stream.read(4), "big")
            return decode_identify_reply(stream.read(min(size, _REPLY_BYTES))[4:])


def _tcp_beside(url: str) -> str:
    parts = urlsplit(url)
    port = parts.port
    return str(Address(parts.hostname or "", port - 1 if port else LOOKUPD_TCP_PORT))


def _own_address(lookupds: Sequence[str]) -> str:
    """Return the address of this machine from which the first nsqlookupd is reached."""
    problem = ""
    for text in lookupds:
        address = parse_address(text, LOOKUPD_TCP_PORT)
        try:
            with socket.create_connection((address.host, address.port), _CONNECT_S) as connection:
                return str(connection.getsockname()[0])
        except OSError as exc:
            problem = f"cannot connect to nsqlookupd {address} ({exc.strerror or exc})"
    raise ConnectionFailed(problem, hint="Give --lookupd-tcp-address.")
