"""The users file: topics and channels that each user may publish to and subscribe to. Pure.

    [users.ann]
    tokens = ["sha256$9F86..."]         # of random tokens; any of them, or
    password = "scrypt$16384$8$1$..."   # a chosen secret, sent as ann:SECRET, or
    jwt = true                          # a JWT whose subject is ann
    common_name = "ann.example.com"     # of the client's certificate
    addresses = ["10.0.0.0/8"]
    tls = true
    publish = ['orders\\..*']            # topics
    subscribe = { 'orders\\..*' = ['billing.*'] }   # topics = channels

    [[jwt]]
    issuer = "https://login.example.com"
    audience = "nsq"
    key = "-----BEGIN PUBLIC KEY-----..."

A client is the user if it has one of the secrets of the entry, and meets all of its conditions:
common name, addresses, TLS. An entry without a secret needs only the conditions. Of several entries
that fit a client, the first one counts.

Patterns are Go's, and match whole names: nsqd gets them anchored. A user who may publish to a topic
sees it with all of its channels. A user who may subscribe sees the topic and these channels.

Each error has the line of the file. TOML parsers do not keep lines, so `_find_line` looks for the
words of the entry that is wrong.
"""

from __future__ import annotations

import csv
import hashlib
import io
import ipaddress
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nsqtools.authd.passwords import as_ip, parse_hash
from nsqtools.errors import ConfigurationError
from nsqtools.protocol.go_regexp import Matcher, compile_go_regexp
from nsqtools.protocol.names import is_valid_name

TOKEN_PREFIX = "sha256$"
ANYTHING = ".*"
_TOKEN_HASH = re.compile(r"sha256\$([0-9a-fA-F]{64})")
# A colon would end the name in USER:SECRET, and TOML has no surrogates.
_NAME = re.compile(r"[^\s:\x00-\x1f\x7f\ud800-\udfff]{1,256}")

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def hash_token(token: str) -> str:
    """Return what the users file has of a token: its SHA-256, because nobody guesses 256 bits."""
    digest = hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{TOKEN_PREFIX}{digest}"


def toml_text(value: str | list[str]) -> str:
    """Return strings in TOML, which lacks the surrogate pairs of JSON's escapes."""
    return json.dumps(value, ensure_ascii=False)


