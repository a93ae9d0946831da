"""``nsq options``: every option of the client, once, with what it takes."""

from __future__ import annotations

import json
from dataclasses import fields
from inspect import signature

import pytest
from plugins.cli import RunNsq, all_commands

from nsqtools.cli.parsing.binding import flatten
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


@pytest.mark.parametrize("arguments", [["tail", "-X", "list"], ["pub", "--producer-opt", "list"]])
def test_the_value_list_lists_them_whatever_else_is_missing(
    run_nsq: RunNsq, arguments: list[str]
) -> None:
    assert run_nsq(arguments) == run_nsq(["options"])


def option_takers() -> list[tuple[str, str]]:
    """Every command that takes client options, with the option that takes them."""
    return [
        (name, "--" + parameter.replace("_", "-"))
        for name, entry in all_commands().items()
        if not entry.raw
        for parameter in signature(flatten(entry.load())).parameters
        if parameter in ("consumer_opt", "producer_opt")
    ]


def test_every_command_that_takes_client_options_lists_them(run_nsq: RunNsq) -> None:
    takers = option_takers()

    assert {"tail", "pub", "to-file", "replay", "peek"} <= {name for name, _ in takers}
    for name, option in takers:
        assert run_nsq([*name.split(), option, "list"]) == run_nsq(["options"])
