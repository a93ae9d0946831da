"""The options that say where NSQ is: the meanings and the errors of the command line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from nsqtools.client.connection_settings import ConnectionSettings, current_secret
from nsqtools.errors import ConfigurationError
from nsqtools.spark.format_options import (
    Options,
    as_options,
    consumer_connection,
    hand_on_secret,
    producer_connection,
    subscription,
)


def consumer(environ: Mapping[str, str] | None = None, **given: str) -> ConnectionSettings:
    options = Options("nsq", {name.lower(): text for name, text in given.items()})
    settings = consumer_connection(options, environ or {})
    options.end()
    return settings


def test_without_any_address_it_is_the_nsqd_of_this_machine() -> None:
    assert consumer() == ConnectionSettings(nsqd_tcp_addresses=("127.0.0.1:4150",))


def test_an_address_of_any_kind_replaces_the_default() -> None:
    assert consumer(nsqdTcpAddress="a:1, b:2").nsqd_tcp_addresses == ("a:1", "b:2")
    assert consumer(lookupdHttpAddress="l:1") == ConnectionSettings((), ("l:1",))
    assert consumer(nsqdHttpAddress="d:1") == ConnectionSettings((), (), ("d:1",))


def test_addresses_of_the_environment_hold_when_no_option_has_one() -> None:
    environ = {"NSQ_NSQD_TCP_ADDRESS": "env:1 env:2"}

    assert consumer(environ).nsqd_tcp_addresses == ("env:1", "env:2")
    assert consumer(environ, lookupdHttpAddress="l:1").nsqd_tcp_addresses == ()


def test_options_have_the_meaning_of_the_flags() -> None:
    settings = consumer(
        tls="true", tlsCaFile="ca.pem", tlsInsecure="true", tlsMinVersion="tls1.3", deflateLevel="3"
    )

    assert settings.options == {
        "tls_v1": "true",
        "tls_root_ca_file": "ca.pem",
        "tls_insecure_skip_verify": "true",
        "tls_min_version": "tls1.3",
        "deflate_level": "3",
        "deflate": "true",
    }


@pytest.mark.parametrize("name", ["max_in_flight", "maxInFlight", "max-in-flight", "MAXINFLIGHT"])
def test_client_options_go_by_go_nsqs_names_however_they_are_written(name: str) -> None:
    assert consumer(**{name: "7"}).client_options().max_in_flight == 7


def test_durations_are_those_of_the_client_options() -> None:
    assert consumer(msg_timeout="5m").client_options().msg_timeout_s == 300


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"tlsCaFile": "ca.pem"}, "option tlsCaFile is given, but TLS is not enabled"),
        ({"tls": "true", "tls_v1": "false"}, "option tls and option tls_v1 contradict each other"),
        ({"tls": "perhaps"}, "invalid value 'perhaps' for client option tls_v1"),
        ({"snappy": "true", "deflate": "true"}, "exclude each other"),
        ({"max_in_flight": "-1"}, "max_in_flight is out of bounds"),
        ({"addressMap": "a:1"}, "invalid addressMap 'a:1': not OLD=NEW"),
        ({"authSecretFile": "/nonexistent"}, "/nonexistent .No such file or directory"),
        ({"auth_secret": "s3cret"}, "a secret must not be an option"),
        ({"authSecret": "s3cret"}, "a secret must not be an option"),
        ({"maxInFlihgt": "1"}, "has no option 'maxinflihgt'"),
    ],
)
def test_what_cannot_work_is_refused(given: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint) as caught:
        consumer(**given)
    assert "s3cret" not in f"{caught.value}{caught.value.hint}"


def test_an_unknown_option_gets_the_name_that_was_meant() -> None:
    with pytest.raises(ConfigurationError) as caught:
        consumer(maxInFlihgt="1")
    assert caught.value.hint == "Did you mean max_in_flight?"


def test_the_secret_comes_from_a_file_or_the_environment_and_is_never_shown(
    tmp_path: Path,
) -> None:
    (tmp_path / "secret").write_text("from-file\n")
    environ = {"NSQ_AUTH_SECRET": "from-environment"}

    from_file = consumer(environ, authSecretFile=str(tmp_path / "secret"))

    assert from_file.client_options().auth_secret == "from-file"
    (tmp_path / "secret").write_text("from-file-later\n")
    assert current_secret(from_file.client_options()) == "from-file-later"
    assert consumer(environ).client_options().auth_secret == "from-environment"
    assert "from-file" not in repr(from_file)


def test_a_producer_has_no_nsqd_http_address() -> None:
    options = Options("nsq", {"nsqdhttpaddress": "d:1"})
    producer_connection(options, {})
    with pytest.raises(ConfigurationError, match="nsqdhttpaddress"):
        options.end()


def test_a_connection_survives_being_written_as_options_but_for_its_secret() -> None:
    settings = ConnectionSettings(
        ("a:1", "b:2"),
        options={"tls_v1": "true", "tls_root_ca_file": "ca.pem", "auth_secret": "s3cret"},
        address_map={"n:4150": "127.0.0.1:1"},
    )
    environ: dict[str, str] = {}

    given = as_options(settings)
    hand_on_secret(settings, environ)

    assert "s3cret" not in str(given)
    assert consumer(environ, **given) == settings


def test_a_subscription_has_topics_and_a_channel() -> None:
    given = {"topic": "clicks, views,clicks", "channel": "spark"}

    assert subscription(Options("nsq", given)) == (("clicks", "views"), "spark", "")


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"channel": "spark"}, "needs the option 'topic'"),
        ({"topic": "clicks"}, "needs the option 'channel'"),
        ({"topic": "a b", "channel": "spark"}, "invalid topic name 'a b'"),
        ({"topic": "clicks", "channel": "a b"}, "invalid channel name 'a b'"),
    ],
)
def test_a_subscription_without_its_names_is_refused(given: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        subscription(Options("nsq", given))
