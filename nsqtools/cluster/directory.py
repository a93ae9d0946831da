"""A cluster as one thing to ask: some nsqd, and the nsqd that some nsqlookupd announce.

    with open_cluster(settings) as cluster:
        answers, failures = cluster.ask_nsqds(NsqdHTTPClient.stats)
        answers             what each nsqd that answered says, by address
        failures            who did not answer, and why

All are asked at the same time, and a dead one costs the others nothing but its timeout; it is named
and left out, and not asked the next question before as much time has passed. Only when none answers
is that an error.

An nsqd whose address is given is asked there, not under the name it announces. One that
nsqlookupd announces is asked under its broadcast address, which the address map may replace. Where
only a TCP address is known the usual HTTP port beside it is tried, and believed if its /info names
that TCP port: no other nsqd than the one that was named is administered.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from nsqtools.files.opening import Renewed
from nsqtools.http.http_api import (
    HTTPAccess,
    KnownNode,
    NsqdHTTPClient,
    NsqlookupdHTTPClient,
    ProducerNode,
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

MAX_WORKERS = 128  # half of a large cluster may hang, and the other half is to be asked in time

C = TypeVar("C")
R = TypeVar("R")


class ClusterAddresses(NamedTuple):
    """Addresses of daemons, as they were given."""

    nsqd_http: Sequence[str] = ()
    lookupd_http: Sequence[str] = ()
    nsqd_tcp: Sequence[str] = ()


class DaemonFailure(NamedTuple):
    """A daemon that did not answer, or refused, by the address it was asked at, and why."""

    address: str
    error: NsqError


Nsqds = Mapping[str, NsqdHTTPClient]
"""Those to ask, by HTTP ``host:port``."""
Answers = tuple[dict[str, R], list[DaemonFailure]]
"""What daemons answered, by address, and who did not."""


def open_cluster(settings: ConnectionSettings, **defaults: Any) -> Cluster:
    """Return the cluster that the settings lead to, to be closed. Raises `ConfigurationError`.

    ``defaults`` are those of `ConnectionSettings.client_options`.
    """
    lookupds, nsqds = settings.lookupd_http_addresses, settings.nsqd_http_addresses
    options = settings.client_options(**defaults)
    files = options.tls_root_ca_file, options.tls_cert, options.tls_key, options.auth_secret_file
    make = partial(http_access, options, (*lookupds, *nsqds), settings.address_map)
    addresses = ClusterAddresses(nsqds, lookupds, settings.nsqd_tcp_addresses)
    if not any(files):
        return Cluster(addresses, make())
    access = Renewed(files, make)
    return Cluster(addresses, access.get(), access.get)


def nsqd_addresses(settings: ConnectionSettings) -> tuple[str, ...]:
    """Return where the nsqd take TCP connections: those given, and those that nsqlookupd know now.

    Raises the error when no nsqlookupd answers, and `NotFoundError` when none knows an nsqd.
    """
    if not settings.lookupd_http_addresses:
        return settings.nsqd_tcp_addresses
    with open_cluster(settings) as cluster:
        answers, failures = cluster.fetch_nodes()
    if failures and not answers:
        raise failures[0].error
    known = {each.node.tcp for nodes in answers.values() for each in nodes}
    found = {*settings.nsqd_tcp_addresses, *map(str, map(cluster.reachable, known))}
    if not found:
        raise NotFoundError(f"{', '.join(settings.lookupd_http_addresses)} know no nsqd")
    return tuple(sorted(found))


class Cluster:
    """The daemons at some addresses. Thread-safe; to be closed. Raises `ConfigurationError`.

    ``renewed`` gives the access with certificates and secret as their files are now; each look-up
    asks for it.
    ``names`` are what nsqd call themselves to nsqlookupd, by address, as they last said it; ``""``
    where that was not asked. ``proven`` are those given by TCP address, by their HTTP address.
    ``remembered`` are those that samples have, even if no nsqlookupd announces them now.
    ``aliases`` are addresses that lead to an nsqd which is asked at the other one.
    """

    def __init__(
        self,
        addresses: ClusterAddresses,
        access: HTTPAccess | None = None,
        renewed: Callable[[], HTTPAccess] | None = None,
    ) -> None:
        self._access = access or HTTPAccess()
        self._renewed = renewed
        self._workers = ThreadPoolExecutor(MAX_WORKERS, thread_name_prefix="nsq-cluster")
        self._clients: dict[str, NsqdHTTPClient] = {}
        self._silent: dict[Hashable, tuple[float, NsqError]] = {}  # until when, and why
        self._lock = threading.Lock()
        urls = [http_url(text, NSQD_HTTP_PORT) for text in addresses.nsqd_http]
        self._logins = {shown_url(url): url for url in urls}  # those given, with password
        tcp_addresses = [parse_address(text) for text in addresses.nsqd_tcp]
        if len(urls) >= len(tcp_addresses):  # fewer are not those of all: one would be overlooked
            tcp_addresses = []
        self.names: dict[str, str] = {}
        self.remembered: Nsqds = {}
        self.aliases: dict[str, str] = {}
        self._other_names: dict[str, list[str]] = {}  # by address, as ``names``
        self._identities: dict[str, _Identity] = {}  # of those that share a port
        self.proven: dict[str, Address] = {}
        self._unproven = {
            url: tcp
            for tcp in tcp_addresses
            if (url := http_url(str(Address(tcp.host, min(tcp.port + HTTP_PORT_OFFSET, 65535))), 0))
            not in self._logins
        }
        # the nsqd that were given, by HTTP address
        self.given = [short_address(url) for url in {**self._logins, **self._unproven}]
        self._infos: dict[str, dict[str, Any]] = {}  # what those given say of themselves
        self._lookupd_urls = [http_url(text, LOOKUPD_HTTP_PORT) for text in addresses.lookupd_http]
        self.lookupds = self._clients_of_lookupds()

    def _clients_of_lookupds(self) -> dict[str, NsqlookupdHTTPClient]:
        return {short_address(url): self._access.nsqlookupd(url) for url in self._lookupd_urls}

    def _renew(self) -> None:
        """Go on with certificates and secret as their files are now."""
        if self._renewed is None or (access := self._renewed()) == self._access:
            return
        with self._lock:
            before = [*self._clients.values(), *self.lookupds.values()]
            self._access, self._clients = access, {}
            self.lookupds = self._clients_of_lookupds()
        for client in before:
            client.close()

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
        """Ask every nsqlookupd for /nodes; answers by its address, and who did not answer."""
        return self.ask(self.lookupds, NsqlookupdHTTPClient.nodes)

    def nsqds(self) -> tuple[Nsqds, list[DaemonFailure]]:
        """Find the nsqd: those given, and those that any nsqlookupd announces.

        Returns them with the failures of nsqlookupd, and of nsqd that are not the ones meant.
        """
        return self.discover_nsqds()[1:]

    def discover_nsqds(self) -> tuple[dict[str, list[KnownNode]], Nsqds, list[DaemonFailure]]:
        """Find the nsqd as `nsqds` does; return what each nsqlookupd knows, too."""
        self._renew()
        answers, failures = self.fetch_nodes()
        announced = [known.node for nodes in answers.values() for known in nodes]
        found, impostors = self.nsqds_among(announced)
        return answers, found, [*failures, *impostors]

    def nsqds_among(self, nodes: Sequence[ProducerNode] = ()) -> tuple[Nsqds, list[DaemonFailure]]:
        """Return the nsqd given, the ``nodes`` announced, and failures to be the nsqd meant."""
        given = {address: self.nsqd(address) for address in self.given}
        found, impostors = self.ask(given, self._name)
        unproven = {short_address(url): tcp for url, tcp in list(self._unproven.items())}
        # those, too, that do not say their name just now
        found = {at: self.names.get(at, "") for at in given if at not in unproven} | found
        # with another HTTP port some are given, or announced, too
        known = {self.reachable(node.tcp) for node in nodes if node.http}
        known |= {given[at].tcp_beside(i) for at, i in self._infos.items() if at not in self.proven}
        doubtful = {address for address, tcp in unproven.items() if tcp not in known}
        impostors = [each for each in impostors if each.address in doubtful]
        own = set(found.values())
        others = {
            short_address(self._access.url_of(node.http)): node.http
            for node in nodes
            if node.http is not None and str(node.http) not in own
        }
        # those given that announce another HTTP port than they have (-broadcast-http-port)
        names = {str(node.http) for node in nodes}
        strange = {at: info for at, info in self._infos.items() if found[at] not in names}
        hosts = {info["broadcast_address"] for info in strange.values()}
        alike = {at: self.nsqd(at) for at, http in others.items() if http.host in hosts}
        for address, info in self.ask(alike, NsqdHTTPClient.info)[0].items():
            if same := [at for at, own in strange.items() if own == info and at != address]:
                found |= dict.fromkeys(same, str(others.pop(address)))
        found |= {address: str(http) for address, http in others.items()}
        self._leave_out_aliases(found)
        self.names |= found
        return {address: self.nsqd(address) for address in found}, impostors

    def _leave_out_aliases(self, found: dict[str, str]) -> None:
        """Keep one address of each nsqd in ``found``: one that was given, or that is known already,
        or else its present name."""
        addresses = {*self.remembered, *found}
        ports = Counter(map(_port_of, addresses))
        shared = {address for address in addresses if ports[_port_of(address)] > 1}
        # A new address may belong to an nsqd that has restarted, and an old one to another by now
        is_new = not shared <= self._identities.keys()
        doubtful = shared if is_new else shared & {*self.aliases, *self.aliases.values()}
        if len(doubtful) > MAX_WORKERS:
            # More than workers: nsqd that hang would cost several time-outs.
            doubtful = set()
        asked = {address: self.nsqd(address) for address in doubtful}
        answers, failures = self.ask(asked, NsqdHTTPClient.info)
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
                    address not in found,
                    address not in self.given,
                    address not in self.names,
                    found.get(address) != identity.name,
                ),
            )
            if len(same) > 1 and kept in found:
                others = [address for address in same if address != kept]
                aliases |= dict.fromkeys(others, kept)
                other_names[kept] = [found.pop(other) for other in others if other in found]
        self.aliases = aliases | {
            other: kept for other, kept in self.aliases.items() if kept not in addresses
        }
        self._other_names = other_names | {
            kept: names for kept, names in self._other_names.items() if kept not in addresses
        }

    def names_of(self, address: str) -> list[str]:
        """Return all names of an nsqd at nsqlookupd; that of its present address comes first."""
        names = [self.names.get(address, ""), *self._other_names.get(address, ())]
        return list(filter(None, names))

    def entries(self, known: Mapping[str, Iterable[KnownNode]]) -> dict[str, dict[str, KnownNode]]:
        """Return what each nsqlookupd knows of an nsqd, by the first name of that."""
        firsts = {
            name: self.names.get(address, "")
            for address, others in self._other_names.items()
            for name in others
        }
        entries: dict[str, dict[str, KnownNode]] = {}
        for lookupd, nodes in known.items():
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
        """Put one question to every nsqd, or to ``nsqds`` where they are known already.

        Raises the first failure when no daemon answers, unless an answer is not ``required``.
        """
        failures: list[DaemonFailure] = []
        if not nsqds:
            nsqds, failures = self.nsqds()
        answers, failed = self.ask(nsqds, question)
        failures += failed
        if required and failures and not answers:
            raise failures[0].error
        return answers, failures

    @property
    def timeout_s(self) -> float:
        """How long a question may take."""
        return self._access.timeout_s

    def remember(self, nsqds: Nsqds) -> None:
        """Note which nsqd the last sample has: they are also asked when no nsqlookupd has them."""
        self.remembered = nsqds

    def keep_only(self, nsqds: Nsqds) -> None:
        """Close the connections to all nsqd but these and those given, and forget these clients.

        Who asks again and again says so after each look: every nsqd that ever left would keep one,
        and its last error.
        """
        now_s = time.monotonic()
        for whom, (until_s, _) in list(self._silent.items()):
            if until_s <= now_s:
                self._silent.pop(whom, None)
        for address in {*self.names, *self._identities}.difference(self.given, nsqds):
            self.names.pop(address, None)
            self._identities.pop(address, None)
        kept = {http_url(address, NSQD_HTTP_PORT) for address in (*self.given, *nsqds)}
        with self._lock:
            left = [self._clients.pop(url) for url in list(self._clients) if url not in kept]
        for client in left:
            client.close()

    def reachable(self, announced: Address) -> Address:
        """Return where an nsqd that announces this TCP address is connected to."""
        return self._access.reachable(announced)

    def tcp_address(self, address: str, info: Mapping[str, Any]) -> str:
        """Return where to connect to the nsqd at an HTTP address, which says ``info`` of itself.

        One that was given is there, too, unless the address map has what it announces.
        """
        announced = Address(info["broadcast_address"], info["tcp_port"])
        place = self.reachable(announced)
        if place == announced and address in self.given:
            place = self.nsqd(address).tcp_beside(info)
        return str(place)

    def ask(self, clients: Mapping[str, C], question: Callable[[C], R]) -> Answers[R]:
        """Put one question to several daemons at once; answers by address, and failures.

        All of them together have the time that one has.
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

    def ask_one(self, whom: Hashable, question: Callable[[], R], latest_s: float) -> R:
        """Put a question to a daemon, until ``latest_s`` on the monotonic clock.

        Who does not answer in time is not asked again for as long: it fails as before. ``whom`` is
        its address, with what is asked where other questions may take longer.
        """
        from nsqtools.http.exchange import within

        until_s, failure = self._silent.get(whom, (0.0, None))
        if failure is not None and time.monotonic() < until_s:
            raise failure.with_traceback(None)
        try:
            with within(latest_s):
                return question()
        except DeadlineExceeded as exc:
            self._silent[whom] = time.monotonic() + self.timeout_s, exc
            raise

    def _name(self, client: NsqdHTTPClient) -> str:
        """Return what an nsqd announces itself as, where that can matter: else it is not asked.

        It can where nsqlookupd may name the same nsqd, or it may be one of those given by TCP
        address, which must not count twice; and for the HTTP port beside such an address, until it
        is proven to belong to it.
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
        """Return the client of an nsqd, made once."""
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
    """Return how a daemon is shown to people: ``host:port``, or a URL of https or without port."""
    shown = shown_url(url)
    return shown.removeprefix("http://") if urlsplit(shown).port else shown


def nsqd_address(text: str) -> str:
    """Return how the nsqd at an address that was given is shown. Raises `ConfigurationError`."""
    return short_address(http_url(text, NSQD_HTTP_PORT))
