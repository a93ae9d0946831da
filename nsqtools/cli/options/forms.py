"""How a listing is printed: ``--output``, ``--columns`` and ``--json``, made into one `Form`.

A command declares ``form: ListingForm``, prints its JSON document where ``form.is_document``, and
gives its rows to `write_listing` otherwise.
"""

from __future__ import annotations

from typing import Annotated

from nsqtools.cli.options.params import OUTPUT, Json
from nsqtools.cli.parsing.binding import From, opt
from nsqtools.cli.render.output import Form, Kind
from nsqtools.errors import ConfigurationError

Columns = Annotated[
    str | None,
    opt(
        "--columns NAME,...",
        "Columns to show, in this order; with json, rows of these instead of the document.",
        OUTPUT,
    ),
]


def listing_form(
    output: Kind | None = opt(
        "-o table|wide|tsv|csv|json|jsonl",
        "Form of the listing; wide leaves out no column, jsonl has a row on each line.",
        OUTPUT,
        show_default="table on a terminal, tsv elsewhere",
    ),
    columns: Columns = None,
    json: Json = False,
) -> Form:
    """The form. Raises `ConfigurationError` where ``--json`` and ``--output`` contradict."""
    if json and output not in (None, Kind.json):
        raise ConfigurationError("--json and --output contradict each other")
    names = [name.strip() for name in (columns or "").split(",")]
    return Form(Kind.json if json else output, tuple(filter(None, names)))


ListingForm = Annotated[Form, From(listing_form)]
