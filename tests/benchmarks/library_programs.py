"""What plain programs with the library do; gonsq is the same with go-nsq.

library_programs.py consume TCP_ADDRESS,... TOPIC CHANNEL [--with loop|run|inline|aio] [--workers N]
library_programs.py publish TCP_ADDRESS TOPIC [--with pub|linger|aio]    a message for each line
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
    parser.add_argument("addresses")
    parser.add_argument("topic")
    parser.add_argument("channel", nargs="?", default="")
    parser.add_argument("--with", dest="how", default="")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--max-in-flight", type=int, default=2500)
    job = parser.parse_args()
    PROGRAMS[job.what, job.how or {"consume": "loop", "publish": "pub"}[job.what]](job)


def consumer_of(job: argparse.Namespace, kind: type) -> object:
    options = ClientOptions(max_in_flight=job.max_in_flight, output_buffer_timeout_s=0.025)
    addresses = job.addresses.split(",")
    return kind(job.topic, job.channel, nsqd_tcp_addresses=addresses, options=options)


def loop(job: argparse.Namespace) -> None:
    with consumer_of(job, Consumer) as consumer:
        for message in consumer:
            message.finish()


def run(job: argparse.Namespace) -> None:
    consumer_of(job, Consumer).run(lambda message: None, workers=job.workers, signals=True)


def inline(job: argparse.Namespace) -> None:
    consumer_of(job, Consumer).run(lambda message: None, inline=True, signals=True)


def aio_loop(job: argparse.Namespace) -> None:
    async def consume() -> None:
        async with consumer_of(job, aio.Consumer) as consumer:
            async for message in consumer:
                await message.finish()

    asyncio.run(consume())


def publish(job: argparse.Namespace) -> None:
    linger_s = LINGER_S if job.how == "linger" else 0
    # with a linger every publish counts until its MPUB is answered
    options = ClientOptions(max_outstanding=WINDOW if not linger_s else 20 * WINDOW)
    failed = []

    def settled(publication: object) -> None:
        if publication.error is not None:
            failed.append(publication.error)

    with Producer(job.addresses, options, linger_s=linger_s) as producer:
        for line in sys.stdin.buffer:
            producer.submit(job.topic, [line[:-1]], on_settled=settled)
    if failed:
        raise failed[0]


def aio_publish(job: argparse.Namespace) -> None:
    async def publish_lines() -> None:
        lines = iter(sys.stdin.buffer)
        async with aio.Producer(job.addresses) as producer:

            async def publish_some() -> None:
                for line in lines:  # shared by all tasks
                    await producer.publish(job.topic, line[:-1])

            async with asyncio.TaskGroup() as tasks:
                for _ in range(WINDOW):
                    tasks.create_task(publish_some())

    asyncio.run(publish_lines())


PROGRAMS = {
    ("consume", "loop"): loop,
    ("consume", "run"): run,
    ("consume", "inline"): inline,
    ("consume", "aio"): aio_loop,
    ("publish", "pub"): publish,
    ("publish", "linger"): publish,
    ("publish", "aio"): aio_publish,
}

main()
