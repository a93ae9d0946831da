"""``nsq mcp``: commands as tools of an assistant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from nsqtools.cli.commands.schema import all_schemas
from nsqtools.cli.options.params import SAFETY
from nsqtools.cli.parsing.app import all_parsers
from nsqtools.cli.parsing.binding import annotation_of, choices_of, opt
from nsqtools.cli.parsing.help import ADDRESS
from nsqtools.cli.registry import PANELS


def mcp(
    allow_changes: bool = opt("", "Let the assistant carry out plans that it has shown.", SAFETY),
    show_messages: bool = opt("", "Let the assistant read bodies of messages.", SAFETY),
) -> None:
    """Serve commands to assistants, as tools of the Model Context Protocol.

    Speaks the protocol on stdin and stdout until stdin ends. The tools are commands of nsq with
    --json. Addresses, TLS and secrets come from the environment and the configuration file, never
    from the assistant.

    Tools only read. A tool that changes topics or channels returns its plan and a token. Only with
    --allow-changes it acts, and only when it is called again with the token and the plan is still
    the same. Bodies are shown only with --show-messages: at most 20 messages, each shortened to
    2,000 characters, with everything but ASCII escaped. They may contain text that tries to
    instruct the assistant.

    Examples:
        claude mcp add nsq -- nsq mcp
        nsq mcp --allow-changes
    """
    from nsqtools.cli.running.mcp_server import serve

    serve(allow_changes=allow_changes, show_messages=show_messages)


# -- tools ----------------------------------------------------------------------------------------

# A command is a tool if it prints JSON and needs no file of this machine: it reads, or it changes
# topics and channels and has a ``--dry-run``. Commands that print bodies are tools on request. An
# assistant gives neither addresses nor options of connection, output and safety.

MAX_MESSAGES = 20
MAX_BODY = 2000  # characters
_PANELS = (None, "Options", "Limits", "Rows", "Bounds", "Selection")
TOKEN = {"type": "string", "description": "The token of the plan to carry out."}


@dataclass(frozen=True, slots=True)
class CommandTool:
    """A command as a tool; ``parameters`` are those of typer by the name that an assistant uses."""

    name: str
    words: tuple[str, ...]
    impact: str
    description: str
    parameters: Mapping[str, Any]
    flags: tuple[str, ...]
    has_bodies: bool

    @property
    def is_change(self) -> bool:
        """Whether it needs a plan."""
        return "--dry-run" in self.flags

    def input_schema(self) -> dict[str, Any]:
        """Return the JSON Schema of its arguments."""
        properties = {name: _schema(parameter) for name, parameter in self.parameters.items()}
        if self.has_bodies:
            properties["count"] = {"type": "integer", "minimum": 1, "maximum": MAX_MESSAGES}
        if self.is_change:
            properties["token"] = TOKEN
        required = [name for name, parameter in self.parameters.items() if parameter.required]
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }

    def command_line(self, arguments: Mapping[str, Any]) -> list[str]:
        """Return the words of the command for arguments that fit the schema.

        No argument becomes another option: values are joined to their options, and the others
        follow ``--``.
        """
        options: list[str] = []
        positional: list[tuple[int, list[str]]] = []
        for name, value in arguments.items():
            parameter = self.parameters[name]
            values = value if isinstance(value, list) else [value]
            if parameter.param_type_name == "argument":
                positional.append((list(self.parameters).index(name), list(map(str, values))))
            elif parameter.is_flag:
                options += parameter.opts[:1] if value else []
            else:
                options += [f"{max(parameter.opts, key=len)}={item}" for item in values]
        if self.has_bodies and "count" not in arguments:
            options.append("--count=3")
        words = [word for _, words in sorted(positional) for word in words]
        extra = [flag for flag in self.flags if flag in ("--once", "--json")]
        return [*self.words, *extra, *options, "--", *words]


def command_tools(*, show_messages: bool) -> dict[str, CommandTool]:
    """Return the tools by name."""
    schemas = dict(all_schemas())
    tools = (
        _tool(path, entry.impact, parser, schemas[path])
        for path, entry, parser in all_parsers()
        if parser is not None and path in schemas and path.split()[0] not in PANELS["Spark"]
    )
    return {
        tool.name: tool
        for tool in tools
        if tool is not None and (show_messages or not tool.has_bodies)
    }


def _tool(path: str, impact: str, parser: Any, schema: str) -> CommandTool | None:
    flags = tuple(name for parameter in parser.params for name in parameter.opts)
    has_bodies = schema == "message" and (impact == "reads" or path == "peek")
    plans = schema == "changes" and "--dry-run" in flags
    needs_file = any(p.required and _is_path(p) for p in parser.params)
    if needs_file or "--json" not in flags or not (impact == "reads" or has_bodies or plans):
        return None
    return CommandTool(
        path.replace(" ", "_"),
        tuple(path.split()),
        impact,
        parser.help.partition("Examples:")[0].strip(),
        dict(_parameters(parser.params, flags)),
        flags,
        has_bodies,
    )


def _parameters(parameters: Sequence[Any], flags: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for parameter in parameters:
        is_option = (
            parameter.param_type_name == "option"
            and parameter.rich_help_panel in _PANELS
            and not parameter.hidden
            and parameter.name not in ("help", "bodies", "delimiter")
            and parameter.metavar != ADDRESS
            and not _is_path(parameter)
            and not ("--once" in flags and parameter.name in ("once", "count"))
        )
        if is_option or parameter.param_type_name == "argument":
            yield parameter.name, parameter


def _is_path(parameter: Any) -> bool:
    kind = annotation_of(parameter)
    return isinstance(kind, type) and issubclass(kind, PurePath)


def _schema(parameter: Any) -> dict[str, Any]:
    text = getattr(parameter, "help", "") or ""
    if getattr(parameter, "is_flag", False):
        return {"type": "boolean", "description": text}
    item: dict[str, Any] = {"type": "string"}
    if values := choices_of(parameter):
        item = {"enum": list(values)}
    elif annotation_of(parameter) is int:
        item = {"type": "integer"}
    if parameter.nargs == -1 or getattr(parameter, "multiple", False):
        return {"type": "array", "items": item, "description": text}
    return {**item, "description": text}
