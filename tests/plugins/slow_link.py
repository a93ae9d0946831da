"""A link to a network namespace that loses, delays or throttles packets.

Two TUN devices, one of them in the namespace, and a thread that carries packets between them: it
needs no netem, which many kernels do not have. What is over the rate waits in a queue for
`MAX_QUEUE_S` and is dropped beyond it, as routers do it.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import random
import secrets
import select
import struct
import subprocess
import threading
import time

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
MAX_PACKET = 65_536
MAX_QUEUE_S = 0.4

_numbers = itertools.count()


def ip(*words: str) -> str:
    """Run ip(8). Raises ``CalledProcessError`` where that is not allowed."""
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True).stdout


def link_addresses() -> tuple[str, str]:
    """Return this end's address and the other's, in a /30 that no other link is likely to have:
    other workers, and other runs, make links on this machine too.
    """
    first = secrets.randbelow(1 << 14) * 4
    prefix = f"10.213.{first >> 8}"
    return f"{prefix}.{(first & 255) + 1}", f"{prefix}.{(first & 255) + 2}"


class SlowLink:
    """`impair` what goes over it, in both directions, until `heal`."""

    def __init__(self) -> None:
        number = next(_numbers)
        self.namespace = f"nsqtools-slow-{os.getpid()}-{number}"
        our_address, self.nsqd_address = link_addresses()
        here, there = f"s{os.getpid()}-{number}a", f"s{os.getpid()}-{number}b"
        self._ends = [_open_tun(here), _open_tun(there)]
        self._stop_receiver, self._stop_sender = os.pipe()
        self._random = random.Random(1)
        self._loss, self._delay_s, self._bits_per_s = 0.0, 0.0, 0.0
        self._free_at = [0.0, 0.0]  # when each direction has sent what is queued
        ip("netns", "add", self.namespace)
        ip("link", "set", there, "netns", self.namespace)
        for where, device, address, peer in (
            ((), here, our_address, self.nsqd_address),
            (("-n", self.namespace), there, self.nsqd_address, our_address),
        ):
            ip(*where, "addr", "add", address, "peer", peer, "dev", device)
            ip(*where, "link", "set", device, "up")
        ip("-n", self.namespace, "link", "set", "lo", "up")
        self._thread = threading.Thread(target=self._carry, name="slow-link")
        self._thread.start()

    def impair(self, *, loss: float = 0.0, delay_s: float = 0.0, bits_per_s: float = 0.0) -> None:
        """Lose this share of the packets, delay each (one way), and send no faster."""
        self._loss, self._delay_s, self._bits_per_s = loss, delay_s, bits_per_s

    def heal(self) -> None:
        self.impair()

    def close(self) -> None:
        os.write(self._stop_sender, b"x")
        self._thread.join()
        for end in (*self._ends, self._stop_receiver, self._stop_sender):
            os.close(end)  # a TUN device goes with its descriptor
        ip("netns", "del", self.namespace)

    def _carry(self) -> None:
        waiting: list[tuple[float, int, int, bytes]] = []  # when, order, to which end, the packet
        order = itertools.count()
        while True:
            timeout_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
            ready, _, _ = select.select([*self._ends, self._stop_receiver], [], [], timeout_s)
            if self._stop_receiver in ready:
                return
            now = time.monotonic()
            for direction, end in enumerate(self._ends):
                if end in ready:
                    packet = os.read(end, MAX_PACKET)
                    at = self._arrival(direction, len(packet), now)
                    if at is not None:
                        heapq.heappush(waiting, (at, next(order), 1 - direction, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, to, packet = heapq.heappop(waiting)
                os.write(self._ends[to], packet)

    def _arrival(self, direction: int, size: int, now: float) -> float | None:
        """Return when a packet arrives, None where it is lost."""
        if self._random.random() < self._loss:
            return None
        sent_at = now
        if self._bits_per_s:
            begins_at = max(now, self._free_at[direction])
            if begins_at - now > MAX_QUEUE_S:
                return None
            sent_at = self._free_at[direction] = begins_at + size * 8 / self._bits_per_s
        return sent_at + self._delay_s


def _open_tun(name: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
