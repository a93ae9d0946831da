"""The places of tables: one table, or one for each topic, as in ``s3://bucket/lake/{topic}``.

Topics have fields of the same name and different types (``id`` is a number here and text there), so
tables with columns for fields are one for each topic unless they exist otherwise. No table is
created below the root of another one, because its readers would find the files of both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from nsqtools.archive.delta import SINK_LOG, is_table
from nsqtools.archive.place import DeniedError, Place, map_concurrently
from nsqtools.archive.place_url import parse_place
from nsqtools.errors import ConfigurationError
from nsqtools.protocol.names import is_valid_name

TOPIC = "{topic}"
COLUMNS = "_columns"
"""The folder with the columns of a Parquet folder: the newest file has all of them."""


def split_at_topic(url: str) -> tuple[str, str]:
    """Return the folder above all tables, and the rest of the URL, which has the topic.

    The rest is empty for a place of one table. Raises `ConfigurationError` for a URL without a
    folder above the tables.
    """
    if TOPIC not in url:
        return url, ""
    base, slash, _ = url.partition(TOPIC)[0].rpartition("/")
    if not slash or base.endswith((":", ":/")):
        raise ConfigurationError(
            f"{url} has no folder above {TOPIC}", hint=f"Write DIRECTORY/{TOPIC}."
        )
    return base or "/", url.removeprefix(f"{base}/")


def url_of_topic(url: str, topic: str | None) -> str:
    """Return the URL of the table of a topic. Raises ``ValueError`` with the reason."""
    if TOPIC not in url:
        return url
    if topic is None:
        raise ValueError("it has bare bodies, which name no topic")
    # nsqd refuses such a topic, so a damaged or forged log has it.
    if not is_valid_name(topic):
        raise ValueError(f"its topic {topic[:64]!r} cannot be the name of a table")
    # A leading dot would hide the table from readers, or lead out of the folder. No topic begins
    # with a tilde.
    return url.replace(TOPIC, f"~{topic}" if topic.startswith(".") else topic)


def has_table(place: Place) -> bool:
    """Return whether a place is a Delta table or a folder of Parquet. Raises ``OSError``."""
    folders = {name.rpartition("/")[2] for name in place.children("")[1]}
    is_parquet = any(name.startswith("topic=") or name in (COLUMNS, SINK_LOG) for name in folders)
    return is_parquet or is_table(place)


def tables_below(place: Place) -> list[Place]:
    """Return the tables in the folders of a place, which is no table. Raises ``OSError``."""
    folders = [name.rpartition("/")[2] for name in place.children("")[1]]
    names = [name for name in folders if name[:1] not in "._" and "=" not in name]
    places: Sequence[Place] = [place / name for name in names]
    are_tables = map_concurrently(has_table, places, is_remote=place.is_remote)
    return [below for below, is_one in zip(places, are_tables, strict=True) if is_one]


def choose_url(
    url: str,
    options: Mapping[str, str],
    *,
    has_columns: bool,
    has_many_topics: Callable[[], bool],
) -> str:
    """Return the URL of the table, or of the tables of the topics, for messages that go to a place.

    A table continues. A place without one gets tables for many topics whose fields become columns,
    and if it has such tables. Raises ``OSError`` and `NsqError`.
    """
    place = parse_place(url, options)
    if TOPIC in url or has_table(place):
        return url
    if (has_columns and has_many_topics()) or tables_below(place):
        return f"{url.rstrip('/')}/{TOPIC}"
    return url


def refuse_inside_table(place: Place) -> None:
    """Raise `ConfigurationError` for a place below a table. Raises ``OSError``."""
    for folder in place.absolute().parents:
        # A user may not have the right to list the root of a bucket.
        with suppress(DeniedError, PermissionError):
            if has_table(folder):
                raise ConfigurationError(
                    f"{place} is inside the table {folder}, whose readers would read both",
                    hint=f"Give another place: nsq archive convert {folder} -o 'PLACE/{TOPIC}' "
                    "--store delta makes tables of its topics.",
                )
