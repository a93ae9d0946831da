"""Journals and indexes of other writers are read as far as they make sense."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plugins.archives import journal_in
from plugins.damage import CHANGE, Change, damaged
from plugins.examples import examples

from nsqtools.archive.journal import stem_of
from nsqtools.archive.layout import decode_index, encode_members

IDS = [b"%016x" % number for number in range(40)]
LINES = b"".join(
    b"%d 100 nsqd-1:4150 %s a.log\n" % (number * 100, b"".join(IDS[number::4]).hex().encode())
    for number in range(4)
)
INDEX = b"".join(b"%d 100 10 1 2\n" % (number * 100) for number in range(20))


@given(
    what=st.lists(CHANGE, max_size=4),
    more=st.binary(max_size=60),
    is_proved=st.booleans(),
    durable=st.sets(st.sampled_from([0, 100, 200, 300])),
)
@settings(max_examples=examples(75))
@example(what=[], more=b"9" * 5000 + b" 1 h " + b"0" * 32 + b" x\n", is_proved=False, durable=set())
@example(
    what=[], more=b"1 " + b"9" * 5000 + b" h " + b"0" * 32 + b" x\n", is_proved=True, durable=set()
)
def test_a_journal_knows_nothing_that_was_not_in_it(
    what: list[Change], more: bytes, is_proved: bool, durable: set[int]
) -> None:
    with TemporaryDirectory() as directory:
        folder = Path(directory)
        path = folder / f"{stem_of('clicks', 'archive')}abc-000001.journal"
        path.write_bytes(damaged(LINES, what) + more + (b"proved\n" if is_proved else b""))

        journal = journal_in(
            folder,
            run="def",
            is_durable=lambda name, head, offset, length: offset in durable,
            now_s=time.time(),
        )

        assert journal.knows("nsqd-1:4150", IDS[0]) in (True, False)
        if not what and not more:
            assert journal.knows("nsqd-1:4150", IDS[0])
        assert not journal.knows("nsqd-1:4150", b"f" * 16)
        journal.close()


@given(st.lists(CHANGE, max_size=4), st.binary(max_size=60))
@settings(max_examples=examples(150))
@example([], b"0 " + b"9" * 5000 + b" 1 1 1\n")
@example([], b"writer " + b"0" * 32 + b" " + b"9" * 5000 + b"\n")
@example([], b"1" * 30 + b" 1 1 1 1\n" * 3)
def test_an_index_is_members_that_follow_each_other(what: list[Change], more: bytes) -> None:
    decode_index(more)
    members = decode_index(damaged(INDEX, what) + more)

    end = 0
    for member in members:
        assert member.offset == end
        end = member.end
    assert decode_index(encode_members(members)) == members


@pytest.mark.alone
def test_an_index_of_a_hundred_megabytes_costs_no_more_than_its_lines() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()

    assert decode_index(b"x" * 50_000_000) == []
    assert decode_index(b"\n" * 5_000_000) == []

    assert time.process_time() - began < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000
