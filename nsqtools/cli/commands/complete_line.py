"""``nsq __complete_line``: completions of a command line, for the scripts in completions/.

    nsq __complete_line bash 'nsq tail --mode=r' "$COMP_WORDBREAKS"
    nsq __complete_line zsh|fish nsq tail --mode=r

The first line of the output is ``KIND LENGTH``. The kinds ``files`` and ``dirs`` are completed by
the shell. For ``words`` and ``nospace`` (no space behind the word) the completions follow, a line
each. The first LENGTH characters of the word at the cursor precede the completed value. bash gets
the matching completions from the last word break on, because it replaces only that part. zsh and
fish filter themselves, and get help texts.

The command's parser reads the line with `CURSOR` in place of the last word, and the parameter that
gets `CURSOR` is completed. Its values depend on its name and metavar, so a new option completes
like similar options without an entry here.

Names are fetched from the cluster of the command line while a user waits for the tab key.
Everything ends after `TOTAL_TIMEOUT_S`, and an error means no completions. Names become part of a
command line, so names that are invalid for nsqd (a daemon may answer anything) are dropped.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from threading import Timer
from typing import Any, NamedTuple

from typer import Context

from nsqtools.cli.options.connection import ClusterSettings, cluster_connection
from nsqtools.cli.parsing.app import HELP_NAMES, command_tree, parser_of
from nsqtools.cli.parsing.binding import UsageError, choices_of, set_converter
from nsqtools.cli.parsing.help import metavar, rows_of
from nsqtools.cli.registry import LISTED, ROOT_OPTIONS, Command, Group
from nsqtools.cli.running.runtime import Runtime
from nsqtools.errors import ConfigurationError, NsqError

# For one daemon. It leaves time to show the answers of other daemons.
TIMEOUT_S = 0.8
# For everything, because name resolution has no timeout.
TOTAL_TIMEOUT_S = 1.0

CURSOR = "\0"
FILES, DIRS, CLIENT_OPTIONS = "files", "dirs", "options"
TOPICS, CHANNELS, NODES, PROFILES = NAMES = ("topics", "channels", "nodes", "profiles")

BY_NAME = {"topic": TOPICS, "channel": CHANNELS, "profile": PROFILES}
BY_NAME |= dict.fromkeys(("consumer-opt", "producer-opt"), CLIENT_OPTIONS)
# Flags of the daemons.
BY_NAME |= {"data-path": DIRS}
BY_NAME |= dict.fromkeys(("config", "tls-cert", "tls-key", "tls-root-ca-file"), FILES)
BY_METAVAR = {"FILE": FILES, "PATH": FILES, "DIR": DIRS, "NODE": NODES}

# Values of options whose type does not list them.
CHOICES = {
    "tls-min-version": ("tls1.2", "tls1.3"),
    # Flags of the daemons.
    "tls-client-auth-policy": ("require", "require-verify"),
    "tls-required": ("true", "false", "tcp-https"),
}


# Unlike zsh and fish, bash inserts completions as they are.
_SPECIAL = re.compile(r"[^\w.:/=,+@%#-]")


class Completion(NamedTuple):
    """Completions of the word at the cursor, each with its help.

    ``prefix`` is the part of the word before the completed value: ``--mode=``.
    """

    words: Sequence[tuple[str, str]] = ()
    kind: str = "words"
    prefix: str = ""


def complete_line(arguments: Sequence[str]) -> int:
    """Print the completions of a command line for a shell."""
    if len(arguments) < 3:
        raise ConfigurationError("the completion scripts of bash, zsh and fish call this")
    shell, *words = arguments
    cut, quote = 0, ""
    if shell == "bash":
        words, cut, quote = split_line(*words)
    *previous, current = words
    completions, kind, prefix = complete_words(previous[1:], current)
    lines = [f"{kind} {len(prefix)}"]
    for word, help in completions:
        if shell == "zsh":
            lines.append(word.replace(":", r"\:") + ":" + help)
        elif shell == "fish":
            lines.append(f"{prefix}{word}\t{help}")
        elif (prefix + word).startswith(current):
            completed = (prefix + word)[cut:]
            lines.append(completed if quote else _SPECIAL.sub(r"\\\g<0>", completed))
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def split_line(line: str, breaks: str) -> tuple[list[str], int, str]:
    """Return the words of a line without quotes, the index of the last word break of bash, and the
    quote that is open at the end.
    """
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
    return words, cut, quote


def complete_words(words: Sequence[str], current: str) -> Completion:
    """Complete the word ``current`` after ``words``, which begin with the command."""
    group = Group("", LISTED)
    tree: Any = command_tree()
    for at, word in enumerate(words):
        entry = group.commands.get(word)
        if entry is None:
            return Completion()
        if isinstance(entry, Command) and entry.raw:
            return complete_daemon(entry, words[at + 1 :], current)
        if isinstance(entry, Command):
            return complete_command(tree.load(word), words[at + 1 :], current)
        group, tree = entry, tree.commands[word]
    if current.startswith("-"):
        options = [(names, help) for names, help in ROOT_OPTIONS if not words or "-h," in names]
        return Completion([(name, help) for names, help in options for name in names.split(", ")])
    return Completion(rows_of(group.commands))


def complete_command(command: Any, words: Sequence[str], current: str) -> Completion:
    """Complete a word of a command whose arguments typer parses."""
    context = Context(command, help_option_names=HELP_NAMES)
    prefix, typed, line = "", current, [*words, CURSOR]
    name, equals, value = current.partition("=")
    if name.startswith("--") and equals:
        prefix, typed, line = f"{name}=", value, [*words, f"{name}={CURSOR}"]
    values, order = parse_line(command, context, line)
    parameters = command.get_params(context)
    options = [option for option in parameters if option.param_type_name == "option"]
    at_cursor = [p for p in parameters if CURSOR in as_list(values.get(p.name))]
    is_value = prefix or any(parameter in options for parameter in at_cursor)
    if current.startswith("-") and not is_value and "--" not in words:
        unused = [o for o in options if o not in order or o.multiple or o.count]
        return Completion(list(spellings(unused)))
    if not at_cursor:
        return Completion()
    parameter = at_cursor[0]
    # The longest name: topic of an argument, or of -t, --topic.
    name = max(parameter.opts, key=len).lstrip("-")
    kind, fixed = values_for(name, metavar(parameter), choices_of(parameter))
    if kind in NAMES and not fixed:
        # The value may be OLD=NEW.
        old, sign, _ = typed.rpartition("=")
        names = [(name, "") for name in fetch_names(kind, values)]
        return Completion(names, prefix=prefix + old + sign)
    return complete_value(kind, fixed, typed, prefix)


def parse_line(
    command: Any, context: Context, line: Sequence[str]
) -> tuple[Mapping[str, Any], Sequence[Any]]:
    """Return the values of parameters in a line, and the parameters in their order.

    Unknown options, and switches with a value, are ignored.
    """
    words = list(line)
    while True:
        try:
            values, _, order = command.make_parser(context).parse_args(list(words))
            return values, order
        except UsageError as error:
            option = getattr(error, "option_name", None)
            wrong_words = [word for word in words if option and word.startswith(option)]
            if not wrong_words:
                return {}, ()
            words.remove(wrong_words[0])


def as_list(value: Any) -> list[Any]:
    """Return the values of a parameter as a list."""
    return list(value) if isinstance(value, list | tuple) else [value]


def spellings(options: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """Iterate over all names of options, with their help."""
    for option in options:
        if not option.hidden:
            for name in (*sorted(option.opts, key=len), *option.secondary_opts):
                yield name, option.help or ""


def complete_daemon(entry: Command, words: Sequence[str], current: str) -> Completion:
    """Complete a word of a daemon, which parses its arguments itself.

    Flags of Go have one dash or two. Their value is the next word, or follows an equals sign. A
    bool accepts only the latter.
    """
    daemon: Any = entry.load()
    flags = daemon.flags()
    name, equals, typed = current.partition("=")
    flag_word = name if equals else words[-1] if words else ""
    flag = flags.get(key := flag_word.lstrip("-"))
    if flag is not None and (equals or (flag_word.startswith("-") and not flag.kind.is_bool)):
        form = "true|false" if flag.kind.is_bool else flag.kind.go_name
        return complete_value(*values_for(key, form), typed, f"{name}=" if equals else "")
    dashes = "--" if current.startswith("--") else "-"
    return Completion([(dashes + name, flag.help) for name, flag in flags.items()])


def values_for(name: str, form: str, fixed: tuple[str, ...] = ()) -> tuple[str, tuple[str, ...]]:
    """Return the kind of an option's values as in `BY_NAME`, and the fixed values if any."""
    fixed = fixed or CHOICES.get(name, ())
    if form == "COLUMN":
        from nsqtools.cluster.stats_documents import COLUMNS

        fixed = tuple(COLUMNS)
    elif name == "log-level":
        from nsqtools.server.daemon_log import LEVELS

        fixed = LEVELS
    # In a metavar such as hour|day|DURATION, lower-case words are typed literally.
    if not fixed and "|" in form:
        fixed = tuple(word for word in form.split("|") if not word.isupper())
    # ARCHIVE_DIR is a DIR.
    return BY_METAVAR.get(form.rpartition("_")[2]) or BY_NAME.get(name, ""), fixed


