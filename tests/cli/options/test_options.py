"""The options of the client: each once, with what it takes, in nsq config show and -X list."""

from __future__ import annotations

import json
from inspect import signature

from plugins.cli import RunNsq, all_commands

from nsqtools.cli.parsing.binding import flatten
from nsqtools.client.options import CLIENT_OPTIONS


def listed(run_nsq: RunNsq) -> dict[str, list[str]]:
    """What -X list says of each option."""
    head, *lines = run_nsq(["tail", "-X", "list"]).out.decode().splitlines()
    assert head.split("\t") == ["option", "default", "bounds", "help"]
    return {name: rest for name, *rest in (line.split("\t") for line in lines)}


def test_every_option_is_listed_with_its_help_and_bounds(run_nsq: RunNsq) -> None:
    rows = listed(run_nsq)

    assert list(rows) == list(CLIENT_OPTIONS)
    assert all(help for _, _, help in rows.values())
    assert rows["read_timeout"][1] == "100ms to 5m"
    assert rows["max_in_flight"][1] == "0 or more"
    assert rows["backoff_strategy"][1] == "exponential|full_jitter"
    assert rows["heartbeat_interval"][0] == "30s"


def test_every_option_is_a_setting_with_its_bounds(run_nsq: RunNsq) -> None:
    settings = json.loads(run_nsq(["config", "show", "--json"]).out)
    bounds = {row["setting"]: row["bounds"] for row in settings}

    assert len(settings) == len(bounds)
    assert {"max_attempts", "publish_timeout"} <= set(bounds)
    assert (bounds["read_timeout"], bounds["deflate-level"]) == ("100ms to 5m", "1 to 9")
    assert all(row["help"] for row in settings if row["setting"] != "config-file")


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
        assert run_nsq([*name.split(), option, "list"]) == run_nsq(["tail", "-X", "list"])
