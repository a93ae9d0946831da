"""Answers of the cluster that several open pages share for a moment.

Ten people who look at one channel are one question every two seconds. Whoever asks first waits for
the daemons; who comes meanwhile waits for the same answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

V = TypeVar("V")

MAX_ANSWERS = 200


@dataclass(slots=True)
class _Answer(Generic[V]):
    lock: threading.Lock = field(default_factory=threading.Lock)
    at_s: float | None = None
    value: V | None = None


class Recent(Generic[V]):
    """Answers by question, each for ``keep_s`` seconds. Thread-safe."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._lock = threading.Lock()
        self._answers: dict[Hashable, _Answer[V]] = {}

    def get(self, question: Hashable, ask: Callable[[V | None], V]) -> V:
        """Return what ``ask`` answered lately, or now; it gets the answer before. Raises as it."""
        with self._lock:
            answer = self._answers.pop(question, None) or _Answer()
            self._answers[question] = answer
            while len(self._answers) > MAX_ANSWERS:
                del self._answers[next(iter(self._answers))]
        with answer.lock:
            now_s = time.monotonic()
            if answer.value is None or answer.at_s is None or now_s - answer.at_s >= self._keep_s:
                answer.value = ask(answer.value)
                answer.at_s = time.monotonic()
            return answer.value
