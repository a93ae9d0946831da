"""Clients for the HTTP APIs of nsqd and nsqlookupd.

A client has one address and reuses its connection. Every failure raises an `NsqError` that names
the URL, whatever the daemon sends. Clients read the plain JSON of NSQ 1.0 and the older, wrapped
form (``status_code``, ``data``). They ignore the proxies of the environment, because daemons are
not behind proxies. They do not follow redirects, which would forward the token to another server.

A client recognizes another server by its answers, not by the status alone. nsqlookupd answers 404
to ``/stats``, like any web server, and that must not be reported as "the topic does not exist".

Any program that reaches nsqlookupd's TCP port can announce anything, so every field of an answer is
checked. A node without a usable address is reported once and skipped.

`HTTPAccess` opens all clients, so that TLS, the bearer token, the address map and the timeouts
apply to every request. Only nsqlookupd gets the token, because an nsqd is only as trustworthy as
its announcement.
"""

from __future__ import annotations

import functools
import json
import logging
import random
import time
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from urllib.parse import quote, unquote_to_bytes, urlencode, urlsplit, urlunsplit

from nsqtools.errors import (
    ConfigurationError,
    ConnectionFailed,
    DeadlineExceeded,
    HTTPError,
    NsqError,
    ProtocolError,
    RefusedError,
    TLSError,
)
from nsqtools.protocol.names import (
    NSQD_HTTP_PORT,
    Address,
    announced_host,
    http_url,
    is_allowed,
    is_valid_name,
    parse_address,
    shown_url,
)
from nsqtools.protocol.text import escape_line

if TYPE_CHECKING:
    import ssl

    from nsqtools.http.exchange import HTTPAnswer
    from nsqtools.protocol.stats import NsqdStats

NSQ_V1 = "application/vnd.nsq; version=1.0"

MAX_BODY_BYTES = 32 << 20
MAX_JSON_VALUES = 1 << 20
"""/stats of 30,000 consumers has this many. An empty list is 3 bytes of JSON and 64 of memory."""

NOTHING: Mapping[str, str] = MappingProxyType({})
JSON: Mapping[str, str] = MappingProxyType({"Accept": "*/*", "Content-Type": "application/json"})
NEEDS_TLS = "This nsqd answers on its HTTPS port only: give an https:// address."
PORTS = "nsqd's HTTP port is usually 4151, nsqlookupd's 4161."
_URL_MARKS = "/?%~:@!$&'()*+,;="  # that a URL may contain unescaped


