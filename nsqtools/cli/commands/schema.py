"""``nsq schema``: what the JSON of each command looks like.

The schemas are files of `nsqtools.cli.schemas`. A command's has the name of the command
(``topic-list.json``); `SHARED` lists the commands that print the same as others, and what is no
command's output alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument

from nsqtools.cli.options.forms import ListingForm
from nsqtools.cli.render.output import write_json, write_listing
from nsqtools.cli.running.runtime import Session
from nsqtools.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator

SCHEMAS = Path(__file__).parents[1] / "schemas"
COLUMNS = ("command", "schema", "prints")

CHANGES = ("create", "delete", "empty", "pause", "unpause")
SHARED = {
    **{f"{kind} {change}": "changes" for kind in ("topic", "channel") for change in CHANGES},
    "tombstone": "changes",
    "tail": "message",
    "to-http": "to-nsq",
    "peek": "message",
    "archive cat": "message",
    "config get": "node-options",
    "config set": "node-options",
    "bench pub": "bench",
    "bench sub": "bench",
    "bench e2e": "bench",
}

Words = Annotated[
    list[str] | None,
    Argument(metavar="COMMAND", help="Words of the command (topic list), or the name of a schema."),
]


def schema(command: Words = None, *, form: ListingForm, runtime: Session) -> None:
    """Print the JSON Schema of what a command prints with --json.

    Without a command, lists all of them. The schema of errors is nsq schema error, that of a
    message nsq schema message. nsq-output(7) says what is promised about them.

    Examples:
        nsq schema
        nsq schema topic list
        nsq schema stat | jq '.properties.queues.items.properties | keys'
    """
    if command:
        write_json(runtime, read_schema(" ".join(command)), indent=2)
        return
    rows = [(name, file, read_schema(file)["title"]) for name, file in all_schemas()]
    write_listing(runtime, COLUMNS, rows, form, optional=("schema",))


def read_schema(name: str) -> dict[str, Any]:
    """The schema of a command or of a name. Raises `NotFoundError`."""
    from json import loads

    file = SCHEMAS / f"{schema_of(name)}.json"
    try:
        document: dict[str, Any] = loads(file.read_text("utf-8"))
    except FileNotFoundError:
        raise NotFoundError(
            f"there is no schema of {name!r}", hint="nsq schema lists what there is."
        ) from None
    return document


def schema_of(command: str) -> str:
    """The name of the schema of what a command prints, whether there is one or not."""
    name = SHARED.get(command, command).replace(" ", "-")
    return "" if "/" in name or name.startswith(".") else name


def all_schemas() -> Iterator[tuple[str, str]]:
    """Every command that prints JSON, with its schema; what belongs to none has its own name."""
    from nsqtools.cli.registry import COMMANDS, Group

    names = [
        f"{word} {below}" if isinstance(entry, Group) else word
        for word, entry in COMMANDS.items()
        for below in (entry.commands if isinstance(entry, Group) else (word,))
    ]
    for name in (*names, "message", "error"):
        if (SCHEMAS / f"{schema_of(name)}.json").exists():
            yield name, schema_of(name)
