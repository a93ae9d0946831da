"""Plain programs with the library; gonsq has the same programs with go-nsq.

library_programs.py loop|run|aio-run|pynsq TCP_ADDRESS[,TCP_ADDRESS] TOPIC CHANNEL
library_programs.py pub|linger|aio TCP_ADDRESS TOPIC    a message for each line
library_programs.py lone|aio-lone TCP_ADDRESS TOPIC SECONDS WORKERS    as gonsq lone
"""

import asyncio
import sys
import threading
import time
from functools import partial

from nsqtools import ClientOptions, Consumer, Producer, aio

WINDOW = 64
BODY = b"x" * 200


OPTIONS = ClientOptions(max_in_flight=2500, output_buffer_timeout_s=0.025)


def make_consumer(addresses: str, topic: str, channel: str, kind: type = Consumer) -> Consumer:
    return kind(topic, channel, nsqd_tcp_addresses=addresses.split(","), options=OPTIONS)


def loop(*place: str) -> None:
    with make_consumer(*place) as consumer:
        for message in consumer:
            message.finish()


def run(*place: str) -> None:
    make_consumer(*place).run(lambda message: None, signals=True)


def aio_run(*place: str) -> None:
    async def handle(message: object) -> None:
        pass

    asyncio.run(make_consumer(*place, kind=aio.Consumer).run(handle, signals=True))


def pynsq(addresses: str, topic: str, channel: str) -> None:
    import nsq

    nsq.Reader(
        message_handler=lambda message: True,  # finish
        nsqd_tcp_addresses=addresses.split(","),
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


def lone(address: str, topic: str, seconds: str, workers: str) -> None:
    latencies: list[float] = []
    with Producer(address) as producer:

        def publish_in_turn() -> None:
            began = time.perf_counter()
            end = began + float(seconds)
            while began < end:
                producer.publish(topic, BODY)
                ended = time.perf_counter()
                latencies.append(ended - began)
                began = ended

        threads = [threading.Thread(target=publish_in_turn) for _ in range(int(workers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print_latencies(latencies)


def aio_lone(address: str, topic: str, seconds: str, workers: str) -> None:
    latencies: list[float] = []

    async def publish_in_turns() -> None:
        async with aio.Producer(address) as producer:

            async def publish_in_turn() -> None:
                began = time.perf_counter()
                end = began + float(seconds)
                while began < end:
                    await producer.publish(topic, BODY)
                    ended = time.perf_counter()
                    latencies.append(ended - began)
                    began = ended

            await asyncio.gather(*(publish_in_turn() for _ in range(int(workers))))

    asyncio.run(publish_in_turns())
    print_latencies(latencies)


def print_latencies(latencies: list[float]) -> None:
    latencies.sort()
    count = len(latencies)
    print(count, *(int(latencies[count * share // 100] * 1e6) for share in (50, 99)))


PROGRAMS = {"loop": loop, "run": run, "pynsq": pynsq, "pub": publish, "aio": aio_publish}
PROGRAMS |= {"aio-run": aio_run, "lone": lone, "aio-lone": aio_lone}
PROGRAMS["linger"] = partial(publish, linger_s=0.005)

name, *place = sys.argv[1:]
PROGRAMS[name](*place)
