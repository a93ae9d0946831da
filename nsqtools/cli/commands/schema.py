"""``nsq schema``: the JSON Schemas of the output of commands.

The schemas are generated from the types in `nsqtools.cli.render.documents`. A schema has the name
of its command (``topic-list``). `SHARED` lists the commands that share a schema.
"""

from __future__ import annotations

from enum import Enum
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NotRequired,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from typer import Argument

from nsqtools.cli.render.output import ListingForm, write_json, write_listing
from nsqtools.cli.running.runtime import Session
from nsqtools.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator

COLUMNS = ("command", "schema", "prints")

CHANGES = ("create", "delete", "empty", "pause", "unpause")
SHARED = {
    **{f"{kind} {change}": "changes" for kind in ("topic", "channel") for change in CHANGES},
    **dict.fromkeys(("tombstone", "topology plan", "topology apply"), "changes"),
    **dict.fromkeys(("tail", "peek", "archive cat", "queue cat"), "message"),
    **dict.fromkeys(("to-http", "to-exec"), "to-nsq"),
    **dict.fromkeys(("config get", "config set"), "node-options"),
    **dict.fromkeys(("bench pub", "bench sub", "bench e2e"), "bench"),
}

Words = Annotated[
    list[str] | None,
    Argument(metavar="COMMAND", help="Words of the command (topic list), or the name of a schema."),
]


def schema(command: Words = None, *, form: ListingForm, runtime: Session) -> None:
    """Print the JSON Schema of what a command prints with --json.

    Without a command, lists all schemas. nsq schema error is the schema of errors, and nsq schema
    message that of messages. nsq-output(7) documents their stability.

    Examples:
        nsq schema
        nsq schema topic list
        nsq schema stat | jq '.properties.queues.items.properties | keys'
    """
    if command:
        write_json(runtime, read_schema(" ".join(command)))
        return
    rows = [(name, shared, read_schema(name)["title"]) for name, shared in all_schemas()]
    write_listing(runtime, COLUMNS, rows, form, optional=("schema",))


def read_schema(name: str) -> dict[str, Any]:
    """Return the schema of a command, or the schema with a name. Raises `NotFoundError`."""
    from nsqtools.cli.render.documents import DOCUMENTS

    shared = schema_of(name)
    if shared not in DOCUMENTS:
        raise NotFoundError(f"there is no schema of {name!r}", hint="nsq schema lists all schemas.")
    kind = DOCUMENTS[shared]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:nsqtools:output:1:{shared}",
        "title": title_of(kind),
        **schema_of_type(kind),
    }


SCALARS: dict[Any, dict[str, Any]] = {
    Any: {},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer", "minimum": 0},
    float: {"type": "number", "minimum": 0},
    NoneType: {"type": "null"},
}


def title_of(kind: Any) -> str:
    """Return the first sentence of the docstring of a type, or of its first type argument."""
    while parts := get_args(kind):
        kind = parts[0]
    return " ".join((kind.__doc__ or kind.__name__).split()).partition(". ")[0].removesuffix(".")


def schema_of_type(kind: Any) -> dict[str, Any]:
    """Convert a type to JSON Schema."""
    form, parts = get_origin(kind), get_args(kind)
    if form is None and kind in SCALARS:
        return SCALARS[kind]
    if form is NotRequired:
        return schema_of_type(parts[0])
    if form is Annotated:
        schema = schema_of_type(parts[0])
        for mark in parts[1:]:
            keyword, value = ("description", mark) if isinstance(mark, str) else mark
            schema = {**schema, keyword: value}
        return schema
    if form is Literal:
        return {"enum": list(parts)}
    if form is list:
        return {"type": "array", "items": schema_of_type(parts[0])}
    if form is dict:
        return {"type": "object", "additionalProperties": schema_of_type(parts[1])}
    if form in (Union, UnionType):
        schemas = [schema_of_type(part) for part in parts]
        scalar, *others = schemas
        if others == [SCALARS[NoneType]] and scalar.get("type") in ("string", "integer", "number"):
            return scalar | {"type": [scalar["type"], "null"]}
        return {"anyOf": schemas}
    if issubclass(kind, Enum):
        return {"enum": [member.value for member in kind]}
    fields = get_type_hints(kind, include_extras=True)
    # Only TypedDict has optional keys.
    required = getattr(kind, "__required_keys__", fields)
    return {
        "type": "object",
        "required": [name for name in fields if name in required],
        "properties": {name: schema_of_type(field) for name, field in fields.items()},
    }


def schema_of(command: str) -> str:
    """Return the name of the schema of a command, which may not exist."""
    return SHARED.get(command, command).replace(" ", "-")


def all_schemas() -> Iterator[tuple[str, str]]:
    """Iterate over the commands with a schema and its name, then the schemas without a command."""
    from nsqtools.cli.registry import COMMANDS, Group
    from nsqtools.cli.render.documents import DOCUMENTS

    names = [
        f"{word} {subcommand}" if isinstance(entry, Group) else word
        for word, entry in COMMANDS.items()
        for subcommand in (entry.commands if isinstance(entry, Group) else (word,))
    ]
    for name in (*names, "message", "error"):
        if schema_of(name) in DOCUMENTS:
            yield name, schema_of(name)