class HTTPAPI:
    """One HTTP address. ``url`` is the base URL; ``access`` has the limits, and TLS.

    User, password and query of the address are sent, but ``url`` omits them because it is shown.

    Thread-safe. Close it, or use it as a context manager.
    """

    kind = "NSQ"
    gets_bearer = False

    def __init__(self, url: str, access: HTTPAccess | None = None) -> None:
        import httpx

        from nsqtools.http.exchange import Exchanges

        self.url = shown_url(url)
        try:
            httpx.URL(url)
        except (httpx.InvalidURL, UnicodeError):  # an argument that is not UTF-8
            raise ConfigurationError(f"invalid HTTP address {self.url!r}") from None
        parts = urlsplit(url)
        login, _, netloc = parts.netloc.rpartition("@")
        self._base = parts._replace(netloc=netloc)
        self._access = limits = access or HTTPAccess()
        headers = {"Accept": NSQ_V1}
        if login:
            headers["Authorization"] = f"Basic {b64encode(unquote_to_bytes(login)).decode()}"
        elif limits.bearer and self.gets_bearer:
            headers["Authorization"] = f"Bearer {limits.bearer}"
        self._exchanges = Exchanges(
            headers, limits.tls, limits.connect_timeout_s, limits.timeout_s, limits.max_body_bytes
        )

    def close(self) -> None:
        """Close the connection."""
        self._exchanges.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, path: str, **parameters: str) -> Any:
        """GET and decode JSON. Raises `ConnectionFailed`, `HTTPError`, `ProtocolError`."""
        return self._decode(self._request("GET", path, parameters).body)

    def post(self, path: str, **parameters: str) -> None:
        """POST without a body. Raises the errors of `get`."""
        self._request("POST", path, parameters)

    def send(self, document: bytes) -> None:
        """POST a JSON document to the address itself. Raises the errors of `get`."""
        self._request("POST", "", NOTHING, document, JSON)

    def administer(self, action: str, topic: str, channel: str = "") -> None:
        """Create or delete a topic, or one channel of it; nsqd also empties, pauses, unpauses.

        Raises `HTTPError` of category ``not_found`` where it does not exist.
        """
        of_channel = {"channel": channel} if channel else {}
        self.post(f"/{'channel' if channel else 'topic'}/{action}", topic=topic, **of_channel)

    def ping(self) -> float | None:
        """Request /ping, which fails if the daemon is unhealthy. Raises the errors of `get`.

        Returns by how many seconds the daemon's clock is ahead of this machine's, with an error of
        a second, or None if the answer has no valid Date header.
        """
        from email.utils import parsedate_to_datetime

        began_s = time.time()
        answer = self._request("GET", "/ping")
        now_s = (began_s + time.time()) / 2
        if answer.body != b"OK":
            raise _unlike(self.url, "NSQ")
        try:
            # The header has whole seconds, so half a second is the mean of the lost part.
            return parsedate_to_datetime(answer.date).timestamp() + 0.5 - now_s
        except (ValueError, OverflowError):
            return None

    def check_health(self) -> None:
        """Request /health of a command with --listen-http. Raises the errors of `get`.

        `HTTPError.code` is what the command says is wrong.
        """
        self._request("GET", "/health")

    def uptime_s(self, start_time: float) -> float:
        """Return the seconds since ``start_time`` of /info, on the daemon's own clock."""
        return time.time() + (self.ping() or 0.0) - start_time

    def _request(
        self,
        method: str,
        path: str,
        parameters: Mapping[str, str] = NOTHING,
        content: bytes | None = None,
        headers: Mapping[str, str] = NOTHING,
    ) -> HTTPAnswer:
        """Ask at a path below the address, with its query but for what ``parameters`` name."""
        import httpcore
        import httpx

        base, path_below = self._base, path
        own = (each for each in base.query.split("&") if each.partition("=")[0] not in parameters)
        # a name that a daemon gave may hold what is not UTF-8: the daemon shall refuse it
        query = "&".join(filter(None, (*own, urlencode(parameters, errors="surrogatepass"))))
        path, query = (quote(each, safe=_URL_MARKS) for each in (base.path + path or "/", query))
        url = urlunsplit((*base[:2], path, query, ""))
        try:
            answer = self._exchanges.request(method, url, content, headers)
        except (httpcore.TimeoutException, DeadlineExceeded) as exc:
            raise DeadlineExceeded(f"{self.url}: no answer in time") from exc
        except ProtocolError as exc:
            raise ProtocolError(f"{self.url}: {exc}", hint=exc.hint) from exc
        except httpcore.LocalProtocolError:  # its text has the secret
            raise ConfigurationError(
                f"{self.url}: HTTP cannot send a header of this request",
                hint="The auth secret must be one line of text.",
            ) from None
        except (UnicodeError, httpx.InvalidURL, httpcore.UnsupportedProtocol) as exc:
            raise ConnectionFailed(f"{self.url}: {exc}", hint="Check the address.") from exc
        except (httpcore.NetworkError, httpcore.ProtocolError, httpx.TransportError) as exc:
            raise self._map(exc) from exc
        if 200 <= answer.status < 300:
            if (view := self._access.view) is not None and method == "GET":
                return answer._replace(body=view(path_below, parameters, answer.body))
            return answer
        code = _error_code(answer)
        raise HTTPError(
            f"{self.url}: {escape_line(code or answer.reason)} (HTTP {answer.status})",
            status=answer.status,
            code=code,
            hint=NEEDS_TLS if code == "TLS_REQUIRED" else "",
        )

    def _map(self, exc: Exception) -> NsqError:
        import httpcore
        import httpx

        cause: BaseException = exc
        while cause.__cause__ or cause.__context__:
            cause = cause.__cause__ or cause.__context__  # type: ignore[assignment]
        reason = (getattr(cause, "strerror", None) or str(cause) or type(cause).__name__).lower()
        if "certificate" in reason:
            return TLSError(
                f"{self.url}: {reason}",
                hint="Set tls_root_ca_file (nsq: --tls-ca-file) to the CA of its certificate.",
            )
        if isinstance(exc, httpcore.ConnectError):
            hint = "Check the address and port."
            if "wrong version number" in reason:  # OpenSSL's name for an answer that is not TLS
                reason = "the peer does not speak TLS"
                hint = f"Write {self.url.replace('https:', 'http:', 1)}, or the port of https."
            return ConnectionFailed(f"cannot connect to {self.url} ({reason})", hint=hint)
        if reason.startswith("peer closed connection"):  # h11's words for a body that is cut
            return ConnectionFailed(f"{self.url}: the connection ended within the answer")
        if isinstance(exc, httpcore.RemoteProtocolError | httpx.RemoteProtocolError):
            return ProtocolError(f"{self.url} does not speak HTTP ({reason})", hint=PORTS)
        return ConnectionFailed(f"{self.url}: {reason}")

    def _answer(self, path: str, **parameters: str) -> bytearray:
        """GET a path that every daemon of the kind has, so 404 means another kind of server."""
        try:
            return self._request("GET", path, parameters).body
        except HTTPError as exc:
            if exc.status == 404:
                raise _unlike(self.url, self.kind) from exc
            raise

    def _decode(self, body: bytes | bytearray) -> Any:
        """Read JSON, wrapped or not. Raises `ProtocolError`."""
        try:
            answer = load_json(body)
        except (ValueError, RecursionError) as exc:
            raise _unlike(self.url, "NSQ") from exc
        if isinstance(answer, dict) and "status_code" in answer and "data" in answer:
            return answer["data"]
        return answer


