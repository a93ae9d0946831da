"""What plain programs with the library do; gonsq is the same with go-nsq.

library_programs.py consume TCP_ADDRESS TOPIC CHANNEL --with loop|run|pynsq
library_programs.py publish TCP_ADDRESS TOPIC --with pub|linger|aio    a message for each line
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from nsqtools import ClientOptions, Consumer, Producer, aio

LINGER_S = 0.005
WINDOW = 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["consume", "publish"])
    parser.add_argument("address")
    parser.add_argument("topic")
    parser.add_argument("channel", nargs="?", default="")
    parser.add_argument("--with", dest="how")
    job = parser.parse_args()
    PROGRAMS[job.how](job)


def consumer_of(job: argparse.Namespace) -> Consumer:
    options = ClientOptions(max_in_flight=2500, output_buffer_timeout_s=0.025)
    return Consumer(job.topic, job.channel, nsqd_tcp_addresses=job.address, options=options)


def loop(job: argparse.Namespace) -> None:
    with consumer_of(job) as consumer:
        for message in consumer:
            message.finish()


def run(job: argparse.Namespace) -> None:
    consumer_of(job).run(lambda message: None, signals=True)


def pynsq(job: argparse.Namespace) -> None:
    import nsq

    nsq.Reader(
        message_handler=lambda message: True,  # finish
        nsqd_tcp_addresses=[job.address],
        topic=job.topic,
        channel=job.channel,
        max_in_flight=2500,
        output_buffer_timeout=25,
    )
    nsq.run()


def publish(job: argparse.Namespace) -> None:
    linger_s = LINGER_S if job.how == "linger" else 0
    # with a linger every publish counts until its MPUB is answered
    options = ClientOptions(max_outstanding=WINDOW if not linger_s else 20 * WINDOW)
    failed = []

    def settled(publication: object) -> None:
        if publication.error is not None:
            failed.append(publication.error)

    with Producer(job.address, options, linger_s=linger_s) as producer:
        for line in sys.stdin.buffer:
            producer.submit(job.topic, [line[:-1]], on_settled=settled)
    if failed:
        raise failed[0]


def aio_publish(job: argparse.Namespace) -> None:
    async def publish_lines() -> None:
        lines = iter(sys.stdin.buffer)
        async with aio.Producer(job.address) as producer:

            async def publish_some() -> None:
                for line in lines:  # shared by all tasks
                    await producer.publish(job.topic, line[:-1])

            async with asyncio.TaskGroup() as tasks:
                for _ in range(WINDOW):
                    tasks.create_task(publish_some())

    asyncio.run(publish_lines())


PROGRAMS = {
    "loop": loop,
    "run": run,
    "pynsq": pynsq,
    "pub": publish,
    "linger": publish,
    "aio": aio_publish,
}

main()
