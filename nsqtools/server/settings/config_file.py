"""The TOML file of ``--config``: the options under the names of their flags, with underscores.

Values are read as nsqd reads them: a duration is Go's text or a number of milliseconds, a list may
be one text with commas, a number may be a text. Unknown keys are ignored. One fault is not
copied: a bool given as a number means what it says, where nsqd takes 0 for true.
"""

from __future__ import annotations

import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

from nsqtools.errors import ConfigurationError
from nsqtools.server.settings.flag_kinds import (
    BOOL,
    DURATION,
    INT,
    PERCENTILES,
    STRING,
    STRINGS,
    FlagKind,
)


def read_config(path: str, options_class: type) -> dict[str, Any]:
    """Return the options of a file by name. Raises `ConfigurationError` with nsqd's text."""
    try:
        document = tomllib.loads(Path(path).read_text())
    except (OSError, ValueError) as exc:
        raise ConfigurationError(f"failed to load config file {path} - {exc}") from exc
    options: dict[str, Any] = {}
    for field in fields(options_class):
        key = field.metadata["key"] or field.name
        if key not in document:
            continue
        try:
            options[field.name] = coerce(field.metadata["kind"], document[key])
        except (ValueError, TypeError) as exc:
            raise ConfigurationError(
                f"ERROR: Resolve failed to coerce value {document[key]!r} for {key} - {exc}"
            ) from exc
    return options


def coerce(kind: FlagKind, value: Any) -> Any:
    """Turn a TOML value into an option's. Raises ``ValueError`` or ``TypeError``."""
    if kind is DURATION and type(value) is int:
        return value / 1000
    if kind in (STRINGS, PERCENTILES) and isinstance(value, list):
        wanted = str if kind is STRINGS else float
        if not all(isinstance(item, (wanted, int)) for item in value):
            raise TypeError("an item has the wrong type")
        return tuple(wanted(item) for item in value)
    if kind is STRINGS:
        return tuple(_text(value).split(","))
    if kind is BOOL and type(value) is int:
        return value != 0
    if kind is INT and type(value) is int:
        return value
    if kind is STRING:
        return str(value)
    if isinstance(value, bool):
        return kind.parse("true" if value else "false")
    return kind.parse(_text(value))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"invalid value type {type(value).__name__}")
    return value
