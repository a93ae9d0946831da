"""``nsq config``: the effective settings, the profiles, and options of running nsqd.

The settings are those that a profile may contain, and the client options. Each is read as a command
reads it: flags override the environment, which overrides the profile, which overrides the file. An
overridden setting is listed without a value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Context

from nsqtools.cli.options.connection import (
    PREFIX,
    REPEATABLE,
    ConsumerFlags,
    EffectiveAddresses,
    MaxInFlight,
    active_setting,
    addresses_or_default,
    client_opt,
    describe_option,
    options_from_client_opt,
    options_from_flags,
    origin_of,
    setting_of,
)
from nsqtools.cli.parsing.binding import Provided, opt
from nsqtools.cli.render.outcomes import report_unreachable
from nsqtools.cli.render.output import ListingForm, write_json, write_listing
from nsqtools.cli.running.administering import ClusterListing
from nsqtools.cli.running.runtime import ExitStatus, Session
from nsqtools.client.connection_settings import SourcedOption, resolve_options
from nsqtools.errors import ConfigurationError, OutputError
from nsqtools.protocol.option_names import OPTION_OF_FLAG
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
BY_COMMAND = ("max_in_flight", "timeout")  # each command has its own default
VALUES = ("node", "option", "value")
PROFILES = ("profile", "selected", "settings")

OptionName = Annotated[
    str, Argument(metavar="OPTION", help="Name as in nsqd's configuration file: log_level.")
]
NewValue = Annotated[str, Argument(metavar="VALUE", help="New value; commas between addresses.")]


def collect_settings(
    context: Context,
    options: ConsumerFlags,
    max_in_flight: MaxInFlight = None,
    producer_opt: list[str] | None = client_opt("producer"),
) -> list[SettingRow]:
    """Return every setting with its origin, in the order of the connection options.

    The parameters only declare the options of the command; their values are read from ``context``.
    Raises `ConfigurationError`.
    """
    flags = list(options_from_flags(context))
    opts = {name: list(options_from_client_opt(context, name)) for name in OPTS}
    effective = {name: resolve_options([*flags, *options]) for name, options in opts.items()}
    rows = [_file_row(context), _profile_row(context)]
    if context.obj.environ.get(AUTH_SECRET):
        rows.append(SettingRow("auth-secret", MASK, _origin_name(Origin.ENVIRONMENT), AUTH_SECRET))
    for name in REPEATABLE:
        if name in OPTS:
            rows += [_opt_row(context, name, option, effective[name]) for option in opts[name]]
        elif not name.startswith(PREFIX):
            rows.append(_row(context, name, effective["consumer_opt"]))
        # A destination is listed only if it is set, because few commands have one.
        elif setting := setting_of(context, name):
            value, origin = _plain(setting.value), _origin_name(setting.origin)
            rows.append(SettingRow(_dashed(name), value, origin, setting.place))
    return _with_descriptions(context, rows)


def show(
    *,
    form: ListingForm,
    rows: Annotated[list[SettingRow], Provided(collect_settings)],
    runtime: Session,
) -> None:
    """Show the effective settings, their origins, and their bounds.

    Flags override the environment, which overrides the profile, which overrides the file. Secrets
    are masked. A setting without a value has no common default: each command has its own. The names
    with underscores are client options, which every command accepts as --consumer-opt NAME=VALUE or
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


def _with_descriptions(context: Context, rows: list[SettingRow]) -> list[SettingRow]:
    """Return the rows with defaults, bounds and help, and the unset client options."""
    from nsqtools.client.options import CLIENT_OPTIONS

    parameters: list[Any] = context.command.params
    helps = {parameter.name: parameter.help for parameter in parameters}
    default = _origin_name(Origin.DEFAULT)
    options = {}
    for option in CLIENT_OPTIONS.values():
        name, text, bounds, help = describe_option(option)
        value = option.default if isinstance(option.default, bool) else text or None
        options[name] = SettingRow(name, value, default, "", bounds, help)
    described = []
    for row in rows:
        flag = row.setting.rpartition(" ")[2].replace("-", "_")
        if option_row := options.pop(OPTION_OF_FLAG.get(flag, flag), None):
            is_unset = row.value is None and row.origin == default and flag not in BY_COMMAND
            row = row._replace(bounds=option_row.bounds, help=option_row.help)
            row = row._replace(value=option_row.value) if is_unset else row
        else:
            row = row._replace(help=helps.get(flag, ""))
        described.append(row)
    return [*described, *options.values()]


def _file_row(context: Context) -> SettingRow:
    path = config_path(context.obj.environ)
    place = "XDG_CONFIG_HOME" if context.obj.environ.get("XDG_CONFIG_HOME") else ""
    origin = Origin.ENVIRONMENT if place else Origin.DEFAULT
    if not path.exists():
        place = f"{place} (it does not exist yet)".strip()
    return SettingRow("config-file", str(path), _origin_name(origin), place)


def _profile_row(context: Context) -> SettingRow:
    name, (origin, place) = context.params.get("profile"), _place(context, "profile")
    if name is not None and not place:
        origin, place = _origin_name(Origin.FILE), str(selection_path(context.obj.environ))
    return SettingRow("profile", name, origin, place)


