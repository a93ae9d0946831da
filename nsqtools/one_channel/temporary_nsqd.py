"""An nsqd in this process that belongs to a cluster until its messages are consumed.

It registers with all nsqlookupd, with the topic and all channels that the topic has in the cluster.
So consumers of each channel connect to it as to any other nsqd. Only the queue of one channel gets
messages (`JobNsqd.put`). Producers find this nsqd as well, and it refuses their publishes.

It leaves in this order: stop delivering, wait for messages in flight, deregister, close the
connections. A consumer that uses nsqlookupd asks it again when a connection ends, and does not
reconnect to an nsqd that is no longer registered.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from nsqtools.cluster.directory import Cluster
from nsqtools.cluster.inventory import lookup_topic
from nsqtools.cluster.topics import not_found_error
from nsqtools.errors import ConfigurationError, ConnectionFailed, NsqError
from nsqtools.protocol.commands import MAGIC_V2, IdentifyReply, decode_identify_reply, identify
from nsqtools.protocol.names import LOOKUPD_TCP_PORT, Address, is_ephemeral, parse_address
from nsqtools.server.job_nsqd import JobNsqd

_CONNECT_S = 2.0
# nsqlookupd lists an nsqd as soon as it has read its REGISTER, and drops it when the connection
# closes. This bounds the wait when the TCP and HTTP addresses are of different nsqlookupd.
_REGISTRATION_TIMEOUT_S = 10.0
# How long consumers may take to answer messages in flight at the end. Messages that time out later
# stay in the data path, and the next run delivers them.
_IN_FLIGHT_TIMEOUT_S = 10.0
_POLL_S = 0.1
_MAX_REPLY_BYTES = 1 << 16  # an IDENTIFY reply has about 400 bytes


class TemporaryNsqd:
    """A member of the cluster between ``with`` and `leave`. Raises `NsqError`, ``OSError``.

    Attributes:
        nsqd: The server, and the messages in it.
        listing_lookupds: The nsqlookupd that list this nsqd. An nsqlookupd that did not list it in
            time is removed, so that the other topics do not wait for it again.
        unfinished: After `leave`, the number of messages in the data path.
        has_data_path: After `leave`, whether the data path still exists.

    Args:
        lookupd_tcp_addresses: Where to register. By default the TCP port next to the HTTP port of
            each nsqlookupd of the cluster.
        broadcast_address: See `JobNsqd`.
        config: See `JobNsqd`.
        report: Called with each notice to the user.
    """

    def __init__(
        self,
        data_path: Path,
        cluster: Cluster,
        *,
        lookupd_tcp_addresses: Sequence[str] = (),
        broadcast_address: str = "",
        config: Path | None = None,
        report: Callable[[str], None],
    ) -> None:
        if not cluster.lookupds:
            raise ConfigurationError(
                "consumers find a temporary nsqd by nsqlookupd",
                hint="Give --lookupd-http-address.",
            )
        self._cluster = cluster
        self.listing_lookupds = list(cluster.lookupds)
        self._report = cache(report)  # a notice that holds for every topic is reported once
        self._lookupds = tuple(lookupd_tcp_addresses) or tuple(
            _tcp_address_of(client.url) for client in cluster.lookupds.values()
        )
        self.nsqd = JobNsqd(
            data_path, self._lookupds, broadcast_address=broadcast_address, config=config
        )
        self._has_left = self.has_data_path = False
        self.unfinished = 0

    def __enter__(self) -> Self:
        self.nsqd.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def join(self, topic: str, channel: str) -> None:
        """Register the topic with all its channels, and deliver their messages.

        Raises `NotFoundError` when the cluster has no such topic or channel, `ConnectionFailed`
        when no nsqlookupd lists this nsqd, and `ConfigurationError` when the other nsqd require
        a secret and this one does not.
        """
        if is_ephemeral(channel) or is_ephemeral(topic):
            raise ConfigurationError(f"{topic}/{channel} is ephemeral, and keeps no messages")
        location = lookup_topic(self._cluster, topic)
        if channel not in location.channels:
            raise not_found_error("channel", channel, location.channels)
        self._adopt_settings([tcp for tcp, _, _ in location.nodes])
        channels = [name for name in location.channels if not is_ephemeral(name)]
        self.nsqd.create_channels(topic, channels)
        self._confirm_registration(topic)

    def _adopt_settings(self, nsqds: Iterable[str]) -> None:
        """Compare access with the first nsqd that answers, and adopt its message timeout."""
        for nsqd in nsqds:
            try:
                reply = _identify(self._cluster.reachable(parse_address(nsqd)))
            except (OSError, NsqError):
                continue
            options = self.nsqd.options
            if reply.auth_required and not options.auth_http_address:
                raise ConfigurationError(
                    f"nsqd {nsqd} asks an auth server about consumers, and this nsqd would not",
                    hint="Give --nsqd-config FILE with auth_http_addresses, and TLS as there.",
                )
            if reply.tls_v1 and not options.has_tls:
                self._report(
                    f"warning: nsqd {nsqd} has TLS and this nsqd has not: consumers that require "
                    "it cannot connect; give --nsqd-config FILE with tls_cert and tls_key"
                )
            # The nsqd of a cluster usually have equal flags, so the first answer is enough.
            self.nsqd.raise_msg_timeout(reply.msg_timeout / 1000)
            break

    def _confirm_registration(self, topic: str) -> None:
        missing = self._wait_for_listing([topic], listed=True)
        if len(missing) == len(self.listing_lookupds):
            raise ConnectionFailed(
                f"nsqlookupd {', '.join(missing)} does not show the nsqd that registered at "
                f"{', '.join(self._lookupds)}",
                hint="Give the TCP address of nsqlookupd with --lookupd-tcp-address.",
            )
        for lookupd in missing:
            self.listing_lookupds.remove(lookupd)
            self._report(
                f"nsqlookupd {lookupd} does not show this nsqd: its consumers will not come"
            )

    def _wait_for_listing(self, topics: Iterable[str], *, listed: bool) -> list[str]:
        """Wait until all nsqlookupd list this nsqd with any of the topics, or none does.

        Return the nsqlookupd that still differ from that at the timeout.
        """
        deadline_s = time.monotonic() + _REGISTRATION_TIMEOUT_S
        address = self.nsqd.address
        lookupds = self.listing_lookupds if listed else list(self._cluster.lookupds)
        while True:
            nodes_by_lookupd, _ = self._cluster.fetch_nodes()
            entries = {
                lookupd: [
                    node
                    for node in nodes
                    if node.node.tcp == address and not node.topics.isdisjoint(topics)
                ]
                for lookupd, nodes in nodes_by_lookupd.items()
            }
            differing = [
                lookupd for lookupd in lookupds if bool(entries.get(lookupd)) is not listed
            ]
            if not differing or time.monotonic() >= deadline_s:
                break
            time.sleep(_POLL_S)
        if listed:
            for lookupd, nodes in entries.items():
                for node in nodes:
                    self._check_broadcast_address(lookupd, node.remote_address)
        return differing

    def _check_broadcast_address(self, lookupd: str, remote_address: str) -> None:
        """Report when nsqlookupd sees this machine at an address other than the broadcast one."""
        broadcast = self.nsqd.options.broadcast_address
        remote = remote_address.rpartition(":")[0].strip("[]")
        try:
            resolved = {str(info[4][0]) for info in socket.getaddrinfo(broadcast, None)}
        except OSError:
            resolved = set()
        if remote and remote not in resolved:
            self._report(
                f"warning: nsqlookupd {lookupd} sees this machine at {remote}, and consumers are "
                f"told {broadcast}; --broadcast-address changes that"
            )

    def leave(self, *, is_complete: bool = False) -> None:
        """Leave the cluster and stop, after messages in flight had some seconds to be answered.

        The data path is removed when it has no messages and the next run does not need the note:
        ``is_complete`` states that the job has no more messages to store.
        """
        if self._has_left:
            return
        self._has_left = True
        nsqd = self.nsqd
        nsqd.pause_channels()
        deadline_s = time.monotonic() + _IN_FLIGHT_TIMEOUT_S
        while time.monotonic() < deadline_s and any(
            channel.in_flight for channel in nsqd.unfinished_channels()
        ):
            time.sleep(_POLL_S)
        self.unfinished = sum(channel.unfinished for channel in nsqd.unfinished_channels())
        number, _ = nsqd.read_note()
        self.has_data_path = bool(self.unfinished or (number and not is_complete))
        self._wait_for_listing(nsqd.deregister(), listed=False)
        nsqd.stop()
        if not self.has_data_path:
            nsqd.remove_data_path()


def _identify(address: Address) -> IdentifyReply:
    """Return the reply of an nsqd to a client without a secret. Raises `NsqError`, ``OSError``."""
    request = identify(b'{"feature_negotiation":true,"tls_v1":true}')
    with socket.create_connection((address.host, address.port), _CONNECT_S) as connection:
        connection.sendall(MAGIC_V2 + request)
        with connection.makefile("rb") as stream:
            size = int.from_bytes(stream.read(4), "big")
            return decode_identify_reply(stream.read(min(size, _MAX_REPLY_BYTES))[4:])


def _tcp_address_of(url: str) -> str:
    """Return the TCP address of an nsqlookupd whose ports are adjacent, as the default ones are."""
    parts = urlsplit(url)
    port = parts.port
    return str(Address(parts.hostname or "", port - 1 if port else LOOKUPD_TCP_PORT))
