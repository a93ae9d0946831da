"""Habits of the shell: variables, profiles, colors, TAB, and hints where nobody answers."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from manual.tree import read_tree
from plugins.cli import RunNsq
from plugins.clusters import RunningCluster
from plugins.daemons import GoNsqd
from plugins.waiting import patience_s

from nsqtools.cli.commands import complete
from nsqtools.cli.commands import complete as name_cache
from nsqtools.cli.options.connection import CONNECTION

CONFIG = """\
tls = false
[profiles.staging]
lookupd-http-address = ["lookup.staging:4161"]
[profiles.local]
nsqd-http-address = "127.0.0.1:1"
consumer-opt = ["auth_secret=hidden", "max_attempts=3"]
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / ".config/nsqtools/config.toml"
    path.parent.mkdir(parents=True)
    path.write_text(CONFIG)
    return path


def settings(run_nsq: RunNsq, *options: str, **env: str) -> dict[str, dict[str, str]]:
    out = run_nsq(["config", "show", "--json", *options], env=env).out
    return {row["setting"]: row for row in json.loads(out)}


# variables


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


def test_a_variable_is_stronger_than_the_file_and_weaker_than_a_flag(
    run_nsq: RunNsq, config: Path
) -> None:
    variables = {"NSQ_TLS": "true", "NSQ_TIMEOUT": "7s", "NSQ_CONSUMER_OPT": "max_attempts=9"}

    shown = settings(run_nsq, **variables)
    overridden = settings(run_nsq, "--timeout", "1s", **variables)

    assert (shown["tls"]["value"], shown["tls"]["place"]) == (True, "NSQ_TLS")
    assert (shown["timeout"]["value"], shown["timeout"]["place"]) == ("7s", "NSQ_TIMEOUT")
    assert shown["consumer-opt max_attempts"]["value"] == "9"
    assert overridden["timeout"]["origin"] == "flag"


def test_a_wrong_variable_is_named(run_nsq: RunNsq) -> None:
    result = run_nsq(["topic", "list"], env={"NSQ_TIMEOUT": "soon"})

    assert result.status == 2
    assert "soon" in result.err


# profiles


def test_a_profile_is_chosen_shown_and_ignored(run_nsq: RunNsq, config: Path) -> None:
    assert run_nsq(["config", "use", "local"]).status == 0
    chosen = settings(run_nsq)
    named = settings(run_nsq, "-P", "staging")
    ignored = settings(run_nsq, "--no-profile")
    listed = json.loads(run_nsq(["config", "profiles", "--json"]).out)
    failed = run_nsq(["topic", "list"])
    run_nsq(["config", "use", "--none"])
    dropped = settings(run_nsq)

    assert chosen["profile"]["value"] == "local"
    assert chosen["profile"]["place"] == str(config.with_name("profile"))
    assert chosen["nsqd-http-address"]["value"] == ["127.0.0.1:1"]
    assert named["lookupd-http-address"]["value"] == ["lookup.staging:4161"]
    assert ignored["profile"]["value"] is None
    assert ignored["nsqd-http-address"]["value"] is None
    assert [(row["profile"], row["selected"]) for row in listed] == [
        ("local", True),
        ("staging", False),
    ]
    assert "127.0.0.1:1" in failed.err
    assert dropped["profile"]["value"] is None


def test_a_profile_that_is_not_there_cannot_be_chosen(run_nsq: RunNsq, config: Path) -> None:
    unknown = run_nsq(["config", "use", "nope"])
    both = run_nsq(["topic", "list", "--no-profile", "-P", "local"])
    reversed_ = run_nsq(["topic", "list", "-P", "local", "--no-profile"])

    assert (unknown.status, both.status, reversed_.status) == (2, 2, 2)
    assert "Profiles in the file: local, staging." in unknown.err
    assert "--profile and --no-profile contradict each other" in both.err
    assert "--profile and --no-profile contradict each other" in reversed_.err


# colors


def test_color_follows_the_flag_then_the_environment(run_nsq: RunNsq) -> None:
    def is_colored(*options: str, **env: str) -> bool:
        out = run_nsq(["schema", "-o", "table", *options], env=env).out
        return b"\x1b[" in out

    assert not is_colored()
    assert is_colored("--color", "always")
    assert is_colored("--color", "always", NO_COLOR="1")
    assert is_colored(FORCE_COLOR="1")
    assert not is_colored("--color", "never", FORCE_COLOR="1")


# hints


@pytest.mark.parametrize("command", ["topic list", "stat --once", "pub -t clicks hello"])
def test_where_nothing_runs_the_hint_says_what_to_try(run_nsq: RunNsq, command: str) -> None:
    result = run_nsq([*command.split(), *(["--retry-timeout", "0s"] * command.startswith("pub"))])

    if result.status == 0:
        pytest.skip("an nsqd runs on the default port of this machine")
    assert result.status == 4
    assert "nsq demo" in result.err
    assert "NSQ_LOOKUPD_HTTP_ADDRESS" in result.err


