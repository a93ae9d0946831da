"""``nsq config show``: what holds, where it stands, and no secrets."""

from __future__ import annotations

from pathlib import Path

import pytest
from plugins.cli import RunNsq

CONFIG = """
lookupd-http-address = ["file:4161"]
max-in-flight = 7

[profiles.lab]
nsqd-tcp-address = ["lab-1:4150", "lab-2:4150"]
consumer-opt = { max_attempts = 4, msg_timeout = "5m", auth_secret = "hush-hush" }
tls = true
tls-ca-file = "/etc/ca.pem"

[profiles.home]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / ".config/nsqtools/config.toml"
    path.parent.mkdir(parents=True)
    path.write_text(CONFIG)
    path.chmod(0o600)  # there is a secret in it
    return path


def test_secrets_are_masked_wherever_they_stand(
    file: Path, tmp_path: Path, run_nsq: RunNsq
) -> None:
    (tmp_path / "secret").write_text("open sesame")
    flags = [f"--auth-secret-file={tmp_path / 'secret'}", "--producer-opt=auth_secret=open sesame"]

    for form in ([], ["--json"]):
        of_profile = run_nsq(["config", "show", "--profile=lab", *form])
        of_flags = run_nsq(["config", "show", *flags, *form])
        assert (of_profile.status, of_flags.status) == (0, 0)
        for result in (of_profile, of_flags):
            assert b"***" in result.out
            assert b"sesame" not in result.out
            assert b"hush" not in result.out
