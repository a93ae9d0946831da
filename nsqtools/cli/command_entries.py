"""What the registry is made of: commands, and groups of them. Nothing is imported here."""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing would triple the time of nsq --version
if TYPE_CHECKING:
    from collections.abc import Callable


class Command:
    """One command: where its function is, what it does in a line, under which heading it stands.

    A *raw* command gets the list of its arguments untouched and does not pass through typer:
    the daemons parse Go-style flags (``-data-path=/var/nsq``) themselves. A *hidden* one is for
    programs, and no list of commands shows it.
    """

    __slots__ = ("entry", "help", "hidden", "panel", "raw")

    def __init__(
        self,
        entry: str,
        help: str,
        *,
        panel: str = "Commands",
        raw: bool = False,
        hidden: bool = False,
    ):
        self.entry = entry
        self.help = help
        self.panel = panel
        self.raw = raw
        self.hidden = hidden

    def load(self) -> Callable[..., int | None]:
        """Import the command's module and return its function."""
        from importlib import import_module

        module, _, function = self.entry.partition(":")
        loaded: Callable[..., int | None] = getattr(import_module(module), function)
        return loaded


class Group:
    """A family of commands: ``nsq topic create``, ``nsq topic delete``."""

    __slots__ = ("commands", "examples", "help", "panel")

    def __init__(
        self,
        help: str,
        commands: dict[str, Command | Group],
        *,
        panel: str,
        examples: tuple[str, ...] = (),
    ):
        self.help = help
        self.commands = commands
        self.panel = panel
        self.examples = examples
