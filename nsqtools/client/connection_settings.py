"""Where to connect and how, as text: one value for the command line and for Spark.

A client option can be given in several places: as a flag, with ``--consumer-opt``, in the
environment, in the configuration file, as an option of a Spark source or sink. Each is a
`GivenOption` under go-nsq's name, and `resolve_options` picks the one that applies. The options
themselves are imported inside the functions: a help page does not need them.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nsqtools.errors import ConfigurationError
from nsqtools.files.opening import warn_of_exposure

if TYPE_CHECKING:
    from nsqtools.client.options import ClientOptions

log = logging.getLogger("nsqtools")

DEFAULT_NSQD_TCP_ADDRESS = "127.0.0.1:4150"

OPTION_OF_FLAG = {
    "tls": "tls_v1",
    "tls_ca_file": "tls_root_ca_file",
    "tls_insecure": "tls_insecure_skip_verify",
    "timeout": "lookupd_poll_timeout",
}
"""go-nsq's names, where the flag has another."""


class PublishMode(enum.Enum):
    """How a job's batches are spread over several nsqd.

    ``all``: every nsqd gets each, and a record is confirmed when all have confirmed it, as to_nsq
    does it. ``round-robin``: one of them, in turn. ``failover``: the first, and the next one only
    while it fails.
    """

    ALL = "all"
    ROUND_ROBIN = "round-robin"
    FAILOVER = "failover"


@dataclass(frozen=True)
class ConnectionSettings:
    """Addresses as text, the client's options as text under go-nsq's names, and the address map."""

    nsqd_tcp_addresses: tuple[str, ...] = (DEFAULT_NSQD_TCP_ADDRESS,)
    lookupd_http_addresses: tuple[str, ...] = ()
    nsqd_http_addresses: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict, repr=False)  # a secret is among them
    address_map: Mapping[str, str] = field(default_factory=dict)
    """Address as announced -> address to connect to."""

    def client_options(self, **defaults: Any) -> ClientOptions:
        """Return the `ClientOptions`: what the user set, over a command's own ``defaults``.

        Raises `ConfigurationError` for an unknown option or a value out of bounds.
        """
        from nsqtools.client.options import ClientOptions

        return ClientOptions(**defaults).with_options(self.options)


def check_can_consume(
    nsqd_tcp_addresses: Collection[str], lookupd_http_addresses: Collection[str]
) -> None:
    """Raise `ConfigurationError` without the address of an nsqd, or of an nsqlookupd."""
    if not nsqd_tcp_addresses and not lookupd_http_addresses:
        hint = "Give the TCP address of an nsqd, or that of an nsqlookupd."
        raise ConfigurationError("a consumer needs an address", hint=hint)


class GivenOption(NamedTuple):
    """A client option as the user gave it: ``given_as`` is the flag or setting, for errors.

    Of two that set the same option, the one with the greater ``origin`` applies. ``file`` is where
    the text was read, and ``place`` is the setting of the configuration file that has it.
    """

    option: str
    text: str
    origin: int
    given_as: str
    file: str = ""
    place: str = ""


def resolve_options(given: Iterable[GivenOption]) -> dict[str, GivenOption]:
    """Return the one that applies for each option: that of the stronger origin.

    Raises `ConfigurationError` for an unknown option, and where two of the same origin differ.
    """
    from nsqtools.client.options import read_option

    resolved: dict[str, GivenOption] = {}
    for new in given:
        known = resolved.get(new.option)
        try:
            _, value = read_option(new.option, new.text)
        except ConfigurationError as exc:
            if not new.place:
                raise
            raise ConfigurationError(f"{new.place}: {exc}", hint=exc.hint) from None
        if known is None or new.origin > known.origin:
            resolved[new.option] = new
        elif new.origin == known.origin and value != read_option(known.option, known.text)[1]:
            raise ConfigurationError(
                f"{known.given_as} and {new.given_as} contradict each other",
                hint=f"Keep one of them: both set the client option {new.option}.",
            )
    return resolved


def texts_of(resolved: Mapping[str, GivenOption]) -> dict[str, str]:
    """Return the options as `ConnectionSettings` has them.

    A secret that was read from a file is read there again at each connection.
    """
    texts = {option: given.text for option, given in resolved.items()}
    secret, file = resolved.get("auth_secret"), resolved.get("auth_secret_file")
    if secret is not None and (secret.file or (file and file.origin < secret.origin)):
        texts["auth_secret_file"] = secret.file
    return texts


def check_tls(
    resolved: Mapping[str, GivenOption], http_addresses: Iterable[str], *, cure: str
) -> None:
    """Refuse TLS settings without effect: the connection would silently be plain text.

    ``cure`` is the hint. Raises `ConfigurationError`.
    """
    settings = resolved.items()
    tls = [each.place or each.given_as for name, each in settings if name.startswith("tls_")]
    if not tls or "tls_v1" in resolved:
        return
    if not any(address.startswith("https://") for address in http_addresses):
        raise ConfigurationError(f"{tls[0]} is given, but TLS is not enabled", hint=cure)


def read_secret(path: Path) -> str:
    """Return the secret in a file, without the final newline. Raises `ConfigurationError`.

    A file that others can read is named in the log.
    """
    warn_of_exposure(path)
    try:
        secret = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigurationError(
            f"cannot read the auth secret from {path} ({reason})",
            hint="The file must hold only the secret.",
        ) from error
    if not secret:
        raise ConfigurationError(f"the auth secret file {path} is empty")
    return secret


def current_secret(options: ClientOptions) -> str:
    """Return the auth secret: what its file holds now, or what is known of it; "" without one."""
    if not options.auth_secret_file:
        return options.auth_secret
    try:
        return read_secret(Path(options.auth_secret_file))
    except ConfigurationError as exc:
        log.warning("%s; %s", exc, "using the one from before" if options.auth_secret else exc.hint)
        return options.auth_secret


def parse_address_map(pairs: Iterable[str], given_as: str) -> dict[str, str]:
    """Read ``OLD=NEW`` pairs, given with the flag ``given_as``. Raises `ConfigurationError`."""
    mapping = {}
    for pair in pairs:
        old, equals, new = pair.partition("=")
        if not (old and equals and new):
            raise ConfigurationError(
                f"invalid {given_as} {pair!r}: not OLD=NEW",
                hint=f"For example: {given_as} nsqd-1:4150=127.0.0.1:4150",
            )
        mapping[old.strip()] = new.strip()
    return mapping
