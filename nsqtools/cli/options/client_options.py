"""The list of all client options: ``-X list`` of every command that has -X."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from nsqtools.cli.render.output import write_listing
from nsqtools.cli.running.runtime import Runtime
from nsqtools.client.options import ClientOptions, option_name
from nsqtools.protocol.text import format_duration

COLUMNS = ("option", "default", "bounds", "help")


def write_client_options(runtime: Runtime) -> None:
    """A line for each option of `ClientOptions`, in their order."""
    write_listing(runtime, COLUMNS, map(describe_option, fields(ClientOptions)))


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
