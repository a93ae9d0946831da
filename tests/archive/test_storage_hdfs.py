"""HDFS as storage: what namenodes and datanodes may answer. `test_storage` has what they should."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

import pytest
from plugins.certificates import Certificates

from nsqtools.archive.hdfs_settings import hdfs_settings, parse_hdfs
from nsqtools.archive.storage import ChangedError, Storage, open_storage
from nsqtools.archive.storage_drafts import remove_drafts
from nsqtools.errors import ConfigurationError
from nsqtools.http import webhdfs


class Asked(NamedTuple):
    """A request; ``operation`` is "" for one to a datanode."""

    operation: str
    path: str
    query: dict[str, str]
    body: bytes


class Answer(NamedTuple):
    status: int = 200
    body: bytes = b""
    location: str = ""
    header: tuple[str, str] = ("X-A", "b")


Serve = Callable[[Asked], Answer | None]
NO_ANSWER = None


def document(value: object, status: int = 200) -> Answer:
    return Answer(status, json.dumps(value).encode())


def refusal(exception: str, message: str = "why", status: int = 403) -> Answer:
    return document({"RemoteException": {"exception": exception, "message": message}}, status)


def file(name: str = "", size: int = 5, inode: int = 7, kind: str = "FILE") -> dict[str, object]:
    numbers = {"length": size, "modificationTime": 1_000, "fileId": inode}
    return {"pathSuffix": name, "type": kind, **numbers}


def status(size: int = 5, inode: int = 7) -> Answer:
    return document({"FileStatus": file(size=size, inode=inode)})


def listing(*files: dict[str, object], left: object = 0) -> Answer:
    found = {"FileStatuses": {"FileStatus": files}}
    return document({"DirectoryListing": {"partialListing": found, "remainingEntries": left}})


class Peer:
    """A namenode and a datanode in one, which answer as ``serve`` says."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.serve: Serve = lambda asked: Answer(404)
        peer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def handle_any(self) -> None:
                parts = urlsplit(self.path)
                query = dict(parse_qsl(parts.query))
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                path = unquote(parts.path).removeprefix(webhdfs.API)
                asked = Asked(query.get("op", ""), path, query, body)
                peer.asked.append(asked)
                answer = peer.serve(asked)
                if answer is None:
                    self.close_connection = True
                    return
                self.send_response(answer.status)
                self.send_header(*answer.header)
                if answer.location:
                    self.send_header("Location", answer.location)
                self.send_header("Content-Length", str(len(answer.body)))
                self.end_headers()
                self.wfile.write(answer.body)

            do_GET = do_PUT = do_DELETE = handle_any

            def log_message(self, *arguments: object) -> None:
                """Silent."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_address[1]}"
        self.data = f"http://{self.address}/data"

    @property
    def operations(self) -> list[str]:
        return [asked.operation or "data" for asked in self.asked]


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Peer]]:
    """Two of them, which are namenodes of ``hdfs://lake``."""
    monkeypatch.setattr(webhdfs, "PAUSES_S", (0.0, 0.0))
    monkeypatch.setenv("HADOOP_USER_NAME", "alice")
    with ExitStack() as stack:
        found = [Peer(), Peer()]
        for each in found:
            run = threading.Thread(target=each.server.serve_forever, args=(0.02,), daemon=True)
            run.start()
            stack.callback(run.join)
            stack.callback(each.server.server_close)
            stack.callback(each.server.shutdown)
        monkeypatch.setenv("NSQ_WEBHDFS_ADDRESS", ",".join(each.address for each in found))
        yield found


@pytest.fixture
def peer(peers: list[Peer], monkeypatch: pytest.MonkeyPatch) -> Peer:
    monkeypatch.setenv("NSQ_WEBHDFS_ADDRESS", peers[0].address)
    return peers[0]


def ask_everything(storage: Storage, tmp_path: Path) -> Iterator[Exception | None]:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    for ask in (
        lambda: list(storage.list("d")),
        lambda: storage.stat("d/x"),
        lambda: storage.read("d/x"),
        lambda: storage.read_range("d/x", 0, 3, "7-1000-5"),
        lambda: storage.put("d/x", b"12345"),
        lambda: storage.put_if_absent("d/x", b"12345"),
        lambda: storage.put_file("d/x", path),
    ):
        try:
            ask()
            yield None
        except Exception as exc:
            yield exc


