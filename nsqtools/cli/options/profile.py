"""``--profile``: puts the settings of the configuration file under a command's options.

typer asks ``default_map`` for what neither the command line nor the environment says, which is just
where a profile belongs. The option is eager, so the map is there before other options are read.
"""

from __future__ import annotations

from typing import Annotated

from typer import Context, Option

from nsqtools.settings import Origin, Setting, config_path, load_settings

CONNECTION = "Connection"  # the panel of help

SETTINGS = "nsqtools.settings"  # the key in typer's context
ORIGIN_OF_SOURCE = {"COMMANDLINE": Origin.FLAG, "ENVIRONMENT": Origin.ENVIRONMENT}


def apply_profile(context: Context, name: str | None) -> str | None:
    """Load the file, and the profile if one is named; remember where each value stands."""
    path = config_path(context.obj.environ)
    if context.resilient_parsing or not (name or path.exists()):
        return name
    from nsqtools.cli.options.connection import profile_keys

    settings = load_settings(path, name, profile_keys())
    context.meta[SETTINGS] = settings
    context.default_map = {key: setting.value for key, setting in settings.items()}
    return name


Profile = Annotated[
    str | None,
    Option(
        "--profile",
        "-P",
        metavar="NAME",
        envvar="NSQ_PROFILE",
        is_eager=True,
        callback=apply_profile,
        help="Named settings from the configuration file.",
        rich_help_panel=CONNECTION,
    ),
]


def setting_of(context: Context, name: str) -> Setting | None:
    """What the configuration file says about the option ``name``, be it in force or not."""
    settings: dict[str, Setting] = context.meta.get(SETTINGS, {})
    return settings.get(name)


def setting_in_force(context: Context, name: str) -> Setting | None:
    """The setting that the option ``name`` has its value from, if it is from the file."""
    source = context.get_parameter_source(name)
    return setting_of(context, name) if source and source.name == "DEFAULT_MAP" else None


def origin_of(context: Context, name: str) -> Origin:
    """Where the value of the option ``name`` comes from."""
    if setting := setting_in_force(context, name):
        return setting.origin
    source = context.get_parameter_source(name)
    return ORIGIN_OF_SOURCE.get(source.name if source else "", Origin.DEFAULT)
