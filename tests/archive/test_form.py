"""The form of a file: messages, bare bodies, or a format that is refused by its name."""

import bz2
import gzip
import io
import json
import lzma
import pickle
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from plugins.archives import numbered, write_archive

from nsqtools.archive.columns import read_batches
from nsqtools.archive.finding import find_archives
from nsqtools.archive.form import is_message
from nsqtools.archive.reader import read_messages, repair, verify
from nsqtools.errors import ConfigurationError, OutputError
from nsqtools.records.envelope import encode_many

COUNT = 50
TEXT = encode_many("clicks", "nsqd:4150", numbered(0, COUNT))
FIRST, REST = TEXT.split(b"\n", 1)
OBJECTS = list(map(json.loads, TEXT.splitlines()))
# Longer than the head that decides the form.
BODIES = b"".join(b"body %d\n" % number for number in range(60_000))


def read(path: Path) -> tuple[set[bool], int, int, bool]:
    """Whether bodies are bare, the numbers of messages by both readers, and any damage."""
    problems: list[str] = []
    [archive] = find_archives([path])
    messages = list(read_messages(archive, lambda _, problem: problems.append(problem)))
    batches = list(read_batches(archive, lambda _, problem: problems.append(problem)))
    envelopes = [message for message in messages if is_message(message.body)]
    assert not envelopes, "a message would be published as a body"
    bare = {not message.topic for message in messages}
    return bare, len(messages), sum(batch.num_rows for batch in batches), bool(problems)


@pytest.mark.parametrize(
    ("text", "messages", "is_damaged"),
    [
        (bytes([FIRST[0] ^ 1]) + TEXT[1:], COUNT - 1, True),
        (bytes([FIRST[0] ^ 0x20]) + FIRST[1:], 0, True),  # "[" for "{", in the only line
        (FIRST[:3] + b"u" + FIRST[4:], 0, True),  # a changed key
        (bytes(100) + TEXT[100:], COUNT - 1, True),
        (bytes(4096) + TEXT, COUNT, True),
        (TEXT[37:], COUNT - 1, True),  # the second part of `split -b`
        (b"\n" + TEXT, COUNT, True),
        (b"# exported by hand\n" + TEXT, COUNT, True),
        (b"body\n" + TEXT, COUNT, True),
        (b"\xef\xbb\xbf" + TEXT, COUNT, False),
        (TEXT.replace(b"\n", b"\r\n"), COUNT, False),
        (lzma.compress(TEXT[:300]) + lzma.compress(TEXT[300:]), COUNT, False),
        (bz2.compress(TEXT), COUNT, False),
        (lzma.compress(TEXT)[:-20], COUNT, True),
    ],
)
def test_one_message_in_the_head_decides_the_form(
    tmp_path: Path, text: bytes, messages: int, is_damaged: bool
) -> None:
    (tmp_path / "x.log").write_bytes(text)
    bare, *counts, has_problems = read(tmp_path)
    assert (bare - {False}, counts, has_problems) == (set(), [messages] * 2, is_damaged)


def test_messages_after_many_bodies_are_damage(tmp_path: Path) -> None:
    (tmp_path / "x.log").write_bytes(BODIES + TEXT)
    assert read(tmp_path) == ({True}, 60_000, 60_000, True)
    nested = b'{"message": %b}\n' % FIRST  # An object that contains a message is a body.
    (tmp_path / "x.log").write_bytes(nested)
    assert read(tmp_path) == ({True}, 1, 1, False)


@pytest.mark.parametrize("compress", [bytes, gzip.compress, lzma.compress])
def test_only_the_head_decides_the_form(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    bodies = BODIES[: BODIES.index(b"\n", 100_000) + 1]
    (tmp_path / "x.log").write_bytes(compress(bodies + TEXT))
    count = bodies.count(b"\n")
    assert read(tmp_path) == ({True}, count, count, True)


@pytest.mark.parametrize(
    ("name", "compress", "command"),
    [
        ("x.log", bytes, "grep"),
        ("x.log.gz", gzip.compress, "zgrep"),
        ("x.log.xz", lzma.compress, "xzgrep"),
        ("x.log.bz2", bz2.compress, "bzgrep"),
    ],
)
def test_messages_among_bodies_can_be_separated_as_the_hint_says(
    tmp_path: Path, name: str, compress: Callable[[bytes], bytes], command: str
) -> None:
    path = tmp_path / name
    path.write_bytes(compress(BODIES + TEXT))
    with pytest.raises(OutputError, match="messages among bare bodies") as caught:
        repair(find_archives([path])[0])
    separate = caught.value.hint.removeprefix("Separate them: ")
    assert separate.startswith(f"{command} ")
    if shutil.which(command) is None:
        pytest.skip(f"no {command}")
    subprocess.run(separate, shell=True, check=True, cwd=tmp_path)
    assert (tmp_path / "messages.log").read_bytes() == TEXT


def packed(kind: str) -> bytes:
    buffer = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("x.log", TEXT)
    else:
        with tarfile.open(fileobj=buffer, mode=kind) as archive:  # type: ignore[call-overload]
            entry = tarfile.TarInfo("x.log")
            entry.size = len(TEXT)
            archive.addfile(entry, io.BytesIO(TEXT))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (packed("zip"), "zip"),
        (packed("w"), "tar"),
        (packed("w:gz"), "tar"),
        (packed("w:xz"), "tar"),
        (gzip.compress(gzip.compress(TEXT)), "compressed twice"),
        (b"\x04\x22\x4d\x18" + TEXT, "lz4"),
        (b"7z\xbc\xaf\x27\x1c" + TEXT, "7z"),
        (b"SQLite format 3\0" + TEXT, "SQLite"),
        (b"ORC\x0a\x0b\x0a\x03\0\0" + TEXT, "ORC"),
        (b"Obj\x01" + TEXT, "Avro"),
        (pickle.dumps(OBJECTS), "pickle"),
        (TEXT.decode().encode("utf-16"), "UTF-16"),
        (TEXT.decode().encode("utf-16-le"), "UTF-16"),
        (json.dumps(OBJECTS).encode(), "a JSON array"),
        (json.dumps(OBJECTS, indent=1).encode(), "a JSON array"),
        (json.dumps(OBJECTS[0], indent=1, sort_keys=True).encode(), "JSON over several lines"),
    ],
)
def test_an_unsupported_format_is_refused_by_name(
    tmp_path: Path, content: bytes, name: str
) -> None:
    (tmp_path / "x.log").write_bytes(content)
    with pytest.raises(ConfigurationError, match=f"as an archive .it is {name}") as caught:
        find_archives([tmp_path])
    assert caught.value.hint


@pytest.mark.parametrize("damage", [b"\x00", bytes(200), bytes(4096)])
def test_an_archive_with_a_damaged_beginning_is_repaired(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "x.log"
    write_archive(path, numbered(0, COUNT))
    path.chmod(0o640)
    path.write_bytes(damage + gzip.decompress(path.read_bytes())[len(damage) :])
    (tmp_path / ".x.log.index").write_bytes(
        b"0 %d %d 7 9\ntotal 1 %d %d 7 9\n" % (len(TEXT), COUNT, COUNT, len(TEXT))
    )
    remaining = len([line for line in TEXT[len(damage) :].splitlines() if is_message(line)])
    problems: list[str] = []
    [archive] = find_archives([tmp_path])
    verify(archive, lambda _, problem: problems.append(problem))
    assert problems
    assert repair(archive) in (remaining, remaining - 1)
    assert verify(*find_archives([tmp_path]), lambda _, problem: pytest.fail(problem)) > 0
