"""What is suggested for what is mistyped: what was meant; habits from the Go utilities are refused.

Wording and exit status are in tests/cli/transcripts/nsq.txt.
"""

from __future__ import annotations

from nsqtools.cli.parsing.app import closest


def test_what_is_as_close_is_suggested_too() -> None:
    assert closest("uploaf", ["upload", "download"]) == ["upload"]
    assert closest("tls-k", ["tls-ca", "tls-kex", "tls-key"]) == ["tls-kex", "tls-key"]
    assert closest("x", []) == []
