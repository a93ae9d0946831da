"""The connection options: which of several origins holds, and what cannot work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from plugins.cli import GivenCommand

from nsqtools.cli.options.connection import (
    ConsumerConnection,
    Destination,
    ProducerConnection,
)
from nsqtools.cli.parsing import app
from nsqtools.cli.running.runtime import Runtime
from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.errors import ConfigurationError

Connect = Callable[..., ConnectionSettings]

CONFIG = """
lookupd-http-address = ["file:4161"]
max-in-flight = 7

[profiles.lab]
nsqd-tcp-address = "lab:4150"
consumer-opt = { max_attempts = 4, msg_timeout = "5m" }
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
    """Parse a command line of a command that consumes; return what the command was given."""
    got: list[ConnectionSettings] = []

    def consume(*, connection: ConsumerConnection) -> None:
        got.append(connection)

    def run(line: str = "", **environ: str) -> ConnectionSettings:
        given_command(consume)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        runtime = replace(Runtime.of_process(), environ={"HOME": str(tmp_path), **environ})
        app.run(["given", *line.split()], runtime)
        return got.pop()

    return run


def addresses(connection: ConnectionSettings) -> tuple[tuple[str, ...], ...]:
    """Of nsqd over TCP, over HTTP, and of nsqlookupd."""
    return (
        connection.nsqd_tcp_addresses,
        connection.nsqd_http_addresses,
        connection.lookupd_http_addresses,
    )


LAB = {"tls_v1": "true", "max_attempts": "4", "msg_timeout": "5m", "max_in_flight": "7"}


@pytest.mark.parametrize(
    ("line", "environ", "expected"),
    [
        ("", {}, (("127.0.0.1:4150",), (), ())),
        ("--nsqd-http-address d:4151", {}, ((), ("d:4151",), ())),
        (
            "--nsqd-tcp-address a:1 --nsqd-tcp-address b:2 --lookupd-http-address l:3",
            {},
            (("a:1", "b:2"), (), ("l:3",)),
        ),
        ("", {"NSQ_NSQD_TCP_ADDRESS": "a:1 b:2"}, (("a:1", "b:2"), (), ())),
    ],
)
def test_addresses_are_the_default_or_what_is_given(
    connect: Connect, line: str, environ: dict[str, str], expected: object
) -> None:
    assert addresses(connect(line, **environ)) == expected


@pytest.mark.parametrize(
    ("line", "environ", "expected"),
    [
        ("", {}, ((), (), ("file:4161",))),
        ("-P lab", {}, (("lab:4150",), (), ())),
        ("", {"NSQ_PROFILE": "lab"}, (("lab:4150",), (), ())),
        ("-P lab", {"NSQ_LOOKUPD_HTTP_ADDRESS": "env:4161"}, ((), (), ("env:4161",))),
        ("-P lab --nsqd-http-address flag:4151", {}, ((), ("flag:4151",), ())),
        ("", {"NSQ_NSQD_TCP_ADDRESS": "a:1,b:2 c:3"}, (("a:1", "b:2", "c:3"), (), ())),
    ],
)
def test_addresses_of_a_weaker_origin_are_ignored_whatever_their_kind(
    connect: Connect, config: Path, line: str, environ: dict[str, str], expected: object
) -> None:
    assert addresses(connect(line, **environ)) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("-P lab", LAB),
        (
            "-P lab --no-tls --consumer-opt max-attempts=9 --max-in-flight 3",
            {**LAB, "tls_v1": "false", "max_attempts": "9", "max_in_flight": "3"},
        ),
        ("--no-profile", {"max_in_flight": "7"}),
    ],
)
def test_a_flag_overrides_one_option_of_the_profile_and_leaves_the_others(
    connect: Connect, config: Path, line: str, expected: dict[str, str]
) -> None:
    assert connect(line).options == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--consumer-opt max_attempts,9", {"max_attempts": "9"}),
        ("--consumer-opt max-attempts=9", {"max_attempts": "9"}),
        ("--consumer-opt max_attempts=1 --consumer-opt max_attempts=2", {"max_attempts": "2"}),
        ("--deflate-level 3", {"deflate_level": "3", "deflate": "true"}),
        ("--deflate-level 3 --no-deflate", {"deflate_level": "3", "deflate": "false"}),
        (
            "--tls --tls-ca-file ca.pem --tls-cert c.pem --tls-key k.pem --tls-insecure"
            " --tls-min-version tls1.3 --snappy --max-in-flight 9",
            {
                "tls_v1": "true",
                "tls_root_ca_file": "ca.pem",
                "tls_cert": "c.pem",
                "tls_key": "k.pem",
                "tls_insecure_skip_verify": "true",
                "tls_min_version": "tls1.3",
                "snappy": "true",
                "max_in_flight": "9",
            },
        ),
        (  # for https
            "--tls-ca-file ca.pem --lookupd-http-address https://l:4161",
            {"tls_root_ca_file": "ca.pem"},
        ),
    ],
)
def test_flags_become_options_under_go_nsqs_names(
    connect: Connect, line: str, expected: dict[str, str]
) -> None:
    assert connect(line).options == expected


