"""The watermark of the disk, a flag that Go does not have, and those that are gone."""

from __future__ import annotations

from pathlib import Path

import pytest
from plugins.raw_client import RawClient, sized

from nsqtools.errors import ConfigurationError
from nsqtools.server import EmbeddedNsqd
from nsqtools.server.go_flags import GONE, FlagError, flags_of, parse_flags, read_config
from nsqtools.server.options import NsqdOptions


def test_a_nearly_full_disk_refuses_publishes_and_ping_says_so() -> None:
    with EmbeddedNsqd(min_disk_free=1 << 60) as nsqd, RawClient(nsqd.tcp_address) as client:
        client.send(b"PUB t\n" + sized(b"x"))
        error = client.read_error()
    assert error.startswith(b"E_PUB_FAILED PUB failed ")
    assert error.endswith(b" bytes free on the disk, fewer than --min-disk-free")


@pytest.mark.parametrize("name", GONE)
def test_a_flag_that_is_gone_says_what_there_is_instead(tmp_path: Path, name: str) -> None:
    with pytest.raises(FlagError, match=r"gone: .*--m"):
        parse_flags(flags_of(NsqdOptions, {}), [f"--{name}=1"])
    config = tmp_path / "nsqd.toml"
    config.write_text(f"{name.replace('-', '_')} = 1\n")
    with pytest.raises(ConfigurationError, match=r"is gone: .*--m"):
        read_config(str(config), NsqdOptions)
