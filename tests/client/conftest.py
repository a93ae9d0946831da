"""What several tests of the client use."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from plugins.certificates import Certificates
from plugins.daemons import GoNsqd


@pytest.fixture
def tls_nsqd(go_nsqd: Callable[..., GoNsqd], certificates: Certificates) -> GoNsqd:
    """An nsqd that offers TLS."""
    return go_nsqd(*certificates.server.nsqd_flags)
