"""Our own programs, compared with those of peers.py in the same run."""

from __future__ import annotations

from benchmarks.contestants import Contestant

CONSUMERS: list[Contestant] = []
PRODUCERS: list[Contestant] = []
