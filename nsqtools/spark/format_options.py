"""Read the options of a data source: ``spark.read.format("nsq-archive").option("since", "-2h")``.

Spark passes options as text with keys in lower case, so ``maxRowsPerTrigger``,
``max-rows-per-trigger`` and ``max_rows_per_trigger`` are the same option. An unknown option is an
error, as everywhere in nsqtools, because an ignored option is worse than none.

``format("nsq")`` has the connection options of the command line, in the spelling of Spark:
``nsqdTcpAddress`` (several separated by commas), ``lookupdHttpAddress``, ``nsqdHttpAddress``,
``addressMap`` (``OLD=NEW,...``), ``tls``, ``tlsCaFile``, ``tlsCert``, ``tlsKey``, ``tlsInsecure``,
``tlsMinVersion``, ``snappy``, ``deflate``, ``deflateLevel``, ``authSecretFile``, and every client
option under go-nsq's name (``max_in_flight`` or ``maxInFlight``). Without an address option, the
addresses come from the environment, for example ``NSQ_NSQD_TCP_ADDRESS``.

A secret is never an option, because a query's plan shows its options. It is read from
``authSecretFile`` or ``NSQ_AUTH_SECRET`` on the driver, and is sent with the tasks. An address with
a password comes from the environment.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from nsqtools.archive.place import SHARED, LocalPlace, Place
from nsqtools.archive.place_url import parse_place
from nsqtools.client.connection_settings import (
    DEFAULT_NSQD_TCP_ADDRESS,
    ConnectionSettings,
    SourcedOption,
    check_tls,
    parse_address_map,
    read_secret,
    resolve_options,
    texts_of,
)
from nsqtools.client.options import CLIENT_OPTIONS
from nsqtools.errors import ConfigurationError
from nsqtools.protocol.option_names import OPTION_OF_FLAG
from nsqtools.records.units import parse_days, parse_size, parse_time, unescape

Value = TypeVar("Value")


def normal(name: str) -> str:
    """Normalize a name for comparisons: lower case, without ``-`` and ``_``."""
    return name.lower().replace("-", "").replace("_", "")


def read_place(name: str, text: str) -> Place:
    """Parse an option with a path or a place in an object store. Raises `ConfigurationError`."""
    try:
        place = parse_place(text)
    except ConfigurationError as exc:
        raise ConfigurationError(f"{name}: {exc}. {exc.hint}".rstrip(". ")) from None
    return place if place.is_remote else LocalPlace(place.path.expanduser().absolute())


class Options:
    """The options of one use of ``format``. Call `end` after the last one has been read.

    Every method raises `ConfigurationError` with the name of the option for an invalid value.
    """

    def __init__(self, format: str, given: Mapping[str, str]) -> None:
        self._format = format
        self._given = {normal(name): str(given[name]) for name in given}
        self._known: dict[str, str] = {}

    def text(self, name: str) -> str | None:
        """Return the text of an option, None for an absent option."""
        self._known[normal(name)] = name
        return self._given.get(normal(name))

    def required(self, name: str, example: str) -> str:
        """Return an option that must be present and not empty."""
        value = self.text(name)
        if not value:
            raise ConfigurationError(
                f"format {self._format!r} needs the option {name!r}",
                hint=f'For example: .option("{name}", "{example}")',
            )
        return value

    def list(self, name: str) -> list[str]:
        """Return a list of values, which are separated by commas."""
        return [part.strip() for part in (self.text(name) or "").split(",") if part.strip()]

    def integer(self, name: str) -> int | None:
        """Return an integer of at least 1."""
        return self._read(name, "a whole number", int, 1)

    def number(self, name: str) -> float | None:
        """Return a number of at least 0."""
        number = self._read(name, "a number", float)
        if number is not None and not 0 <= number < float("inf"):
            raise ConfigurationError(f"option {name}={number:g} must be a number >= 0")
        return number

    def size(self, name: str) -> int | None:
        """Return a size in bytes, at least 1: ``64KiB``, ``100MB``."""
        return self._read(name, "a size such as 64MiB", parse_size, 1)

    def ending(self, name: str) -> bytes | None:
        """Return the bytes that end each body: ``\\n``, ``\\x00``."""
        ending = self._read(name, "text with escapes such as \\n", unescape)
        if ending == b"":
            raise ConfigurationError(
                f"option {name} is empty", hint="Give the bytes that end each body."
            )
        return ending

    def duration_s(self, name: str) -> float | None:
        """Return a duration in seconds: ``250ms``, ``5m``, ``7d``."""
        return self._read(name, "a duration such as 30s", parse_days)

    def time_ns(self, name: str) -> int | None:
        """Return nanoseconds since 1970: RFC 3339, or ``-2h`` before now."""
        kind = "a time such as 2026-11-21T08:00:00Z or -2h"
        return self._read(name, kind, partial(parse_time, now_ns=time.time_ns()))

    def location(self, name: str) -> Path | None:
        """Return an absolute local path."""
        place = self.place(name)
        if place is None:
            return None
        if not place.is_remote:
            return place.path
        raise ConfigurationError(
            f"{name}: {place}: only a directory is supported here", hint=SHARED
        )

    def place(self, name: str) -> Place | None:
        """Return an absolute path, or a place in an object store."""
        text = self.text(name)
        return None if text is None else read_place(name, text)

    def flag(self, name: str, *, default: bool) -> bool:
        """Return a boolean: ``true`` or ``false``."""
        choices = ("true", "false") if default else ("false", "true")
        return self.choice(name, choices) == "true"

    def choice(self, name: str, choices: Sequence[str]) -> str:
        """Return one of the choices; the first is the default."""
        value = (self.text(name) or choices[0]).strip().lower()
        if value not in choices:
            raise ConfigurationError(f"option {name}={value} must be one of {', '.join(choices)}")
        return value

    def end(self) -> None:
        """Refuse options that no method has read."""
        for name in sorted(set(self._given) - set(self._known)):
            from difflib import get_close_matches

            hint = f"Its options are: {', '.join(sorted(self._known.values()))}."
            if near := get_close_matches(name, self._known, 1):
                hint = f"Did you mean {self._known[near[0]]}?"
            raise ConfigurationError(f"format {self._format!r} has no option {name!r}", hint=hint)

    def _read(
        self, name: str, kind: str, read: Callable[[str], Value], low: int | None = None
    ) -> Value | None:
        text = self.text(name)
        if text is None:
            return None
        try:
            value = read(text)
        except ValueError:
            raise ConfigurationError(f"option {name}={text!r} is not {kind}") from None
        if isinstance(value, int) and low is not None and value < low:
            raise ConfigurationError(f"option {name}={value} must be >= {low}")
        return value


SLOTS = "NSQ_SPARK_SLOTS"


def slots_of(environ: Mapping[str, str]) -> int:
    """Return the number of parallel tasks that our session has set, 0 for an unknown number."""
    text = environ.get(SLOTS, "")
    return int(text) if text.isdecimal() else 0


ENVIRONMENT, OPTION = 0, 1  # The ranks of origins: an option overrides the environment.

NSQD_TCP, LOOKUPD_HTTP, NSQD_HTTP = "nsqdTcpAddress", "lookupdHttpAddress", "nsqdHttpAddress"
ADDRESS_MAP = "addressMap"
SECRET_FILE, SECRET = "authSecretFile", "NSQ_AUTH_SECRET"
VARIABLE = {
    NSQD_TCP: "NSQ_NSQD_TCP_ADDRESS",
    LOOKUPD_HTTP: "NSQ_LOOKUPD_HTTP_ADDRESS",
    NSQD_HTTP: "NSQ_NSQD_HTTP_ADDRESS",
}
FLAGS = ["tls", "tlsCaFile", "tlsCert", "tlsKey", "tlsInsecure", "tlsMinVersion"]
FLAGS += ["snappy", "deflate", "deflateLevel"]
"""Options with other names on the command line: ``tlsCaFile`` is ``--tls-ca-file``."""

FILES = ("tls_root_ca_file", "tls_cert", "tls_key")


def _addresses_of(settings: ConnectionSettings) -> dict[str, tuple[str, ...]]:
    return {
        NSQD_TCP: settings.nsqd_tcp_addresses,
        LOOKUPD_HTTP: settings.lookupd_http_addresses,
        NSQD_HTTP: settings.nsqd_http_addresses,
    }


def _has_password(addresses: Mapping[str, Iterable[str]]) -> bool:
    return any("@" in text for texts in addresses.values() for text in texts)


def as_options(settings: ConnectionSettings) -> dict[str, str]:
    """Convert a connection to options, without its secrets: see `export_secrets`."""
    options = {name: text for name, text in settings.options.items() if name != "auth_secret"}
    # Executors of a cluster run in other directories.
    options |= {name: os.path.abspath(options[name]) for name in FILES if options.get(name)}
    if not _has_password(addresses := _addresses_of(settings)):
        options |= {kind: ",".join(texts) for kind, texts in addresses.items() if texts}
    if settings.address_map:
        pairs = settings.address_map.items()
        options[ADDRESS_MAP] = ",".join(f"{old}={new}" for old, new in pairs)
    return options


def export_secrets(settings: ConnectionSettings, environ: MutableMapping[str, str]) -> None:
    """Put the secret, and addresses if one has a password, into the environment of a session.

    Call it before the session is started.
    """
    addresses = _addresses_of(settings)
    if _has_password(addresses):
        environ.update({VARIABLE[kind]: " ".join(addresses[kind]) for kind in addresses})
    if secret := settings.options.get("auth_secret"):
        environ[SECRET] = secret


def read_connection(
    options: Options,
    environ: Mapping[str, str],
    kinds: tuple[str, ...] = (NSQD_TCP, LOOKUPD_HTTP, NSQD_HTTP),
) -> ConnectionSettings:
    """Read a connection with these kinds of addresses. Raises `ConfigurationError`."""
    addresses = _addresses(options, environ, kinds)
    lookupd, nsqd_http = addresses.get(LOOKUPD_HTTP, ()), addresses.get(NSQD_HTTP, ())
    resolved = resolve_options(_statements(options, environ))
    check_tls(resolved, [*lookupd, *nsqd_http], cure='Add .option("tls", "true").')
    settings = ConnectionSettings(
        addresses.get(NSQD_TCP, ()),
        lookupd,
        nsqd_http,
        texts_of(resolved),
        parse_address_map(options.list(ADDRESS_MAP), ADDRESS_MAP),
    )
    settings.client_options()  # Raises for contradictory values before the job starts.
    return settings


def _addresses(
    options: Options, environ: Mapping[str, str], kinds: tuple[str, ...]
) -> dict[str, tuple[str, ...]]:
    """Return the addresses of the options, or of the environment, or the nsqd of this machine."""
    addresses = {kind: tuple(options.list(kind)) for kind in kinds}
    if _has_password(addresses):
        raise ConfigurationError(
            "a password must not be in an option, because a query's plan shows options",
            hint=f"Set {', '.join(VARIABLE[kind] for kind in kinds if addresses[kind])} instead.",
        )
    if not any(addresses.values()):
        variables = {kind: environ.get(VARIABLE[kind], "") for kind in kinds}
        addresses = {
            kind: tuple(text.replace(",", " ").split()) for kind, text in variables.items()
        }
    return addresses if any(addresses.values()) else {NSQD_TCP: (DEFAULT_NSQD_TCP_ADDRESS,)}


def _statements(options: Options, environ: Mapping[str, str]) -> Iterator[SourcedOption]:
    if options.text("auth_secret") is not None:
        raise ConfigurationError(
            "a secret must not be an option, because a query's plan shows options",
            hint=f'Use .option("{SECRET_FILE}", "FILE") or set {SECRET}.',
        )
    if options.text("deflateLevel") is not None and options.text("deflate") is None:
        yield SourcedOption("deflate", "true", OPTION, "option deflateLevel")
    for name in (*FLAGS, "skip_lookupd_authorization", *CLIENT_OPTIONS):
        if (text := options.text(name)) is not None:
            flag = re.sub("(?=[A-Z])", "_", name).lower()
            yield SourcedOption(OPTION_OF_FLAG.get(flag, flag), text, OPTION, f"option {name}")
    if path := options.text(SECRET_FILE):
        source, file = f"option {SECRET_FILE}", str(Path(path).absolute())
        yield SourcedOption("auth_secret", read_secret(Path(path)), OPTION, source, file)
    if secret := environ.get(SECRET):
        yield SourcedOption("auth_secret", secret, ENVIRONMENT, SECRET)