def complete_value(kind: str, fixed: Sequence[str], typed: str, prefix: str) -> Completion:
    """Complete a value that begins with ``typed``."""
    if fixed or kind not in (FILES, DIRS, CLIENT_OPTIONS):
        return Completion([(value, "") for value in fixed], prefix=prefix)
    if kind != CLIENT_OPTIONS:
        return Completion(kind=kind, prefix=prefix)
    from nsqtools.client.options import CLIENT_OPTIONS as ALL

    options = [(f"{name}=", option.metadata["help"]) for name, option in ALL.items()]
    return Completion([] if set("=,") & set(typed) else options, "nospace", prefix)


def fetch_names(kind: str, values: Mapping[str, Any]) -> list[str]:
    """Return the profiles, or names from the cluster that a line with ``values`` uses.

    Channels are those of the line's topic, or of all topics. Returns nothing if no daemon answers.
    """
    runtime = Runtime.of_process()
    if kind == PROFILES:
        from nsqtools.settings import config_path, profile_names

        with suppress(NsqError):
            return profile_names(config_path(runtime.environ))
        return []
    from nsqtools.cluster.topics import fetch_channels, fetch_topics
    from nsqtools.protocol.names import is_valid_name

    limit = Timer(TOTAL_TIMEOUT_S, os._exit, (0,))
    limit.daemon = True
    limit.start()
    try:
        with cluster_from_line(values, runtime).open(TIMEOUT_S) as cluster:
            if kind == NODES:
                nsqds, _ = cluster.nsqds()
                # host:port or a URL, without characters that are special in a shell.
                return [nsqd for nsqd in nsqds if re.fullmatch(r"[\w.:/-]+", nsqd, re.ASCII)]
            if kind == TOPICS:
                names: Iterable[str] = fetch_topics(cluster)[0]
            else:
                topic = [None, *as_list(values.get("topic"))][-1]
                names = fetch_channels(cluster, topic or "")
    except NsqError:
        return []
    finally:
        limit.cancel()
    return sorted(filter(is_valid_name, names))


def cluster_from_line(values: Mapping[str, Any], runtime: Runtime) -> ClusterSettings:
    """Return the cluster that a command with these values would use. Raises `NsqError`."""
    parser = parser_of("names", cluster_connection)
    context = Context(parser, obj=runtime)
    for parameter in sorted(parser.params, key=lambda parameter: not parameter.is_eager):
        set_converter(parameter)
        parameter.handle_parse_result(context, values, [])
    settings: ClusterSettings = parser.invoke(context)
    return settings
