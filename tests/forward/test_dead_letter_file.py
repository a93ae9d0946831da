"""Dead letters in a file: on disk before their message is finished."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from plugins.power_cut import PowerCut

from nsqtools.client.message import Batch, Message
from nsqtools.forward.courier import DeadLetterFile
from nsqtools.forward.parcel import Parcel


class Source:
    """A connection that delivered something."""

    topic, nsqd, received_at = "clicks", "127.0.0.1:4150", 0.0

    def parcel(self, number: int) -> Any:
        message_id = b"%016d" % number
        source: Any = self
        message = Message(source, 1, 1, message_id, b"body %d" % number)
        return Parcel(Batch(source, [message]), [message.body], "clicks", 0.0)


def test_a_dead_letter_that_was_kept_is_there_after_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "dead.jsonl"
    with PowerCut(tmp_path, monkeypatch) as record:
        for run in range(2):
            box = DeadLetterFile(path)
            for number in range(5 * run, 5 * run + 5):
                box.put(
                    Source().parcel(number),
                    "HTTP 400",
                    lambda parcel, is_kept: record.note(*[m.body for m in parcel.messages]),
                )
            box.close()

    cuts = list(record.cuts())
    assert len(cuts[-1][0]) == 10
    for promised, cut in cuts:
        content = cut.files.get("dead.jsonl", b"")
        assert [body for body in promised if b'"%s"' % body not in content] == []
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_one_process_cannot_write_takes_nothing_of_another_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "dead.jsonl"
    one, other = DeadLetterFile(path), DeadLetterFile(path)
    kept: list[tuple[bytes, bool]] = []

    def note(parcel: Any, is_kept: bool) -> None:
        kept.append((parcel.bodies[0], is_kept))

    writing = threading.Thread(target=other.put, args=(Source().parcel(2), "HTTP 400", note))
    sync = os.fdatasync

    def full(descriptor: int) -> None:
        monkeypatch.setattr(os, "fdatasync", sync)
        writing.start()
        writing.join(0.2)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fdatasync", full)
    one.put(Source().parcel(1), "HTTP 400", note)
    writing.join()
    one.close()
    other.close()

    assert sorted(kept) == [(b"body 1", False), (b"body 2", True)]
    [line] = path.read_bytes().splitlines()
    assert b'"body 2"' in line
