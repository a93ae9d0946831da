"""How HDFS is reached over HTTP: where its namenodes are, and as whom.

An ``hdfs://`` URL names the port that Hadoop's own clients use, 8020. Python asks the namenode's
HTTP port, 9870 unless something else is said: by the option, by ``NSQ_WEBHDFS_ADDRESS``, or by
``hdfs-site.xml`` in ``HADOOP_CONF_DIR``, which also knows the namenodes of a name service.

The user is the URL's, else ``HADOOP_USER_NAME``, else the one that runs this, as in Hadoop. The
executors of Spark know theirs from ``SPARK_USER``.
"""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, unquote

from nsqtools.errors import ConfigurationError
from nsqtools.protocol.addresses import http_url

if TYPE_CHECKING:
    from collections.abc import Sequence

ADDRESS, USER, CA_FILE = "NSQ_WEBHDFS_ADDRESS", "HADOOP_USER_NAME", "NSQ_TLS_CA_FILE"
OPTIONS = ("webhdfs_address", "user", "ca_file")
HTTP_PORT, HTTPS_PORT, RPC_PORT = 9870, 9871, 8020

_URL = re.compile(
    r"hdfs://?(?:([^@/\s]+)@)?((?:\[[0-9a-f:.]+\]|[^@/:\[\]\s]+)(?::\d+)?)(?:/(.*))?",
    re.DOTALL | re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class HDFSSettings:
    """``namenodes`` are base URLs; of a high-available pair one is active."""

    namenodes: tuple[str, ...]
    user: str
    ca_file: str = ""


class HDFSPlace(NamedTuple):
    """What an ``hdfs://`` URL names. ``user`` is "" for the usual one; ``path`` has no slash
    around it. ``name`` is a namenode, or a name service; it has no port if that is Hadoop's own.
    """

    user: str
    name: str
    path: str

    @property
    def root(self) -> str:
        """The URL of ``/`` there."""
        return f"hdfs://{quote(self.user, safe='')}@{self.name}" if self.user else self.url

    @property
    def url(self) -> str:
        """The URL of ``/`` there, as Hadoop takes it: the user is said elsewhere."""
        return f"hdfs://{self.name}"


def parse_hdfs(text: str) -> HDFSPlace:
    """Read an ``hdfs://`` URL. Raises `ConfigurationError`."""
    match = _URL.fullmatch(text)
    if match is None:
        raise ConfigurationError(
            f"{text} names no namenode", hint="Write hdfs://NAMENODE:8020/PATH."
        )
    parts = [part for part in (match[3] or "").split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ConfigurationError(f"{text}: a path in HDFS must not contain ..")
    name = match[2].lower().removesuffix(f":{RPC_PORT}")
    return HDFSPlace(unquote(match[1] or ""), name, "/".join(parts))


def hdfs_settings(
    place: HDFSPlace,
    options: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> HDFSSettings:
    """Return how to reach the HDFS of a URL. Raises `ConfigurationError`."""
    options = options or {}
    environ = os.environ if environ is None else environ
    if unknown := sorted(set(options) - set(OPTIONS)):
        raise ConfigurationError(
            f"HDFS has no setting {unknown[0]!r}", hint=f"There are {', '.join(OPTIONS)}."
        )
    name = place.name
    given = options.get("webhdfs_address") or environ.get(ADDRESS) or ""
    namenodes = _given(given, name) or _of_hadoop(name, environ)
    if not namenodes:
        host = name if name.endswith("]") else re.sub(r":\d+$", "", name)
        namenodes = [f"{host}:{HTTP_PORT}"]
    users = (place.user, options.get("user"), environ.get(USER), environ.get("SPARK_USER"))
    return HDFSSettings(
        tuple(map(_url, namenodes)),
        next(filter(None, users), "") or _whoami(),
        options.get("ca_file") or environ.get(CA_FILE) or "",
    )


def _url(text: str) -> str:
    port = HTTPS_PORT if text.startswith("https:") else HTTP_PORT
    url = http_url(text, port)
    if "?" in url or "@" in url or url.count("/") > 2:
        raise ConfigurationError(
            f"invalid address of a namenode {text!r}", hint="Write HOST:9870 or https://HOST:9871."
        )
    return url


def _given(text: str, name: str) -> list[str]:
    """Return the addresses in a list that are for a namenode: ``NAME=ADDRESS``, or for all."""
    found: dict[str, list[str]] = {"": [], name: []}
    for each in filter(None, (part.strip() for part in text.split(","))):
        of, equals, address = each.rpartition("=")
        of = of.lower().removesuffix(f":{RPC_PORT}")
        if not address or (equals and not of):
            raise ConfigurationError(
                f"invalid {ADDRESS} {each!r}", hint="Write ADDRESS or NAME=ADDRESS, with commas."
            )
        found.setdefault(of, []).append(address)
    return found[name] or found[""]


def _of_hadoop(name: str, environ: Mapping[str, str]) -> Sequence[str]:
    """Return what Hadoop's own configuration says of a namenode or name service."""
    folder = environ.get("HADOOP_CONF_DIR")
    if not folder:
        return []
    known = dict(_properties(Path(folder, "hdfs-site.xml")))
    scheme = "https" if known.get("dfs.http.policy") == "HTTPS_ONLY" else "http"
    key = f"dfs.namenode.{scheme}-address"
    if nodes := known.get(f"dfs.ha.namenodes.{name}"):
        keys = [f"{key}.{name}.{node.strip()}" for node in nodes.split(",")]
    else:
        keys = [f"{key}.{name}"]
    found = [known[each] for each in keys if known.get(each) and "${" not in known[each]]
    return [f"https://{each}" if scheme == "https" else each for each in found]


def _properties(path: Path) -> Iterator[tuple[str, str]]:
    """Iterate over the properties in a file of Hadoop; over none where it is not there."""
    from xml.etree import ElementTree

    try:
        root = ElementTree.parse(path).getroot()
    except FileNotFoundError:
        return
    except (OSError, ElementTree.ParseError, ValueError) as exc:
        raise ConfigurationError(f"cannot read {path} ({exc})") from None
    for each in root.iter("property"):
        yield (each.findtext("name") or "").strip(), (each.findtext("value") or "").strip()


def _whoami() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user number without a name
        raise ConfigurationError(
            "this user has no name for HDFS", hint=f"Set {USER}, or write hdfs://USER@NAMENODE/."
        ) from None
