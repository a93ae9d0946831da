"""The loop of a daemon measures its turns, and shares them among busy clients."""

import asyncio
import time
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest

from nsqtools.http import loop_meter
from nsqtools.http.loop_meter import LoopMeter, MeteredLoop, meter_of


def run(meter_use: object) -> LoopMeter:
    with asyncio.Runner(loop_factory=MeteredLoop) as runner:
        runner.run(meter_use)  # type: ignore[arg-type]
        return meter_of(runner.get_loop())


def test_the_longest_turn_is_measured_in_wall_and_cpu_time() -> None:
    async def stall() -> None:
        await asyncio.sleep(0)
        time.sleep(0.03)
        await asyncio.sleep(0)

    meter = run(stall())
    assert meter.longest_s >= 0.03
    assert meter.longest_cpu_s < 0.02
    meter.forget()
    assert meter.longest_s == 0.0


def test_many_busy_clients_get_small_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    now_s = 1000.0  # a frozen wall clock: interruptions by other processes do not count
    clock = SimpleNamespace(monotonic=lambda: now_s, thread_time=time.thread_time)
    monkeypatch.setattr(loop_meter, "time", clock)

    async def be_busy() -> None:
        meter = meter_of(asyncio.get_running_loop())
        for clients in (1, 1, 50, 50):
            budgets = [meter.share_ends_s() - now_s for _ in range(clients)]
            shares.append(budgets[0])
            await asyncio.sleep(0)

    run(be_busy())
    assert shares[1] > 0.0015
    assert shares[3] < 0.0003


def test_work_beyond_a_turn_waits_for_the_next_one_in_order() -> None:
    served: list[tuple[int, int]] = []  # the number, and its turn

    turn = 0

    def work(number: int) -> None:
        served.append((number, turn))
        until_s = time.thread_time() + 0.003
        while time.thread_time() < until_s:
            pass

    async def be_busy() -> None:
        nonlocal turn
        loop = asyncio.get_running_loop()
        for number in range(12):
            meter_of(loop).soon(partial(work, number), loop)
        while len(served) < 12:
            await asyncio.sleep(0)
            turn += 1

    run(be_busy())
    assert [number for number, _ in served] == list(range(12))
    turns = Counter(turn for _, turn in served)
    assert max(turns.values()) <= 4  # of 3 ms in 8
