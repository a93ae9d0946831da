"""Where the value of an option comes from: ``--profile``, and the addresses of a cluster.

typer asks ``default_map`` for what neither the command line nor the environment says, which is just
where a profile belongs. ``--profile`` is eager, so the map is there before other options are read.

Addresses of all kinds are one setting. Those from the strongest origin that gives any (flag,
environment, profile, file) are taken and the rest is ignored: ``--nsqd-tcp-address`` on the command
line never also consumes from the cluster that the profile names.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated

from typer import Context

from nsqtools.cli.parsing.binding import opt
from nsqtools.client.connection_settings import DEFAULT_NSQD_TCP_ADDRESS
from nsqtools.errors import ConfigurationError
from nsqtools.settings import (
    REPEATABLE,
    Origin,
    Setting,
    config_path,
    load_settings,
    selected_profile,
    who_else_can_write,
)

CONNECTION = "Connection"  # the panel of help

SETTINGS = "nsqtools.settings"  # the keys in typer's context
NO_PROFILE = "nsqtools.no_profile"
ORIGIN_OF_SOURCE = {"COMMANDLINE": Origin.FLAG, "ENVIRONMENT": Origin.ENVIRONMENT}


def variable_of(option: str) -> str:
    """The environment variable of a connection option: NSQ_TLS_CA_FILE of ``--tls-ca-file``."""
    return "NSQ_" + option.lstrip("-").replace("-", "_").upper()


def forget_profile(context: Context, is_given: bool) -> bool:
    """Note ``--no-profile``, which typer reads before a profile that the environment names."""
    if is_given and not context.resilient_parsing:
        if context.get_parameter_source("profile") is not None:
            raise ConfigurationError("--profile and --no-profile contradict each other")
        context.meta[NO_PROFILE] = True
    return is_given


def apply_profile(context: Context, name: str | None) -> str | None:
    """Load the file, and the profile if one is named; remember where each value stands."""
    environ = context.obj.environ
    path = config_path(environ)
    if context.meta.get(NO_PROFILE):
        if origin_of(context, "profile") is Origin.FLAG:
            raise ConfigurationError("--profile and --no-profile contradict each other")
        name = None
    elif name is None and not context.resilient_parsing:
        name = selected_profile(environ)
    if context.resilient_parsing or not (name or os.path.exists(path)):
        return name
    try:
        settings = load_settings(path, name, REPEATABLE)
    except ConfigurationError as error:
        # setpriv and its like leave the HOME of another user: only what was asked for must be read
        if name or not isinstance(error.__cause__, OSError):
            raise
        context.obj.tell(f"nsq: {str(error).splitlines()[0]}; going on without it")
        return name
    if problem := who_else_can_write(path):
        context.obj.tell(f"nsq: warning: {problem}; it decides where this connects")
    context.meta[SETTINGS] = settings
    context.default_map = {key: setting.value for key, setting in settings.items()}
    return name


Profile = Annotated[
    str | None,
    opt(
        "--profile -P NAME",
        "Named settings from the configuration file.",
        CONNECTION,
        envvar="NSQ_PROFILE",
        is_eager=True,
        callback=apply_profile,
    ),
]


NoProfile = Annotated[
    bool,
    opt(
        "--no-profile",
        "Use no profile: neither that of NSQ_PROFILE nor the one that nsq config use chose.",
        CONNECTION,
        is_eager=True,
        callback=forget_profile,
    ),
]


def setting_of(context: Context, name: str) -> Setting | None:
    """What the configuration file says about the option ``name``, be it in force or not."""
    settings: dict[str, Setting] = context.meta.get(SETTINGS, {})
    return settings.get(name)


def setting_in_force(context: Context, name: str) -> Setting | None:
    """The setting that the option ``name`` has its value from, if it is from the file."""
    source = context.get_parameter_source(name)
    return setting_of(context, name) if source and source.name == "DEFAULT_MAP" else None


def origin_of(context: Context, name: str) -> Origin:
    """Where the value of the option ``name`` comes from."""
    if setting := setting_in_force(context, name):
        return setting.origin
    source = context.get_parameter_source(name)
    return ORIGIN_OF_SOURCE.get(source.name if source else "", Origin.DEFAULT)


KINDS = ("nsqd_tcp_address", "lookupd_http_address", "nsqd_http_address")

Addresses = tuple[str, ...]

NsqdTcpAddresses = Annotated[
    list[str] | None,
    opt(
        "--nsqd-tcp-address HOST:PORT",
        f"nsqd, over TCP; {DEFAULT_NSQD_TCP_ADDRESS} when no address is given.",
        CONNECTION,
        envvar="NSQ_NSQD_TCP_ADDRESS",
    ),
]
LookupdHttpAddresses = Annotated[
    list[str] | None,
    opt(
        "--lookupd-http-address HOST:PORT",
        "nsqlookupd, over HTTP; finds the nsqd of a topic.",
        CONNECTION,
        envvar="NSQ_LOOKUPD_HTTP_ADDRESS",
    ),
]
NsqdHttpAddresses = Annotated[
    list[str] | None,
    opt(
        "--nsqd-http-address HOST:PORT",
        "nsqd, over HTTP.",
        CONNECTION,
        envvar="NSQ_NSQD_HTTP_ADDRESS",
    ),
]
AddressMap = Annotated[
    list[str] | None,
    opt(
        "--address-map OLD=NEW",
        "Connect to NEW in place of OLD, the address that an nsqd announces.",
        CONNECTION,
        envvar=variable_of("--address-map"),
    ),
]


def given_addresses(context: Context) -> tuple[Addresses, Addresses, Addresses]:
    """The nsqd TCP, nsqlookupd and nsqd HTTP addresses that hold; without any, the default nsqd."""
    nsqd, lookupd, nsqd_http = strongest_addresses(context, KINDS)
    if not (nsqd or lookupd or nsqd_http):
        nsqd = (DEFAULT_NSQD_TCP_ADDRESS,)
    return nsqd, lookupd, nsqd_http


def strongest_addresses(context: Context, kinds: Sequence[str]) -> list[Addresses]:
    """The addresses of each kind, of those from the strongest origin that gives any."""
    given = [tuple(context.params.get(kind) or ()) for kind in kinds]
    origins = [
        origin_of(context, kind) if addresses else Origin.DEFAULT
        for kind, addresses in zip(kinds, given, strict=True)
    ]
    strongest = max(origins)
    return [
        addresses if origin is strongest else ()
        for addresses, origin in zip(given, origins, strict=True)
    ]
