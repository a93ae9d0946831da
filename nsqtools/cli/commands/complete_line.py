"""``nsq __complete_line``: what can follow the beginning of a command line, for completions/.

    nsq __complete_line bash 'nsq tail --mode=r' "$COMP_WORDBREAKS"
    nsq __complete_line zsh|fish nsq tail --mode=r

The first line printed is ``KIND LENGTH``: files and dirs are left to the shell, words and nospace
(no space after one) are listed below it; the first LENGTH characters of the word at the cursor
precede the value. bash gets what begins with that word, from its last word break on, because it
replaces no more; zsh and fish choose themselves, and get help texts.

The parser of the command reads the line with `CURSOR` in place of the last word, and the parameter
that gets it is the one to complete. Parameters are recognized by what users see, their names and
the word for their value, so that a new option completes like similar ones without being listed
here.

Names come from the cluster that the line names, while a user waits for the tab key: all ends after
a second whatever hangs, and when anything fails there is just nothing to complete. They go into a
command line, so names that no nsqd would take (a daemon may answer anything) are left out.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from threading import Timer
from typing import Any, NamedTuple

from typer import Context

from nsqtools.cli.options.connection import ClusterSettings, cluster_connection
from nsqtools.cli.parsing.app import HELP_NAMES, command_tree, parser_of
from nsqtools.cli.parsing.binding import UsageError, set_converter
from nsqtools.cli.parsing.help import choices, metavar, rows_of
from nsqtools.cli.registry import LISTED, ROOT_OPTIONS, Command, Group
from nsqtools.cli.running.runtime import Runtime
from nsqtools.errors import ConfigurationError, NsqError

TIMEOUT_S = 0.8  # for a daemon; what another one answered in time is still shown
LIMIT_S = 1.0  # for everything: name resolution knows no time-out

CURSOR = "\0"
FILES, DIRS, CLIENT_OPTIONS = "files", "dirs", "options"
TOPICS, CHANNELS, NODES, PROFILES = NAMES = ("topics", "channels", "nodes", "profiles")

BY_NAME = {"topic": TOPICS, "channel": CHANNELS, "profile": PROFILES}
BY_NAME |= dict.fromkeys(("consumer-opt", "producer-opt"), CLIENT_OPTIONS)
# of the daemons
BY_NAME |= {"data-path": DIRS}
BY_NAME |= dict.fromkeys(("config", "tls-cert", "tls-key", "tls-root-ca-file"), FILES)
BY_METAVAR = {"FILE": FILES, "PATH": FILES, "DIR": DIRS, "NODE": NODES}

CHOICES = {
    "tls-min-version": ("tls1.2", "tls1.3"),
    # of the daemons
    "tls-client-auth-policy": ("require", "require-verify"),
    "tls-required": ("true", "false", "tcp-https"),
}
"""Values of options whose type does not list them, by name."""


class Offer(NamedTuple):
    """What can be at the cursor: words, each with its help, and what precedes them in the word
    that is typed: ``--mode=``."""

    words: Sequence[tuple[str, str]] = ()
    kind: str = "words"
    prefix: str = ""


def complete_line(arguments: Sequence[str]) -> int:
    """Print what can follow a command line, for the completion of shells."""
    if len(arguments) < 3:
        raise ConfigurationError("the completion scripts of bash, zsh and fish call this")
    shell, *words = arguments
    cut = 0
    if shell == "bash":
        words, cut = split(*words)
    *before, current = words
    found, kind, prefix = offer_for(before[1:], current)
    lines = [f"{kind} {len(prefix)}"]
    for word, help in found:
        if shell == "zsh":
            lines.append(word.replace(":", r"\:") + ":" + help)
        elif shell == "fish":
            lines.append(f"{prefix}{word}\t{help}")
        elif (prefix + word).startswith(current):
            lines.append((prefix + word)[cut:])
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def split(line: str, breaks: str) -> tuple[list[str], int]:
    """The words of a line, without quotes, and where in the last one bash's last word begins."""
    words, cut, quote, is_escaped = [""], 0, "", False
    for character in line:
        if is_escaped or (quote and character != quote and (character != "\\" or quote == "'")):
            words[-1] += character
            is_escaped = False
        elif character == "\\":
            is_escaped = True
        elif character in "'\"":
            quote = "" if quote else character
        elif character.isspace():
            words += [""] if words[-1] else []
            cut = 0
        else:
            words[-1] += character
            cut = len(words[-1]) if character in breaks else cut
    return words, cut


