"""nsq-config(5): the configuration file. The prose is written by hand, in the markup of `roff`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from nsqtools.cli.docs import roff
from nsqtools.cli.docs.tree import Option, Page
from nsqtools.cli.options.client_options import describe_option
from nsqtools.cli.options.connection import profile_keys
from nsqtools.client.options import ClientOptions

PROSE = """
# NAME

nsq-config - settings and profiles of nsq

# SYNOPSIS

`$XDG_CONFIG_HOME/nsqtools/config.toml`

`~/.config/nsqtools/config.toml`

# DESCRIPTION

The file is TOML, in UTF-8. It says where to connect and how, for all commands; nothing else can be
set in it. It need not exist.

Settings at the top of the file always hold. Those in a table `[profiles.`*name*`]` hold when the
profile is chosen, with `--profile` *name* (`-P`) or the variable NSQ_PROFILE, and are stronger than
those at the top.

A key is the name of an option without the dashes in front. Dashes and underscores inside are the
same. An unknown key is an error, and so is a profile that is not there.

# PRECEDENCE

A value is taken from the first of these that has one:

1.::
  the option on the command line
2.::
  the environment variable
3.::
  the chosen profile
4.::
  the top of the file
5.::
  the default

Addresses of all kinds are one setting here: where the command line has any address, no address of
the environment or the file is used, of whatever kind. The client options of `consumer-opt` and
`producer-opt` are settings of their own, one by one.

# VALUES

Switches are `true` or `false`, numbers are numbers, and everything else is text, durations
(`"30s"`) included. Where an option may be repeated the value is a list, or one value alone. Client
options are best written as a table.

# KEYS

{keys}

# CLIENT OPTIONS

These are the keys of `consumer-opt` and `producer-opt`, with the names of go-nsq.

{client_options}

# FILES

`~/.config/nsqtools/config.toml`::
  Where the file is, unless XDG_CONFIG_HOME names another directory than `~/.config`.

# EXAMPLES

    lookupd-http-address = ["127.0.0.1:4161"]

    [profiles.staging]
    lookupd-http-address = ["lookup-1.staging:4161", "lookup-2.staging:4161"]
    tls = true
    tls-ca-file = "/etc/ssl/staging.pem"
    auth-secret-file = "/etc/nsq/staging.secret"
    consumer-opt = { max_attempts = 10, msg_timeout = "5m" }

With that file:

    nsq tail -t clicks                 # on this machine
    nsq tail -t clicks -P staging      # there

# SEE ALSO

{see_also}
"""


def render_config_page(root: Page) -> str:
    """The page."""
    blocks = {
        "keys": list(_keys(root)),
        "client_options": list(_client_options()),
        "see_also": roff.references([("nsq", 1), ("nsq-config", 1), ("nsq-options", 1)]),
    }
    return roff.page([*roff.title("nsq-config", 5), *roff.prose(PROSE, blocks)])


def _keys(root: Page) -> Iterator[str]:
    options = {
        option.names[-1].removeprefix("--"): option
        for page in root.walk()
        for option in page.options
    }
    for key, is_repeatable in profile_keys().items():
        name = key.replace("_", "-")
        option = options[name]
        text = roff.escape(option.help)
        yield from roff.entry(f"{roff.bold(name)} = {_kind(option, is_repeatable)}", text)


def _kind(option: Option, is_repeatable: bool) -> str:
    if option.value is None:
        return "true|false"
    if option.names[-1].endswith("-opt"):
        return roff.escape("{ ") + roff.italic("KEY = VALUE") + roff.escape(", ... }")
    value = roff.italic(option.value.metavar)
    if is_repeatable:
        return roff.escape('["') + value + roff.escape('", ...]')
    return value if option.value.metavar == "N" else f'"{value}"'


def _client_options() -> Iterator[str]:
    for field in fields(ClientOptions):
        name, default, bounds, help = describe_option(field)
        facts = [f"Default: {default}." if default else "", f"Bounds: {bounds}." if bounds else ""]
        sentence = help[0].upper() + help[1:] + "."
        text = " ".join([sentence, *filter(None, facts)])
        yield from roff.entry(roff.bold(name), roff.escape(text))
