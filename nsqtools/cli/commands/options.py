"""``nsq options``: what ``--consumer-opt`` and ``--producer-opt`` take."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from nsqtools.cli.output import write_listing
from nsqtools.cli.params import Json
from nsqtools.cli.runtime import Session
from nsqtools.client.options import ClientOptions, option_name
from nsqtools.protocol.durations import format_duration

COLUMNS = ("option", "default", "bounds", "help")


def options(*, json: Json = False, runtime: Session) -> None:
    """List every client option with its default, bounds and meaning.

    The names are go-nsq's. Give them to any command as --consumer-opt NAME=VALUE or
    --producer-opt NAME=VALUE, or in a profile.

    Examples:
        nsq options
        nsq options --json | jq -r .option
        nsq tail -t clicks --consumer-opt max_attempts=10
    """
    write_listing(runtime, COLUMNS, map(describe_option, fields(ClientOptions)), json=json)


def describe_option(option: Any) -> tuple[str, str, str, str]:
    """Name, default, bounds and help of a field of `ClientOptions`, as text."""
    show = format_duration if option.metadata["kind"] == "duration" else _plain
    low, high = option.metadata["low"], option.metadata["high"]
    bounds = "|".join(option.metadata["choices"])
    if low is not None:
        bounds = f"{show(low)} to {show(high)}" if high is not None else f"{show(low)} or more"
    return option_name(option), show(option.default), bounds, option.metadata["help"]


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
