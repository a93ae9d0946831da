"""How long a lone message takes from publishing to the printed line: ``latency.py [MESSAGES]``.

nsqd holds a message back in its output buffer when a connection could take more, for 250 ms unless
the client asks for less. Messages are published one at a time, with pauses of up to 70 ms.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import ours, peers
from benchmarks.contestants import Job
from plugins.daemons import GoNsqd
from plugins.waiting import wait_until


def latencies_ms(nsqd: GoNsqd, command: Sequence[str], job: Job, messages: int) -> list[float]:
    """Publish messages one by one and wait for the line of each."""
    nsqd.create_channel(job.topic, job.channel)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as program:
        assert program.stdout is not None
        wait_until(
            lambda: nsqd.channel_stats(job.topic, job.channel)["client_count"],
            what="the program has subscribed",
        )
        taken = []
        for number in range(messages):
            time.sleep(random.uniform(0, 0.07))
            began = time.perf_counter()
            nsqd.publish(job.topic, b"%d" % number)
            program.stdout.readline()
            taken.append((time.perf_counter() - began) * 1000)
        program.terminate()
    return taken


def main() -> None:
    messages = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    print(f"{'milliseconds':<16}{'p50':>8}{'p90':>8}{'max':>8}")
    for name, command in (("nsq_tail", peers.nsq_tail), ("nsq tail", ours.tail)):
        with TemporaryDirectory(prefix="nsqd-") as directory, GoNsqd(Path(directory)) as nsqd:
            job = Job(nsqd.tcp_address, "latency", "c")
            taken = latencies_ms(nsqd, command(job), job, messages)
        p90 = statistics.quantiles(taken, n=10)[-1]
        print(f"{name:<16}{statistics.median(taken):>8.2f}{p90:>8.2f}{max(taken):>8.2f}")


if __name__ == "__main__":
    main()
