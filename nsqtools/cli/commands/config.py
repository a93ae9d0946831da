"""``nsq config``: the options of running nsqd, and the profiles of the configuration file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument

from nsqtools.cli.options.cluster_connection import ClusterConnection
from nsqtools.cli.options.forms import ListingForm
from nsqtools.cli.parsing.binding import opt
from nsqtools.cli.render.listing import tell_left_out
from nsqtools.cli.render.output import Form, write_json, write_listing
from nsqtools.cli.running.runtime import Runtime, Session
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

if TYPE_CHECKING:
    from nsqtools.cli.render.documents import NodeOption


VALUES = ("node", "option", "value")
PROFILES = ("profile", "selected", "settings")

OptionName = Annotated[
    str, Argument(metavar="OPTION", help="Name as in nsqd's configuration file: log_level.")
]
ChosenName = Annotated[str | None, Argument(metavar="PROFILE", help="Name of the profile.")]

NewValue = Annotated[str, Argument(metavar="VALUE", help="New value; commas between addresses.")]


def get(
    option: OptionName, *, form: ListingForm, cluster: ClusterConnection, runtime: Session
) -> int:
    """Show one option of every running nsqd.

    Examples:
        nsq config get max_rdy_count
        nsq config get nsqlookupd_tcp_addresses --json
    """
    from nsqtools.cluster.admin import get_option

    form.check(VALUES)
    with cluster.open() as opened:
        values, failures = get_option(opened, option)
    write_values(runtime, option, values, form)
    return tell_left_out(failures, runtime)


def set_(
    option: OptionName,
    value: NewValue,
    *,
    form: ListingForm,
    cluster: ClusterConnection,
    runtime: Session,
) -> int:
    """Change one option of every running nsqd, until it exits.

    log_level and nsqlookupd_tcp_addresses can be changed. nsqd forgets the change when it restarts.

    Examples:
        nsq config set log_level debug
        nsq config set nsqlookupd_tcp_addresses lookup-1:4160,lookup-2:4160
    """
    from nsqtools.cluster.admin import set_option

    form.check(VALUES)
    with cluster.open() as opened:
        values, failures = set_option(opened, option, value)
    write_values(runtime, option, values, form)
    return tell_left_out(failures, runtime)


def write_values(runtime: Runtime, option: str, values: dict[str, Any], form: Form) -> None:
    """One line, or object, for each nsqd."""
    if form.is_document:
        documents: list[NodeOption] = [
            {"node": node, "option": option, "value": value} for node, value in values.items()
        ]
        write_json(runtime, documents, indent=2)
        return
    rows = [
        (node, option, ",".join(map(str, value)) if isinstance(value, list) else value)
        for node, value in values.items()
    ]
    write_listing(runtime, VALUES, rows, form)


def profiles(*, form: ListingForm, runtime: Session) -> None:
    """List the profiles of the configuration file, and which one is used.

    nsq config show -P NAME shows what a profile sets.

    Examples:
        nsq config profiles
    """
    path = config_path(runtime.environ)
    names = profile_names(path) if path.exists() else []
    used = runtime.environ.get("NSQ_PROFILE") or selected_profile(runtime.environ)
    rows = []
    for name in names:
        settings = load_settings(path, name, REPEATABLE).values()
        own = sum(setting.origin is Origin.PROFILE for setting in settings)
        rows.append((name, name == used, own))
    write_listing(runtime, PROFILES, rows, form)


def use(
    profile: ChosenName = None,
    none: bool = opt("", "Use no profile from now on."),
    *,
    runtime: Session,
) -> None:
    """Choose the profile that commands use when neither --profile nor NSQ_PROFILE names one.

    The choice is kept in a file beside the configuration file. --no-profile ignores it for one
    command, nsq config show says which profile is in force.

    Examples:
        nsq config use staging
        nsq config use --none
    """
    if (profile is None) is not none:
        raise ConfigurationError("give either the name of a profile or --none")
    path = selection_path(runtime.environ)
    if profile is not None:
        load_settings(config_path(runtime.environ), profile, REPEATABLE)
    try:
        if profile is None:
            path.unlink(missing_ok=True)
        else:
            path.write_text(f"{profile}\n", "utf-8")
    except OSError as error:
        raise OutputError(f"cannot write {path} ({error.strerror})") from error
    runtime.tell(f"nsq: {'profile ' + profile if profile else 'no profile'} is used from now on")
    if runtime.environ.get("NSQ_PROFILE"):
        runtime.tell("nsq: NSQ_PROFILE is set, and stronger")
