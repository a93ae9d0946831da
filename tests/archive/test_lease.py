"""The lock of a place in an object store: one run at a time."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from plugins.object_store import Bucket

from nsqtools.archive.lease import Lease, held, leased
from nsqtools.archive.location import StoredPlace, parse_place
from nsqtools.errors import OutputError


@pytest.fixture
def place(bucket: Bucket) -> StoredPlace:
    found = parse_place(f"{bucket.url}/lake")
    assert isinstance(found, StoredPlace)
    return found


def test_a_place_has_one_writer_and_is_free_at_once_after_it(place: StoredPlace) -> None:
    with leased(place, "lock") as lease:
        lease.check()
        threading.Timer(0.3, lease.renew).start()
        with pytest.raises(OutputError, match=f"another run writes to {place}/lock"):
            Lease(place / "lock").take(5)
    with leased(place, "lock"):
        pass


def test_the_place_of_a_run_that_was_killed_can_be_taken_over(place: StoredPlace) -> None:
    dead = Lease(place / "lock")
    dead.take()

    Lease(place / "lock").take(0.6)

    with pytest.raises(OutputError, match="another run writes"):
        dead.check()


def test_a_run_that_slept_while_another_had_the_place_has_lost_it(place: StoredPlace) -> None:
    asleep = Lease(place / "lock")
    asleep.take()
    other = Lease(place / "lock")
    other.take(0.6)
    for _ in range(3):  # the next number of the first one has come and gone
        other.renew()

    with pytest.raises(OutputError, match="another run writes"):
        asleep.check()

    other.check()


def test_one_run_at_a_time_has_a_directory(tmp_path: Path) -> None:
    with held(tmp_path / "new", "notes/lock"):
        second = held(tmp_path / "new", "notes/lock")
        with pytest.raises(OutputError, match="another run writes to"):
            second.__enter__()
    with held(tmp_path / "new", "notes/lock"):
        pass
