"""Compare programs side by side: ``python tests/benchmarks consume --messages 500000 --rounds 5``.

``python tests/benchmarks report`` measures all that README and nsq-benchmarks(7) claim (`report`).

Rounds are interleaved, because the speed of a shared machine drifts: every round runs all
contestants once, and what counts are medians and their ratios, not a single figure.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import ours, peers
from benchmarks.contestants import Contestant
from benchmarks.measure import Measured, drain, publish
from cryptography.x509.oid import ExtendedKeyUsageOID
from plugins.certificates import LOOPBACK, Authority, Credentials
from plugins.daemons import GoNsqd
from plugins.http_api import Nsqd

Measure = Callable[[Nsqd, Contestant, int], Measured]

BENCHMARKS: dict[str, tuple[Measure, list[Contestant], list[Contestant]]] = {
    "consume": (drain, peers.CONSUMERS, ours.CONSUMERS),
    "consume-into-pipe": (partial(drain, into_pipe=True), peers.CONSUMERS, ours.CONSUMERS),
    "publish": (publish, peers.PRODUCERS, ours.PRODUCERS),
    "handlers": (drain, peers.HANDLERS, ours.HANDLERS),
    "connections": (drain, peers.CONNECTIONS, ours.CONNECTIONS),
    "library-publish": (publish, peers.LIBRARY_PRODUCERS, ours.LIBRARY_PRODUCERS),
    "transports": (drain, ours.CONSUMERS[:1], ours.TRANSPORTS),
}


def run_rounds(
    measure: Measure, contestants: list[Contestant], messages: int, rounds: int
) -> dict[str, list[Measured]]:
    """What each contestant took, one a round; nsqd is a new one each round."""
    found: dict[str, list[Measured]] = {contestant.name: [] for contestant in contestants}
    for _ in range(rounds):
        with everything_in_memory(messages) as nsqd:
            for contestant in contestants:
                found[contestant.name].append(measure(nsqd, contestant, messages))
    return found


@contextmanager
def everything_in_memory(messages: int) -> Iterator[GoNsqd]:
    """The Go nsqd with room for so many messages, which offers TLS."""
    with (
        TemporaryDirectory(prefix="certificate-") as certificate,
        TemporaryDirectory(prefix="nsqd-") as directory,
        GoNsqd(
            Path(directory),
            f"-mem-queue-size={messages}",
            "-tcp-address=0.0.0.0:0",  # `Job.many_addresses`
            *server_certificate(Path(certificate)).nsqd_flags,
        ) as nsqd,
    ):
        yield nsqd


def server_certificate(directory: Path) -> Credentials:
    """What nsqd needs to offer TLS to those who ask for it."""
    return Authority(directory, "ca").issue("server", ExtendedKeyUsageOID.SERVER_AUTH, LOOPBACK)


def table(found: dict[str, list[Measured]], baselines: list[str]) -> str:
    """Medians and extremes of the rates, each median as a multiple of the baselines', and cost."""
    medians = {name: statistics.median(run.rate for run in runs) for name, runs in found.items()}
    against = [name for name in baselines if name in medians]
    heads = "".join(f"{f'x {name}':>18}" for name in against)
    costs = f"{'CPU us':>9}{'MB':>6}{'fds':>6}"
    rows = [f"{'messages/s':<24}{'median':>10}{'min':>10}{'max':>10}{costs}{heads}"]
    for name, runs in found.items():
        rates = [run.rate for run in runs]
        ratios = "".join(f"{medians[name] / medians[other]:>18.2f}" for other in against)
        figures = "".join(f"{f:>10,.0f}" for f in (medians[name], min(rates), max(rates)))
        cpu_us = statistics.median(run.cpu_us for run in runs)
        peak_mb, descriptors = max(run.peak_mb for run in runs), max(r.descriptors for r in runs)
        rows.append(f"{name:<24}{figures}{cpu_us:>9.2f}{peak_mb:>6.0f}{descriptors:>6}{ratios}")
    return "\n".join(rows)


def main() -> None:
    if sys.argv[1:2] == ["report"]:
        from benchmarks.report.command import main as report

        raise SystemExit(report(sys.argv[2:]))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("benchmark", choices=BENCHMARKS)
    parser.add_argument("--messages", type=int, default=500_000, help="of 200 bytes (500000)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", action="append", help="a contestant's name; repeatable")
    arguments = parser.parse_args()

    measure, theirs, own = BENCHMARKS[arguments.benchmark]
    chosen = [c for c in (*theirs, *own) if c.name in (arguments.only or [c.name])]
    if not chosen:
        parser.error(f"no such contestant; there are {', '.join(c.name for c in theirs + own)}")
    found = run_rounds(measure, chosen, arguments.messages, arguments.rounds)
    print(table(found, [contestant.name for contestant in theirs]))


if __name__ == "__main__":
    main()
