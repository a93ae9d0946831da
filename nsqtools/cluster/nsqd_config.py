"""The options of running nsqd, by /config: all can be read, two can be changed while it runs."""

from __future__ import annotations

import json
import re
from typing import Any

from nsqtools.cluster.directory import Cluster, DaemonFailure
from nsqtools.errors import ConfigurationError, HTTPError
from nsqtools.http.nsqd_http import NsqdHTTPClient

ADDRESSES = "nsqlookupd_tcp_addresses"
CHANGEABLE = ("log_level", ADDRESSES)

Answers = tuple[dict[str, Any], list[DaemonFailure]]


def get_option(cluster: Cluster, name: str) -> Answers:
    """Read an option of every nsqd. Raises `ConfigurationError` when there is no such option."""
    option = _option(name)

    def get(client: NsqdHTTPClient) -> Any:
        try:
            return client.config(option)
        except HTTPError as exc:
            if exc.code == "INVALID_OPTION":
                raise ConfigurationError(
                    f"{client.url} has no option {option}",
                    hint="Names are those of nsqd's configuration file, such as max_rdy_count.",
                ) from exc
            raise

    return cluster.ask_nsqds(get)


def set_option(cluster: Cluster, name: str, value: str) -> Answers:
    """Change an option of every nsqd; the answers are the new values.

    Addresses are separated by commas. Raises `ConfigurationError` for what nsqd refuses.
    """
    option = _option(name)
    if option not in CHANGEABLE:
        raise ConfigurationError(
            f"{option} cannot be changed while nsqd runs",
            hint=f"These can: {', '.join(CHANGEABLE)}.",
        )
    if option == ADDRESSES:
        value = json.dumps([text.strip() for text in value.split(",") if text.strip()])

    def put(client: NsqdHTTPClient) -> Any:
        try:
            return client.set_config(option, value)
        except HTTPError as exc:
            if exc.code == "INVALID_VALUE":
                raise ConfigurationError(
                    f"{client.url} does not take {value!r} for {option}",
                    hint="log_level is debug, info, warn, error or fatal.",
                ) from exc
            raise

    return cluster.ask_nsqds(put)


def _option(name: str) -> str:
    option = name.replace("-", "_")
    if not re.fullmatch("[a-z0-9_]+", option):
        raise ConfigurationError(f"{name!r} is not the name of an option")
    return option
