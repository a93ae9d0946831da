"""Settings from the configuration file, with those of one named profile taking precedence.

    # ~/.config/nsqtools/config.toml
    lookupd-http-address = ["127.0.0.1:4161"]

    [profiles.staging]
    lookupd-http-address = ["lookup-1.staging:4161", "lookup-2.staging:4161"]
    tls = true
    auth-secret-file = "/etc/nsq/staging.secret"
    consumer-opt = { snappy = true, msg_timeout = "5m" }

Keys are the names of options without the leading dashes. Flags and environment variables override
the file. Each value has its origin. Unknown keys are errors, because a misspelled setting would
otherwise be ignored silently.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from nsqtools.errors import ConfigurationError

PROFILES = "profiles"


class Origin(IntEnum):
    """The origin of a value. A greater origin overrides a smaller one."""

    DEFAULT = 0
    FILE = 1
    PROFILE = 2
    ENVIRONMENT = 3
    FLAG = 4


class Setting(NamedTuple):
    """A value of the file, and its key and path for messages."""

    value: str | list[str]
    origin: Origin
    place: str


class SettingRow(NamedTuple):
    """One setting. ``value`` is None if it is unset or overridden; ``place`` is its source."""

    setting: str
    value: str | bool | list[str] | None
    origin: str
    place: str
    bounds: str = ""
    help: str = ""


def config_path(environ: Mapping[str, str]) -> Path:
    """Return ``$XDG_CONFIG_HOME/nsqtools/config.toml``, by default below ~/.config."""
    return user_folder(environ, "XDG_CONFIG_HOME", ".config") / "nsqtools" / "config.toml"


def user_folder(environ: Mapping[str, str], variable: str, default: str) -> Path:
    """Return the directory that ``variable`` names, by default ``default`` below the home."""
    # A user without HOME and without an entry in the passwd database gets "/~".
    home = environ.get("HOME") or os.path.expanduser("~")
    return Path(environ.get(variable) or Path("/", home, default))


def selection_path(environ: Mapping[str, str]) -> Path:
    """Return the path of the file with the profile that ``nsq config use`` chose."""
    return config_path(environ).with_name("profile")


def selected_profile(environ: Mapping[str, str]) -> str | None:
    """Return the profile that ``nsq config use`` chose, if any. Raises `ConfigurationError`."""
    path = selection_path(environ)
    try:
        return path.read_text("utf-8").strip() or None
    except OSError:
        # The file is missing or unreadable: HOME may be that of another user.
        return None
    except UnicodeDecodeError as error:
        hint = "nsq config use writes it."
        raise ConfigurationError(f"{path} is not UTF-8 text", hint=hint) from error


def load_settings(
    path: Path, profile: str | None, repeatable: Mapping[str, bool]
) -> dict[str, Setting]:
    """Read ``path`` and return its settings; those of ``profile`` take precedence.

    ``repeatable`` maps the names of all settings (with underscores: ``lookupd_http_address``) to
    whether they take several values. Raises `ConfigurationError`, which names file and key, for
    invalid content.
    """
    document = _read(path)
    profiles = document.pop(PROFILES, {})
    settings = _settings(document, path, "", Origin.FILE, repeatable)
    if profile is not None:
        if not isinstance(profiles, dict):
            raise ConfigurationError(f"{path}: {PROFILES} is not a table")
        table = profiles.get(profile)
        if table is None:
            hint = f"Profiles in the file: {', '.join(sorted(profiles)) or 'none'}."
            raise ConfigurationError(f"{path}: there is no profile {profile!r}", hint=hint)
        settings |= _settings(table, path, f"{PROFILES}.{profile}.", Origin.PROFILE, repeatable)
    return settings


def check_ownership(path: Path) -> str:
    """Return a warning if another user can change the file, which decides where nsq connects, or
    replace it in its directory.

    Write permission of the user's primary group is accepted, because most systems create one group
    for each user. In a sticky directory such as /tmp only owners replace files. Returns "" if only
    the owner can change the file.
    """
    return _ownership_problem(path) or _ownership_problem(path.parent)


def _ownership_problem(path: Path) -> str:
    try:
        status = path.stat()
    except OSError:
        return ""
    if status.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to another user"
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISDIR(status.st_mode) and mode & stat.S_ISVTX:
        return ""
    if mode & stat.S_IWOTH:
        return f"{path} can be changed by every user (mode {mode:04o})"
    if mode & stat.S_IWGRP and status.st_gid != os.getegid():
        return f"{path} can be changed by its group (mode {mode:04o})"
    return ""


def profile_names(path: Path) -> list[str]:
    """Return the names of the profiles in the file. Raises `ConfigurationError`."""
    profiles = _read(path).get(PROFILES, {})
    return sorted(profiles) if isinstance(profiles, dict) else []


def _read(path: Path) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        hint = "This file contains the profiles."
        raise ConfigurationError(f"cannot read {path} ({error.strerror})", hint=hint) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: {error}", hint="The file is TOML, in UTF-8.") from error


def _settings(
    table: Any, path: Path, prefix: str, origin: Origin, repeatable: Mapping[str, bool]
) -> dict[str, Setting]:
    if not isinstance(table, dict):
        raise ConfigurationError(f"{path}: {prefix.rstrip('.')} is not a table")
    settings = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        place = f"{prefix}{key} in {path}"
        if name not in repeatable:
            raise ConfigurationError(f"unknown setting {place}", hint=_suggestion(name, repeatable))
        if name in settings:
            raise ConfigurationError(f"{place} is set twice, with - and with _")
        parse = _values if repeatable[name] else _value
        settings[name] = Setting(parse(value, place), origin, place)
    return settings


def _value(value: Any, place: str) -> str:
    """Return a value as text, as an environment variable would contain it."""
    if isinstance(value, str | int | float) and "\0" not in (text := str(value)):
        return text.lower() if isinstance(value, bool) else text
    raise ConfigurationError(f"{place}: write text, a number, true or false")


def _values(value: Any, place: str) -> list[str]:
    """Return several values: of a list, a single value, or a table as ``key=value`` pairs."""
    if isinstance(value, list):
        return [_value(item, place) for item in value]
    if isinstance(value, dict):
        return [f"{key}={_value(item, place)}" for key, item in value.items()]
    return [_value(value, place)]


def _suggestion(name: str, names: Iterable[str]) -> str:
    from difflib import get_close_matches

    matches = get_close_matches(name, list(names), 1)
    return f"Did you mean {matches[0].replace('_', '-')}?" if matches else "See nsq-config(5)."
