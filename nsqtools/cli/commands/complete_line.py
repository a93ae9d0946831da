"""``nsq __complete_line``: what can follow the beginning of a command line, for completions/.

    nsq __complete_line bash 'nsq tail --mode=r' "$COMP_WORDBREAKS"
    nsq __complete_line zsh|fish nsq tail --mode=r

The first line printed is ``KIND LENGTH``: files and dirs are left to the shell, words and nospace
(no space after one) are listed below it; the first LENGTH characters of the word at the cursor
precede the value. bash gets what begins with that word, from its last word break on, because it
replaces no more; zsh and fish choose themselves, and get help texts.

Names come from the cluster that the line names, by way of `nsqtools.cli.commands.complete`.
Parameters are recognized by what users see, their names and the word for their value, so that a new
option completes like similar ones without being listed here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from nsqtools.cli.registry import COMMANDS, ROOT_OPTIONS, Command, Group
from nsqtools.errors import ConfigurationError

FILES, DIRS, CLIENT_OPTIONS = "files", "dirs", "options"

BY_NAME = {
    "topic": "topics",
    "channel": "channels",
    "profile": "profiles",
    "consumer-opt": CLIENT_OPTIONS,
    "producer-opt": CLIENT_OPTIONS,
    # of the daemons
    "config": FILES,
    "data-path": DIRS,
    "tls-cert": FILES,
    "tls-key": FILES,
    "tls-root-ca-file": FILES,
}
BY_METAVAR = {"FILE": FILES, "PATH": FILES, "DIR": DIRS, "NODE": "nodes"}

CHOICES = {
    "tls-min-version": ("tls1.2", "tls1.3"),
    # of the daemons
    "tls-client-auth-policy": ("require", "require-verify"),
    "tls-required": ("true", "false", "tcp-https"),
}
"""Values of options whose type does not list them, by name."""


class Value(NamedTuple):
    """What a value can be: one of ``choices``, or of the kind of `BY_NAME`."""

    kind: str = ""
    choices: tuple[str, ...] = ()


class Option(NamedTuple):
    """An option with all its spellings, or a flag of a daemon; a switch has no value."""

    names: tuple[str, ...]
    help: str
    value: Value | None = None
    is_repeatable: bool = False
    value_is_optional: bool = False
    """A bool of Go: a value is written after ``=`` or not at all."""
    panel: str = ""


class Offer(NamedTuple):
    """What can be at the cursor: words, each with its help."""

    words: Sequence[tuple[str, str]] = ()
    kind: str = "words"
    prefix: str = ""
    """What precedes the value in the word at the cursor: ``--mode=``."""


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
    entry: Command | Group = Group("", COMMANDS)
    path = []
    for word in words:
        if not isinstance(entry, Group):
            break
        if word not in entry.commands:
            return Offer()
        entry = entry.commands[word]
        path.append(word)
    if isinstance(entry, Command):
        line = raw_line(entry) if entry.raw else typed_line(typed_command(path))
        return line.offer(words[len(path) :], current)
    if current.startswith("-"):
        names = [(each, text) for each, text in ROOT_OPTIONS if not path or "help" in each]
        return Offer([(name, text) for each, text in names for name in each.split(", ")])
    shown = entry.commands.items()
    return Offer([(n, c.help) for n, c in shown if isinstance(c, Group) or not c.hidden])


class CommandLine:
    """What a command takes, and what its line has said of it."""

    def __init__(
        self,
        options: Iterable[Option],
        arguments: Sequence[Value],
        *,
        last_is_repeated: bool = False,
        has_go_flags: bool = False,
    ):
        self.options = {name: option for option in options for name in option.names}
        self.arguments = arguments
        self.last_is_repeated = last_is_repeated
        self.has_go_flags = has_go_flags
        self.given: list[tuple[str, str | None]] = []
        self.topic = ""

    def offer(self, words: Sequence[str], current: str) -> Offer:
        """What can be the word ``current`` after the ``words`` that follow the command."""
        count, awaiting, only_arguments = 0, "", False
        for word in words:
            if awaiting:
                self.take(awaiting, word)
                awaiting = ""
            elif only_arguments or len(word) < 2 or word[0] != "-":
                if self.argument(count).kind == "topics":
                    self.topic = word
                count += 1
                only_arguments |= self.has_go_flags
            elif word == "--":
                only_arguments = True
            else:
                awaiting = self.read_option(word)
        if awaiting:
            return self.values(self.options[awaiting].value, "", current)
        if only_arguments or not current.startswith("-"):
            return self.values(self.argument(count), "", current)
        name, equals, value = current.partition("=")
        if not equals:
            return self.unused_options(current)
        option = self.options.get(self.spelled(name))
        return self.values(option and option.value, name + "=", value)

    def spelled(self, name: str) -> str:
        """The name of an option as it is declared; daemons take a flag with one dash or two."""
        return "-" + name.lstrip("-") if self.has_go_flags else name

    def read_option(self, word: str) -> str:
        """Note the options of a word; returns the name of that whose value is the next word."""
        name, equals, rest = word.partition("=")
        if word[1] != "-" and not self.has_go_flags:  # letters: -v, -qn 10, -tclicks
            name, equals, rest = word[:2], "", word[2:]
        name = self.spelled(name)
        option = self.options.get(name)
        if option is None:
            return ""
        if option.value is None or option.value_is_optional:
            self.take(name, None)
            return self.read_option(f"-{rest}") if rest and not equals else ""
        if not (equals or rest):
            return name
        self.take(name, rest)
        return ""

    def take(self, name: str, value: str | None) -> None:
        """Note that an option was given."""
        self.given.append((name, value))
        kind = self.options[name].value
        if kind and kind.kind == "topics" and value:
            self.topic = value

    def argument(self, count: int) -> Value:
        """What the argument with that number is, from 0."""
        if count < len(self.arguments):
            return self.arguments[count]
        return self.arguments[-1] if self.last_is_repeated else Value()

    def unused_options(self, current: str) -> Offer:
        """Every option that may still be given; with two dashes, where a flag began so."""
        given = [self.options[name] for name, _ in self.given]
        used = {option.names for option in given if not option.is_repeatable}
        dash = "-" if self.has_go_flags and current.startswith("--") else ""
        return Offer(
            [
                (dash + name, option.help)
                for name, option in self.options.items()
                if option.names not in used
            ]
        )

    def values(self, value: Value | None, prefix: str, typed: str) -> Offer:
        """What a value can be, of which ``typed`` is there, after ``prefix``."""
        if value is None:
            return Offer()
        if value.choices or not value.kind:
            return Offer([(each, "") for each in value.choices], prefix=prefix)
        if value.kind in (FILES, DIRS):
            return Offer(kind=value.kind, prefix=prefix)
        if value.kind == CLIENT_OPTIONS:
            return Offer([] if set("=,") & set(typed) else client_options(), "nospace", prefix)
        old, equals, _ = typed.rpartition("=")  # OLD=NEW
        names = self.names(value.kind)
        return Offer([(name, "") for name in names], prefix=prefix + old + equals)

    def names(self, kind: str) -> list[str]:
        """Names from the cluster that the line names."""
        from nsqtools.cli.options.connection import CONNECTION, TLS
        from nsqtools.cli.parsing.app import HELP_NAMES, LazyGroup
        from nsqtools.cli.running.runtime import Runtime

        asked = Command("nsqtools.cli.commands.complete:names_of", "")
        asking = LazyGroup("nsq", Group("", {"names": asked})).load("names")
        request = [kind]
        if kind == "channels" and self.topic:
            request += ["--topic", self.topic.rpartition("=")[2]]
        known = typed_line(asking).options
        for name, value in self.given:
            if name in known and known[name].panel in (CONNECTION, TLS):
                request += [name] if value is None else [name, value]
        runtime = Runtime.of_process(["names", *request])
        with asking.make_context(
            "names", request, obj=runtime, help_option_names=HELP_NAMES
        ) as context:
            names: list[str] = asking.invoke(context)
        return names


def client_options() -> list[tuple[str, str]]:
    """What ``-X`` takes: ``max_attempts=``."""
    from nsqtools.client.options import CLIENT_OPTIONS

    return [(f"{name}=", option.metadata["help"]) for name, option in CLIENT_OPTIONS.items()]


def value_of(name: str, metavar: str, choices: tuple[str, ...] = ()) -> Value:
    """The value of the option or argument ``name`` (``data-path``, without leading dashes)."""
    choices = choices or CHOICES.get(name, ())
    if metavar == "COLUMN":
        from nsqtools.cluster.stats_documents import COLUMNS

        choices = tuple(COLUMNS)
    elif name == "log-level":
        from nsqtools.server.daemon_log import LEVELS

        choices = LEVELS
    if not choices and "|" in metavar:  # hour|day|DURATION: lower-case words are typed literally
        choices = tuple(word for word in metavar.split("|") if not word.isupper())
    kind = BY_METAVAR.get(metavar.rpartition("_")[2])  # ARCHIVE_DIR is a DIR
    return Value(kind or BY_NAME.get(name, ""), choices)


def typed_command(path: Sequence[str]) -> Any:
    """The command at ``path``, as typer reads it."""
    from nsqtools.cli.parsing.app import command_tree

    group: Any = command_tree()
    for word in path[:-1]:
        group = group.commands[word]
    return group.load(path[-1])


def typed_line(command: Any) -> CommandLine:
    """What a command takes whose arguments typer reads."""
    from typer import Context

    from nsqtools.cli.parsing.app import HELP_NAMES
    from nsqtools.cli.parsing.help import choices, metavar

    parameters = command.get_params(Context(command, help_option_names=HELP_NAMES))
    options, arguments, is_repeated = [], [], False
    for each in parameters:
        if each.param_type_name == "argument":
            arguments.append(value_of(each.name, metavar(each), choices(each)))
            is_repeated = each.nargs == -1
        elif not each.hidden:
            names = (*sorted(each.opts, key=len), *each.secondary_opts)
            is_switch = each.is_flag or each.count
            value = value_of(max(each.opts, key=len).lstrip("-"), metavar(each), choices(each))
            options.append(
                Option(
                    names,
                    each.help or "",
                    None if is_switch else value,
                    is_repeatable=bool(each.multiple or each.count),
                    panel=each.rich_help_panel or "",
                )
            )
    return CommandLine(options, arguments, last_is_repeated=is_repeated)


def raw_line(entry: Command) -> CommandLine:
    """What a command takes that reads its arguments itself."""
    from nsqtools.cli.parsing.help import raw_parts

    page, flags = raw_parts(entry)
    if flags is None:
        arguments = [value_of(each.lower(), each) for each, _ in page.sections["Arguments"]]
        return CommandLine([Option(("-h", "--help"), dict(ROOT_OPTIONS)["-h, --help"])], arguments)
    options = []
    for name, flag in flags.items():
        is_bool = flag.kind.is_bool
        value = value_of(name, "true|false" if is_bool else flag.kind.go_name)
        options.append(Option((f"-{name}",), flag.help, value, flag.kind.repeatable, is_bool))
    return CommandLine(options, (), has_go_flags=True)
