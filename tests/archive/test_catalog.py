"""What lies at some places: recognized by what is in it, and listed as its log says."""

from __future__ import annotations

import pytest
from plugins.object_store import Bucket

from nsqtools.archive.catalog import find_inputs
from nsqtools.archive.location import parse_place
from nsqtools.errors import NotFoundError


def test_what_lies_at_a_place_is_recognized(bucket: Bucket) -> None:
    bucket.storage.put("lake/topic=a/date=b/x.parquet", b"PAR1....")
    bucket.storage.put("table/_delta_log/0.json", b"{}")
    bucket.storage.put("archive/.a.gz.index", b"")
    bucket.storage.put("archive/a.gz", b"x")
    places = [parse_place(f"{bucket.url}/{name}") for name in ("lake", "table", "archive")]
    place, table, archive = places

    found = find_inputs(places)

    assert (found.archives, found.parquet, found.delta) == ((archive,), (place,), (table,))
    with pytest.raises(NotFoundError, match="there is no"):
        find_inputs([parse_place(f"{bucket.url}/nothing")])
