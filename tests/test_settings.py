"""The configuration file: where it is, what it may say, and which of its parts holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsqtools.errors import ConfigurationError
from nsqtools.settings import Origin, config_path, load_settings

KNOWN = {"lookupd_http_address": True, "consumer_opt": True, "tls": False, "tls_ca_file": False}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def load(path: Path, text: str, profile: str | None = None) -> dict[str, object]:
    path.write_text(text)
    return {name: s.value for name, s in load_settings(path, profile, KNOWN).items()}


def test_the_file_is_in_the_users_configuration_directory() -> None:
    assert config_path({"HOME": "/home/me"}) == Path("/home/me/.config/nsqtools/config.toml")
    assert config_path({"HOME": "/home/me", "XDG_CONFIG_HOME": "/etc/me"}) == Path(
        "/etc/me/nsqtools/config.toml"
    )


def test_a_user_without_a_home_has_no_file_in_the_current_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", unknown)
    for environ in ({}, {"HOME": ""}):
        assert config_path(environ) == Path("/~/.config/nsqtools/config.toml")


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ('lookupd-http-address = ["a:1", "b:2"]', {"lookupd_http_address": ["a:1", "b:2"]}),
        (
            'lookupd_http_address = "a:1"\ntls = true',
            {"lookupd_http_address": ["a:1"], "tls": True},
        ),
        (
            'consumer-opt = { max_attempts = 3, snappy = true, msg_timeout = "5m", jitter = 0.5 }',
            {"consumer_opt": ["max_attempts=3", "snappy=true", "msg_timeout=5m", "jitter=0.5"]},
        ),
        ("[profiles.lab]\ntls = true", {}),
    ],
)
def test_each_form_of_a_value_is_read(path: Path, text: str, settings: dict[str, object]) -> None:
    assert load(path, text) == settings


def test_a_profile_stands_over_the_file_and_each_value_knows_its_place(path: Path) -> None:
    profiles = "[profiles.lab]\ntls = false\n[profiles.other]\ntls = true\n"
    path.write_text(f"tls = true\ntls-ca-file = 'f.pem'\n{profiles}")
    settings = load_settings(path, "lab", KNOWN)
    assert settings["tls"] == (False, Origin.PROFILE, f"profiles.lab.tls in {path}")
    assert settings["tls_ca_file"] == ("f.pem", Origin.FILE, f"tls-ca-file in {path}")


def test_a_file_that_is_not_utf8_is_named(path: Path) -> None:
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigurationError, match=r"config\.toml"):
        load_settings(path, None, KNOWN)


def test_a_setting_that_is_there_twice_is_refused(path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"tls-ca-file in .*: it is there twice"):
        load(path, "tls_ca_file = 'a'\ntls-ca-file = 'b'")