def _row(context: Context, name: str, effective: Mapping[str, SourcedOption]) -> SettingRow:
    """Return the row of a setting with a flag. Addresses of weaker origins have no value."""
    value = context.params.get(name)
    origin, place = _place(context, name)
    reason = ""
    if name in EffectiveAddresses._fields:
        addresses = getattr(addresses_or_default(context), name)
        if value and not addresses:
            reason = "a stronger origin gives other addresses"
        value = addresses
    else:
        option = effective.get(OPTION_OF_FLAG.get(name, name))
        if value is not None and option is not None and option.origin > origin_of(context, name):
            reason, value = f"{option.given_as} is stronger", None
    place = f"not in force: {place}, and {reason}" if reason else place
    return SettingRow(_dashed(name), _plain(value), origin, place)


def _opt_row(
    context: Context, name: str, option: SourcedOption, effective: Mapping[str, SourcedOption]
) -> SettingRow:
    """Return the row of a client option from ``--consumer-opt`` or ``--producer-opt``."""
    from nsqtools.client.options import CLIENT_OPTIONS

    place = option.place or _place(context, name)[1]
    is_secret = CLIENT_OPTIONS[option.option].metadata["secret"]
    value: str | None = MASK if is_secret else option.text or "true"
    if (stronger := effective[option.option]).origin > option.origin:
        place, value = f"not in force: {place}, and {stronger.given_as} is stronger", None
    origin = _origin_name(Origin(option.origin))
    return SettingRow(f"{_dashed(name)} {option.option}", value, origin, place)


def _place(context: Context, name: str) -> tuple[str, str]:
    """Return the name of the origin of an option's value, and the exact place."""
    origin = origin_of(context, name)
    place = ""
    if (setting := active_setting(context, name)) is not None:
        place = setting.place
    elif origin is Origin.ENVIRONMENT:
        parameters: list[Any] = context.command.params
        place = next(str(option.envvar) for option in parameters if option.name == name)
    elif origin is Origin.FLAG:
        place = f"--{_dashed(name)}"
    return _origin_name(origin), place


def _origin_name(origin: Origin) -> str:
    return origin.name.lower()


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _plain(value: Any) -> str | bool | list[str] | None:
    match value:
        case None | [] | ():
            return None
        case list() | tuple():
            return [_masked(str(item)) for item in value]
        case bool():
            return value
        case float():  # seconds
            return format_duration(value)
    return _masked(str(value))


def _masked(text: str) -> str:
    """Return an address without user, password and query, any of which may be a secret."""
    # USER:PASSWORD@HOST without a scheme is refused by other commands, but printed here.
    without_user = re.sub("(//).*@|^[^/:]+:[^/]*@", rf"\1{MASK}@", text)
    return re.sub(r"(/[^?]*\?).+", rf"\1{MASK}", without_user)


def get(option: OptionName, *, listing: ClusterListing) -> int:
    """Show one option of every running nsqd.

    Examples:
        nsq config get max_rdy_count
        nsq config get nsqlookupd_tcp_addresses --json
    """
    from nsqtools.cluster.admin import get_option

    return write_values(listing, option, lambda cluster: get_option(cluster, option))


def set_(option: OptionName, value: NewValue, *, listing: ClusterListing) -> int:
    """Change one option of every running nsqd, until it exits.

    log_level and nsqlookupd_tcp_addresses can be changed. nsqd forgets the change when it restarts.

    Examples:
        nsq config set log_level debug
        nsq config set nsqlookupd_tcp_addresses lookup-1:4160,lookup-2:4160
    """
    from nsqtools.cluster.admin import set_option

    return write_values(listing, option, lambda cluster: set_option(cluster, option, value))


def write_values(
    listing: ClusterListing,
    option: str,
    ask: Callable[[Cluster], tuple[dict[str, Any], Sequence[DaemonFailure]]],
) -> int:
    """Write the value of an option on each nsqd, which ``ask`` returns by node."""
    with listing.open(VALUES) as cluster:
        values, failures = ask(cluster)
    if not listing.form.is_document:
        for node, value in values.items():
            if isinstance(value, list):
                values[node] = ",".join(map(str, value))
    documents = [{"node": node, "option": option, "value": values[node]} for node in values]
    listing.write_records(VALUES, documents)
    return report_unreachable(failures, listing.runtime)


def profiles(*, form: ListingForm, runtime: Session) -> int:
    """List the profiles of the configuration file, and which one is used.

    nsq config show -P NAME shows what a profile sets. A profile that commands would refuse has no
    number of settings; then the reason is printed, and the exit status is 2.

    Examples:
        nsq config profiles
    """
    path = config_path(runtime.environ)
    names = profile_names(path) if path.exists() else []
    used = runtime.environ.get("NSQ_PROFILE") or selected_profile(runtime.environ)
    if names:
        load_settings(path, None, REPEATABLE)  # an error outside of the profiles concerns all
    rows: list[tuple[str, bool, int | None]] = []
    refusals = []
    for name in names:
        count = None
        try:
            settings = load_settings(path, name, REPEATABLE).values()
            count = sum(setting.origin is Origin.PROFILE for setting in settings)
        except ConfigurationError as error:
            refusals.append(error)
        rows.append((name, name == used, count))
    write_listing(runtime, PROFILES, rows, form)
    for refusal in refusals:
        runtime.report(refusal)
    return ExitStatus.USAGE if refusals else ExitStatus.DONE


def use(
    profile: Annotated[str | None, Argument(help="Name of the profile.")] = None,
    none: bool = opt("", "Use no profile from now on."),
    *,
    runtime: Session,
) -> None:
    """Choose the profile that commands use without --profile and NSQ_PROFILE.

    The choice is stored in a file next to the configuration file. --no-profile ignores it for one
    command. nsq config show shows the profile in force.

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