def offer_for(words: Sequence[str], current: str) -> Offer:
    """What can be the word ``current`` after ``words``, which begin with the command."""
    group = Group("", LISTED)
    tree: Any = command_tree()
    for at, word in enumerate(words):
        entry = group.commands.get(word)
        if entry is None:
            return Offer()
        if isinstance(entry, Command) and entry.raw:
            return raw_offer(entry, words[at + 1 :], current)
        if isinstance(entry, Command):
            return typed_offer(tree.load(word), words[at + 1 :], current)
        group, tree = entry, tree.commands[word]
    if current.startswith("-"):
        names = [(each, text) for each, text in ROOT_OPTIONS if not words or "help" in each]
        return Offer([(name, text) for each, text in names for name in each.split(", ")])
    return Offer(rows_of(group.commands))


def typed_offer(command: Any, words: Sequence[str], current: str) -> Offer:
    """What can follow in a command whose arguments typer reads."""
    context = Context(command, help_option_names=HELP_NAMES)
    prefix, typed, line = "", current, [*words, CURSOR]
    name, equals, value = current.partition("=")
    if name.startswith("--") and equals:
        prefix, typed, line = f"{name}=", value, [*words, f"{name}={CURSOR}"]
    given, order = read_line(command, context, line)
    parameters = command.get_params(context)
    options = [each for each in parameters if each.param_type_name == "option"]
    at_cursor = [each for each in parameters if CURSOR in texts_of(given.get(each.name))]
    is_value = prefix or any(each in options for each in at_cursor)
    if current.startswith("-") and not is_value and "--" not in words:
        unused = [each for each in options if each not in order or each.multiple or each.count]
        return Offer(list(spellings(unused)))
    for each in at_cursor:
        name = max(each.opts, key=len).lstrip("-")  # topic, of an argument or of -t, --topic
        kind, known = value_of(name, metavar(each), choices(each))
        if kind in NAMES and not known:
            old, sign, _ = typed.rpartition("=")  # OLD=NEW
            found = [(name, "") for name in names_for(kind, given)]
            return Offer(found, prefix=prefix + old + sign)
        return offer_of(kind, known, typed, prefix)
    return Offer()


def read_line(
    command: Any, context: Context, line: Sequence[str]
) -> tuple[Mapping[str, Any], Sequence[Any]]:
    """What a line gives to parameters, and these in their order; without the options in it that
    the command has not, or that have a value and take none."""
    words = list(line)
    while True:
        try:
            given, _, order = command.make_parser(context).parse_args(list(words))
            return given, order
        except UsageError as wrong:
            option = getattr(wrong, "option_name", None)
            wrong_words = [each for each in words if option and each.startswith(option)]
            if not wrong_words:
                return {}, ()
            words.remove(wrong_words[0])


def texts_of(value: Any) -> list[Any]:
    """What a line gives to a parameter."""
    return list(value) if isinstance(value, list | tuple) else [value]


