"""The connection options: precedence of their origins, and invalid combinations."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from manual.tree import read_tree
from plugins.cli import GivenCommand, RunNsq

from nsqtools.cli.options.connection import (
    CONNECTION,
    ClusterConnection,
    ClusterSettings,
    ConsumerConnection,
    Destination,
    ProducerConnection,
    ViewedCluster,
)
from nsqtools.cli.parsing import app
from nsqtools.cli.running.runtime import Runtime, message_and_hint
from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.client.options import CLIENT_OPTIONS
from nsqtools.errors import ConnectionFailed
from nsqtools.protocol.option_names import OPTION_OF_FLAG
from nsqtools.settings import check_ownership, config_path

Connect = Callable[..., ConnectionSettings]

CONFIG = """
lookupd-http-address = ["file:4161"]
max-in-flight = 7

[profiles.lab]
nsqd-tcp-address = "lab:4150"
consumer_opt = { max_attempts = 4, msg_timeout = "5m", snappy = true, lookupd_poll_jitter = 0.5 }
tls = true
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The user's configuration file, with a profile ``lab``."""
    path = tmp_path / ".config/nsqtools/config.toml"
    path.parent.mkdir(parents=True)
    path.write_text(CONFIG)
    return path


@pytest.fixture
def connect(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given_command: GivenCommand
) -> Connect:
    """Parse the command line of a consuming command with environment variables, and return the
    settings that the command gets."""
    settings: list[ConnectionSettings] = []

    def consume(*, connection: ConsumerConnection) -> None:
        settings.append(connection)

    def run(line: str = "", **environ: str) -> ConnectionSettings:
        given_command(consume)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        runtime = replace(Runtime.of_process(), environ={"HOME": str(tmp_path), **environ})
        app.run(["given", *line.split()], runtime)
        return settings.pop()

    return run


WITHOUT_FILE = [
    ("", {}, "127.0.0.1:4150||"),
    ("--nsqd-http-address d:4151", {}, "|d:4151|"),
    ("--nsqd-tcp-address a:1 --lookupd-http-address l:3", {}, "a:1||l:3"),
    ("", {"NSQ_NSQD_TCP_ADDRESS": "a:1,b:2 c:3"}, "a:1 b:2 c:3||"),
    ("", {"NSQ_NSQD_TCP_ADDRESS": "a:1, b:2,"}, "a:1 b:2||"),
    ("--nsqd-tcp-address=", {}, "||"),
]
WITH_FILE = [
    ("", {}, "||file:4161"),
    ("-P lab", {}, "lab:4150||"),
    ("", {"NSQ_PROFILE": "lab"}, "lab:4150||"),
    ("-P lab", {"NSQ_LOOKUPD_HTTP_ADDRESS": "env:4161"}, "||env:4161"),
    ("-P lab --nsqd-http-address flag:4151", {}, "|flag:4151|"),
    ("", {"NSQ_NSQD_TCP_ADDRESS": "a:1"}, "a:1||"),
]


