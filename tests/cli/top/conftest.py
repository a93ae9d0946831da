"""``nsq top`` on a terminal, looking at the ``nsqd`` of the file.

open_top   ``top = open_top("--sort=depth", columns=100)``; then ``top.see("\\r", "clicks")``
top        one that is there, and may change it
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from plugins.http_api import Nsqd
from plugins.screens import NsqOnAScreen, TerminalScreen

OpenTop = Callable[..., TerminalScreen]


@pytest.fixture
def open_top(nsq_on_a_screen: NsqOnAScreen, nsqd: Nsqd) -> OpenTop:
    here = f"--nsqd-http-address={nsqd.http_address}"
    command = ["top", here, "--interval", "100ms"]
    return lambda *more, **screen: nsq_on_a_screen([*command, *more], **screen)


@pytest.fixture
def top(open_top: OpenTop) -> TerminalScreen:
    top = open_top("--allow-changes")
    top.wait_for("clicks", "q quit")
    return top
