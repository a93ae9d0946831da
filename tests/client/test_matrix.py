"""Every transport against the real nsqd: nothing waits in a layer.

What each carries, in little pieces and in large ones, is in test_negotiation.py.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from plugins.certificates import Certificates
from plugins.clients import TOPIC, Consume, Produce, take
from plugins.daemons import GoNsqd
from plugins.waiting import patience_s

COMPRESSION: list[dict[str, bool]] = [{}, {"snappy": True}, {"deflate": True}]
MODES = [{**compression, "tls_v1": tls} for tls in (False, True) for compression in COMPRESSION]


def name(mode: dict[str, bool]) -> str:
    return "+".join(key for key, is_on in mode.items() if is_on) or "plain"


@pytest.mark.parametrize("mode", MODES, ids=name)
@pytest.mark.alone
def test_a_lone_message_does_not_wait_for_a_buffer(
    tls_nsqd: GoNsqd,
    certificates: Certificates,
    produce: Produce,
    consume: Consume,
    mode: dict[str, bool],
) -> None:
    """Without a flush in some layer it would come with the next heartbeat, in half a minute."""
    options: dict[str, Any] = {"tls_root_ca_file": str(certificates.ca), **mode}
    consumer = consume(tls_nsqd.tcp_address, fail_fast=True, **options)
    producer = produce(tls_nsqd.tcp_address, **options)
    for _ in range(3):
        began = time.monotonic()
        producer.publish(TOPIC, b"x")
        take(consumer, 1)[0].finish()
        assert time.monotonic() - began < patience_s(1)
