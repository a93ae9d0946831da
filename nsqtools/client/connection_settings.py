"""Connection settings as text, for the command line and for Spark.

A client option can be set in several places: a flag, ``--consumer-opt``, the environment, the
configuration file, an option of a Spark source or sink. Each occurrence is a `SourcedOption` under
go-nsq's name, and `resolve_options` selects the effective one. The options themselves are imported
inside the functions, because a help page does not need them.
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


class PublishMode(enum.Enum):
    """How the batches of a job are distributed to several nsqd.

    ``all``: every nsqd gets each batch, and a record is confirmed when all nsqd have confirmed it
    (as in to_nsq). ``round-robin``: the nsqd take turns. ``failover``: the first nsqd gets all
    batches, and the next one only while the first fails.
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
    options: Mapping[str, str] = field(default_factory=dict, repr=False)  # includes a secret
    address_map: Mapping[str, str] = field(default_factory=dict)
    """Announced address -> address to connect to."""

    def client_options(self, **defaults: Any) -> ClientOptions:
        """Return `ClientOptions` of the user's settings, with the ``defaults`` of a command.

        Raises `ConfigurationError` for an unknown option or a value out of bounds.
        """
        from nsqtools.client.options import ClientOptions

        return ClientOptions(**defaults).with_options(self.options)


def check_can_consume(
    nsqd_tcp_addresses: Collection[str], lookupd_http_addresses: Collection[str]
) -> None:
    """Raise `ConfigurationError` if there is no address of an nsqd or nsqlookupd."""
    if not nsqd_tcp_addresses and not lookupd_http_addresses:
        hint = "Give the TCP address of an nsqd, or the HTTP address of an nsqlookupd."
        raise ConfigurationError("a consumer needs an address", hint=hint)


class SourcedOption(NamedTuple):
    """An occurrence of a client option.

    ``given_as`` is the flag or setting for error messages. The occurrence with the greatest
    ``origin`` is effective. ``file`` is the file that the text was read from, and ``place`` the
    setting in the configuration file.
    """

    option: str
    text: str
    origin: int
    given_as: str
    file: str = ""
    place: str = ""


def resolve_options(given: Iterable[SourcedOption]) -> dict[str, SourcedOption]:
    """Return the effective occurrence of each option.

    Raises `ConfigurationError` for an unknown option, and for different values of equal origin.
    """
    from nsqtools.client.options import read_option

    resolved: dict[str, SourcedOption] = {}
    for item in given:
        earlier = resolved.get(item.option)
        try:
            _, value = read_option(item.option, item.text)
        except ConfigurationError as exc:
            # The error has the name of the client option, and that of --timeout is another one.
            is_named = item.given_as.replace("-", "_").endswith(item.option)
            place = item.place or ("" if is_named else item.given_as)
            if not place:
                raise
            raise ConfigurationError(f"{place}: {exc}", hint=exc.hint) from None
        if earlier is None or item.origin > earlier.origin:
            resolved[item.option] = item
        elif item.origin == earlier.origin and value != read_option(item.option, earlier.text)[1]:
            raise ConfigurationError(
                f"{earlier.given_as} and {item.given_as} contradict each other",
                hint=f"Keep one of them: both set the client option {item.option}.",
            )
    return resolved


def texts_of(resolved: Mapping[str, SourcedOption]) -> dict[str, str]:
    """Return the texts of the options, for `ConnectionSettings`.

    A secret from a file is read again at each connection, so the file is set as well.
    """
    texts = {option: given.text for option, given in resolved.items()}
    secret, file = resolved.get("auth_secret"), resolved.get("auth_secret_file")
    if secret is not None and (secret.file or (file and file.origin < secret.origin)):
        texts["auth_secret_file"] = secret.file
    return texts


def check_tls(
    resolved: Mapping[str, SourcedOption], http_addresses: Iterable[str], *, cure: str
) -> None:
    """Raise `ConfigurationError`, with the hint ``cure``, for TLS settings without effect.

    Otherwise the connection would silently be plain text.
    """
    tls = [option for name, option in resolved.items() if name.startswith("tls_")]
    if not tls or "tls_v1" in resolved:
        return
    if not any(address.startswith("https://") for address in http_addresses):
        setting = tls[0].place or tls[0].given_as
        raise ConfigurationError(f"{setting} is given, but TLS is not enabled", hint=cure)


def read_secret(path: Path) -> str:
    """Return the secret in a file, without the final newline. Raises `ConfigurationError`.

    Logs a warning about a file that other users can read.
    """
    warn_of_exposure(path)
    try:
        secret = path.read_text("utf-8-sig").strip()
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
    """Return the auth secret from its file, or the last known one; "" without a secret."""
    if not options.auth_secret_file:
        return options.auth_secret
    try:
        return read_secret(Path(options.auth_secret_file))
    except ConfigurationError as exc:
        log.warning("%s; %s", exc, "using the earlier one" if options.auth_secret else exc.hint)
        return options.auth_secret


def parse_address_map(pairs: Iterable[str], given_as: str) -> dict[str, str]:
    """Parse ``OLD=NEW`` pairs of the flag ``given_as``. Raises `ConfigurationError`."""
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
