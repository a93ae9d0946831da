"""A pynsq consumer that finishes every message: ``pynsq_consumer.py ADDRESS TOPIC CHANNEL``."""

from __future__ import annotations

import sys

import nsq

_, address, topic, channel = sys.argv

nsq.Reader(
    message_handler=lambda message: True,  # finish
    nsqd_tcp_addresses=[address],
    topic=topic,
    channel=channel,
    max_in_flight=2500,
    output_buffer_timeout=25,
)
nsq.run()
