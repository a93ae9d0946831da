"""The options of all commands: each once, with a variable of its name, in nsq config show."""

from __future__ import annotations

import json

import pytest
from manual.tree import read_tree
from plugins.cli import RunNsq

from nsqtools.cli.options.connection import CONNECTION
from nsqtools.client.connection_settings import OPTION_OF_FLAG
from nsqtools.client.options import CLIENT_OPTIONS


def test_every_option_is_a_setting_with_its_default_bounds_and_help(run_nsq: RunNsq) -> None:
    settings = {
        row["setting"]: row for row in json.loads(run_nsq(["config", "show", "--json"]).out)
    }

    names = {name.replace("-", "_") for name in settings}
    assert {OPTION_OF_FLAG.get(name, name) for name in names} >= set(CLIENT_OPTIONS)
    assert settings["read_timeout"]["bounds"] == "100ms to 5m"
    assert settings["backoff_strategy"]["bounds"] == "exponential|full_jitter"
    assert settings["heartbeat_interval"]["value"] == "30s"
    assert settings["deflate-level"]["bounds"] == "1 to 9"
    assert all(row["help"] for name, row in settings.items() if name != "config-file")


def test_every_connection_option_has_a_variable_of_its_name() -> None:
    without = {
        option.names[-1]
        for page in read_tree().walk()
        if not page.is_raw and page.words[1:2] != ("spark",)
        for option in page.options
        if option.panel in (CONNECTION, "TLS, compression, secret")
        and option.environment != "NSQ_" + option.names[-1][2:].upper().replace("-", "_")
    }

    assert without == {"--no-profile"}


@pytest.mark.parametrize("command", ["topic list", "stat --once", "pub -t clicks hello"])
def test_where_nothing_runs_the_hint_says_what_to_try(run_nsq: RunNsq, command: str) -> None:
    result = run_nsq([*command.split(), *(["--retry-timeout", "0s"] * command.startswith("pub"))])

    if result.status == 0:
        pytest.skip("an nsqd runs on the default port of this machine")
    assert result.status == 4
    assert "nsq demo" in result.err
    assert "NSQ_LOOKUPD_HTTP_ADDRESS" in result.err
