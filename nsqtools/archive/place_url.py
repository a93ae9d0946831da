"""The paths and URLs that users give for a place.

A place is written as a path, a ``file:`` URL, or the URL of an object store (``s3://``, ``s3a://``,
``gs://``, ``az://``, ``abfss://``).

Trap: an unknown scheme must never be taken for a relative path. ``s3n://bucket/lake`` would be a
local directory named ``s3n:``, and a verified copy there would justify deleting the only other one.

Trap: `pathlib.Path` joins the slashes of a URL, so text is parsed before it becomes a path.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote

from nsqtools.archive.place import LocalPlace, Place
from nsqtools.errors import ConfigurationError

OBJECT_SCHEMES = ("s3", "s3a", "gs", "az", "abfss")
HDFS_SCHEMES = ("hdfs", "webhdfs")
LOCAL_HOSTS = ("", "localhost")

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")


def parse_place(text: str, options: Mapping[str, str] | None = None) -> Place:
    """Return the place of a local path or URL, without any request.

    Args:
        options: settings of the object store under obstore's names, in addition to those of the
            environment.

    Raises `ConfigurationError` for an unsupported scheme, and `NsqError` if the package for object
    stores is not installed.
    """
    if scheme_of(text) in OBJECT_SCHEMES:
        # Loaded only when a store is used, to spare local commands the time of the import.
        from nsqtools.archive.storage_objects import BucketPlace

        return BucketPlace.from_url(text, options or {})
    if options:
        raise ConfigurationError(f"{text} is not an object store and takes no storage options")
    return LocalPlace(local_path(text))


def scheme_of(text: str) -> str:
    """Return the scheme of a URL in lower case, "" for a path."""
    match = _SCHEME.match(text)
    return match[1].lower() if match else ""


def local_path(text: str) -> Path:
    """Return the path of a local path or ``file:`` URL. Raises `ConfigurationError`."""
    if not text:
        raise ConfigurationError("an empty path names no file or directory")
    match = _SCHEME.match(text)
    if match is None:
        return Path(text)
    rest = text[len(match[0]) - 1 :]
    host, slash, path = rest[2:].partition("/") if rest.startswith("//") else ("", "/", rest[1:])
    if match[1].lower() != "file" or host not in LOCAL_HOSTS or not slash:
        supported = ", ".join(f"{scheme}://" for scheme in ("file", *OBJECT_SCHEMES))
        hint = f"Give a local path or one of {supported}."
        if match[1].lower() in HDFS_SCHEMES:
            hint = "Copy it with `hdfs dfs -get`, mount it, or give an object store (s3://...)."
        raise ConfigurationError(f"{text} is not supported as storage", hint=hint)
    return Path("/" + unquote(path))
