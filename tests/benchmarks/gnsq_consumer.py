"""A gnsq consumer that finishes every message: ``gnsq_consumer.py ADDRESS TOPIC CHANNEL``."""

from __future__ import annotations

import sys

import gnsq

_, address, topic, channel = sys.argv

consumer = gnsq.Consumer(
    topic, channel, nsqd_tcp_addresses=[address], max_in_flight=2500, output_buffer_timeout=25
)


@consumer.on_message.connect
def handle(consumer: gnsq.Consumer, message: gnsq.Message) -> None:
    message.finish()


consumer.start()
