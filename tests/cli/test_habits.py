"""Habits of the shell: variables, colors, and hints where nobody answers."""

from __future__ import annotations

import pytest
from manual.tree import read_tree
from plugins.cli import RunNsq

from nsqtools.cli.options.connection import CONNECTION


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
