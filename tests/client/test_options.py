"""ClientOptions: bounds, go-nsq's names, text forms."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nsqtools.cli.options.connection import ClientFlags, LookupFlags
from nsqtools.client.connection import identify_body
from nsqtools.client.connection_settings import current_secret
from nsqtools.client.options import CLIENT_OPTIONS as OPTIONS
from nsqtools.client.options import ClientOptions, read_option
from nsqtools.errors import ConfigurationError
from nsqtools.protocol.commands import decode_identify
from nsqtools.protocol.option_names import OPTION_OF_FLAG

# Options of go-nsq 1.1.0 that have another name here or do not exist.
GO_NSQ_NAMES = """
dial_timeout read_timeout write_timeout local_addr lookupd_poll_interval lookupd_poll_jitter
max_requeue_delay default_requeue_delay backoff_strategy max_backoff_duration
backoff_multiplier max_attempts low_rdy_idle_timeout low_rdy_timeout
rdy_redistribute_interval client_id hostname user_agent heartbeat_interval sample_rate tls_v1
tls_root_ca_file tls_cert tls_key tls_insecure_skip_verify tls_min_version deflate
deflate_level snappy output_buffer_size output_buffer_timeout max_in_flight msg_timeout
auth_secret skip_lookupd_authorization max_msg_size topology_region topology_zone
lookupd_poll_timeout
"""


def test_every_option_of_go_nsq_exists() -> None:
    for name in GO_NSQ_NAMES.split():
        option: Any = read_option(name, "")[0] if name.startswith("skip") else OPTIONS[name].name
        assert hasattr(ClientOptions(), option)


READ: dict[tuple[str, str], tuple[str, object]] = {
    ("max-in-flight", " 100 "): ("max_in_flight", 100),
    **{("heartbeat_interval", text): ("heartbeat_interval_s", 5) for text in ("5s", "5000")},
    ("heartbeat_interval", "-1s"): ("heartbeat_interval_s", -1),
    ("msg_timeout", "1m30s"): ("msg_timeout_s", 90),
    **{("snappy", text): ("snappy", not text) for text in ("", "0")},
    ("lookupd_poll_jitter", "0.5"): ("lookupd_poll_jitter", 0.5),
    ("backoff_strategy", "full_jitter"): ("backoff_strategy", "full_jitter"),
    ("skip_lookupd_authorization", "true"): ("lookupd_authorization", True),
    ("auth_secret", "s3cret"): ("auth_secret", "s3cret"),
}


def test_an_option_is_read_from_text() -> None:
    assert {option: read_option(*option) for option in READ} == READ
    for (name, text), (field, value) in READ.items():
        assert getattr(ClientOptions().with_options({name: text}), field) == value, name


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *[("max_in_flight", text) for text in ("", "x", "1.5", "1" * 5000)],
        *[("msg_timeout", text) for text in ("", "1", "x", "1x", "--5", "9" * 400, "1h")],
        *[("snappy", text) for text in ("yes", "2")],
        *[("lookupd_poll_jitter", text) for text in ("", "x", "nan", "2", "-0.1")],
        *[("tls_min_version", text) for text in ("", "tls2", "TLS1.2")],
        ("backoff_strategy", "linear"),
    ],
)
def test_an_invalid_value_is_refused_with_a_hint(name: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=name) as caught:
        ClientOptions().with_options({name: text})
    assert caught.value.hint


@pytest.mark.parametrize(
    ("name", "refused", "allowed"),
    [
        ("heartbeat_interval_s", (0, 0.999, 61, -2, -0.5), (1, 60, -1)),
        ("output_buffer_timeout_s", (0.024, 31, -1), (0.025, 0)),
        ("output_buffer_size", (63, 65537, 0), (64, -1)),
        ("sample_rate", (100,), (99,)),
        ("msg_timeout_s", (0.5, 901), (0, 900)),
        ("deflate_level", (0,), (1,)),
        ("max_attempts", (65536,), (0,)),
        ("dial_timeout_s", (float("inf"), 86_401), (86_400,)),  # `select` takes 24 days at most
        ("lookupd_poll_timeout_s", (86_401,), (86_400,)),
        ("lookupd_poll_jitter", (1.1,), (1,)),
        ("backoff_multiplier_s", (float("nan"),), (0,)),
        ("local_addr", ("a:b",), ("",)),
        # invalid types are refused as well
        ("max_in_flight", (2.5, "10"), (0,)),
        ("msg_timeout_s", (None,), (2.5,)),
        ("auth_secret", (b"bytes",), ("text",)),
        ("tls_pin_sha256", ("abc",), ("",)),
        ("ssl_context", ("ca.pem",), (None,)),
        # each without the other
        *((name, ("file.pem",), ("",)) for name in ("tls_cert", "tls_key")),
    ],
)
def test_values_that_nsqd_would_refuse_are_refused(
    name: str, refused: tuple[Any, ...], allowed: tuple[Any, ...]
) -> None:
    base = replace(ClientOptions(), heartbeat_interval_s=-1)
    for value in refused:
        with pytest.raises(ConfigurationError):
            replace(base, **{name: value})
    for value in allowed:
        replace(base, **{name: value})


def test_contradicting_options_are_refused() -> None:
    wrong: list[dict[str, Any]] = [{"heartbeat_interval_s": 50, "read_timeout_s": 40}]
    for change in (*wrong, {"snappy": True, "deflate": True}):
        with pytest.raises(ConfigurationError):
            replace(ClientOptions(), **change)
    ClientOptions(output_buffer_timeout_s=-1, output_buffer_size=-1)  # -1 disables buffering
    assert "hush" not in repr(ClientOptions(auth_secret="hush"))


def test_identify_leaves_defaults_to_nsqd() -> None:
    options = ClientOptions(client_id="me", hostname="me.example", heartbeat_interval_s=-1)
    fields = json.loads(identify_body(options))
    assert (fields["client_id"], fields["hostname"]) == ("me", "me.example")
    assert (fields["heartbeat_interval"], fields["output_buffer_timeout"]) == (-1, 25)
    decided = identify_body(replace(options, msg_timeout_s=2, deflate=True, sample_rate=5))
    changes = {"msg_timeout": 2000, "deflate": True, "deflate_level": 6, "sample_rate": 5}
    assert json.loads(decided) == fields | changes
    assert decode_identify(decided).msg_timeout == 2000  # nsqd's side


ENVIRONMENT = {
    "tls": ("true", True),
    "tls_ca_file": ("/ca.pem", "/ca.pem"),
    "tls_cert": ("/cert.pem", "/cert.pem"),
    "tls_key": ("/key.pem", "/key.pem"),
    "tls_insecure": ("true", True),
    "tls_min_version": ("tls1.3", "tls1.3"),
    "snappy": ("0", False),
    "deflate": ("t", True),
    "deflate_level": ("9", 9),
    "auth_requires_tls": ("1", True),
    "tls_pin_sha256": (f"{'ab' * 32} {'cd' * 32}", f"{'ab' * 32} {'cd' * 32}"),
    "timeout": ("3s", 3.0),
    "lookupd_authorization": ("true", True),
    "allow_announced": ("*.internal", "*.internal"),
    "max_in_flight": ("7", 7),
}


def test_options_come_from_the_variables_of_the_commands(tmp_path: Path) -> None:
    flags = {*ClientFlags.__annotations__, *LookupFlags.__annotations__, "max_in_flight"}
    assert flags == {*OPTION_OF_FLAG} == {*ENVIRONMENT, "auth_secret_file"}
    environ = {f"NSQ_{flag.upper()}": text for flag, (text, _) in ENVIRONMENT.items()}
    environ |= {"NSQ_CONSUMER_OPT": "msg_timeout=2m max_attempts,9", "NSQ_PROFILE": "prod"}
    options = ClientOptions.from_env(environ)
    for flag, (_, value) in ENVIRONMENT.items():
        assert getattr(options, OPTIONS[OPTION_OF_FLAG[flag]].name) == value, flag
    assert (options.msg_timeout_s, options.max_attempts) == (120.0, 9)
    producer = {"NSQ_PRODUCER_OPT": "client_id=web", "NSQ_CONSUMER_OPT": "client_id=x"}
    assert ClientOptions.from_env(producer, role="producer").client_id == "web"
    secret = tmp_path / "secret"
    secret.write_text("s3cret\n")
    secret.chmod(0o600)
    options = ClientOptions.from_env({"NSQ_AUTH_SECRET_FILE": str(secret)})
    assert current_secret(options) == "s3cret"
    assert ClientOptions.from_env({"NSQ_AUTH_SECRET": "s"}).auth_secret == "s"
    assert ClientOptions.from_env({"NSQ_DEFLATE_LEVEL": "3"}).deflate
    assert ClientOptions.from_env({"NSQ_TLS": ""}) == ClientOptions()


@pytest.mark.parametrize(
    ("environ", "complaint"),
    [
        ({"NSQ_MAX_IN_FLIGHT": "many"}, "many.*max_in_flight"),
        ({"NSQ_CONSUMER_OPT": "max_inflight=1"}, "unknown client option 'max_inflight'"),
        ({"NSQ_TLS": "1", "NSQ_CONSUMER_OPT": "tls_v1=0"}, "NSQ_TLS and NSQ_CONSUMER_OPT contra"),
        ({"NSQ_TLS_CA_FILE": "ca.pem"}, "NSQ_TLS_CA_FILE is given, but TLS is not enabled"),
    ],
    ids=str,
)
def test_an_invalid_variable_is_reported_by_name(environ: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        ClientOptions.from_env(environ)


@pytest.mark.parametrize("option", ["tls_root_ca_file", "tls_cert", "tls_key", "auth_secret_file"])
def test_a_relative_file_stays_when_the_program_changes_its_directory(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = {"tls_cert": "file", "tls_key": "file"} | {option: "file"}
    options = ClientOptions().with_options(texts)
    monkeypatch.chdir("/")
    assert getattr(options, option) == str(tmp_path / "file")
