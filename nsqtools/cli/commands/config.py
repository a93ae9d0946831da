"""``nsq config``: the settings in force, the profiles that give them, and options of running nsqd.

The settings are what a profile may hold, and the client options. Each is read as a command reads
it, with the flags of this command line over the environment, over the profile, over the file; what
a stronger setting has put out of force has no value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Context

from nsqtools.cli.options.connection import (
    PREFIX,
    REPEATABLE,
    GivenAddresses,
    MaxInFlight,
    Reaching,
    active_setting,
    client_opt,
    describe_option,
    given_addresses,
    opt_statements,
    options_from_flags,
    origin_of,
    setting_of,
)
from nsqtools.cli.parsing.binding import From, opt
from nsqtools.cli.render.outcomes import report_unreachable
from nsqtools.cli.render.output import ListingForm, write_json, write_listing
from nsqtools.cli.running.administering import ClusterListing
from nsqtools.cli.running.runtime import Session
from nsqtools.client.connection_settings import OPTION_OF_FLAG, SourcedOption, resolve_options
from nsqtools.errors import ConfigurationError, OutputError
from nsqtools.protocol.text import format_duration
from nsqtools.settings import (
    Origin,
    SettingRow,
    config_path,
    load_settings,
    profile_names,
    selected_profile,
    selection_path,
)

if TYPE_CHECKING:
    from nsqtools.cluster.directory import Cluster, DaemonFailure

MASK = "***"
AUTH_SECRET = "NSQ_AUTH_SECRET"
OPTS = ("consumer_opt", "producer_opt")
VALUES = ("node", "option", "value")
PROFILES = ("profile", "selected", "settings")

OptionName = Annotated[
    str, Argument(metavar="OPTION", help="Name as in nsqd's configuration file: log_level.")
]
NewValue = Annotated[str, Argument(metavar="VALUE", help="New value; commas between addresses.")]


def in_force(
    context: Context,
    options: Reaching,
    max_in_flight: MaxInFlight = None,
    producer_opt: list[str] | None = client_opt("producer"),
) -> list[SettingRow]:
    """Every setting, in the order of the connection options; read from ``context``, that knows
    where each is set. Raises `ConfigurationError`."""
    said = list(options_from_flags(context))
    opts = {name: list(opt_statements(context, name)) for name in OPTS}
    holds = {name: resolve_options([*said, *given]) for name, given in opts.items()}
    rows = [_file_row(context), _profile_row(context)]
    if context.obj.environ.get(AUTH_SECRET):
        rows.append(SettingRow("auth-secret", MASK, _word(Origin.ENVIRONMENT), AUTH_SECRET))
    for name in REPEATABLE:
        if name in OPTS:
            rows += [_opt_row(context, name, each, holds[name]) for each in opts[name]]
        elif not name.startswith(PREFIX):
            rows.append(_row(context, name, holds["consumer_opt"]))
        elif setting := setting_of(context, name):  # of another cluster, which few commands have
            value, origin = _plain(setting.value), _word(setting.origin)
            rows.append(SettingRow(_shown(name), value, origin, setting.place))
    return _explained(context, rows)


def show(
    *, form: ListingForm, rows: Annotated[list[SettingRow], From(in_force)], runtime: Session
) -> None:
    """Show the settings in force, where each comes from, and its bounds.

    Flags are stronger than the environment, that than the profile, that than the file. Secrets are
    masked. A setting without a value has no default here: each command has its own. The names with
    underscores are client options, which every command takes as --consumer-opt NAME=VALUE or
    --producer-opt NAME=VALUE (-X for short).

    Examples:
        nsq config show
        nsq config show -P staging --columns setting,value,place
        NSQ_NSQD_TCP_ADDRESS=nsqd-1:4150 nsq config show --json
    """
    if form.is_document:
        write_json(runtime, [row._asdict() for row in rows])
        return
    cells = [[" ".join(cell) if isinstance(cell, list) else cell for cell in row] for row in rows]
    write_listing(
        runtime, SettingRow._fields, cells, form, optional=("help", "place", "bounds", "origin")
    )


def _explained(context: Context, rows: list[SettingRow]) -> list[SettingRow]:
    """The rows with defaults, bounds and help, and the client options that nothing sets."""
    from nsqtools.client.options import CLIENT_OPTIONS

    parameters: list[Any] = context.command.params
    helps = {each.name: each.help for each in parameters}
    default = _word(Origin.DEFAULT)
    options = {}
    for option in CLIENT_OPTIONS.values():
        name, text, bounds, help = describe_option(option)
        value = option.default if isinstance(option.default, bool) else text or None
        options[name] = SettingRow(name, value, default, "", bounds, help)
    explained = []
    for row in rows:
        flag = row.setting.rpartition(" ")[2].replace("-", "_")
        if known := options.pop(OPTION_OF_FLAG.get(flag, flag), None):
            is_unset = row.value is None and row.origin == default and flag != "max_in_flight"
            row = row._replace(bounds=known.bounds, help=known.help)
            row = row._replace(value=known.value) if is_unset else row
        else:
            row = row._replace(help=helps.get(flag, ""))
        explained.append(row)
    return [*explained, *options.values()]


def _file_row(context: Context) -> SettingRow:
    path = config_path(context.obj.environ)
    place = "XDG_CONFIG_HOME" if context.obj.environ.get("XDG_CONFIG_HOME") else ""
    origin = Origin.ENVIRONMENT if place else Origin.DEFAULT
    if not path.exists():
        place = f"{place} (it does not exist yet)".strip()
    return SettingRow("config-file", str(path), _word(origin), place)


def _profile_row(context: Context) -> SettingRow:
    name, (origin, place) = context.params.get("profile"), _place(context, "profile")
    if name is not None and not place:
        origin, place = _word(Origin.FILE), str(selection_path(context.obj.environ))
    return SettingRow("profile", name, origin, place)


def _row(context: Context, name: str, settled: Mapping[str, SourcedOption]) -> SettingRow:
    """A setting that has a flag of its own. Of the kinds of addresses only those of the strongest
    origin hold."""
    value = context.params.get(name)
    origin, place = _place(context, name)
    why_not = ""
    if name in GivenAddresses._fields:
        held = getattr(given_addresses(context), name)
        if value and not held:
            why_not = "a stronger origin gives other addresses"
        value = held
    else:
        holds = settled.get(OPTION_OF_FLAG.get(name, name))
        if value is not None and holds is not None and holds.origin > origin_of(context, name):
            why_not, value = f"{holds.given_as} is stronger", None
    place = f"not in force: {place}, and {why_not}" if why_not else place
    return SettingRow(_shown(name), _plain(value), origin, place)


def _opt_row(
    context: Context, name: str, said: SourcedOption, settled: Mapping[str, SourcedOption]
) -> SettingRow:
    """A client option that ``--consumer-opt`` or ``--producer-opt`` sets."""
    from nsqtools.client.options import CLIENT_OPTIONS

    place = said.place or _place(context, name)[1]
    is_secret = CLIENT_OPTIONS[said.option].metadata["secret"]
    value: str | None = MASK if is_secret else said.text or "true"
    if (holds := settled[said.option]).origin > said.origin:
        place, value = f"not in force: {place}, and {holds.given_as} is stronger", None
    return SettingRow(f"{_shown(name)} {said.option}", value, _word(Origin(said.origin)), place)


def _place(context: Context, name: str) -> tuple[str, str]:
    """The origin of an option's value by its name, and where exactly it is set."""
    origin = origin_of(context, name)
    place = ""
    if (setting := active_setting(context, name)) is not None:
        place = setting.place
    elif origin is Origin.ENVIRONMENT:
        parameters: list[Any] = context.command.params
        place = next(str(each.envvar) for each in parameters if each.name == name)
    elif origin is Origin.FLAG:
        place = f"--{_shown(name)}"
    return _word(origin), place


