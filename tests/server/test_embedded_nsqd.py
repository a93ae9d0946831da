"""The embedded nsqd as a library: what a failed start leaves behind."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from nsqtools.errors import ConfigurationError
from nsqtools.server import EmbeddedNsqd


def test_a_start_that_failed_gives_the_data_path_back(tmp_path: Path) -> None:
    metadata = tmp_path / "nsqd.dat"
    metadata.write_text("{")
    nsqd = EmbeddedNsqd(data_path=str(tmp_path))

    with pytest.raises(ConfigurationError, match="failed to parse metadata"):
        nsqd.start()
    metadata.unlink()

    nsqd.start()
    assert nsqd.tcp_address.startswith("127.0.0.1:")
    nsqd.stop()
    gc.collect()  # a socket that was left open would warn, and fail the test
