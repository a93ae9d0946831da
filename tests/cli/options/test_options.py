"""The options of the client: each once, with what it takes, in nsq config show."""

from __future__ import annotations

import json

from plugins.cli import RunNsq

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