def _word(origin: Origin) -> str:
    return origin.name.lower()


def _shown(name: str) -> str:
    return name.replace("_", "-")


def _plain(value: Any) -> str | bool | list[str] | None:
    match value:
        case None | [] | ():
            return None
        case list() | tuple():
            return [_without_login(str(each)) for each in value]
        case bool():
            return value
        case float():  # seconds
            return format_duration(value)
    return _without_login(str(value))


def _without_login(text: str) -> str:
    return re.sub("//.*@", f"//{MASK}@", text)


def get(option: OptionName, *, listing: ClusterListing) -> int:
    """Show one option of every running nsqd.

    Examples:
        nsq config get max_rdy_count
        nsq config get nsqlookupd_tcp_addresses --json
    """
    from nsqtools.cluster.admin import get_option

    return ask_each(listing, option, lambda opened: get_option(opened, option))


def set_(option: OptionName, value: NewValue, *, listing: ClusterListing) -> int:
    """Change one option of every running nsqd, until it exits.

    log_level and nsqlookupd_tcp_addresses can be changed. nsqd forgets the change when it restarts.

    Examples:
        nsq config set log_level debug
        nsq config set nsqlookupd_tcp_addresses lookup-1:4160,lookup-2:4160
    """
    from nsqtools.cluster.admin import set_option

    return ask_each(listing, option, lambda opened: set_option(opened, option, value))


def ask_each(
    listing: ClusterListing,
    option: str,
    ask: Callable[[Cluster], tuple[dict[str, Any], Sequence[DaemonFailure]]],
) -> int:
    """Ask for the value of an option: a line, or object, for each nsqd."""
    with listing.open(VALUES) as opened:
        values, failures = ask(opened)
    documents = [{"node": node, "option": option, "value": values[node]} for node in values]
    if not listing.form.is_document:
        for each in documents:
            if isinstance(each["value"], list):
                each["value"] = ",".join(map(str, each["value"]))
    listing.write_records(VALUES, documents)
    return report_unreachable(failures, listing.runtime)


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
    profile: Annotated[str | None, Argument(help="Name of the profile.")] = None,
    none: bool = opt("", "Use no profile from now on."),
    *,
    runtime: Session,
) -> None:
    """Choose the profile that commands use without --profile and NSQ_PROFILE.

    The choice is kept in a file beside the configuration file. --no-profile ignores it for one
    command, nsq config show says which profile is in force.

    Examples:
        nsq config use staging
        nsq config use --none
    """
    if (profile is None) is not none:
        raise ConfigurationError("give either the name of a profile or --none")
    from nsqtools.files.durable import replace_file

    path = selection_path(runtime.environ)
    if profile is not None:
        load_settings(config_path(runtime.environ), profile, REPEATABLE)
    try:
        if profile is None:
            path.unlink(missing_ok=True)
        else:
            replace_file(path, f"{profile}\n".encode(), 0o644)
    except OSError as error:
        raise OutputError(f"cannot write {path} ({error.strerror})") from error
    runtime.info(f"nsq: {'profile ' + profile if profile else 'no profile'} is used from now on")
    if runtime.environ.get("NSQ_PROFILE"):
        runtime.info("nsq: NSQ_PROFILE is set, and stronger")
