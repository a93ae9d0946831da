"""Convert permissions.csv of pynsqauthd to a users file. Pure.

A row ``login,ip,tls_required,topic,channel,subscribe,publish`` applies to a client whose secret is
the login, whose address is in ip, and who has TLS if that is required; an empty login or ip applies
to everyone. pynsqauthd gives a client the permissions of all rows that apply, a users file those of
the first entry that fits. So the result has an entry for each combination of login, ip and TLS, the
narrowest ones first, with the permissions of all rows that apply whenever the entry does.

Without an OAuth server the login is the secret. So the users file has its hash, and the entries are
called ``user-1``, ``user-2``.
"""

from __future__ import annotations

import csv
import io
import ipaddress
import json
from collections.abc import Iterator
from typing import NamedTuple

from nsqtools.authd.users import ANYTHING, hash_token
from nsqtools.errors import ConfigurationError

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
    yield f"publish = {json.dumps(list(topics))}"
    subscribe: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.may_subscribe:
            subscribe.setdefault(row.topic, {})[row.channel or ANYTHING] = None
    pairs = (f"{json.dumps(t)} = {json.dumps(list(each))}" for t, each in subscribe.items())
    yield f"subscribe = {{ {', '.join(pairs)} }}"


def _rows(text: str, name: str) -> Iterator[_Row]:
    reader = csv.DictReader(io.StringIO(text.removeprefix("\ufeff")))
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
