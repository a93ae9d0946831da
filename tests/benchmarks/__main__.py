"""Compare programs side by side: ``python tests/benchmarks consume --messages 500000 --rounds 5``.

Rounds are interleaved, because the speed of a shared machine drifts: every round runs all
contestants once, and what counts are medians and their ratios, not a single figure.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import ours, peers
from benchmarks.contestants import Contestant
from benchmarks.measure import drain_rate, publish_rate
from cryptography.x509.oid import ExtendedKeyUsageOID
from plugins.certificates import LOOPBACK, Authority, Credentials
from plugins.daemons import GoNsqd
from plugins.http_api import Nsqd

Measure = Callable[[Nsqd, Contestant, int], float]

BENCHMARKS: dict[str, tuple[Measure, list[Contestant], list[Contestant]]] = {
    "consume": (drain_rate, peers.CONSUMERS, ours.CONSUMERS),
    "consume-into-pipe": (partial(drain_rate, into_pipe=True), peers.CONSUMERS, ours.CONSUMERS),
    "publish": (publish_rate, peers.PRODUCERS, ours.PRODUCERS),
    "handlers": (drain_rate, peers.HANDLERS, ours.HANDLERS),
    "connections": (drain_rate, peers.CONNECTIONS, ours.CONNECTIONS),
    "library-publish": (publish_rate, peers.LIBRARY_PRODUCERS, ours.LIBRARY_PRODUCERS),
    "transports": (drain_rate, ours.CONSUMERS[:1], ours.TRANSPORTS),
}


def run_rounds(
    measure: Measure, contestants: list[Contestant], messages: int, rounds: int
) -> dict[str, list[float]]:
    """Rates of each contestant, one a round; nsqd is a new one each round."""
    rates: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for _ in range(rounds):
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
            for contestant in contestants:
                rates[contestant.name].append(measure(nsqd, contestant, messages))
    return rates


def server_certificate(directory: Path) -> Credentials:
    """What nsqd needs to offer TLS to those who ask for it."""
    return Authority(directory, "ca").issue("server", ExtendedKeyUsageOID.SERVER_AUTH, LOOPBACK)


def table(rates: dict[str, list[float]], baselines: list[str]) -> str:
    """Medians, extremes, and each median as a multiple of the baselines'."""
    medians = {name: statistics.median(values) for name, values in rates.items()}
    against = [name for name in baselines if name in medians]
    heads = "".join(f"{f'x {name}':>18}" for name in against)
    rows = [f"{'messages/s':<24}{'median':>10}{'min':>10}{'max':>10}{heads}"]
    for name, values in rates.items():
        ratios = "".join(f"{medians[name] / medians[other]:>18.2f}" for other in against)
        figures = "".join(f"{f:>10,.0f}" for f in (medians[name], min(values), max(values)))
        rows.append(f"{name:<24}{figures}{ratios}")
    return "\n".join(rows)


def main() -> None:
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
    rates = run_rounds(measure, chosen, arguments.messages, arguments.rounds)
    print(table(rates, [contestant.name for contestant in theirs]))


if __name__ == "__main__":
    main()
