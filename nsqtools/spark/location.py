"""Where data is: the paths of all commands and data sources, parsed in one place.

A location is a path of a mounted file system, or a ``file:`` URL. Any other scheme (``s3a://``,
``hdfs://`` ...) is refused before anything runs. Taken for a relative path, ``s3a://bucket/lake``
would be a local directory named ``s3a:``, and what was verified there would justify deleting the
only other copy.

Trap: `pathlib.Path` joins the slashes of a URL, so text is parsed before it becomes a path; what
already is one is recognized all the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")
LOCAL_HOSTS = ("", "localhost")

SHARED = "Give a directory that this machine and the executors have mounted under one path."


def parse_location(text: str) -> Path:
    """Return the path that a location names. Raises ``ValueError`` for one that is not local."""
    if not text:
        raise ValueError("an empty path names no file or directory")
    scheme = _SCHEME.match(text)
    if scheme is None:
        return Path(text)
    name, rest = scheme[1].lower(), text[len(scheme[0]) - 1 :]
    host, slash, below = rest[2:].partition("/") if rest.startswith("//") else ("", "/", rest[1:])
    if name != "file" or host not in LOCAL_HOSTS or not slash:
        where = f"host {host!r}" if name == "file" else f"{name}:"
        raise ValueError(f"{text}: {where} is not supported, only mounted file systems are")
    return Path("/" + unquote(below))


def parse_locations(texts: Iterable[str]) -> list[Path]:
    """Return the paths of several locations. Raises ``ValueError``."""
    return [parse_location(text) for text in texts]


def spark_url(path: Path) -> str:
    """Return how to name a local path to Spark: without a scheme it may mean another file system.

    Hadoop takes what follows ``file://`` as it is, so nothing is escaped.
    """
    return f"file://{path.absolute()}"
