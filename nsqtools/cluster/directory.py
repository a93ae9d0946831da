"""A cluster as one thing to ask: some nsqd, and the nsqd that some nsqlookupd know.

    with Cluster(places) as cluster:
        survey = cluster.survey()
        survey.nodes        what each nsqd that answered says
        survey.failures     who did not answer, and why

All are asked at the same time, and a dead one costs the others nothing but its time-out; it is
named and left out. Only where nobody answers is that an error.

An nsqd whose address is given is asked there, and never under the name it announces. One that
nsqlookupd names is asked under its broadcast address, which ``address_map`` may replace. Where only
a TCP address is known the usual HTTP port beside it is tried, and believed if its /info names that
TCP port: nobody administers another nsqd than the one that was named.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

from nsqtools.errors import ConfigurationError, NsqError
from nsqtools.http.http_api import HTTPAPI
from nsqtools.http.nsqd_http import NsqdHTTPClient
from nsqtools.http.nsqlookupd_http import KnownNode, NsqlookupdHTTPClient
from nsqtools.protocol.addresses import (
    LOOKUPD_HTTP_PORT,
    NSQD_HTTP_PORT,
    Address,
    http_url,
    parse_address,
)
from nsqtools.protocol.stats import NsqdStats
from nsqtools.protocol.stats_reading import read_stats

if TYPE_CHECKING:
    import ssl

HTTP_PORT_OFFSET = 1  # nsqd listens on 4150 and 4151 unless told otherwise
MAX_WORKERS = 32

C = TypeVar("C")
R = TypeVar("R")
H = TypeVar("H", bound=HTTPAPI)


@dataclass(frozen=True, slots=True)
class Places:
    """Addresses as they were given. ``address_map`` is announced -> reachable."""

    nsqd_http_addresses: Sequence[str] = ()
    lookupd_http_addresses: Sequence[str] = ()
    nsqd_tcp_addresses: Sequence[str] = ()
    address_map: Mapping[str, str] = field(default_factory=dict)


class Failure(NamedTuple):
    """A daemon that did not do its part, by the address it was asked at, and why."""

    address: str
    error: NsqError


class NodeReport(NamedTuple):
    """What one nsqd says. ``at_s`` is the moment of its answer on the monotonic clock."""

    address: str
    at_s: float
    stats: NsqdStats


@dataclass(frozen=True, slots=True)
class Survey:
    """One look at every nsqd."""

    nodes: tuple[NodeReport, ...]
    failures: tuple[Failure, ...]


class Nsqd(NamedTuple):
    """An nsqd to ask. ``address`` is its HTTP ``host:port``; ``announced`` what it calls itself
    to nsqlookupd (``""`` where that was not asked); ``is_given`` when its own address was."""

    address: str
    announced: str
    is_given: bool
    client: NsqdHTTPClient


class Cluster:
    """The daemons at some `Places`. A context manager. Raises `ConfigurationError`."""

    def __init__(
        self,
        places: Places,
        *,
        connect_timeout_s: float = 2.0,
        timeout_s: float = 5.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._timeout_s = timeout_s
        self._tls = tls
        self._address_map = places.address_map
        self._workers = ThreadPoolExecutor(MAX_WORKERS, thread_name_prefix="nsq-cluster")
        self._clients: dict[str, NsqdHTTPClient] = {}
        urls = [http_url(text, NSQD_HTTP_PORT) for text in places.nsqd_http_addresses]
        tcp_addresses = [] if urls else [parse_address(a) for a in places.nsqd_tcp_addresses]
        self._unproven = {
            http_url(f"{Address(tcp.host, tcp.port + HTTP_PORT_OFFSET)}", NSQD_HTTP_PORT): tcp
            for tcp in tcp_addresses
        }
        self._given = list(dict.fromkeys([*urls, *self._unproven]))
        self.lookupds = {
            place_of(url): self._open(NsqlookupdHTTPClient, url)
            for url in (http_url(a, LOOKUPD_HTTP_PORT) for a in places.lookupd_http_addresses)
        }

    def close(self) -> None:
        """Close all connections."""
        self._workers.shutdown(cancel_futures=True)
        for client in [*self._clients.values(), *self.lookupds.values()]:
            client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def known_nodes(self) -> tuple[dict[str, list[KnownNode]], list[Failure]]:
        """Ask every nsqlookupd for /nodes; answers by its address, and who did not answer."""
        return self.ask(self.lookupds, NsqlookupdHTTPClient.nodes)

    def nsqds(self) -> tuple[list[Nsqd], list[Failure]]:
        """Find the nsqd: those given, and those that any nsqlookupd knows.

        Returns them with the failures of nsqlookupd, and of nsqd that are not the ones meant.
        """
        answers, failures = self.known_nodes()
        found, impostors = self.nsqds_among(answers)
        return found, [*failures, *impostors]

    def nsqds_among(
        self, answers: Mapping[str, Sequence[KnownNode]]
    ) -> tuple[list[Nsqd], list[Failure]]:
        """The nsqd given and those that `known_nodes` told of; and who is not the one meant."""
        announced, impostors = self.ask(self._given_clients(), self._name)
        given = set(announced)
        for nodes in answers.values():
            for known in nodes:
                name = str(known.node.http)
                if known.node.http is not None and name not in announced.values():
                    reachable = self._address_map.get(name, name)
                    announced[place_of(http_url(reachable, NSQD_HTTP_PORT))] = name
        found = [
            Nsqd(address, name, address in given, self._client(address))
            for address, name in announced.items()
        ]
        return found, impostors

    def survey(
        self,
        topic: str = "",
        channel: str = "",
        *,
        clients: bool = False,
        memory: bool = False,
        required: bool = True,
    ) -> Survey:
        """Take the statistics of every nsqd.

        Raises the first failure when nobody answers, unless an answer is not ``required``.
        """

        def look(client: NsqdHTTPClient) -> tuple[float, NsqdStats]:
            began_s = time.monotonic()
            answer = client.stats(topic, channel, clients=clients, memory=memory)
            return (began_s + time.monotonic()) / 2, read_stats(answer)

        answers, failures = self.ask_nsqds(look, required=required)
        nodes = (NodeReport(address, *answer) for address, answer in answers.items())
        return Survey(tuple(nodes), tuple(failures))

    def ask_nsqds(
        self, question: Callable[[NsqdHTTPClient], R], *, required: bool = True
    ) -> tuple[dict[str, R], list[Failure]]:
        """Put one question to every nsqd. Raises as `survey` does."""
        nsqds, failures = self.nsqds()
        answers, failed = self.ask({nsqd.address: nsqd.client for nsqd in nsqds}, question)
        failures += failed
        if required and failures and not answers:
            raise failures[0].error
        return answers, failures

    def nsqd(self, address: str) -> NsqdHTTPClient:
        """The nsqd at an address that `nsqds` or `survey` named."""
        return self._client(address)

    def ask(
        self, clients: Mapping[str, C], question: Callable[[C], R]
    ) -> tuple[dict[str, R], list[Failure]]:
        """Put one question to several daemons at once; answers by address, and failures."""
        pending = {
            address: self._workers.submit(question, client) for address, client in clients.items()
        }
        answers, failures = {}, []
        for address, future in pending.items():
            try:
                answers[address] = future.result()
            except NsqError as exc:
                failures.append(Failure(address, exc))
        return answers, failures

    def _given_clients(self) -> dict[str, NsqdHTTPClient]:
        return {place_of(url): self._client(url) for url in self._given}

    def _name(self, client: NsqdHTTPClient) -> str:
        """Return what an nsqd announces itself as, where that can matter: else it is not asked.

        It can where nsqlookupd may name the same nsqd, which must not count twice, and for the HTTP
        port beside a TCP address, until it is proven to belong to it.
        """
        tcp = self._unproven.get(client.url)
        if tcp is None and not self.lookupds:
            return ""
        info = client.info()
        if tcp is not None:
            if info["tcp_port"] != tcp.port:
                raise ConfigurationError(
                    f"{client.url} is not the HTTP port of {tcp}",
                    hint="Give the address with --nsqd-http-address.",
                )
            self._unproven.pop(client.url, None)
        return f"{info.get('broadcast_address')}:{info.get('http_port')}"

    def _client(self, address: str) -> NsqdHTTPClient:
        """The client for an address or URL, made once. Called on one thread only."""
        url = http_url(address, NSQD_HTTP_PORT)
        if url not in self._clients:
            self._clients[url] = self._open(NsqdHTTPClient, url)
        return self._clients[url]

    def _open(self, kind: type[H], url: str) -> H:
        return kind(
            url,
            connect_timeout_s=self._connect_timeout_s,
            timeout_s=self._timeout_s,
            tls=self._tls if url.startswith("https:") else None,
        )


def place_of(url: str) -> str:
    """How a daemon is called: ``host:port``, and the whole URL where it is no plain one."""
    return url.removeprefix("http://")