@pytest.mark.parametrize("has_file", [False, True])
def test_only_addresses_of_the_strongest_origin_are_used(
    connect: Connect, config: Path, has_file: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_file:
        config.unlink()
    for line, environ, expected in WITH_FILE if has_file else WITHOUT_FILE:
        with monkeypatch.context():
            parsed = connect(line, **environ)
            for name in environ:
                monkeypatch.delenv(name)
        kinds = (
            parsed.nsqd_tcp_addresses,
            parsed.nsqd_http_addresses,
            parsed.lookupd_http_addresses,
        )
        assert "|".join(map(" ".join, kinds)) == expected, (line, environ)


TLS = {"tls_v1": "true"}
OPTS = {"max_attempts": "4", "msg_timeout": "5m", "snappy": "true", "lookupd_poll_jitter": "0.5"}
LAB = {"tls_v1": "true", "max_in_flight": "7", **OPTS}
OPTIONS: dict[str, dict[str, str]] = {
    # a flag overrides one option of the profile and keeps the others
    "-P lab": LAB,
    "-P lab --no-tls --consumer-opt max-attempts=9 --max-in-flight 3": LAB
    | {"tls_v1": "false", "max_attempts": "9", "max_in_flight": "3"},
    "--no-profile": {"max_in_flight": "7"},
    # flags become options under go-nsq's names
    "--consumer-opt max_attempts,9": {"max_attempts": "9"},
    "--consumer-opt max_attempts=1 --consumer-opt max_attempts=2": {"max_attempts": "2"},
    "--deflate-level 3": {"deflate_level": "3", "deflate": "true"},
    "--deflate-level 3 --no-deflate": {"deflate_level": "3", "deflate": "false"},
    "--tls --tls-cert c.pem --tls-key k.pem --snappy": TLS
    | {"tls_cert": "c.pem", "tls_key": "k.pem", "snappy": "true"},
    "--tls --tls-min-version tls1.3": TLS | {"tls_min_version": "tls1.3"},
    # for https
    "--tls-ca-file ca.pem --lookupd-http-address https://l:4161": {"tls_root_ca_file": "ca.pem"},
    # the same value twice is no contradiction
    "--max-in-flight 2 --consumer-opt max_in_flight=02": {"max_in_flight": "2"},
    "--no-tls --tls-insecure": {"tls_v1": "false", "tls_insecure_skip_verify": "true"},
}


@pytest.mark.usefixtures("config")
@pytest.mark.parametrize("line", OPTIONS)
def test_flags_override_the_profile_one_by_one(connect: Connect, line: str) -> None:
    assert connect(line).options == {"max_in_flight": "7", **OPTIONS[line]}


@pytest.mark.usefixtures("config")
def test_cluster_commands_get_client_options_and_viewers_tls(
    given_command: GivenCommand, tmp_path: Path
) -> None:
    received: list[ClusterSettings] = []

    def look(*, cluster: ClusterConnection) -> None:
        received.append(cluster)

    def view(*, cluster: ViewedCluster) -> None:
        received.append(cluster)

    runtime = replace(Runtime.of_process(), environ={"HOME": str(tmp_path)})
    for command in (look, view):
        given_command(command)
        app.run(["given", "-P", "lab", "-X", "max_http_body=2048"], runtime)
    opts = {"max_http_body": "2048", **OPTS}
    assert [settings.connection.options for settings in received] == [
        opts,
        {"tls_v1": "true", **opts},
    ]


def test_without_a_home_no_file_of_the_current_directory_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", Mock(side_effect=KeyError))
    for environ in ({}, {"HOME": ""}):
        assert config_path(environ) == Path("/~/.config/nsqtools/config.toml")


def test_options_of_the_user_override_defaults_of_a_command(connect: Connect) -> None:
    line = "--consumer-opt output_buffer_timeout=1s --consumer-opt snappy"
    connection = connect(f"{line} --address-map n1:4150=127.0.0.1:1 --address-map n2:1=h:2")

    options = connection.client_options(output_buffer_timeout_s=0.025, max_in_flight=5)

    assert (options.output_buffer_timeout_s, options.max_in_flight) == (1.0, 5)
    assert options.snappy is True
    assert connection.address_map == {"n1:4150": "127.0.0.1:1", "n2:1": "h:2"}


def test_the_secret_comes_from_the_environment_or_the_stronger_file(
    connect: Connect, config: Path, tmp_path: Path
) -> None:
    config.write_text("")
    secret = tmp_path / "secret"
    secret.write_text("s3cret\n")

    assert connect(NSQ_AUTH_SECRET="env").options == {"auth_secret": "env"}
    assert connect(f"--auth-secret-file {secret}", NSQ_AUTH_SECRET="env").options == {
        "auth_secret": "s3cret",
        "auth_secret_file": str(secret),  # read again at each connection
    }
    config.write_text(f'consumer_opt = {{ auth_secret_file = "{secret}" }}')
    assert connect(NSQ_AUTH_SECRET="env").options == {"auth_secret": "env", "auth_secret_file": ""}


def test_a_byte_order_mark_is_not_part_of_the_secret(connect: Connect, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("\ufeffs3cret\n")

    assert connect(f"--auth-secret-file {secret}").options["auth_secret"] == "s3cret"


def test_the_destination_has_its_own_options_and_none_of_the_source(
    monkeypatch: pytest.MonkeyPatch, given_command: GivenCommand, tmp_path: Path
) -> None:
    received: list[ConnectionSettings] = []

    def publish(*, connection: ProducerConnection) -> None:
        received.append(connection)

    def forward(*, to: Destination, connection: ConsumerConnection) -> None:
        received.extend([to, connection])

    given_command(publish)
    app.run(["given", "--nsqd-tcp-address", "a:1", "--producer-opt", "max_outstanding=8"])
    assert received.pop() == ConnectionSettings(("a:1",), options={"max_outstanding": "8"})

    given_command(forward)
    monkeypatch.setenv("NSQ_SNAPPY", "true")
    environ = {"HOME": str(tmp_path), "NSQ_AUTH_SECRET": "hush", "NSQ_SNAPPY": "true"}
    runtime = replace(Runtime.of_process(), environ=environ)
    line = "given --destination-nsqd-tcp-address a:1 --destination-deflate-level 3 --no-snappy"
    app.run([*line.split(), "--destination-tls", "--destination-tls-min-version=tls1.3"], runtime)
    compressed = {"deflate_level": "3", "deflate": "true"}
    assert received[0].options == {**compressed, "tls_v1": "true", "tls_min_version": "tls1.3"}
    assert received[1].options == {"snappy": "false", "auth_secret": "hush"}


def test_a_switch_can_be_set_by_the_environment(connect: Connect) -> None:
    for text, value in {"1": "true", "YES": "true", "off": "false", "false": "false"}.items():
        assert connect(NSQ_TLS=text).options == {"tls_v1": value}


def test_every_client_option_is_a_setting_with_help(run_nsq: RunNsq) -> None:
    rows = json.loads(run_nsq(["config", "show", "--json"]).out)
    settings = {row["setting"]: row for row in rows}

    names = {name.replace("-", "_") for name in settings}
    assert {OPTION_OF_FLAG.get(name, name) for name in names} >= set(CLIENT_OPTIONS)
    assert all(row["help"] for name, row in settings.items() if name != "config-file")


def test_every_connection_option_has_an_environment_variable() -> None:
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
def test_the_hint_suggests_a_first_step_where_no_nsqd_runs(run_nsq: RunNsq, command: str) -> None:
    result = run_nsq([*command.split(), *(["--retry-timeout", "0s"] * command.startswith("pub"))])

    if result.status == 0:
        pytest.skip("an nsqd runs on the default port of this machine")
    assert result.status == 4
    assert "nsq demo" in result.err
    assert "NSQ_LOOKUPD_HTTP_ADDRESS" in result.err
    # an address that only begins like the default one gets no such hint
    error = ConnectionFailed("cannot connect to 127.0.0.1:41500 (connection refused)", hint="Look.")
    assert message_and_hint(error)[1] == "Look."


@pytest.mark.parametrize(
    ("file_mode", "folder_mode", "changed"),
    [
        (0o644, 0o755, ""),
        (0o664, 0o775, ""),  # the user's own group
        (0o646, 0o755, "config.toml"),
        (0o600, 0o757, "nsqtools"),  # others can replace the file
        (0o600, 0o1777, ""),
    ],
)
def test_a_configuration_that_others_can_change_is_reported(
    config: Path, file_mode: int, folder_mode: int, changed: str
) -> None:
    config.chmod(file_mode)
    config.parent.chmod(folder_mode)
    warning = check_ownership(config)
    assert Path(warning.partition(" can be changed by every user")[0]).name == changed
