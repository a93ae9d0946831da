"""HDFS over WebHDFS, the HTTP API that every namenode has.

A namenode answers questions about names itself and sends a client on to a datanode for data. Of
several namenodes the active one is found by asking: a standby refuses, and says that it is one. A
question is asked again when nobody answered, so whoever changes something must bear that it was
done before: `rename` says how.

The name of the user is sent, without proof (Hadoop's simple authentication). A namenode that wants
Kerberos is an error that says so.

Traps: a namenode names the datanode to talk to, so it could send us anywhere; nothing secret is
sent there, and TLS is not left. The messages of Java's exceptions may hold whole stack traces: what
is shown is the first line, with nothing in it that a terminal would act on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar
from urllib.parse import quote, urlsplit

from nsqtools.errors import ConnectionFailed, DeadlineExceeded, HTTPError, NsqError, ProtocolError
from nsqtools.http.http_api import HTTPAPI, load_json
from nsqtools.protocol.escaping import escape_line

if TYPE_CHECKING:
    import ssl

    from nsqtools.http.exchange import Answer

T = TypeVar("T")

API = "/webhdfs/v1"
LONGEST_REASON = 200
MOST_DATA = 8 << 20
"""Bytes of a file in one answer."""
LONGEST_ANSWER = 24 << 20  # a folder is listed a thousand names at a time
MOST_DATANODES = 64  # with connections of their own

CONNECT_TIMEOUT_S, TIMEOUT_S = 5.0, 120.0
SLOWEST_UPLOAD = 256 << 10  # bytes a second
PAUSES_S = (0.2, 1.0, 3.0)
"""Between rounds over all namenodes: one takes over from another within seconds."""
NOT_NOW = {"StandbyException", "RetriableException", "ObserverRetryOnActiveException"}

NOT_A_FOLDER = "(is not a directory)"

UNLIKE = "it does not answer like WebHDFS"
HINT = "The HTTP port of a namenode is usually 9870; NSQ_WEBHDFS_ADDRESS names another one."
KERBEROS = (
    "it wants Kerberos or another authentication, which is not supported (HTTP 401)",
    "Mount HDFS on this machine and on all executors (its NFS gateway or hadoop-fuse-dfs).",
)


class FileStatus(NamedTuple):
    """What a namenode says of a file or folder. ``name`` is "" where it was asked for itself."""

    name: str
    is_file: bool
    is_folder: bool
    size: int
    modified_ms: int
    inode: int
    """No other file has it, now or later."""


class WebHDFS:
    """One HDFS, by the base URLs of its namenodes. Thread-safe. Close it.

    Paths are absolute. Methods raise `HTTPError`, whose ``code`` is the name of Java's exception,
    `ConnectionFailed`, `DeadlineExceeded`, `TLSError` and `ProtocolError`.
    """

    def __init__(
        self, namenodes: Sequence[str], user: str, *, tls: ssl.SSLContext | None = None
    ) -> None:
        self._tls = tls
        self._user = user
        self._namenodes = [_Node(url, tls) for url in namenodes]
        self._active = 0
        self._datanodes: dict[str, _Node] = {}

    def close(self) -> None:
        """Close all connections."""
        for node in (*self._namenodes, *self._datanodes.values()):
            node.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # -- names ----------------------------------------------------------------------------------

    def status(self, path: str) -> FileStatus:
        """Return what there is to know of a file or folder."""
        document = self._ask("GET", path, "GETFILESTATUS")
        return _reading(lambda: _status(document["FileStatus"]), self._where)

    def list(self, path: str) -> Iterator[FileStatus]:
        """Iterate over what a folder holds, in order of names; of a file over itself."""
        after = ""
        while True:
            asked = {"startAfter": after} if after else {}
            document = self._ask("GET", path, "LISTSTATUS_BATCH", **asked)
            found, left = _reading(partial(_listing, document), self._where)
            yield from found
            if left <= 0:
                return
            if not found or _bytes(found[-1].name) <= _bytes(after):
                raise ProtocolError(f"{self._where}: {UNLIKE}: its listing does not go on")
            after = found[-1].name

    def rename(self, path: str, to: str, *, replaces: bool) -> None:
        """Give a file another name, in one step; a file of that name goes, or is an error.

        `HTTPError` with ``FileNotFoundException`` or ``FileAlreadyExistsException`` may mean that
        this was done, and the answer lost.
        """
        how = "OVERWRITE" if replaces else "NONE"
        self._ask("PUT", path, "RENAME", destination=to, renameoptions=how)

    def delete(self, path: str) -> None:
        """Remove a file; one that is not there is fine."""
        self._ask("DELETE", path, "DELETE", recursive="false")

    # -- data -----------------------------------------------------------------------------------

    def read(self, path: str, start: int, length: int) -> bytes:
        """Return the bytes from ``start``, which must be in the file, at most `MOST_DATA`."""
        length = min(length, MOST_DATA)
        asked = {"offset": str(start), "length": str(length)}
        answer = self._transfer("GET", path, "OPEN", asked, lambda: (None, 0))
        if len(answer.body) > length:
            raise ProtocolError(f"{self._where}: {UNLIKE}: it sends more than it was asked for")
        return bytes(answer.body)

    def create(self, path: str, parts: Callable[[], Iterator[bytes]], size: int) -> None:
        """Write a file, and its folders; one that is there is replaced.

        Every datanode has it on its disk, not only in memory, when this returns.
        """
        asked = {"overwrite": "true", "createflag": "CREATE,OVERWRITE,SYNC_BLOCK"}
        self._transfer("PUT", path, "CREATE", asked, lambda: (parts(), size))

    def _transfer(
        self,
        method: str,
        path: str,
        operation: str,
        asked: Mapping[str, str],
        content: Callable[[], tuple[Iterator[bytes] | None, int]],
    ) -> Answer:
        """Ask a namenode where, and then a datanode, another one when the first cannot be reached.

        What is sent can be sent again: it is a whole file.
        """
        avoided: list[str] = []
        for pause_s in (*PAUSES_S, None):
            more = {**asked, "excludedatanodes": ",".join(avoided)} if avoided else asked
            answer = self._ask_namenodes(method, path, operation, more)
            if 200 <= answer.status < 300 and method == "GET":  # HttpFS has the data itself
                return answer
            url = self._redirect(answer)
            node = self._datanode(url)
            try:
                parts, size = content()
                answer = node.ask(method, url, None, parts, size)
            except (ConnectionFailed, DeadlineExceeded):
                if pause_s is None:
                    raise
                avoided.append(urlsplit(url).hostname or "")
                time.sleep(pause_s)
                continue
            if not 200 <= answer.status < 300:
                raise _refusal(answer, node.url)
            return answer
        raise AssertionError

    def _redirect(self, answer: Answer) -> str:
        """Return where a namenode sends us."""
        if answer.status not in (301, 302, 303, 307, 308):
            raise ProtocolError(f"{self._where}: {UNLIKE} (HTTP {answer.status})", hint=HINT)
        try:
            parts = urlsplit(answer.location)
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            usable = False
        if not usable or "@" in parts.netloc:
            raise ProtocolError(f"{self._where}: {UNLIKE}: it names no datanode", hint=HINT)
        if parts.scheme == "http" and self._where.startswith("https:"):
            raise ProtocolError(f"{self._where} sends us to a datanode without TLS")
        return answer.location

    def _datanode(self, url: str) -> _Node:
        parts = urlsplit(url)
        base = f"{parts.scheme}://{parts.netloc}"
        if base not in self._datanodes:
            if len(self._datanodes) >= MOST_DATANODES:
                self._datanodes = {}  # their connections end with those who use them
            self._datanodes[base] = _Node(base, self._tls)
        return self._datanodes[base]

    # -- namenodes ------------------------------------------------------------------------------

    @property
    def _where(self) -> str:
        return self._namenodes[self._active].url

    def _ask(self, method: str, path: str, operation: str, **asked: str) -> Any:
        answer = self._ask_namenodes(method, path, operation, asked)
        if answer.status != 200:
            raise ProtocolError(f"{self._where}: {UNLIKE} (HTTP {answer.status})", hint=HINT)
        if not answer.body:
            return None
        return _reading(lambda: load_json(answer.body), self._where)

    def _ask_namenodes(
        self, method: str, path: str, operation: str, asked: Mapping[str, str]
    ) -> Answer:
        """Return the answer of the active namenode. Raises `HTTPError` for a refusal."""
        parameters = {"op": operation, **asked, "user.name": self._user}
        place = API + quote(path, safe="/", errors="surrogatepass")
        failure: NsqError | None = None
        for pause_s in (*PAUSES_S, None):
            first, count = self._active, len(self._namenodes)
            for number in (*range(first, count), *range(first)):
                node = self._namenodes[number]
                try:
                    answer: Answer = node.ask(method, node.url + place, parameters)
                except (ConnectionFailed, DeadlineExceeded) as exc:
                    failure = exc
                    continue
                if answer.status >= 400:
                    refusal = _refusal(answer, node.url)
                    if refusal.code not in NOT_NOW:
                        raise refusal
                    failure = refusal
                    continue
                self._active = number
                return answer
            if isinstance(failure, DeadlineExceeded):  # it has taken long enough
                break
            if pause_s is not None:
                time.sleep(pause_s)
        assert failure is not None
        raise failure


class _Node(HTTPAPI):
    """A namenode or a datanode."""

    def __init__(self, url: str, tls: ssl.SSLContext | None, timeout_s: float = TIMEOUT_S) -> None:
        super().__init__(
            url,
            connect_timeout_s=CONNECT_TIMEOUT_S,
            timeout_s=timeout_s,
            max_body_bytes=LONGEST_ANSWER,
            tls=tls,
        )
        self._headers["Accept"] = "*/*"
        self._given = tls

    def ask(
        self,
        method: str,
        url: str,
        parameters: dict[str, str] | None,
        parts: Iterator[bytes] | None = None,
        size: int = 0,
    ) -> Answer:
        """Return the answer, whatever its status. ``parts`` of a file are ``size`` bytes in all."""
        if parts is None:
            return self._exchange(method, url, parameters)
        headers: dict[bytes | str, bytes | str] = {
            "Content-Length": str(size),
            "Content-Type": "application/octet-stream",
        }
        if size <= MOST_DATA:
            return self._exchange(method, url, parameters, parts, headers)
        with _Node(self.url, self._given, TIMEOUT_S + size / SLOWEST_UPLOAD) as patient:
            return patient._exchange(method, url, parameters, parts, headers)

    def _map(self, exc: Exception) -> NsqError:
        """A peer that breaks off may have died: another one is asked, as if it were gone."""
        error = super()._map(exc)
        return ConnectionFailed(str(error), hint=HINT) if type(error) is ProtocolError else error


def _reading(read: Callable[[], T], where: str) -> T:
    """Return what is read from an answer. Raises `ProtocolError` for what cannot be read."""
    try:
        return read()
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise ProtocolError(f"{where}: {UNLIKE}", hint=HINT) from None


def _status(document: Any) -> FileStatus:
    name, kind = document["pathSuffix"], document["type"]
    numbers = [document[key] for key in ("length", "modificationTime", "fileId")]
    if not isinstance(name, str) or "/" in name or name in (".", ".."):
        raise ValueError
    if not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers):
        raise ValueError
    return FileStatus(name, kind == "FILE", kind == "DIRECTORY", *numbers)


def _listing(document: Any) -> tuple[list[FileStatus], int]:
    listing = document["DirectoryListing"]
    found = [_status(each) for each in listing["partialListing"]["FileStatuses"]["FileStatus"]]
    return found, int(listing["remainingEntries"])


def _bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")


def _refusal(answer: Answer, url: str) -> HTTPError:
    """Return the error that an answer is."""
    try:
        said = load_json(answer.body)["RemoteException"]
        code, message = str(said["exception"]), str(said["message"])
    except (ValueError, TypeError, LookupError, RecursionError):
        code, message = "", ""
    if answer.status == 401:
        return HTTPError(f"{url}: {KERBEROS[0]}", status=401, code=code, hint=KERBEROS[1])
    if not code:
        text = f"{url}: {UNLIKE} (HTTP {answer.status})"
        return HTTPError(text, status=answer.status, hint=HINT)
    first = message.partition("\n")[0]
    if first.endswith(NOT_A_FOLDER):  # which the check of permissions is the first to notice
        code = "ParentNotDirectoryException"
    line = escape_line(first or code)[:LONGEST_REASON]
    return HTTPError(f"{url}: {line}", status=answer.status, code=code)
