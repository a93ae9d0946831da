"""Where to connect and how, as text: one value for the command line and for Spark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nsqtools.errors import ConfigurationError

if TYPE_CHECKING:
    from nsqtools.client.options import ClientOptions

DEFAULT_NSQD_TCP_ADDRESS = "127.0.0.1:4150"


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
        """The `ClientOptions`: what the user set, over a command's own ``defaults``.

        Raises `ConfigurationError` for an unknown option or a value out of bounds.
        """
        from nsqtools.client.options import ClientOptions

        return ClientOptions(**defaults).with_options(self.options)


def parse_address_map(pairs: Iterable[str], speaker: str) -> dict[str, str]:
    """Read ``OLD=NEW`` pairs, given as ``speaker``. Raises `ConfigurationError`."""
    mapping = {}
    for pair in pairs:
        old, equals, new = pair.partition("=")
        if not (old and equals and new):
            raise ConfigurationError(
                f"{speaker} {pair!r} is not OLD=NEW",
                hint=f"For example: {speaker} nsqd-1:4150=127.0.0.1:4150",
            )
        mapping[old.strip()] = new.strip()
    return mapping
