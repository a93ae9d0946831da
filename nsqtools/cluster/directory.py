"""Ask all daemons of a cluster: the given nsqd, and the nsqd that nsqlookupd announces.

    with open_cluster(settings) as cluster:
        answers, failures = cluster.ask_nsqds(NsqdHTTPClient.stats)
        answers             the answer of each nsqd, by address
        failures            the other daemons, each with its error

All daemons are asked at the same time, so a dead one costs its timeout once. It is named, left out,
and not asked again for as long as that timeout. It is an error only if no daemon answers.

A given nsqd is asked at the given address, not under the name that it announces. An announced nsqd
is asked at its broadcast address, which the address map may replace. If only a TCP address is
given, the usual HTTP port next to it is tried, and trusted if its /info names that TCP port: a
command never administers another nsqd than the named one.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Self, TypeVar
from urllib.parse import urlsplit

from nsqtools.client.connection import http_access
from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.errors import (
    ConfigurationError,
    ConnectionFailed,
    DeadlineExceeded,
    NotFoundError,
    NsqError,
)
from nsqtools.files.opening import ReloadedValue
from nsqtools.http.http_api import (
    HTTPAPI,
    HTTPAccess,
    KnownNode,
    NsqdHTTPClient,
    NsqlookupdHTTPClient,
    ProducerNode,
    View,
)
from nsqtools.protocol.names import (
    HTTP_PORT_OFFSET,
    LOOKUPD_HTTP_PORT,
    NSQD_HTTP_PORT,
    Address,
    http_url,
    parse_address,
    shown_url,
)

# Half of a large cluster may hang for a whole timeout; the other half needs threads of its own.
MAX_WORKERS = 128

C = TypeVar("C")
R = TypeVar("R")


class ClusterAddresses(NamedTuple):
    """Addresses of daemons, as the user gave them."""

    nsqd_http: Sequence[str] = ()
    lookupd_http: Sequence[str] = ()
    nsqd_tcp: Sequence[str] = ()


class DaemonFailure(NamedTuple):
    """A daemon that did not answer, or refused, by the address it was asked at, and why."""

    address: str
    error: NsqError

    @property
    def reason(self) -> str:
        """The error without the address, for texts that name it already."""
        return str(self.error).rpartition(f"//{self.address}: ")[2]


Nsqds = Mapping[str, NsqdHTTPClient]
"""The nsqd to ask, by HTTP ``host:port``."""
Answers = tuple[dict[str, R], list[DaemonFailure]]
"""The answers of daemons by address, and the failures of the others."""


def open_cluster(settings: ConnectionSettings, **defaults: Any) -> Cluster:
    """Return the cluster of these settings. The caller closes it. Raises `ConfigurationError`.

    ``defaults`` are passed to `ConnectionSettings.client_options`.
    """
    lookupds, nsqds = settings.lookupd_http_addresses, settings.nsqd_http_addresses
    options = settings.client_options(**defaults)
    files = options.tls_root_ca_file, options.tls_cert, options.tls_key, options.auth_secret_file
    make = partial(http_access, options, (*lookupds, *nsqds), settings.address_map)
    addresses = ClusterAddresses(nsqds, lookupds, settings.nsqd_tcp_addresses)
    if not any(files):
        return Cluster(addresses, make())
    access = ReloadedValue(files, make)
    return Cluster(addresses, access.get(), access.get)


def nsqd_addresses(settings: ConnectionSettings) -> tuple[str, ...]:
    """Return the TCP addresses of the nsqd that are given or announced by nsqlookupd.

    Raises the first failure if no nsqlookupd answers, and `NotFoundError` if none has an nsqd.
    """
    if not settings.lookupd_http_addresses:
        return settings.nsqd_tcp_addresses
    with open_cluster(settings) as cluster:
        answers, failures = cluster.fetch_nodes()
    if failures and not answers:
        raise failures[0].error
    announced = {entry.node.tcp for entries in answers.values() for entry in entries}
    addresses = {*settings.nsqd_tcp_addresses, *map(str, map(cluster.reachable, announced))}
    if not addresses:
        raise NotFoundError(f"{', '.join(settings.lookupd_http_addresses)} know no nsqd")
    return tuple(sorted(addresses))


class Cluster:
    """The daemons at some addresses. Thread-safe. The caller closes it.

    ``renewed`` returns the access with the present certificates and secret; each discovery calls
    it. ``names`` has the name under which each nsqd announces itself, by address, or ``""`` if it
    was not asked. ``proven`` has the TCP address of each nsqd that was given by one, by HTTP
    address. ``remembered`` are the nsqd of the last sample, even if no nsqlookupd announces them.
    ``aliases`` maps other addresses of an nsqd to the address at which it is asked.

    Raises `ConfigurationError` for an invalid address.
    """

    def __init__(
        self,
        addresses: ClusterAddresses,
        access: HTTPAccess | None = None,
        renewed: Callable[[], HTTPAccess] | None = None,
    ) -> None:
        self._addresses = addresses
        self._access = access or HTTPAccess()
        self._renewed = renewed
        self._workers = ThreadPoolExecutor(MAX_WORKERS, thread_name_prefix="nsq-cluster")
        self._clients: dict[str, NsqdHTTPClient] = {}
        # Daemons that are not asked again before that time, and their last error.
        self._silent: dict[Hashable, tuple[float, NsqError]] = {}
        self._lock = threading.Lock()
        urls = [http_url(text, NSQD_HTTP_PORT) for text in addresses.nsqd_http]
        self._logins = {shown_url(url): url for url in urls}  # with passwords
        tcp_addresses = [parse_address(text) for text in addresses.nsqd_tcp]
        # Fewer HTTP than TCP addresses cannot cover all nsqd: then each TCP address is tried.
        if len(urls) >= len(tcp_addresses):
            tcp_addresses = []
        self.names: dict[str, str] = {}
        self.remembered: Nsqds = {}
        self.aliases: dict[str, str] = {}
        self._other_names: dict[str, list[str]] = {}  # by address
        self._identities: dict[str, _Identity] = {}  # of nsqd that share a port
        self.proven: dict[str, Address] = {}
        self._unproven = {
            url: tcp
            for tcp in tcp_addresses
            if (url := http_url(str(Address(tcp.host, min(tcp.port + HTTP_PORT_OFFSET, 65535))), 0))
            not in self._logins
        }
        self.given_addresses = [short_address(url) for url in {**self._logins, **self._unproven}]
        self._infos: dict[str, dict[str, Any]] = {}  # /info of the given nsqd
        self._lookupd_urls = [http_url(text, LOOKUPD_HTTP_PORT) for text in addresses.lookupd_http]
        self.lookupds = self._clients_of_lookupds()

    def _clients_of_lookupds(self) -> dict[str, NsqlookupdHTTPClient]:
        return {short_address(url): self._access.nsqlookupd(url) for url in self._lookupd_urls}

    def _renew(self) -> None:
        """Use the certificates and the secret that are in their files now."""
        if self._renewed is None or (access := self._renewed()) == self._access:
            return
        with self._lock:
            old_clients = [*self._clients.values(), *self.lookupds.values()]
            self._access, self._clients = access, {}
            self.lookupds = self._clients_of_lookupds()
        for client in old_clients:
            client.close()

    def limited_to(self, view: View) -> Cluster:
        """Return the cluster as ``view`` shows it, to be closed by the caller."""
        renewed = self._renewed

        def renewed_view() -> HTTPAccess:
            return replace(renewed() if renewed else self._access, view=view)

        return Cluster(self._addresses, renewed_view(), renewed and renewed_view)

    def close(self) -> None:
        """Close all connections."""
        self._workers.shutdown(cancel_futures=True)
        for client in [*self._clients.values(), *self.lookupds.values()]:
            client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fetch_nodes(self) -> Answers[list[KnownNode]]:
        """Ask every nsqlookupd for /nodes."""
        return self.ask(self.lookupds, NsqlookupdHTTPClient.nodes)

    def nsqds(self) -> tuple[Nsqds, list[DaemonFailure]]:
        """Find the nsqd that are given or that any nsqlookupd announces.

        The failures are those of nsqlookupd, and of nsqd that are not the ones the user named.
        """
        return self.discover_nsqds()[1:]

    def discover_nsqds(self) -> tuple[dict[str, list[KnownNode]], Nsqds, list[DaemonFailure]]:
        """Find the nsqd as `nsqds` does; return the answers of nsqlookupd as well."""
        self._renew()
        answers, failures = self.fetch_nodes()
        announced = [entry.node for entries in answers.values() for entry in entries]
        nsqds, impostors = self.nsqds_among(announced)
        return answers, nsqds, [*failures, *impostors]

    def nsqds_among(self, nodes: Sequence[ProducerNode] = ()) -> tuple[Nsqds, list[DaemonFailure]]:
        """Return the given and the announced nsqd, and the given ones that are another nsqd."""
        given_nsqds = {address: self.nsqd(address) for address in self.given_addresses}
        names, impostors = self.ask(given_nsqds, self._name)
        unproven = {short_address(url): tcp for url, tcp in list(self._unproven.items())}
        # A given nsqd is part of the cluster even if it does not answer now.
        names = {at: self.names.get(at, "") for at in given_nsqds if at not in unproven} | names
        # An nsqd may also be given, or announced, with another HTTP port.
        reachable = {self.reachable(node.tcp) for node in nodes if node.http}
        reachable |= {
            given_nsqds[at].tcp_beside(i) for at, i in self._infos.items() if at not in self.proven
        }
        doubtful = {address for address, tcp in unproven.items() if tcp not in reachable}
        impostors = [failure for failure in impostors if failure.address in doubtful]
        taken = set(names.values())
        announced = {
            short_address(self._access.url_of(node.http)): node.http
            for node in nodes
            if node.http is not None and str(node.http) not in taken
        }
        # A given nsqd may announce another HTTP port than it has (-broadcast-http-port).
        announced_names = {str(node.http) for node in nodes}
        unlisted = {
            at: info for at, info in self._infos.items() if names[at] not in announced_names
        }
        hosts = {info["broadcast_address"] for info in unlisted.values()}
        candidates = {at: self.nsqd(at) for at, http in announced.items() if http.host in hosts}
        for address, info in self.ask(candidates, NsqdHTTPClient.info)[0].items():
            if same := [
                at for at, given_info in unlisted.items() if given_info == info and at != address
            ]:
                names |= dict.fromkeys(same, str(announced.pop(address)))
        names |= {address: str(http) for address, http in announced.items()}
        self._leave_out_aliases(names)
        self.names |= names
        return {address: self.nsqd(address) for address in names}, impostors

    def _leave_out_aliases(self, names: dict[str, str]) -> None:
        """Keep one address of each nsqd in ``names``: a given one, else one asked before, else
        its present name."""
        addresses = {*self.remembered, *names}
        ports = Counter(map(_port_of, addresses))
        shared = {address for address in addresses if ports[_port_of(address)] > 1}
        # A new address may belong to an nsqd that has restarted, and an old one to another nsqd.
        is_new = not shared <= self._identities.keys()
        doubtful = shared if is_new else shared & {*self.aliases, *self.aliases.values()}
        if len(doubtful) > MAX_WORKERS:
            # More than workers: nsqd that hang would cost several time-outs.
            doubtful = set()
        clients = {address: self.nsqd(address) for address in doubtful}
        answers, failures = self.ask(clients, NsqdHTTPClient.info)
        self._identities |= {address: _identity(address, info) for address, info in answers.items()}
        for failure in failures:
            self._identities.pop(failure.address, None)
        groups: dict[_Identity, list[str]] = {}
        for address in sorted(shared & self._identities.keys()):
            groups.setdefault(self._identities[address], []).append(address)
        aliases: dict[str, str] = {}
        other_names: dict[str, list[str]] = {}
        for identity, same in groups.items():
            kept = min(
                same,
                key=lambda address: (
                    address not in names,
                    address not in self.given_addresses,
                    address not in self.names,
                    names.get(address) != identity.name,
                ),
            )
            if len(same) > 1 and kept in names:
                duplicates = [address for address in same if address != kept]
                aliases |= dict.fromkeys(duplicates, kept)
                other_names[kept] = [names.pop(other) for other in duplicates if other in names]
        self.aliases = aliases | {
            other: kept for other, kept in self.aliases.items() if kept not in addresses
        }
        self._other_names = other_names | {
            kept: others for kept, others in self._other_names.items() if kept not in addresses
        }

    def names_of(self, address: str) -> list[str]:
        """Return all names of an nsqd at nsqlookupd, the one of its present address first."""
        names = [self.names.get(address, ""), *self._other_names.get(address, ())]
        return list(filter(None, names))

    def entries(
        self, answers: Mapping[str, Iterable[KnownNode]]
    ) -> dict[str, dict[str, KnownNode]]:
        """Return the entries of each nsqd by its first name, each by nsqlookupd."""
        firsts = {
            name: self.names.get(address, "")
            for address, aliases in self._other_names.items()
            for name in aliases
        }
        entries: dict[str, dict[str, KnownNode]] = {}
        for lookupd, nodes in answers.items():
            for entry in nodes:
                name = str(entry.node.http)
                of_nsqd = entries.setdefault(firsts.get(name) or name, {})
                if name not in firsts or lookupd not in of_nsqd:
                    of_nsqd[lookupd] = entry
        return entries

    def ask_nsqds(
        self,
        question: Callable[[NsqdHTTPClient], R],
        *,
        required: bool = True,
        nsqds: Nsqds | None = None,
    ) -> Answers[R]:
        """Ask every nsqd, or only ``nsqds``, one question.

        Raises the first failure if no daemon answers, unless an answer is not ``required``.
        """
        failures: list[DaemonFailure] = []
        if not nsqds:
            nsqds, failures = self.nsqds()
        answers, failed = self.ask(nsqds, question)
        failures += failed
        if required and failures and not answers:
            raise failures[0].error
        return answers, failures

    def ask_services(self, addresses: Sequence[str]) -> list[DaemonFailure]:
        """Ask commands for their /health; return those with a problem, and those without answer.

        Raises `ConfigurationError` for an invalid address.
        """
        services = {address: HTTPAPI(http_url(address, 0), self._access) for address in addresses}
        try:
            return self.ask(services, HTTPAPI.check_health)[1]
        finally:
            for service in services.values():
                service.close()

    @property
    def timeout_s(self) -> float:
        """The time limit for one question."""
        return self._access.timeout_s

    def remember(self, nsqds: Nsqds) -> None:
        """Note which nsqd the last sample has: they are also asked when no nsqlookupd has them."""
        self.remembered = nsqds

    def keep_only(self, nsqds: Nsqds) -> None:
        """Close the connections to all nsqd except these and the given ones.

        A long-running caller does so after each discovery. Otherwise every nsqd that ever left
        would keep a connection and its last error.
        """
        now_s = time.monotonic()
        for key, (until_s, _) in list(self._silent.items()):
            if until_s <= now_s:
                self._silent.pop(key, None)
        for address in {*self.names, *self._identities}.difference(self.given_addresses, nsqds):
            self.names.pop(address, None)
            self._identities.pop(address, None)
        kept = {http_url(address, NSQD_HTTP_PORT) for address in (*self.given_addresses, *nsqds)}
        with self._lock:
            unused = [self._clients.pop(url) for url in list(self._clients) if url not in kept]
        for client in unused:
            client.close()

    def reachable(self, announced: Address) -> Address:
        """Return the address at which an nsqd that announces this TCP address is reached."""
        return self._access.reachable(announced)

    def tcp_address(self, address: str, info: Mapping[str, Any]) -> str:
        """Return the TCP address of the nsqd at an HTTP address, whose answer to /info is ``info``.

        A given nsqd is reached at its given host, unless the address map has the announced address.
        """
        announced = Address(info["broadcast_address"], info["tcp_port"])
        reachable = self.reachable(announced)
        if reachable == announced and address in self.given_addresses:
            reachable = self.nsqd(address).tcp_beside(info)
        return str(reachable)

    def ask(self, clients: Mapping[str, C], question: Callable[[C], R]) -> Answers[R]:
        """Ask several daemons one question at the same time.

        All of them together have the time limit of one.
        """
        latest_s = time.monotonic() + self.timeout_s
        try:
            pending = {
                address: self._workers.submit(
                    self.ask_one, address, partial(question, client), latest_s
                )
                for address, client in clients.items()
            }
        except RuntimeError as exc:  # it is closed, or no thread can be started
            raise ConnectionFailed(f"no daemon can be asked ({exc})") from exc
        answers, failures = {}, []
        for address, future in pending.items():
            try:
                answers[address] = future.result()
            except NsqError as exc:
                failures.append(DaemonFailure(address, exc))
        return answers, failures

    def ask_one(self, key: Hashable, question: Callable[[], R], latest_s: float) -> R:
        """Ask a daemon one question, until ``latest_s`` on the monotonic clock.

        A daemon that does not answer in time is not asked again for as long, and fails with the
        same error. ``key`` is its address, together with the question if others may take longer.
        """
        from nsqtools.http.exchange import within

        until_s, failure = self._silent.get(key, (0.0, None))
        if failure is not None and time.monotonic() < until_s:
            raise failure.with_traceback(None)
        try:
            with within(latest_s):
                return question()
        except DeadlineExceeded as exc:
            self._silent[key] = time.monotonic() + self.timeout_s, exc
            raise

    def _name(self, client: NsqdHTTPClient) -> str:
        """Return the name under which an nsqd announces itself, or "" if nobody needs it.

        It is needed where nsqlookupd may announce the same nsqd, which must not count twice, and
        for an nsqd that was given by TCP address, until its HTTP port is proven.
        """
        tcp = self._unproven.get(client.url)
        if not (self._unproven or self.lookupds):
            return ""
        try:
            info = client.info()
        except ConnectionFailed as exc:
            if tcp is None:
                raise
            port = urlsplit(client.url).port
            reason = str(exc).rpartition(" (")[2].removesuffix(")")
            raise ConnectionFailed(
                f"{tcp}: no answer at its usual HTTP port {port} ({reason})",
                hint="Give nsqd's HTTP address with --nsqd-http-address.",
            ) from exc
        if tcp is not None:
            if info["tcp_port"] != tcp.port:
                raise ConfigurationError(
                    f"{client.url} is not the HTTP port of {tcp}",
                    hint="Give the address with --nsqd-http-address.",
                )
            self._unproven.pop(client.url, None)
            self.proven[short_address(client.url)] = tcp
        self._infos[short_address(client.url)] = info
        return str(Address(info["broadcast_address"], info["http_port"]))

    def nsqd(self, address: str) -> NsqdHTTPClient:
        """Return the client of an nsqd; it is created once."""
        url = http_url(address, NSQD_HTTP_PORT)
        with self._lock:
            if url not in self._clients:
                self._clients[url] = self._access.nsqd(self._logins.get(url, url))
            return self._clients[url]


class _Identity(NamedTuple):
    """The identity of an nsqd: the address that it announces now, and facts of its process."""

    name: str
    facts: tuple[Hashable, ...]


def _identity(address: str, info: Mapping[str, Any]) -> _Identity:
    facts = [info.get(name) for name in ("hostname", "start_time", "tcp_port")]
    is_complete = all(facts) and all(isinstance(fact, str | int) for fact in facts)
    name = str(Address(info["broadcast_address"], info["http_port"]))
    return _Identity(name, tuple(facts) if is_complete else (address,))


def _port_of(address: str) -> int | None:
    return urlsplit(http_url(address, NSQD_HTTP_PORT)).port


def short_address(url: str) -> str:
    """Return a daemon as people see it: ``host:port``, or a URL of https or without a port."""
    text = shown_url(url)
    return text.removeprefix("http://") if urlsplit(text).port else text


def nsqd_address(text: str) -> str:
    """Return a given nsqd as people see it. Raises `ConfigurationError`."""
    return short_address(http_url(text, NSQD_HTTP_PORT))
