"""Measure two sides in turns, so that what the machine does meanwhile falls on both.

Rounds alternate A and B, and who begins alternates too: A B, B A, A B ...
"""

from __future__ import annotations

from collections.abc import Callable

from nsqtools.bench.bench import Bench
from nsqtools.bench.bench_plan import BenchMode, BenchPlan
from nsqtools.bench.comparison import Comparison, Round, Side
from nsqtools.bench.program import ProgramPlan, ProgramRun
from nsqtools.errors import NsqError

Plan = BenchPlan | ProgramPlan


class SideFailed(NsqError):
    """A side could not be measured; says and advises what its error did."""

    def __init__(self, name: str, error: NsqError) -> None:
        super().__init__(f"{name}: {error}", hint=error.hint)
        self.category = error.category


class Compare:
    """Runs both sides: `run` on one thread, `stop` from any.

    ``show`` is called ten times a second with the round, the name of the side, what it does and how
    many messages were handled. A plan is what its side is measured by.
    """

    def __init__(
        self,
        mode: BenchMode,
        a: tuple[str, Plan],
        b: tuple[str, Plan],
        rounds: int,
        show: Callable[[int, str, str, int], None],
    ) -> None:
        self._mode = mode
        self._sides = [(_side(name, *given), given[1]) for name, given in (("A", a), ("B", b))]
        self._rounds = rounds
        self._show = show
        self._running: Bench | ProgramRun | None = None
        self._interrupted = False

    def stop(self) -> None:
        """Ask `run` to end with the rounds that are complete."""
        self._interrupted = True
        if (running := self._running) is not None:
            running.stop()

    def run(self) -> Comparison | None:
        """Measure; None when it was stopped before each side had a round.

        Raises `NsqError` when a side fails, or when messages of one are missing.
        """
        for number in range(self._rounds):
            for side, plan in self._sides if number % 2 == 0 else reversed(self._sides):
                try:
                    done = self._measure(side, plan, number)
                except NsqError as error:
                    raise SideFailed(side.name, error) from error
                if self._interrupted:
                    return self._comparison()
                side.rounds.append(done)
        return self._comparison()

    def _comparison(self) -> Comparison | None:
        (a, _), (b, _) = self._sides
        if not (a.rounds and b.rounds):
            return None
        return Comparison(self._mode, a, b, self._interrupted)

    def _measure(self, side: Side, plan: Plan, number: int) -> Round:
        def show(phase: str, count: int) -> None:
            self._show(number + 1, side.name, phase, count)

        if isinstance(plan, ProgramPlan):
            self._running = ProgramRun(plan, show)
            return self._running.run()
        self._running = bench = Bench(plan, show)
        report = bench.run()
        if not (report.is_intact or report.interrupted):
            raise NsqError(
                f"{report.published} messages were published and {report.consumed} consumed"
            )
        side.limits = report.limits
        return Round(
            report.messages,
            report.seconds,
            report.bytes,
            report.cpu_us_per_message,
            report.latencies,
        )


def _side(name: str, what: str, plan: Plan) -> Side:
    if isinstance(plan, ProgramPlan):
        return Side(name, what, is_program=True, nsqds=(plan.nsqd_tcp_address,))
    return Side(name, what, is_program=False, nsqds=plan.nsqd_tcp_addresses)