def test_a_commands_defaults_give_way_to_what_the_user_said(connect: Connect) -> None:
    connection = connect("--consumer-opt output_buffer_timeout=1s --consumer-opt snappy")

    options = connection.client_options(output_buffer_timeout_s=0.025, max_in_flight=5)

    assert (options.output_buffer_timeout_s, options.max_in_flight) == (1.0, 5)
    assert options.snappy is True


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("--snappy --consumer-opt snappy=false", "--snappy and --consumer-opt snappy contradict"),
        ("--consumer-opt max_in_flight=1 --max-in-flight 2", "contradict each other"),
        ("--consumer-opt colour=red", "unknown client option 'colour'"),
        ("--consumer-opt max_attempts=x", "max_attempts"),
        ("--tls-ca-file ca.pem", "--tls-ca-file is given, but TLS is not enabled"),
        ("--tls-ca-file ca.pem --lookupd-http-address l:1", "TLS is not enabled"),
        ("--address-map a:1", "invalid --address-map 'a:1': not OLD=NEW"),
        ("--auth-secret-file /nonexistent", "/nonexistent .No such file or directory"),
        ("-P lab", "config.toml .No such file"),
    ],
)
def test_what_cannot_work_is_refused(connect: Connect, line: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        connect(line)


def test_saying_the_same_twice_is_no_contradiction(connect: Connect) -> None:
    connection = connect(
        "--max-in-flight 2 --consumer-opt max_in_flight=02 --no-tls --tls-insecure"
    )

    assert connection.client_options().max_in_flight == 2


def test_the_secret_comes_from_the_environment_or_the_stronger_file(
    connect: Connect, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret\n")

    assert connect(NSQ_AUTH_SECRET="env").options == {"auth_secret": "env"}
    assert connect(f"--auth-secret-file {secret}", NSQ_AUTH_SECRET="env").options == {
        "auth_secret": "s3cret",
        "auth_secret_file": str(secret),  # to be read again at each connection
    }


@pytest.mark.parametrize("content", [b"\n", b"\xff"])
def test_an_unusable_secret_file_is_named_and_its_content_is_not(
    connect: Connect, tmp_path: Path, content: bytes
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(content)

    with pytest.raises(ConfigurationError, match=str(secret)):
        connect(f"--auth-secret-file {secret}")


def test_the_address_map_has_pairs(connect: Connect) -> None:
    connection = connect("--address-map n1:4150=127.0.0.1:1 --address-map n2:4150=127.0.0.1:2")

    assert connection.address_map == {"n1:4150": "127.0.0.1:1", "n2:4150": "127.0.0.1:2"}


def test_what_is_wrong_in_the_file_says_where_it_stands_and_what_was_meant(
    connect: Connect, config: Path
) -> None:
    config.write_text("[profiles.lab]\nsnappy = 'perhaps'\n")
    with pytest.raises(ConfigurationError, match=r"lab.snappy in .*config.toml: 'perhaps'"):
        connect("-P lab")

    config.write_text("[profiles.lab]\nconsumer-opt = { max_attemps = 4 }\n")
    for line in ("-P lab", "-P lab -X msg_timeout=1s"):
        with pytest.raises(ConfigurationError, match=r"profiles.lab.consumer-opt in .*") as caught:
            connect(line)
        assert "max_attempts?" in caught.value.hint


def test_a_producer_has_nsqd_addresses_and_producer_options(given_command: GivenCommand) -> None:
    got: list[ConnectionSettings] = []

    def publish(*, connection: ProducerConnection) -> None:
        got.append(connection)

    given_command(publish)
    app.run(["given", "--nsqd-tcp-address", "a:1", "--producer-opt", "max_outstanding=8"])

    assert got == [ConnectionSettings(("a:1",), options={"max_outstanding": "8"})]


def test_a_destination_has_client_options_of_its_own_and_nothing_of_the_source(
    monkeypatch: pytest.MonkeyPatch, given_command: GivenCommand, tmp_path: Path
) -> None:
    got: list[ConnectionSettings] = []

    def forward(*, to: Destination, connection: ConsumerConnection) -> None:
        got.extend([to, connection])

    given_command(forward)
    monkeypatch.setenv("NSQ_SNAPPY", "true")
    environ = {"HOME": str(tmp_path), "NSQ_AUTH_SECRET": "hush", "NSQ_SNAPPY": "true"}
    runtime = replace(Runtime.of_process(), environ=environ)
    line = "given --destination-nsqd-tcp-address a:1 --destination-deflate-level 3 --no-snappy"
    app.run([*line.split(), "--destination-tls", "--destination-tls-min-version=tls1.3"], runtime)

    assert got[0].options == {
        "deflate_level": "3",
        "deflate": "true",
        "tls_v1": "true",
        "tls_min_version": "tls1.3",
    }
    assert got[1].options == {"snappy": "false", "auth_secret": "hush"}
