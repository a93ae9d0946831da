"""A report as one HTML page: data, script and style in it, for a browser without a network.

The charts are Plotly's, whose script (4.8 MB) is put into the page. What messages were called ends
up only in the JSON, which the page shows as text, never as markup.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from nsqtools.errors import NsqError


def require_plotly() -> None:
    """Raise `NsqError` where the library of the charts is missing."""
    try:
        import plotly  # noqa: F401
    except ImportError as error:
        raise NsqError(
            "the HTML page needs the package plotly",
            hint="Install it with: pip install 'nsqtools[spark]'",
        ) from error


def render_page(document: Mapping[str, Any], made: str) -> str:
    """Return the page of a report's document; ``made`` is the time, in RFC 3339."""
    from plotly.offline import get_plotlyjs

    template = resources.files(__package__).joinpath("page.html").read_text("utf-8")
    data = json.dumps({**document, "made": made}, ensure_ascii=False).replace("<", "\\u003c")
    head, _, rest = template.partition("@REPORT@")
    middle, _, tail = rest.partition("@PLOTLY@")
    return "".join((head, data, middle, get_plotlyjs(), tail))
