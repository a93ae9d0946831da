"""``nsq options``: every option of the client, once, with what it takes."""

from __future__ import annotations

import json
from dataclasses import fields

from plugins.cli import RunNsq

from nsqtools.client.options import ClientOptions, option_name


def test_every_option_is_listed_with_its_help(run_nsq: RunNsq) -> None:
    listing = json.loads(run_nsq(["options", "--json"]).out)

    assert [row["option"] for row in listing] == [option_name(f) for f in fields(ClientOptions)]
    assert all(row["help"] for row in listing)


def test_bounds_and_choices_read_as_they_are_written(run_nsq: RunNsq) -> None:
    rows = {row["option"]: row for row in json.loads(run_nsq(["options", "--json"]).out)}

    assert rows["read_timeout"]["bounds"] == "100ms to 5m"
    assert rows["max_in_flight"]["bounds"] == "0 or more"
    assert rows["backoff_strategy"]["bounds"] == "exponential|full_jitter"
    assert rows["heartbeat_interval"]["default"] == "30s"
