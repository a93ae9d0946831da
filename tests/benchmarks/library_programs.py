"""What plain programs with the library do; gonsq is the same with go-nsq.

library_programs.py loop|run|pynsq TCP_ADDRESS TOPIC CHANNEL
library_programs.py pub|linger|aio TCP_ADDRESS TOPIC    a message for each line
"""

import asyncio
import sys
from functools import partial

from nsqtools import ClientOptions, Consumer, Producer, aio

WINDOW = 64


def make_consumer(address: str, topic: str, channel: str) -> Consumer:
    options = ClientOptions(max_in_flight=2500, output_buffer_timeout_s=0.025)
    return Consumer(topic, channel, nsqd_tcp_addresses=address, options=options)


def loop(*place: str) -> None:
    with make_consumer(*place) as consumer:
        for message in consumer:
            message.finish()


def run(*place: str) -> None:
    make_consumer(*place).run(lambda message: None, signals=True)


def pynsq(address: str, topic: str, channel: str) -> None:
    import nsq

    nsq.Reader(
        message_handler=lambda message: True,  # finish
        nsqd_tcp_addresses=[address],
        topic=topic,
        channel=channel,
        max_in_flight=2500,
        output_buffer_timeout=25,
    )
    nsq.run()


def publish(address: str, topic: str, linger_s: float = 0.0) -> None:
    # with a linger every publish counts until its MPUB is answered
    options = ClientOptions(max_outstanding=WINDOW if not linger_s else 20 * WINDOW)
    failed = []

    def settled(publication: object) -> None:
        if publication.error is not None:
            failed.append(publication.error)

    with Producer(address, options, linger_s=linger_s) as producer:
        for line in sys.stdin.buffer:
            producer.submit(topic, [line[:-1]], on_settled=settled)
    if failed:
        raise failed[0]


def aio_publish(address: str, topic: str) -> None:
    async def publish_lines() -> None:
        lines = iter(sys.stdin.buffer)
        async with aio.Producer(address) as producer:

            async def publish_some() -> None:
                for line in lines:  # shared by all tasks
                    await producer.publish(topic, line[:-1])

            async with asyncio.TaskGroup() as tasks:
                for _ in range(WINDOW):
                    tasks.create_task(publish_some())

    asyncio.run(publish_lines())


PROGRAMS = {"loop": loop, "run": run, "pynsq": pynsq, "pub": publish, "aio": aio_publish}
PROGRAMS["linger"] = partial(publish, linger_s=0.005)

name, *place = sys.argv[1:]
PROGRAMS[name](*place)
