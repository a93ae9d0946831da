"""The command tree as plain data, every command loaded: what all documents are rendered from.

The parameters come from the typer commands, or for the daemons from their flags; the prose (usage,
description, examples) is that of the help page, so manual and help cannot differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from typer import Context

from nsqtools.cli.parsing.app import HELP_NAMES, LazyGroup, command_tree
from nsqtools.cli.parsing.help import (
    CONNECTION_OPTIONS,
    HelpPage,
    group_page,
    help_page_of,
    metavar,
    notes,
    root_page,
)
from nsqtools.cli.registry import DEPRECATED, ROOT_OPTIONS, Command
from nsqtools.server.go_flags import Flag

OPTIONS = "Options"  # the panel of an option that names none


@dataclass(frozen=True)
class Option:
    """An option, with all its spellings, or a flag in Go's syntax."""

    names: tuple[str, ...]
    """The shortest first: ``-t``, ``--topic``."""
    help: str
    metavar: str | None = None
    """The word for its value; None for a switch."""
    off_names: tuple[str, ...] = ()
    """The spellings that switch it off: ``--no-tls``."""
    notes: tuple[str, ...] = ()
    """``env: NSQ_PROFILE``, ``default: 5s``, ``required``, ``repeatable``."""
    panel: str = OPTIONS
    environment: str = ""
    is_repeatable: bool = False
    is_of_connection: bool = False
    """nsq-options(7) describes it, and the pages of commands leave it out."""

    @property
    def spellings(self) -> tuple[str, ...]:
        return self.names + self.off_names


@dataclass(frozen=True)
class Argument:
    """A positional argument."""

    metavar: str
    help: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Page:
    """A command, or a group of commands, or ``nsq`` itself."""

    words: tuple[str, ...]
    """``("nsq", "topic", "create")``."""
    summary: str
    help: HelpPage
    options: tuple[Option, ...]
    arguments: tuple[Argument, ...] = ()
    commands: tuple[Page, ...] = ()
    is_raw: bool = False
    """typer does not read its arguments."""
    has_go_flags: bool = False

    @property
    def path(self) -> str:
        """The words as they are typed."""
        return " ".join(self.words)

    def walk(self) -> Iterator[Page]:
        """This page and all below it, in the order of the help."""
        yield self
        for command in self.commands:
            yield from command.walk()


HELP_OPTION = Option(tuple(HELP_NAMES), dict(ROOT_OPTIONS)[", ".join(HELP_NAMES)])


def read_tree() -> Page:
    """Load every command, and return the page of ``nsq``."""
    tree = command_tree()
    context = Context(tree, info_name="nsq", help_option_names=HELP_NAMES)
    options = tuple(Option(tuple(names.split(", ")), help) for names, help in ROOT_OPTIONS)
    page = root_page()
    commands = _commands(tree, context, ("nsq",))
    return Page(("nsq",), page.description, page, options, commands=commands)


def _commands(group: LazyGroup, context: Context, words: tuple[str, ...]) -> tuple[Page, ...]:
    pages = []
    for name, entry in group.group.commands.items():
        path = (*words, name)
        if entry in DEPRECATED.values():
            continue
        if isinstance(entry, Command):
            pages.append(_raw_command(entry, path) if entry.raw else _command(group, context, path))
        else:
            below: Any = group.commands[name]
            inner = Context(below, info_name=name, parent=context)
            page = group_page(" ".join(path), entry)
            commands = _commands(below, inner, path)
            pages.append(Page(path, entry.help, page, (HELP_OPTION,), commands=commands))
    return tuple(pages)


def _command(group: LazyGroup, context: Context, words: tuple[str, ...]) -> Page:
    command = group.load(words[-1])
    inner = Context(command, info_name=words[-1], parent=context)
    parameters: list[Any] = command.get_params(inner)
    entry = group.group.commands[words[-1]]
    return Page(
        words,
        entry.help,
        help_page_of(command, inner),
        tuple(
            _option(each)
            for each in parameters
            if each.param_type_name == "option" and not each.hidden
        ),
        tuple(_argument(each) for each in parameters if each.param_type_name == "argument"),
    )


def _option(option: Any) -> Option:
    names = tuple(sorted(option.opts, key=len))
    is_switch = option.is_flag or option.count
    return Option(
        names,
        option.help or "",
        None if is_switch else metavar(option),
        tuple(option.secondary_opts),
        tuple(notes(option)),
        option.rich_help_panel or OPTIONS,
        option.envvar or "",
        bool(option.multiple or option.count),
        option.name in CONNECTION_OPTIONS,
    )


def _argument(argument: Any) -> Argument:
    return Argument(metavar(argument), argument.help or "", tuple(notes(argument)))


def _raw_command(entry: Command, words: tuple[str, ...]) -> Page:
    """A daemon, which reads its arguments itself."""
    daemon: Any = entry.load()
    page, flags = daemon.page(), daemon.flags()
    texts = [text for _, text in page.sections["Flags"]]
    options = tuple(map(_flag, flags.items(), texts))
    return Page(words, entry.help, page, options, is_raw=True, has_go_flags=True)


def _flag(named: tuple[str, Flag], text: str) -> Option:
    name, flag = named
    metavar = "" if flag.kind.is_bool else flag.kind.go_name
    return Option((f"-{name}",), text, metavar, is_repeatable=flag.kind.repeatable)