def spellings(options: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """All names of options, with their help."""
    for each in options:
        if not each.hidden:
            for name in (*sorted(each.opts, key=len), *each.secondary_opts):
                yield name, each.help or ""


def raw_offer(entry: Command, words: Sequence[str], current: str) -> Offer:
    """What can follow in a daemon, which reads its arguments itself; flags of Go have one dash or
    two, and their values are the next word, or for a bool behind = only."""
    daemon: Any = entry.load()
    flags = daemon.flags()
    name, equals, typed = current.partition("=")
    said = name if equals else words[-1] if words else ""
    flag = flags.get(key := said.lstrip("-"))
    if flag is not None and (equals or (said.startswith("-") and not flag.kind.is_bool)):
        form = "true|false" if flag.kind.is_bool else flag.kind.go_name
        return offer_of(*value_of(key, form), typed, f"{name}=" if equals else "")
    dashes = "--" if current.startswith("--") else "-"
    return Offer([(dashes + each, flag.help) for each, flag in flags.items()])


def value_of(name: str, form: str, known: tuple[str, ...] = ()) -> tuple[str, tuple[str, ...]]:
    """What a value can be: its kind as in `BY_NAME`, and the few choices, if there are."""
    known = known or CHOICES.get(name, ())
    if form == "COLUMN":
        from nsqtools.cluster.stats_documents import COLUMNS

        known = tuple(COLUMNS)
    elif name == "log-level":
        from nsqtools.server.daemon_log import LEVELS

        known = LEVELS
    if not known and "|" in form:  # hour|day|DURATION: lower-case words are typed literally
        known = tuple(word for word in form.split("|") if not word.isupper())
    # ARCHIVE_DIR is a DIR
    return BY_METAVAR.get(form.rpartition("_")[2]) or BY_NAME.get(name, ""), known


def offer_of(kind: str, known: Sequence[str], typed: str, prefix: str) -> Offer:
    """A value of which ``typed`` is there."""
    if known or kind not in (FILES, DIRS, CLIENT_OPTIONS):
        return Offer([(each, "") for each in known], prefix=prefix)
    if kind != CLIENT_OPTIONS:
        return Offer(kind=kind, prefix=prefix)
    from nsqtools.client.options import CLIENT_OPTIONS as ALL

    options = [(f"{name}=", option.metadata["help"]) for name, option in ALL.items()]
    return Offer([] if set("=,") & set(typed) else options, "nospace", prefix)


def names_for(kind: str, given: Mapping[str, Any]) -> list[str]:
    """The names of the configuration file, or of the cluster that the options of a line name; none
    when no daemon answers. Channels are those of its topic, or of all topics."""
    runtime = Runtime.of_process()
    if kind == PROFILES:
        from nsqtools.settings import config_path, profile_names

        return profile_names(config_path(runtime.environ))
    from nsqtools.cluster.topics import fetch_channels, fetch_topics
    from nsqtools.protocol.names import is_valid_name

    cluster = cluster_of(given, runtime)
    limit = Timer(LIMIT_S, os._exit, (0,))
    limit.daemon = True
    limit.start()
    try:
        with cluster.open(TIMEOUT_S) as opened:
            if kind == NODES:
                nsqds, _ = opened.nsqds()
                # host:port or a URL, with nothing in it that means more to a shell
                return [each for each in nsqds if re.fullmatch(r"[\w.:/-]+", each, re.ASCII)]
            if kind == TOPICS:
                names: Iterable[str] = fetch_topics(opened)[0]
            else:
                topic = [None, *texts_of(given.get("topic"))][-1]
                names = fetch_channels(opened, topic or "")
    except NsqError:
        return []
    finally:
        limit.cancel()
    return sorted(filter(is_valid_name, names))


def cluster_of(given: Mapping[str, Any], runtime: Runtime) -> ClusterSettings:
    """The cluster, read from what a line gives as a command reads it. Raises `NsqError`."""
    asking = parser_of("names", cluster_connection)
    context = Context(asking, obj=runtime)
    for each in sorted(asking.params, key=lambda each: not each.is_eager):
        set_converter(each)
        each.handle_parse_result(context, given, [])
    cluster: ClusterSettings = asking.invoke(context)
    return cluster
