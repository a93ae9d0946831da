"""The options of ``format("nsq")`` that say where NSQ is and how to reach it.

They are those of the command line, written as Spark writes options, and mean the same:
``nsqdTcpAddress`` (several separated by commas), ``lookupdHttpAddress``, ``nsqdHttpAddress``,
``addressMap`` (``OLD=NEW,...``), ``tls``, ``tlsCaFile``, ``tlsCert``, ``tlsKey``, ``tlsInsecure``,
``tlsMinVersion``, ``snappy``, ``deflate``, ``deflateLevel``, ``authSecretFile``, and every client
option under go-nsq's name (``max_in_flight`` or ``maxInFlight``). Addresses come from the
environment when no option names one, from ``NSQ_NSQD_TCP_ADDRESS`` for example.

A secret never is an option: a query's plan shows options to whoever may look at it. It is read from
``authSecretFile`` or ``NSQ_AUTH_SECRET``, on the driver, and travels to tasks with what they run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from nsqtools.client.connection_settings import (
    DEFAULT_NSQD_TCP_ADDRESS,
    ConnectionSettings,
    parse_address_map,
)
from nsqtools.client.options import ClientOptions, option_name
from nsqtools.client.statements import OPTION_OF_FLAG, Statement, check_tls, read_secret, settle
from nsqtools.errors import ConfigurationError
from nsqtools.protocol.names import check_channel, check_topic
from nsqtools.spark.options import Options

ENVIRONMENT, GIVEN = 0, 1  # origins of statements, the stronger last

NSQD_TCP, LOOKUPD_HTTP, NSQD_HTTP = "nsqdTcpAddress", "lookupdHttpAddress", "nsqdHttpAddress"
ADDRESS_MAP = "addressMap"
SECRET_FILE, SECRET = "authSecretFile", "NSQ_AUTH_SECRET"
VARIABLE = {
    NSQD_TCP: "NSQ_NSQD_TCP_ADDRESS",
    LOOKUPD_HTTP: "NSQ_LOOKUPD_HTTP_ADDRESS",
    NSQD_HTTP: "NSQ_NSQD_HTTP_ADDRESS",
}
FLAGS = {
    "tls": "tls",
    "tlsCaFile": "tls_ca_file",
    "tlsCert": "tls_cert",
    "tlsKey": "tls_key",
    "tlsInsecure": "tls_insecure",
    "tlsMinVersion": "tls_min_version",
    "snappy": "snappy",
    "deflate": "deflate",
    "deflateLevel": "deflate_level",
}
"""Options that are flags on the command line, each with the name it has there."""


class Subscription(NamedTuple):
    """What a consumer subscribes to: ``channel`` of each topic."""

    topics: tuple[str, ...]
    channel: str


def subscription(options: Options) -> Subscription:
    """Read ``topic`` (several separated by commas) and ``channel``. Raises `ConfigurationError`."""
    options.required("topic", "clicks")
    topics = tuple(dict.fromkeys(check_topic(topic) for topic in options.list("topic")))
    return Subscription(topics, check_channel(options.required("channel", "spark")))


def consumer_connection(options: Options, environ: Mapping[str, str]) -> ConnectionSettings:
    """Read the connection of a source. Raises `ConfigurationError`."""
    return _connection(options, environ, (NSQD_TCP, LOOKUPD_HTTP, NSQD_HTTP))


def producer_connection(options: Options, environ: Mapping[str, str]) -> ConnectionSettings:
    """Read the connection of a sink. Raises `ConfigurationError`."""
    return _connection(options, environ, (NSQD_TCP, LOOKUPD_HTTP))


def as_options(settings: ConnectionSettings) -> dict[str, str]:
    """Write a connection as options, without its secret: see `hand_on_secret`."""
    given = {
        NSQD_TCP: ",".join(settings.nsqd_tcp_addresses),
        LOOKUPD_HTTP: ",".join(settings.lookupd_http_addresses),
        NSQD_HTTP: ",".join(settings.nsqd_http_addresses),
        ADDRESS_MAP: ",".join(f"{old}={new}" for old, new in settings.address_map.items()),
    }
    said = {name: text for name, text in settings.options.items() if name != "auth_secret"}
    return {name: text for name, text in given.items() if text} | said


def hand_on_secret(settings: ConnectionSettings, environ: MutableMapping[str, str]) -> None:
    """Put the secret where the session's processes find it; to be done before it is started."""
    if secret := settings.options.get("auth_secret"):
        environ[SECRET] = secret


def _connection(
    options: Options, environ: Mapping[str, str], kinds: tuple[str, ...]
) -> ConnectionSettings:
    addresses = _addresses(options, environ, kinds)
    lookupd, nsqd_http = addresses.get(LOOKUPD_HTTP, ()), addresses.get(NSQD_HTTP, ())
    settled = settle(_statements(options, environ))
    check_tls(settled, [*lookupd, *nsqd_http], cure='Add .option("tls", "true").')
    settings = ConnectionSettings(
        addresses.get(NSQD_TCP, ()),
        lookupd,
        nsqd_http,
        {option: said.text for option, said in settled.items()},
        parse_address_map(options.list(ADDRESS_MAP), ADDRESS_MAP),
    )
    settings.client_options()  # values that do not fit each other are refused here and now
    return settings


def _addresses(
    options: Options, environ: Mapping[str, str], kinds: tuple[str, ...]
) -> dict[str, tuple[str, ...]]:
    """The addresses of the options, else of the environment, else the nsqd of this machine."""
    given = {kind: tuple(options.list(kind)) for kind in kinds}
    if not any(given.values()):
        given = {kind: tuple(environ.get(VARIABLE[kind], "").split()) for kind in kinds}
    return given if any(given.values()) else {NSQD_TCP: (DEFAULT_NSQD_TCP_ADDRESS,)}


def _statements(options: Options, environ: Mapping[str, str]) -> Iterator[Statement]:
    if options.text("auth_secret") is not None:
        raise ConfigurationError(
            "a secret does not belong into the options, which a query's plan shows",
            hint=f'Use .option("{SECRET_FILE}", "FILE") or set {SECRET}.',
        )
    for name, flag in FLAGS.items():
        text = options.text(name)
        if text is not None:
            yield Statement(OPTION_OF_FLAG.get(flag, flag), text, GIVEN, f"option {name}")
    if options.text("deflateLevel") is not None and options.text("deflate") is None:
        yield Statement("deflate", "true", GIVEN, "option deflateLevel")
    for name in ("skip_lookupd_authorization", *map(option_name, fields(ClientOptions))):
        text = options.text(name)
        if text is not None:
            yield Statement(name, text, GIVEN, f"option {name}")
    if path := options.text(SECRET_FILE):
        yield Statement("auth_secret", read_secret(Path(path)), GIVEN, f"option {SECRET_FILE}")
    if secret := environ.get(SECRET):
        yield Statement("auth_secret", secret, ENVIRONMENT, SECRET)