def test_an_address_that_nobody_typed_is_not_blamed(run_nsq: RunNsq) -> None:
    result = run_nsq(["stat", "--once", "--nsqd-tcp-address", "127.0.0.1:1", "--json"])

    error = json.loads(result.err)
    assert (error["code"], error["address"]) == ("connect", "127.0.0.1:1")
    assert "at its usual HTTP port 2" in error["message"]


def test_a_message_above_the_limit_names_the_option_and_the_limit_of_nsqd(
    run_nsq: RunNsq, go_nsqd: Callable[..., GoNsqd]
) -> None:
    nsqd = go_nsqd("-max-msg-size=4000000", "-max-body-size=8000000")
    place = ["--nsqd-tcp-address", nsqd.tcp_address, "--nsqd-http-address", nsqd.http_address]

    result = run_nsq(["pub", "-t", "clicks", *place[:2]], stdin=b"x" * 1_500_000 + b"\n")

    assert "-X publish_max_msg_size=1500000" in result.err


# TAB


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the second after which the command ends its process, which here runs the tests."""
    monkeypatch.setattr(complete, "TIMEOUT", f"{patience_s(10):g}s")
    monkeypatch.setattr(complete, "Timer", lambda *_: threading.Timer(0, int))


@pytest.mark.usefixtures("unhurried")
def test_nodes_are_completed(run_nsq: RunNsq, cluster: RunningCluster) -> None:
    said = run_nsq(["__complete", "nodes", *cluster.lookupd_options])

    assert sorted(said.out.decode().split()) == sorted(n.http_address for n in cluster.nsqds)


@pytest.fixture
def processes_ended(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Waits for the processes that ask the cluster again: a late one would write old names."""
    spawn = os.posix_spawn
    pids: list[int] = []

    def spawn_and_note(*arguments: Any, **options: Any) -> int:
        pids.append(spawn(*arguments, **options))
        return pids[-1]

    def wait() -> None:
        while pids:
            os.waitpid(pids.pop(), 0)

    monkeypatch.setattr(os, "posix_spawn", spawn_and_note)
    return wait


@pytest.mark.usefixtures("unhurried")
def test_names_are_answered_from_the_cache_and_found_again_behind_the_scenes(
    run_nsq: RunNsq,
    nsqd: GoNsqd,
    nsq_env: dict[str, str],
    processes_ended: Callable[[], None],
) -> None:
    ask = ["__complete_line", "bash", f"nsq tail --nsqd-http-address={nsqd.http_address} -t ", ""]
    nsqd.create_topic("clicks")
    first = run_nsq(ask)
    nsqd.create_topic("views")
    kept = run_nsq(ask)
    age(Path(nsq_env["HOME"]), name_cache.FRESH_S + 1)
    stale = run_nsq(ask)

    assert first.out == kept.out == stale.out == b"words 0\nclicks\n"
    processes_ended()
    assert run_nsq(ask).out == b"words 0\nclicks\nviews\n"
    age(Path(nsq_env["HOME"]), name_cache.STALE_S + 1)
    nsqd.create_topic("orders")
    assert run_nsq(ask).out == b"words 0\nclicks\norders\nviews\n"


@pytest.mark.usefixtures("unhurried")
def test_what_is_kept_belongs_to_a_cluster_and_holds_no_secret(
    run_nsq: RunNsq, nsqd: GoNsqd, nsq_env: dict[str, str]
) -> None:
    nsqd.create_topic("clicks")
    here = {"NSQ_NSQD_HTTP_ADDRESS": nsqd.http_address, "NSQ_AUTH_SECRET": "open sesame"}

    run_nsq(["__complete", "topics"], env=here)
    elsewhere = run_nsq(["__complete", "topics"], env={"NSQ_NSQD_HTTP_ADDRESS": "127.0.0.1:1"})

    [kept] = (Path(nsq_env["HOME"]) / ".cache/nsqtools").iterdir()
    assert "clicks" in kept.read_text()
    assert "sesame" not in kept.read_text()
    assert elsewhere.out == b""


def age(home: Path, seconds: float) -> None:
    for file in (home / ".cache/nsqtools").iterdir():
        os.utime(file, (time.time() - seconds,) * 2)


# the front door


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["-h"], "Usage: nsq COMMAND"),
        (["topic", "list", "-h"], "Usage: nsq topic list"),
        (["help", "topic", "list"], "Usage: nsq topic list"),
        (["help"], "Usage: nsq COMMAND"),
        (["tail", "--version"], r"nsq \d+\.\d+"),
    ],
)
def test_help_and_version_are_found_where_people_look(
    run_nsq: RunNsq, arguments: list[str], shown: str
) -> None:
    result = run_nsq(arguments)

    assert result.status == 0
    assert re.match(shown, result.out.decode())
