"""The library's plain loop, as a program: ``library_loop.py TCP_ADDRESS TOPIC CHANNEL``."""

from __future__ import annotations

import sys

from nsqtools import ClientOptions, Consumer


def main() -> None:
    address, topic, channel = sys.argv[1:]
    options = ClientOptions(max_in_flight=2500, output_buffer_timeout_s=0.025)
    with Consumer(topic, channel, nsqd_tcp_addresses=[address], options=options) as consumer:
        for message in consumer:
            message.finish()


main()
