"""Archives with bytes changed, cut off or put in at random: reading ends, and nothing is raised.

What checksums can show is shown: of a file that is cut off, and of one with an index whose bytes
were changed, only messages are read that were archived. (A member that is both cut off and changed
has no checksum to show it.)
"""

from __future__ import annotations

import gzip
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plugins.archives import write_archive
from plugins.damage import CHANGE, Change, damaged
from plugins.examples import examples

from nsqtools.archive.finding import PARQUET_MAGIC, find_archives
from nsqtools.archive.layout import index_of
from nsqtools.archive.members import scan_members
from nsqtools.archive.reader import read_messages
from nsqtools.protocol.frames import WireMessage

MESSAGES = [WireMessage(1000 + n, 1, b"%016x" % n, b"body %d \xff" % n) for n in range(60)]
BODIES = {message.body for message in MESSAGES}

changes = st.lists(CHANGE, min_size=1, max_size=4)


@given(what=changes, has_index=st.booleans(), is_compressed=st.booleans())
@settings(max_examples=examples(75))
def test_a_damaged_archive_is_read_without_inventing_messages(
    what: list[Change], has_index: bool, is_compressed: bool
) -> None:
    with TemporaryDirectory() as directory:
        path = write_archive(
            Path(directory) / "a.gz", MESSAGES[:20], MESSAGES[20:40], MESSAGES[40:]
        )
        data = path.read_bytes()
        if not is_compressed:
            data = gzip.decompress(data)
        changed = damaged(data, what)
        assume(not changed.startswith(PARQUET_MAGIC))  # refused as a file of another program
        path.write_bytes(changed)
        if not (has_index and is_compressed):
            index_of(path).unlink()
        problems: list[str] = []
        (archive,) = find_archives([path])

        found = list(read_messages(archive, lambda path, problem: problems.append(problem)))

        scan_members(path)
        if changed[:2] != data[:2] or not is_compressed:
            return  # its bytes are taken for bare bodies
        cuts = [kind for kind, _, _ in what if kind == "cut"]
        if len(cuts) == len(what) or (has_index and not cuts):
            assert {message.body for message in found if message.topic} <= BODIES
            assert problems or len(found) in (0, 20, 40, 60)
