"""The lock of a place in an object store: one run at a time."""

import errno
import threading
from itertools import chain, repeat
from unittest.mock import DEFAULT, Mock, patch

import pytest
from plugins.object_store import Bucket
from plugins.waiting import wait_until

from nsqtools.archive.lease import Lease, NumberedObjects
from nsqtools.archive.place import Place
from nsqtools.archive.place_url import parse_place
from nsqtools.errors import OutputError


@pytest.fixture
def place(bucket: Bucket) -> Place:
    return parse_place(f"{bucket.url}/lake")


def test_a_place_has_one_writer_and_is_free_immediately_afterwards(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.put("lock/note.txt", b"of somebody")
    monkeypatch.setitem(Lease.__init__.__kwdefaults__, "renew_s", 0.1)
    with place.lock("lock") as lease:
        lease.check()
        with pytest.raises(OutputError, match=f"another run writes to {place}/lock"):
            Lease(place / "lock").take(60)
    with place.lock("lock"):  # This run cannot release it.
        monkeypatch.setattr(NumberedObjects, "append", Mock(side_effect=OSError("away")))


@pytest.mark.parametrize("renewals", [0, 3])
def test_a_run_that_was_suspended_loses_its_lease_to_another(place: Place, renewals: int) -> None:
    asleep = Lease(place / "lock")
    asleep.take()
    other = Lease(place / "lock")
    other.take(0.6)
    # After some renewals the next number of the first run has been used and removed.
    for _ in range(renewals):
        other.renew()
    with pytest.raises(OutputError, match="another run writes"):
        asleep.check()
    other.check()


def test_a_write_whose_response_was_lost_is_not_taken_for_another_run(place: Place) -> None:
    lease = Lease(place / "lock")
    lease.take()
    for answers in ([], [OSError("it was reset")]):
        numbers = NumberedObjects(place / "lock", lease._numbers.number)
        numbers.append(numbers.read(numbers.number))
        put = Mock(
            wraps=lease._numbers.place.put_if_absent, side_effect=chain(answers, repeat(DEFAULT))
        )
        with patch.object(lease._numbers.place, "put_if_absent", put):
            lease.check()
    lease.release()
    Lease(place / "lock").take(0)


def test_an_unreachable_store_does_not_cost_the_lease(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = Lease(place / "lock", renew_s=0.01)
    lease.take()
    append = Mock(side_effect=chain([OSError("away")] * 3, repeat(None)))
    monkeypatch.setattr(NumberedObjects, "append", append)
    keeper = threading.Thread(target=lease.keep)
    keeper.start()
    wait_until(lambda: append.call_count > 3, what="a renewal that works")
    lease.raise_if_lost()
    lease.release()
    keeper.join()


def test_a_lease_that_is_not_renewed_is_lost(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = Lease(place / "lock", renew_s=0.01)
    lease.take()
    away = Mock(side_effect=OSError(errno.ENETDOWN, "the network is down"))
    monkeypatch.setattr(NumberedObjects, "append", away)
    lease.keep(lease_s=0.1)
    with pytest.raises(OutputError, match="the network is down"):
        lease.raise_if_lost()
