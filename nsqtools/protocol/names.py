"""Names of topics and channels, and addresses of daemons.

A name is 1 to 64 characters of ``[.a-zA-Z0-9_-]``, including the optional suffix ``#ephemeral``
(nsqd, internal/protocol/names.go; the protocol page prints ``1 <`` where nsqd accepts 1). Names are
written into command lines unquoted, so this check also keeps a newline in a name from becoming a
second command. It must match the whole text: ``$`` would let a trailing newline pass.

An address is ``host:port`` for TCP, and ``host:port`` or a URL for HTTP. It keeps the *name* of the
host, which is resolved at every connect, so that a client follows a daemon that moved
(go-nsq#104). IPv6 addresses are written in brackets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from ipaddress import IPv6Address
from typing import NamedTuple
from urllib.parse import urlsplit, urlunsplit

from nsqtools.errors import ConfigurationError

MAX_NAME_LENGTH = 64
EPHEMERAL = "#ephemeral"

_NAME = re.compile(r"[.a-zA-Z0-9_-]+(#ephemeral)?")


def is_valid_name(name: str) -> bool:
    """Return whether nsqd would accept the name for a topic or a channel."""
    return len(name) <= MAX_NAME_LENGTH and _NAME.fullmatch(name) is not None


def is_ephemeral(name: str) -> bool:
    """Return whether the topic or channel lives in memory only and ends with its last client."""
    return name.endswith(EPHEMERAL)


def check_topic(name: str) -> str:
    """Return the topic name unchanged. Raises `ConfigurationError` when nsqd would refuse it."""
    return _check("topic", name)


def check_channel(name: str) -> str:
    """Return the channel name unchanged. Raises `ConfigurationError` when nsqd would refuse it."""
    return _check("channel", name)


def _check(kind: str, name: str) -> str:
    if is_valid_name(name):
        return name
    raise ConfigurationError(
        f"invalid {kind} name {name!r}",
        hint=f"A {kind} name is 1 to {MAX_NAME_LENGTH} characters of a-z A-Z 0-9 . _ -, "
        f"optionally ending in {EPHEMERAL}.",
    )


# -- addresses ------------------------------------------------------------------------------------

NSQD_TCP_PORT = 4150
NSQD_HTTP_PORT = 4151
HTTP_PORT_OFFSET = 1  # from the TCP port to the HTTP port of a daemon, unless configured otherwise
LOOKUPD_TCP_PORT = 4160
LOOKUPD_HTTP_PORT = 4161

MAX_HOST_LENGTH = 255
_HOST = re.compile(r"[a-zA-Z0-9][\w-]{0,62}(\.[\w-]{1,63})*\.?", re.ASCII)
_IPV6 = re.compile(r"[0-9a-fA-F:.]{2,45}(%[\w.-]+)?", re.ASCII)


class Address(NamedTuple):
    """A host name or IP address (without brackets) and a TCP port; ``str()`` adds the brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, default_port: int = NSQD_TCP_PORT) -> Address:
    """Read ``host``, ``host:port``, ``[v6]`` or ``[v6]:port``.

    Raises `ConfigurationError` for anything else.
    """
    text = text.strip()
    if "://" in text:
        raise _bad_address(text, "A TCP address is host:port, without a scheme.")
    if "@" in text:
        raise _bad_address(text, "A login is for HTTP: http://USER:PASSWORD@HOST:PORT.")
    if "," in text:
        cure = "repeat the option, or separate them by spaces in a variable"
        raise _bad_address(text, f"It is several: {cure}.")
    if text.startswith("["):
        host, bracket, suffix = text[1:].partition("]")
        if not bracket or (suffix and not suffix.startswith(":")):
            raise _bad_address(text)
        port_text = suffix[1:]
    elif text.count(":") > 1:
        host, _, port_text = text.rpartition(":")
        is_port = len(port_text) > 3 and port_text.isdecimal() and announced_host(host)
        bracketed = f"[{host}]:{port_text}" if is_port else f"[{text}]:PORT"
        raise _bad_address(text, f"Write an IPv6 address in brackets: {bracketed}.")
    else:
        host, _, port_text = text.partition(":")
        suffix = text[len(host) :]
    if not host or any(c.isspace() or c in "/?#[]" for c in host):
        raise _bad_address(text)
    if not suffix:
        return Address(host, default_port)
    if not re.fullmatch(r"[0-9]{1,5}", port_text) or not 0 < int(port_text) < 65536:
        raise _bad_address(text)
    return Address(host, int(port_text))