def _unlike(url: str, what: str) -> ProtocolError:
    return ProtocolError(f"{url} does not answer like {what}", hint=PORTS)


def load_json(body: bytes | bytearray) -> Any:
    """Decode JSON of at most `MAX_JSON_VALUES`. Raises ``ValueError`` and ``RecursionError``."""
    if sum(map(body.count, (b",", b"[", b"{"))) > MAX_JSON_VALUES:
        raise ValueError(f"more than {MAX_JSON_VALUES} values")
    return json.loads(body)


def _error_code(answer: HTTPAnswer) -> str:
    try:
        message = load_json(answer.body)["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        # /ping of nsqd and /health of a command give the reason as text; a proxy gives HTML.
        is_text = answer.status == 503 and not answer.body.startswith(b"<")
        is_reason = is_text or answer.body.startswith(b"NOK")
        return answer.body[:500].decode("utf-8", "replace").strip() if is_reason else ""
    return message if isinstance(message, str) else ""


class NsqdHTTPClient(HTTPAPI):
    """One nsqd."""

    kind = "nsqd"

    def info(self) -> dict[str, Any]:
        """Return /info: version, ports, limits. Raises the errors of `HTTPAPI.get`."""
        info = self._object(self._answer("/info"), "tcp_port")
        ports = [info["tcp_port"], info.setdefault("http_port", 0)]
        host = info.setdefault("broadcast_address", "")
        if not isinstance(host, str) or not all(type(p) is int and 0 <= p < 65536 for p in ports):
            raise _unlike(self.url, self.kind)
        info["broadcast_address"] = announced_host(host) or host
        return info

    def tcp_beside(self, info: Mapping[str, Any]) -> Address:
        """Return the TCP address: the host of the URL and the port of ``info``."""
        return Address(urlsplit(self.url).hostname or "", info["tcp_port"])

    def stats(
        self, topic: str = "", channel: str = "", *, clients: bool = False, memory: bool = False
    ) -> NsqdStats:
        """Return /stats, of one topic and channel or of all.

        Clients and memory are omitted by default, because they cost nsqd the most.
        """
        from nsqtools.protocol.stats import read_stats

        answer = self.ask_stats(topic, channel, clients=clients, memory=memory)
        return read_stats(self.decode_stats(answer))

    def ask_stats(
        self, topic: str = "", channel: str = "", *, clients: bool = False, memory: bool = False
    ) -> bytearray:
        """Return the undecoded answer of `stats`, whose size the caller can check first."""
        names = {"topic": topic} if topic else {}
        names |= {"channel": channel} if channel else {}
        parts = {"include_clients": str(clients).lower(), "include_mem": str(memory).lower()}
        return self._answer("/stats", format="json", **parts, **names)

    def decode_stats(self, body: bytes | bytearray) -> dict[str, Any]:
        """Decode what `ask_stats` returned. Raises `ProtocolError`."""
        answer = self._object(body, "topics")
        if not isinstance(answer["topics"], list | None):  # null is no topic
            raise _unlike(self.url, self.kind)
        return answer

    def config(self, option: str) -> Any:
        """Return an option of the running nsqd: a number, a boolean, a list or a string."""
        return self._config("GET", option)

    def set_config(self, option: str, value: str) -> Any:
        """Change an option of the running nsqd until it restarts, and return the new value."""
        return self._config("PUT", option, value.encode("utf-8", "surrogateescape"))

    def _config(self, method: str, option: str, value: bytes | None = None) -> Any:
        # nsqd sends a string bare and every other value as JSON.
        body = self._request(method, f"/config/{option}", content=value).body
        try:
            return load_json(body)
        except (ValueError, RecursionError):
            return body.decode("utf-8", "backslashreplace")

    def _object(self, body: bytes | bytearray, expected: str) -> dict[str, Any]:
        answer = self._decode(body)
        if isinstance(answer, dict) and expected in answer:
            return answer
        raise _unlike(self.url, self.kind)


log = logging.getLogger("nsqtools")

MAX_NODES = 1000


class ProducerNode(NamedTuple):
    """An nsqd that nsqlookupd announces. ``http`` is None if the nsqd serves no HTTP."""

    tcp: Address
    http: Address | None


class KnownNode(NamedTuple):
    """An nsqd of /nodes. ``tombstoned`` has the topics that are hidden for this nsqd."""

    node: ProducerNode
    hostname: str
    version: str
    topics: frozenset[str]
    tombstoned: frozenset[str]
    remote_address: str = ""


class Lookup(NamedTuple):
    """The answer of one nsqlookupd about a topic: its channels and nsqd.

    ``is_known`` is False if the answer was TOPIC_NOT_FOUND, which is not a failure.
    """

    is_known: bool
    channels: frozenset[str]
    nodes: frozenset[ProducerNode]

    @property
    def nsqd(self) -> frozenset[Address]:
        """The TCP addresses of the nsqd."""
        return frozenset(node.tcp for node in self.nodes)


class NsqlookupdHTTPClient(HTTPAPI):
    """One nsqlookupd.

    If it announces more than ``max_nodes`` nsqd, a random sample is used. A program that reaches
    its TCP port can announce any number of nsqd, and must not displace all others every time.
    ``allow_announced`` has patterns of TCP addresses; nodes at other addresses are skipped.
    """

    kind = "nsqlookupd"
    gets_bearer = True

    def lookup(self, topic: str) -> Lookup:
        """Look a topic up, at the path of the address if it has one, as go-nsq does.

        Raises the errors of `HTTPAPI.get`.
        """
        path = "" if self._base.path else "/lookup"
        try:
            answer = self.get(path, topic=topic)
        except HTTPError as exc:
            if exc.status == 404 and exc.code in ("TOPIC_NOT_FOUND", ""):
                return Lookup(False, frozenset(), frozenset())
            if exc.status == 404 and exc.code == "NOT_FOUND":  # nsqd, for any unknown path
                raise _unlike(self.url, self.kind) from exc
            raise
        return decode_lookup(answer, self.url, self._access)

    def topics(self) -> list[str]:
        """Return the names of all topics."""
        return _names(self._decode(self._answer("/topics")), "topics", self.url)

    def channels(self, topic: str) -> list[str]:
        """Return the names of a topic's channels; none for an unknown topic."""
        answer = self._decode(self._answer("/channels", topic=topic))
        return _names(answer, "channels", self.url)

    def nodes(self) -> list[KnownNode]:
        """Return every registered nsqd that has sent a recent heartbeat."""
        producers = _producers(self._decode(self._answer("/nodes")), self.url, self._access)
        nodes = (_known_node(producer, self.url) for producer in producers)
        return list(filter(None, nodes))

    def tombstone(self, topic: str, node: str) -> None:
        """Hide the nsqd ``node`` (its broadcast ``host:http_port``) for a topic, for a while."""
        # nsqlookupd stores an IPv6 address as it was announced, with or without brackets.
        for name in {node, node.replace("[", "").replace("]", "")}:
            self.post("/topic/tombstone", topic=topic, node=name)


def decode_lookup(answer: Any, url: str, access: HTTPAccess) -> Lookup:
    """Read the answer to /lookup. Raises `ProtocolError` when it has another shape."""
    channels = frozenset(_names(answer, "channels", url))
    nodes = (_node(producer, url) for producer in _producers(answer, url, access))
    return Lookup(True, channels, frozenset(filter(None, nodes)))


def _producers(answer: Any, url: str, access: HTTPAccess) -> list[dict[str, Any]]:
    entries = _list(answer, "producers", url)
    producers = [p if isinstance(p, dict) else {"broadcast_address": p} for p in entries]
    # Filtering comes before sampling, which would otherwise pick nodes that are not allowed.
    if access.allow_announced:
        producers = _allowed(producers, url, access.allow_announced)
    most = access.max_nodes
    if len(producers) <= most:
        return producers
    text = "%s announces %d nsqd; %d of them, drawn at random, are believed (max_discovered_nsqd)"
    log.warning(text, url, len(producers), most)
    # A program may have seeded the default generator.
    return random.SystemRandom().sample(producers, most)


def _allowed(producers: list[Any], url: str, patterns: tuple[str, ...]) -> list[Any]:
    kept = []
    for producer in producers:
        tcp = _listener(announced_host(_name(producer)), producer, "tcp_port")
        if tcp is None or is_allowed(tcp, patterns):  # no address is reported as such
            kept.append(producer)
        else:
            _report(url, f"{tcp}, which allow_announced does not allow")
    return kept


def _node(producer: dict[str, Any], url: str) -> ProducerNode | None:
    name = _name(producer)
    host = announced_host(name)
    tcp, http = (_listener(host, producer, key) for key in ("tcp_port", "http_port"))
    if tcp is None:
        port = producer.get("tcp_port")
        _report(url, f"{name!r:.80}, port {port!r:.20}, which is not an address")
        return None
    return ProducerNode(tcp, http)


def _name(producer: dict[str, Any]) -> Any:
    """Return the broadcast address of a producer, else its hostname or remote host."""
    remote_host = str(producer.get("remote_address") or "").rpartition(":")[0]
    return producer.get("broadcast_address") or producer.get("hostname") or remote_host


_reported: dict[str, set[str]] = {}
MAX_REPORTS = 100
"""Log lines about one nsqlookupd. Without a limit a hostile announcer could fill a disk."""


def _report(url: str, problem: str) -> None:
    """Log a skipped node once."""
    reported = _reported.setdefault(url, set())
    if problem in reported or len(reported) == MAX_REPORTS:
        return
    reported.add(problem)
    log.warning("%s announces an nsqd at %s; left out", url, problem)
    if len(reported) == MAX_REPORTS:
        log.warning("%s announces more nsqd that are left out; further ones are not named", url)


def _known_node(producer: dict[str, Any], url: str) -> KnownNode | None:
    node = _node(producer, url)
    if node is None:
        return None
    topics, hidden = (
        each if isinstance(each := producer.get(key), list) else []
        for key in ("topics", "tombstones")
    )
    named = frozenset(filter(_is_name, topics))
    pairs = zip(topics, hidden, strict=False)
    tombstoned = {topic for topic, is_hidden in pairs if is_hidden and _is_name(topic)}
    facts = (str(producer.get(key) or "") for key in ("hostname", "version", "remote_address"))
    hostname, version, remote_address = facts
    return KnownNode(node, hostname, version, named, named & tombstoned, remote_address)


def _listener(host: str, producer: dict[str, Any], key: str) -> Address | None:
    port = producer.get(key)
    return Address(host, port) if host and type(port) is int and 0 < port < 65536 else None


def _names(answer: Any, key: str, url: str) -> list[str]:
    return list(filter(_is_name, _list(answer, key, url)))


def _list(answer: Any, key: str, url: str) -> list[Any]:
    values = answer.get(key) if isinstance(answer, dict) else None
    if not isinstance(values, list):
        raise _unlike(url, NsqlookupdHTTPClient.kind)
    return values


def _is_name(name: object) -> bool:
    return isinstance(name, str) and is_valid_name(name)


View = Callable[[str, Mapping[str, str], bytearray], bytearray]
"""From the path, the parameters and the body of an answer to GET, the body that a user may see."""


@dataclass(frozen=True, slots=True)
class HTTPAccess:
    """Open clients with the same timeouts, limits and credentials.

    ``timeout_s`` covers a whole exchange. ``max_nodes`` limits the nsqd of one nsqlookupd, and
    ``allow_announced`` has patterns of their addresses (empty: any). Only https URLs need ``tls``.

    ``address_map`` is announced -> reachable, each with or without a port; an ``http(s)://`` URL on
    the right is for HTTP only. ``view`` limits what the daemons answer. Raises `ConfigurationError`
    for an address that cannot be used.
    """

    connect_timeout_s: float = 2.0
    timeout_s: float = 5.0
    max_body_bytes: int = MAX_BODY_BYTES
    max_nodes: int = MAX_NODES
    allow_announced: tuple[str, ...] = ()
    auth_requires_tls: bool = False
    tls: ssl.SSLContext | None = None
    bearer: str = field(default="", repr=False)
    address_map: Mapping[str, str] = field(default_factory=dict)
    view: View | None = None

    def __post_init__(self) -> None:
        for text in self.address_map.values():  # now, not when nsqlookupd announces it
            if "://" in text:
                http_url(text, NSQD_HTTP_PORT)
            else:
                parse_address(text)

    def nsqd(self, url: str) -> NsqdHTTPClient:
        """Return the client for one nsqd, to be closed."""
        return NsqdHTTPClient(url, self)

    def nsqlookupd(self, url: str) -> NsqlookupdHTTPClient:
        """Return the client for one nsqlookupd, to be closed.

        Raises `RefusedError` where the secret must not go there in plain text.
        """
        if self.bearer and not url.startswith("https:"):
            if self.auth_requires_tls:
                raise RefusedError(
                    f"{shown_url(url)} would get the auth secret in plain text",
                    hint="Give an https:// address, or do without auth_requires_tls.",
                )
            _warn_of_plain_text(shown_url(url))
        return NsqlookupdHTTPClient(url, self)

    def reachable(self, announced: Address) -> Address:
        """Return where to connect to over TCP for an announced address."""
        mapped = self._mapped(announced)
        return announced if "://" in mapped else parse_address(mapped, announced.port)

    def url_of(self, announced: Address) -> str:
        """Return the base URL for an announced HTTP address."""
        mapped = self._mapped(announced)
        return http_url(mapped if "://" in mapped else str(self.reachable(announced)), 0)

    def _mapped(self, announced: Address) -> str:
        name = str(announced)
        return self.address_map.get(name) or self.address_map.get(announced.host) or name


@functools.cache
def _warn_of_plain_text(url: str) -> None:
    hint = "give an https:// address, or refuse this with auth_requires_tls"
    log.warning("the auth secret goes to %s in plain text; %s", url, hint)