HOSTILE: list[tuple[Answer | None, str]] = [
    (Answer(200, b"not JSON"), "WebHDFS"),
    (Answer(200, b"[" * 100_000), "WebHDFS"),
    (Answer(200, b"[]"), "WebHDFS"),
    (document({"FileStatus": {}, "DirectoryListing": 5}), "WebHDFS"),
    (document({"FileStatus": file(size=-1)}), "WebHDFS"),
    (document({"FileStatus": file(size=1 << 70)}), "WebHDFS"),
    (listing(file("../x")), "WebHDFS"),
    (listing(file("..", kind="DIRECTORY")), "WebHDFS"),
    (listing(file("x"), left="many"), "WebHDFS"),
    (listing(file("x"), left=3), "WebHDFS"),
    (Answer(404, b"<html>not found</html>"), "WebHDFS"),
    (Answer(500, b""), "WebHDFS"),
    (document({"RemoteException": []}, 500), "WebHDFS"),
    (Answer(401, b"", "", ("WWW-Authenticate", "Negotiate")), "Kerberos"),
    (refusal("AccessControlException", "no\n\tat java.lang"), "no"),
    (refusal("IOException", "\x1b[31m" + "x" * 10_000, 500), "x"),
    (Answer(307), "datanode"),
    (Answer(307, b"", "ftp://host/x"), "datanode"),
    (Answer(307, b"", "http://user@host/x"), "datanode"),
    (Answer(307, b"", "http://[::1/x"), "datanode"),
    (Answer(200, b"{}", "", ("Content-Encoding", "gzip")), "compressed"),
    (NO_ANSWER, "127.0.0.1"),
]


def test_whatever_is_answered_is_one_clear_line(peer: Peer, tmp_path: Path) -> None:
    storage = open_storage("hdfs://lake/a")
    for answer, said in HOSTILE:
        peer.serve = lambda asked, answer=answer: answer  # type: ignore[misc]
        found = [each for each in ask_everything(storage, tmp_path) if each]

        assert any(said in str(each) for each in found), (answer, found)
        for each in found:
            assert isinstance(each, OSError), answer
            assert each.filename.startswith("hdfs://lake/a")
            assert each.strerror.isprintable()
            assert len(each.strerror) < 400


def test_a_listing_is_read_in_parts_and_leaves_out_what_is_not_whole(peer: Peer) -> None:
    def serve(asked: Asked) -> Answer:
        if asked.path == "/a/d":
            return listing(file("z"))
        if asked.path == "/a/gone":
            return refusal("AccessControlException", f"/{'a' * 300} (is not a directory)")
        if "startAfter" not in asked.query:
            return listing(file("a"), file("d", kind="DIRECTORY"), left=4)
        hidden = (file(".x.0123456789abcdef.tmp"), file("e._COPYING_"))
        return listing(*hidden, file("gone", kind="DIRECTORY"), file("link", kind="SYMLINK"))

    peer.serve = serve
    storage = open_storage("hdfs://bob@lake:8020/a")

    assert sorted(entry.name for entry in storage.list()) == ["a", "d/z"]
    assert {asked.query["user.name"] for asked in peer.asked} == {"bob"}


def test_a_standby_is_passed_over_and_then_left_alone(peers: list[Peer]) -> None:
    peers[0].serve = lambda asked: refusal("StandbyException")
    peers[1].serve = lambda asked: status()
    storage = open_storage("hdfs://lake/a")

    assert [storage.stat("x").size for _ in range(3)] == [5] * 3
    assert [len(peer.asked) for peer in peers] == [1, 3]

    peers[0].serve, peers[1].serve = peers[1].serve, peers[0].serve
    assert storage.stat("x").size == 5


@pytest.mark.parametrize("replaces", [True, False])
def test_a_rename_whose_answer_is_lost_is_found_to_be_done(peer: Peer, replaces: bool) -> None:
    """The second time the source is gone, or the target is there: by our own doing."""

    def serve(asked: Asked) -> Answer | None:
        if asked.operation == "RENAME":
            if peer.operations.count("RENAME") == 1:
                return NO_ANSWER
            return refusal("FileNotFoundException" if replaces else "FileAlreadyExistsException")
        answers = {"CREATE": Answer(307, b"", peer.data), "": Answer(201)}
        return answers.get(asked.operation, status())

    peer.serve = serve
    storage = open_storage("hdfs://lake/a")
    (storage.put if replaces else storage.put_if_absent)("x", b"12345")

    assert "DELETE" not in peer.operations
    [sent] = [asked.body for asked in peer.asked if asked.operation == ""]
    assert sent == b"12345"


def test_what_another_writer_has_put_there_is_not_taken_for_ours(peer: Peer) -> None:
    def serve(asked: Asked) -> Answer:
        if asked.operation == "RENAME":
            return refusal("FileAlreadyExistsException")
        if asked.operation == "GETFILESTATUS":
            return status(inode=8 if asked.path == "/a/x" else 7)
        answers = {"CREATE": Answer(307, b"", peer.data), "": Answer(201)}
        return answers.get(asked.operation, document({"boolean": True}))

    peer.serve = serve
    with pytest.raises(FileExistsError):
        open_storage("hdfs://lake/a").put_if_absent("x", b"12345")

    [removed] = [asked for asked in peer.asked if asked.operation == "DELETE"]
    assert removed.path.startswith("/a/.x.")