def _bad_address(
    text: str, hint: str = "Write host:port, with a port from 1 to 65535.", kind: str = "address"
) -> ConfigurationError:
    redacted = re.sub(r"(?s)^(\w+://)?.*@", r"\1***@", text)
    return ConfigurationError(f"invalid {kind} {redacted!r}", hint=hint)


def announced_host(name: object) -> str:
    """Return the host that a daemon announces, without brackets, or "" for anything else."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_HOST_LENGTH:
        return ""
    host = name[1:-1] if name.startswith("[") and name.endswith("]") else name
    if ":" not in host:
        return host if _HOST.fullmatch(host) else ""
    with suppress(ValueError):
        return host if _IPV6.fullmatch(host) and IPv6Address(host) else ""
    return ""


def parse_patterns(text: str) -> tuple[str, ...]:
    """Read patterns of `is_allowed`, separated by blanks or commas. Raises `ConfigurationError`."""
    patterns = tuple(text.replace(",", " ").split())
    for pattern in patterns:
        host, port = _pattern_parts(pattern)
        if not host or "/" in pattern or not re.fullmatch(r"[\d*?]*", port):
            raise ConfigurationError(
                f"invalid pattern of addresses {pattern!r}",
                hint="Write HOST:PORT or HOST, with * and ? as in file names: *.internal:4150.",
            )
    return patterns


def is_allowed(address: Address, patterns: Iterable[str]) -> bool:
    """Return whether an address matches a pattern: ``*.internal:4150``, ``10.1.*`` (any port).

    ``*`` and ``?`` match as in file names. An IPv6 address is written in brackets.
    """
    for pattern in patterns:
        host, port = _pattern_parts(pattern)
        if _matches(address.host, host) and (not port or _matches(str(address.port), port)):
            return True
    return False


def _pattern_parts(pattern: str) -> tuple[str, str]:
    host, _, port = pattern[1:].partition("]") if pattern[:1] == "[" else pattern.partition(":")
    return host, port.removeprefix(":")


def _matches(text: str, pattern: str) -> bool:
    return fnmatchcase(text.lower(), pattern.lower().replace("[", "[[]"))


def http_url(text: str, default_port: int) -> str:
    """Turn an HTTP address into a base URL: ``host[:port]`` or ``http(s)://host[:port][/path][?query]``.

    The default port applies to a bare host; a URL without a port has that of its scheme. The result
    has no trailing slash. Raises `ConfigurationError`.
    """
    text = text.strip()
    if not re.search("://|@", text):
        # urlsplit would take the host of "localhost:4161" for a scheme.
        head, slash, path = text.partition("/")
        text = f"http://{parse_address(head, default_port)}{slash}{path}"
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # The port is no number, or the IPv6 address is malformed.
        usable = False
    if not usable or parts.fragment or any(c.isspace() for c in text):
        raise _bad_address(text, "Write host:port or http(s)://host:port.", "HTTP address")
    return urlunsplit(parts._replace(path=parts.path.rstrip("/")))


def shown_url(url: str) -> str:
    """Return a URL without user, password and query, which must not be shown or stored."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query=""))


def one_or_several(addresses: str | Sequence[str]) -> Sequence[str]:
    """Return one address as a list, and a list unchanged."""
    return [addresses] if isinstance(addresses, str) else addresses
