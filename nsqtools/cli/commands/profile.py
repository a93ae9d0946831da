"""``nsq profile``: the named settings of the configuration file, and which of them are used."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from nsqtools.cli.options.forms import ListingForm
from nsqtools.cli.render.output import write_listing
from nsqtools.cli.running.runtime import Session
from nsqtools.errors import ConfigurationError, OutputError
from nsqtools.settings import (
    REPEATABLE,
    Origin,
    config_path,
    load_settings,
    profile_names,
    selected_profile,
    selection_path,
)

COLUMNS = ("profile", "selected", "settings")
SETTINGS = ("setting", "value")
MASKED = ("auth_secret=", "auth-secret=")

Name = Annotated[str, Argument(metavar="PROFILE", help="Name of the profile.")]
OptionalName = Annotated[
    str | None, Argument(metavar="PROFILE", help="Name of the profile; default: the one in use.")
]
ChosenName = Annotated[str | None, Argument(metavar="PROFILE", help="Name of the profile.")]
NoneAtAll = Annotated[bool, Option("--none", help="Use no profile from now on.")]


def ls(*, form: ListingForm, runtime: Session) -> None:
    """List the profiles of the configuration file, and which one is used.

    Examples:
        nsq profile ls
    """
    path = config_path(runtime.environ)
    names = profile_names(path) if path.exists() else []
    chosen = in_use(runtime.environ.get("NSQ_PROFILE"), selected_profile(runtime.environ))
    rows = [(name, name == chosen, len(_own(path, name))) for name in names]
    write_listing(runtime, COLUMNS, rows, form)


def use(profile: ChosenName = None, none: NoneAtAll = False, *, runtime: Session) -> None:
    """Choose the profile that commands use when neither --profile nor NSQ_PROFILE names one.

    The choice is kept in a file beside the configuration file. --no-profile ignores it for one
    command, nsq config show says which profile is in force.

    Examples:
        nsq profile use staging
        nsq profile use --none
    """
    if (profile is None) is not none:
        raise ConfigurationError("give either the name of a profile or --none")
    path = selection_path(runtime.environ)
    if profile is not None:
        load_settings(config_path(runtime.environ), profile, REPEATABLE)
    try:
        write_selection(path, profile)
    except OSError as error:
        raise OutputError(f"cannot write {path} ({error.strerror})") from error
    runtime.tell(f"nsq: {'profile ' + profile if profile else 'no profile'} is used from now on")
    if runtime.environ.get("NSQ_PROFILE"):
        runtime.tell("nsq: NSQ_PROFILE is set, and stronger")


def show(profile: OptionalName = None, *, form: ListingForm, runtime: Session) -> None:
    """Show what a profile sets, over the settings at the top of the file.

    Examples:
        nsq profile show staging
        nsq profile show --json
    """
    path = config_path(runtime.environ)
    environ = runtime.environ
    name = profile or in_use(environ.get("NSQ_PROFILE"), selected_profile(environ))
    if name is None:
        raise ConfigurationError("no profile is in use", hint="Name one: nsq profile ls.")
    rows = [(key, value) for key, value in sorted(_own(path, name).items())]
    write_listing(runtime, SETTINGS, rows, form)


def in_use(from_environment: str | None, selected: str | None) -> str | None:
    """The profile of a command that names none."""
    return from_environment or selected


def write_selection(path: Path, name: str | None) -> None:
    """Note the choice, or forget it. Raises ``OSError``."""
    if name is None:
        path.unlink(missing_ok=True)
    else:
        path.write_text(f"{name}\n", "utf-8")


def _own(path: Path, name: str) -> dict[str, str]:
    """What a profile sets, as text, with secrets masked. Raises `ConfigurationError`."""
    return {
        key.replace("_", "-"): _text(setting.value)
        for key, setting in load_settings(path, name, REPEATABLE).items()
        if setting.origin is Origin.PROFILE
    }


def _text(value: bool | str | list[str]) -> str:
    if isinstance(value, list):
        return " ".join(
            f"{each.partition('=')[0]}=***" if each.startswith(MASKED) else each for each in value
        )
    return str(value).lower() if isinstance(value, bool) else value