def test_a_file_that_was_cut_short_is_not_published(peer: Peer) -> None:
    answers = {"CREATE": Answer(307, b"", peer.data), "": Answer(201), "GETFILESTATUS": status(3)}
    peer.serve = lambda asked: answers.get(asked.operation, document({"boolean": True}))

    with pytest.raises(OSError, match="3 of 5 bytes"):
        open_storage("hdfs://lake/a").put("x", b"12345")

    assert "RENAME" not in peer.operations
    assert peer.operations[-1] == "DELETE"


def test_what_killed_writers_left_of_a_file_is_removed(peer: Peer) -> None:
    draft, other = ".x.0123456789abcdef.tmp", ".y.0123456789abcdef.tmp"
    found = listing(file("x"), file(draft), file(other), file(".x.index"))
    peer.serve = lambda asked: found if asked.operation != "DELETE" else document({"boolean": True})

    assert remove_drafts(open_storage("hdfs://lake/a"), "d/x") == 1

    assert [(each.operation, each.path) for each in peer.asked[1:]] == [("DELETE", f"/a/d/{draft}")]


def test_a_datanode_that_is_gone_is_avoided(peer: Peer) -> None:
    def serve(asked: Asked) -> Answer:
        if asked.operation == "":
            return Answer(200, b"234")
        is_second = asked.query.get("excludedatanodes") == "127.0.0.1"
        return Answer(307, b"", peer.data if is_second else "http://127.0.0.1:9/x")

    peer.serve = serve

    assert open_storage("hdfs://lake/a").read_range("x", 1, 3) == b"234"


def test_a_datanode_that_sends_too_much_or_another_version_is_refused(peer: Peer) -> None:
    answers = {"OPEN": Answer(307, b"", peer.data), "": Answer(200, b"1234")}
    peer.serve = lambda asked: answers.get(asked.operation, status())
    storage = open_storage("hdfs://lake/a")

    with pytest.raises(OSError, match="more than it was asked for"):
        storage.read_range("x", 0, 3)
    with pytest.raises(ChangedError):
        storage.read_range("x", 0, 4, "8-1000-5")


def test_https_is_verified_and_not_left_for_a_datanode_without(
    peer: Peer, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.server.cert, certificates.server.key)
    peer.server.socket = context.wrap_socket(peer.server.socket, server_side=True)
    data = {"OPEN": Answer(307, b"", f"https://{peer.address}/data"), "": Answer(200, b"123")}
    peer.serve = lambda asked: data[asked.operation]
    monkeypatch.setenv("NSQ_WEBHDFS_ADDRESS", f"https://{peer.address}")

    with pytest.raises(OSError, match="certificate"):
        open_storage("hdfs://lake/a").read("x")
    monkeypatch.setenv("NSQ_TLS_CA_FILE", str(certificates.ca))
    assert open_storage("hdfs://lake/a").read("x") == b"123"
    data["OPEN"] = Answer(307, b"", peer.data)
    with pytest.raises(OSError, match="datanode without TLS"):
        open_storage("hdfs://lake/a").read("x")


SITE = """<?xml version="1.0"?><configuration>
<property><name>dfs.ha.namenodes.lake</name><value>nn1, nn2</value></property>
<property><name>dfs.namenode.http-address.lake.nn1</name><value>one:50070</value></property>
<property><name>dfs.namenode.http-address.lake.nn2</name><value>two:50070</value></property>
</configuration>"""


def test_where_namenodes_are_is_given_or_configured_or_usual(tmp_path: Path) -> None:
    def found(url: str, **environ: str) -> tuple[tuple[str, ...], str]:
        settings = hdfs_settings(parse_hdfs(url), environ={"USER": "me", **environ})
        return settings.namenodes, settings.user

    (tmp_path / "hdfs-site.xml").write_text(SITE)
    here = {"HADOOP_CONF_DIR": str(tmp_path), "HADOOP_USER_NAME": "hugo"}
    given = {"NSQ_WEBHDFS_ADDRESS": "lake=three,lake:8020=https://four,five:1"}

    assert found("hdfs://NN:8020/x", **here) == (("http://nn:9870",), "hugo")
    assert found("hdfs://a%40b@[::1]:9000/x") == (("http://[::1]:9870",), "a@b")
    assert found("hdfs://lake/x", **here)[0] == ("http://one:50070", "http://two:50070")
    assert found("hdfs://lake/x", **here, **given)[0] == ("http://three:9870", "https://four")
    assert found("hdfs://other/x", SPARK_USER="s", **given) == (("http://five:1",), "s")
    (tmp_path / "hdfs-site.xml").write_text("<configuration>")
    with pytest.raises(ConfigurationError, match=r"cannot read .*hdfs-site\.xml"):
        found("hdfs://lake/x", **here)


@pytest.mark.parametrize("text", ["=a", "a=", "http://h/path", "http://u:p@h", "h:port"])
def test_an_address_that_cannot_be_one_is_refused(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSQ_WEBHDFS_ADDRESS", text)
    with pytest.raises(ConfigurationError):
        open_storage("hdfs://lake/x")


def test_a_setting_that_hdfs_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no setting 'sse'"):
        open_storage("hdfs://lake/x", {"sse": "1"})