class Client(NamedTuple):
    """A client, as nsqd reports it."""

    address: str = ""
    tls: bool = False
    common_name: str = ""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern for whole names; ``text`` is anchored."""

    text: str
    matches: Matcher = field(compare=False)  # a new object after each reload


class Grant(NamedTuple):
    """The permission to publish to topics, or, with ``channels``, to subscribe."""

    topic: Pattern
    channels: tuple[Pattern, ...] = ()

    def as_authorization(self) -> dict[str, Any]:
        """Return the entry of an answer to nsqd."""
        return {
            "topic": self.topic.text,
            "channels": [channel.text for channel in self.channels] or [ANYTHING],
            "permissions": ["subscribe" if self.channels else "publish"],
        }


@dataclass(frozen=True, slots=True)
class User:
    """An entry of the file."""

    name: str
    tokens: frozenset[str] = frozenset()
    password: str = field(default="", repr=False)
    takes_jwt: bool = False
    common_name: str = ""
    addresses: tuple[Network, ...] = ()
    needs_tls: bool = False
    grants: tuple[Grant, ...] = ()

    @property
    def has_secret(self) -> bool:
        """Whether a client has to send a secret to be this user."""
        return bool(self.tokens or self.password or self.takes_jwt)

    def reason_to_refuse(self, client: Client) -> str:
        """Return the condition that a client does not meet, "" if it meets all but the secret."""
        if self.needs_tls and not client.tls:
            return "the connection has no TLS"
        if self.common_name and self.common_name != client.common_name:
            return f"the certificate's common name is not {self.common_name}"
        if self.addresses:
            address = as_ip(client.address)
            if address is None or not any(address in network for network in self.addresses):
                return f"the address {client.address or '(unknown)'} is in none of its ranges"
        return ""

    def conditions(self) -> Iterator[str]:
        """Yield what a client must have apart from a secret, in words."""
        if self.needs_tls:
            yield "with TLS"
        if self.common_name:
            yield f"with a certificate of {self.common_name}"
        if self.addresses:
            yield f"from {', '.join(map(str, self.addresses))}"

    def grant_to_publish(self, topic: str) -> Grant | None:
        """Return the grant that lets the user publish to a topic."""
        grants = (grant for grant in self.grants if not grant.channels)
        return next((grant for grant in grants if grant.topic.matches(topic)), None)

    def grant_to_subscribe(self, topic: str, channel: str | None = None) -> Grant | None:
        """Return the grant that lets the user subscribe to a channel, or to any without one."""
        grants = (grant for grant in self.grants if grant.channels and grant.topic.matches(topic))
        for grant in grants:
            if channel is None or any(pattern.matches(channel) for pattern in grant.channels):
                return grant
        return None

    def sees(self, topic: str, channel: str | None = None) -> bool:
        """Return whether the user may see a topic, or a channel of it.

        A daemon may send names that NSQ does not allow. They match nothing, and re2 raises an error
        for those that are not UTF-8.
        """
        if not all(map(is_valid_name, filter(None, (topic, channel)))):
            return False
        return bool(self.grant_to_publish(topic) or self.grant_to_subscribe(topic, channel))


class Issuer(NamedTuple):
    """An issuer of JWTs; ``claim`` has the name of the user, ``line`` is that of the entry."""

    issuer: str
    audience: str
    key: str
    claim: str
    line: int


class Users:
    """All entries, and the ways to them."""

    def __init__(self, users: Sequence[User] = (), issuers: Sequence[Issuer] = ()) -> None:
        self.by_name = {user.name: user for user in users}
        self.issuers = tuple(issuers)
        self.without_secret = tuple(user for user in users if not user.has_secret)
        self.by_token: dict[str, list[User]] = {}
        for user in users:
            for token in user.tokens:
                self.by_token.setdefault(token, []).append(user)


class _EntryError(ValueError):
    """Something is wrong with an entry; ``words`` are on its line, the best ones first."""

    def __init__(self, reason: str, *words: str) -> None:
        super().__init__(reason)
        self.words = words


def parse_users(text: str, name: str) -> Users:
    """Read a users file, which is called ``name``. Raises `ConfigurationError` with the line."""
    import tomllib

    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as exc:
        reason = str(exc) or "it is nested too deeply"
        raise ConfigurationError(f"{name}: {reason}", hint="The file is TOML.") from exc
    table: tuple[str, ...] = ()
    try:
        if unknown := sorted(document.keys() - {"users", "jwt"}):
            raise _EntryError(f"unknown entry {unknown[0]!r}", unknown[0])
        users = []
        for user_name, entry in _as_table(document, "users").items():
            table = ("users", user_name)
            users.append(_user(user_name, entry))
        issuers = []
        for index, entry in enumerate(_as_list(document, "jwt", dict)):
            table = ("jwt", str(index))
            line = _find_line(text, table, ())
            issuers.append(_issuer(entry, line))
    except _EntryError as exc:
        line = _find_line(text, table, exc.words)
        raise ConfigurationError(
            f"{name}, line {line}: {exc}", hint="nsq-auth(7) explains the users file."
        ) from None
    return Users(users, issuers)


_KEYS = ("tokens", "password", "jwt", "common_name", "addresses", "tls", "publish", "subscribe")


def _user(name: str, entry: Any) -> User:
    if not _NAME.fullmatch(name):
        raise _EntryError(f"a user cannot be called {name!r}", name)
    if not isinstance(entry, dict):
        raise _EntryError(f"user {name} is not a table", name)
    if unknown := [key for key in entry if key not in _KEYS]:
        raise _EntryError(f"user {name}: unknown key {unknown[0]!r}", unknown[0])
    password = _as_text(entry, "password")
    if password:
        try:
            parse_hash(password)
        except ValueError:
            reason = "password is no hash of nsq authd hash"
            raise _EntryError(f"user {name}: {reason}", "password") from None
    user = User(
        name,
        frozenset(_token(text) for text in _as_list(entry, "tokens", str)),
        password,
        _as_switch(entry, "jwt"),
        _as_text(entry, "common_name"),
        tuple(_network(text) for text in _as_list(entry, "addresses", str)),
        _as_switch(entry, "tls"),
        (
            *(Grant(_pattern(topic)) for topic in _as_list(entry, "publish", str)),
            *(
                Grant(_pattern(topic), tuple(map(_pattern, _channels(topics, topic))))
                for topics in [_as_table(entry, "subscribe")]
                for topic in topics
            ),
        ),
    )
    if not (user.has_secret or user.common_name or user.addresses):
        reason = "needs tokens, password, jwt, common_name or addresses, or anyone would be it"
        raise _EntryError(f"user {name} {reason}")
    return user


def _token(text: str) -> str:
    match = _TOKEN_HASH.fullmatch(text)
    if match is None:  # perhaps the token itself, which must not be in a log
        raise _EntryError("a token is not a hash of nsq authd hash --new", text, "tokens")
    return TOKEN_PREFIX + match[1].lower()


def _network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError as exc:
        raise _EntryError(f"addresses: {exc}", text, "addresses") from None


def _pattern(text: str) -> Pattern:
    try:
        compile_go_regexp(text)  # alone first: "a)(b" is one only between parentheses
        anchored = f"^(?:{text})$"
        return Pattern(anchored, compile_go_regexp(anchored))
    except ValueError as exc:
        raise _EntryError(f"invalid pattern {text!r}: {exc}", text) from None


def _channels(topics: dict[str, Any], topic: str) -> list[str]:
    channels: list[str] = _as_list(topics, topic, str)
    if not channels:
        raise _EntryError(f"subscribe: {topic!r} has no channels", topic)
    return channels


def _issuer(entry: dict[str, Any], line: int) -> Issuer:
    texts = {key: _as_text(entry, key) for key in ("issuer", "audience", "key")}
    for key, text in texts.items():
        if not text:
            raise _EntryError(f"jwt needs {key}")
    if unknown := sorted(entry.keys() - texts.keys() - {"claim"}):
        raise _EntryError(f"jwt: unknown key {unknown[0]!r}", unknown[0])
    return Issuer(**texts, claim=_as_text(entry, "claim") or "sub", line=line)


def _as_text(table: dict[str, Any], key: str) -> str:
    value = table.get(key, "")
    if not isinstance(value, str) or (key in table and not value):
        raise _EntryError(f"{key} must be a text", key)
    return value


def _as_switch(table: dict[str, Any], key: str) -> bool:
    value = table.get(key, False)
    if not isinstance(value, bool):
        raise _EntryError(f"{key} must be true or false", key)
    return value


def _as_list(table: dict[str, Any], key: str, kind: type) -> list[Any]:
    value = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
        items = "texts" if kind is str else "tables"
        raise _EntryError(f"{key} must be a list of {items}", key)
    return value


def _as_table(table: dict[str, Any], key: str) -> dict[str, Any]:
    value = table.get(key, {})
    if not isinstance(value, dict):
        raise _EntryError(f"{key} must be a table", key)
    return value


def _find_line(text: str, table: tuple[str, ...], words: Sequence[str]) -> int:
    """Return the line in a table that has the first of the words that any line of it has.

    The line of the head of the table where none has one, the first of the file without a table.
    """
    lines: list[tuple[int, str]] = []
    counts: dict[str, int] = {}
    path: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        if head := re.match(r"\s*(\[\[?)([^\[\]]+)\]", line):
            path = tuple(_key_parts(head[2]))
            if head[1] == "[[" and path:
                counts[path[0]] = counts.get(path[0], -1) + 1
                path = (path[0], str(counts[path[0]]))
        inline = path == table[:-1] and _key_parts(line.partition("=")[0])[:1] == list(table[-1:])
        if path[: len(table)] == table or inline:
            lines.append((number, line))
    for word in words:
        for form in (word, json.dumps(word)[1:-1]):  # of '' and of "" in TOML
            for number, line in lines:
                if form in line:
                    return number
    return lines[0][0] if lines else 1


def _key_parts(text: str) -> list[str]:
    """Return the parts of a dotted key, without quotes."""
    parts = re.findall(r"\"((?:[^\"\\]|\\.)*)\"|'([^']*)'|([\w-]+)", text)
    return ["".join(part) for part in parts]


# -- conversion of permissions.csv ----------------------------------------------------------------

# A row ``login,ip,tls_required,topic,channel,subscribe,publish`` applies to a client whose secret
# is the login, whose address is in ip, and who has TLS if that is required; an empty login or ip
# applies to everyone. pynsqauthd gives a client the permissions of all rows that apply, a users
# file those of the first entry that fits. So the result has an entry for each combination of
# login, ip and TLS, the narrowest ones first, with the permissions of all rows that apply whenever
# the entry does.
#
# Without an OAuth server the login is the secret. So the users file has its hash, and the entries
# are called ``user-1``, ``user-2``.

COLUMNS = ("login", "ip", "tls_required", "topic", "channel", "subscribe", "publish")
ANY_CLIENT = ("0.0.0.0/0", "::/0")


class _Condition(NamedTuple):
    login: str
    network: ipaddress.IPv4Network | ipaddress.IPv6Network | None
    needs_tls: bool

    def includes(self, other: _Condition) -> bool:
        """Return whether it holds whenever another one does."""
        if self.login not in ("", other.login) or (self.needs_tls and not other.needs_tls):
            return False
        if self.network is None:
            return True
        # TypeError of subnet_of for another version
        return (
            other.network is not None
            and other.network.version == self.network.version
            and other.network.subnet_of(self.network)  # type: ignore[arg-type]
        )

    @property
    def breadth(self) -> tuple[bool, int, bool]:
        """Return what orders conditions, the narrowest first."""
        bits = self.network.max_prefixlen - self.network.prefixlen if self.network else 129
        return not self.login, bits, not self.needs_tls


class _Row(NamedTuple):
    condition: _Condition
    topic: str
    channel: str
    may_subscribe: bool
    may_publish: bool


def convert_permissions(text: str, name: str) -> str:
    """Return the TOML for a CSV file that is called ``name``. Raises `ConfigurationError`."""
    try:
        rows = list(_rows(text, name))
    except csv.Error as exc:
        raise ConfigurationError(f"{name}: {exc}") from exc
    conditions = dict.fromkeys(row.condition for row in rows)
    lines: list[str] = []
    for number, condition in enumerate(sorted(conditions, key=lambda each: each.breadth), 1):
        lines += ["", f"[users.user-{number}]"]
        if condition.login:
            lines.append(f"tokens = [{json.dumps(hash_token(condition.login))}]")
        if condition.network is not None or not condition.login:
            networks = [str(condition.network)] if condition.network else list(ANY_CLIENT)
            lines.append(f"addresses = {json.dumps(networks)}")
        lines += ["tls = true"] if condition.needs_tls else []
        lines += _permissions([row for row in rows if row.condition.includes(condition)])
    return "\n".join(lines[1:]) + "\n"


def _permissions(rows: list[_Row]) -> Iterator[str]:
    topics = dict.fromkeys(row.topic for row in rows if row.may_publish)
    yield f"publish = {toml_text(list(topics))}"
    subscribe: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.may_subscribe:
            subscribe.setdefault(row.topic, {})[row.channel or ANYTHING] = None
    pairs = (f"{toml_text(t)} = {toml_text(list(each))}" for t, each in subscribe.items())
    yield f"subscribe = {{ {', '.join(pairs)} }}"


def _rows(text: str, name: str) -> Iterator[_Row]:
    reader = csv.DictReader(io.StringIO(text))
    columns = ["tls_required" if name == "tls" else name for name in reader.fieldnames or ()]
    reader.fieldnames = columns  # The column is tls in its documentation, tls_required in its code.
    if missing := [column for column in COLUMNS if column not in columns]:
        raise ConfigurationError(
            f"{name}: no column {missing[0]}", hint=f"pynsqauthd has {', '.join(COLUMNS)}."
        )
    for values in reader:
        line = reader.line_num
        row = {column: (values.get(column) or "").strip() for column in COLUMNS}
        try:
            network = ipaddress.ip_network(row["ip"], strict=False) if row["ip"] else None
        except ValueError as exc:
            raise ConfigurationError(f"{name}, line {line}: {exc}") from None
        yield _Row(
            _Condition(row["login"], network, row["tls_required"].lower() in ("1", "true", "tls")),
            row["topic"],
            row["channel"],
            row["subscribe"].lower() == "subscribe",
            row["publish"].lower() == "publish",
        )
