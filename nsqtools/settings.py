"""Settings from the configuration file: the file's own, and those of one named profile over them.

    # ~/.config/nsqtools/config.toml
    lookupd-http-address = ["127.0.0.1:4161"]

    [profiles.staging]
    lookupd-http-address = ["lookup-1.staging:4161", "lookup-2.staging:4161"]
    tls = true
    auth-secret-file = "/etc/nsq/staging.secret"
    consumer-opt = { snappy = true, msg_timeout = "5m" }

Keys are the names of the options without the leading dashes. Flags and environment variables are
stronger than anything here; every value remembers its origin. Unknown keys are errors, since a
setting that is silently ignored is worse than none.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from nsqtools.errors import ConfigurationError

PROFILES = "profiles"


class Origin(IntEnum):
    """Where a value comes from; a greater origin is stronger."""

    DEFAULT = 0
    FILE = 1
    PROFILE = 2
    ENVIRONMENT = 3
    FLAG = 4


class Setting(NamedTuple):
    """A value of the file and where exactly it is."""

    value: str | list[str]
    origin: Origin
    place: str


class SettingRow(NamedTuple):
    """One setting: its value, None where it has none or is not in force, and where it is set."""

    setting: str
    value: str | bool | list[str] | None
    origin: str
    place: str
    bounds: str = ""
    help: str = ""


def config_path(environ: Mapping[str, str]) -> Path:
    """The configuration file: ``$XDG_CONFIG_HOME/nsqtools/config.toml``, by default ~/.config."""
    return user_folder(environ, "XDG_CONFIG_HOME", ".config") / "nsqtools" / "config.toml"


def user_folder(environ: Mapping[str, str], variable: str, usual: str) -> Path:
    """Return a folder of the user: where ``variable`` says, by default ``usual`` below the home."""
    home = environ.get("HOME") or os.path.expanduser("~")  # "~" of a user whom nothing gives one
    return Path(environ.get(variable) or Path("/", home, usual))


def selection_path(environ: Mapping[str, str]) -> Path:
    """The file with the name of the profile that ``nsq config use`` chose."""
    return config_path(environ).with_name("profile")


def selected_profile(environ: Mapping[str, str]) -> str | None:
    """The profile that ``nsq config use`` chose, if any. Raises `ConfigurationError`."""
    path = selection_path(environ)
    try:
        return path.read_text("utf-8").strip() or None
    except OSError:  # it is not there, or belongs to another user whose HOME we have
        return None
    except UnicodeDecodeError as error:
        hint = "nsq config use writes it."
        raise ConfigurationError(f"{path} is not UTF-8 text", hint=hint) from error


def load_settings(path: Path, profile: str | None, known: Mapping[str, bool]) -> dict[str, Setting]:
    """Read ``path`` and return its settings, those of ``profile`` over the file's own.

    ``known`` has the names that may be set (with underscores: ``lookupd_http_address``), each with
    whether it takes several values. Raises `ConfigurationError`, naming file and key, for whatever
    the file may not say.
    """
    document = _read(path)
    profiles = document.pop(PROFILES, {})
    settings = _settings(document, path, "", Origin.FILE, known)
    if profile is not None:
        if not isinstance(profiles, dict):
            raise ConfigurationError(f"{path}: {PROFILES} is not a table")
        table = profiles.get(profile)
        if table is None:
            hint = f"Profiles in the file: {', '.join(sorted(profiles)) or 'none'}."
            raise ConfigurationError(f"{path}: there is no profile {profile!r}", hint=hint)
        settings |= _settings(table, path, f"{PROFILES}.{profile}.", Origin.PROFILE, known)
    return settings


def who_else_can_write(path: Path) -> str:
    """Say who else than its owner may change the file, "" for no one: it decides where we connect.

    A group of the user's own, as most systems give one to each user, is no one else.
    """
    try:
        status = path.stat()
    except OSError:
        return ""
    if status.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to another user"
    if status.st_mode & stat.S_IWOTH:
        return f"{path} can be changed by every user (mode {stat.S_IMODE(status.st_mode):04o})"
    if status.st_mode & stat.S_IWGRP and status.st_gid != os.getegid():
        return f"{path} can be changed by its group (mode {stat.S_IMODE(status.st_mode):04o})"
    return ""


def profile_names(path: Path) -> list[str]:
    """The profiles that the file has. Raises `ConfigurationError`."""
    profiles = _read(path).get(PROFILES, {})
    return sorted(profiles) if isinstance(profiles, dict) else []


def _read(path: Path) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        hint = "Profiles are kept in this file."
        raise ConfigurationError(f"cannot read {path} ({error.strerror})", hint=hint) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: {error}", hint="The file is TOML, in UTF-8.") from error


def _settings(
    table: Any, path: Path, prefix: str, origin: Origin, known: Mapping[str, bool]
) -> dict[str, Setting]:
    if not isinstance(table, dict):
        raise ConfigurationError(f"{path}: {prefix.rstrip('.')} is not a table")
    settings = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        place = f"{prefix}{key} in {path}"
        if name not in known:
            raise ConfigurationError(f"unknown setting {place}", hint=_suggestion(name, known))
        if name in settings:
            raise ConfigurationError(f"{place}: it is there twice, with - and with _")
        read = _values if known[name] else _value
        settings[name] = Setting(read(value, place), origin, place)
    return settings


def _value(value: Any, place: str) -> str:
    """A value as the environment would have it."""
    if isinstance(value, str | int | float) and "\0" not in (text := str(value)):
        return text.lower() if isinstance(value, bool) else text
    raise ConfigurationError(f"{place}: write text, a number, true or false")


def _values(value: Any, place: str) -> list[str]:
    """Several values: a list, one value alone, or a table of ``key=value`` pairs."""
    if isinstance(value, list):
        return [_value(item, place) for item in value]
    if isinstance(value, dict):
        return [f"{key}={_value(item, place)}" for key, item in value.items()]
    return [_value(value, place)]


def _suggestion(name: str, known: Mapping[str, bool]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name, known, 1)
    return f"Did you mean {near[0].replace('_', '-')}?" if near else "See nsq-config(5)."
