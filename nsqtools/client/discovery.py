"""Discovery: ask every nsqlookupd, again and again, which nsqd have a topic.

All of them are asked in every round, at the same time, and the answers are united: nsqlookupd do
not talk to each other, and one that is down, slow or empty must not hide what another knows. An
error costs no connection; it is logged and the next round tries again.

The thread sleeps ``lookupd_poll_interval`` plus a random share of it between rounds, drawn for each
round, so that a fleet of clients spreads out. A lost connection asks for an earlier round.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from nsqtools.client.handshake import client_tls_context
from nsqtools.client.options import ClientOptions
from nsqtools.errors import DeadlineExceeded, NsqError
from nsqtools.http.access import HTTPAccess
from nsqtools.http.nsqlookupd_http import Lookup, NsqlookupdHTTPClient
from nsqtools.protocol.addresses import LOOKUPD_HTTP_PORT, Address, http_url

log = logging.getLogger("nsqtools")

EARLY_AFTER_S = 1.0
EARLY_ROUNDS_APART_S = 5.0
MAX_CONNECT_TIMEOUT_S = 2.0


def http_access(
    options: ClientOptions,
    http_addresses: Iterable[str],
    address_map: Mapping[str, str] | None = None,
) -> HTTPAccess:
    """Return how the client options ask daemons at these addresses, and those they announce.

    Raises `ConfigurationError` for TLS files and mapped addresses that cannot be used.
    """
    address_map = address_map or {}
    uses_tls = any(text.startswith("https:") for text in (*http_addresses, *address_map.values()))
    return HTTPAccess(
        connect_timeout_s=min(MAX_CONNECT_TIMEOUT_S, options.lookupd_poll_timeout_s),
        timeout_s=options.lookupd_poll_timeout_s,
        tls=client_tls_context(options) if uses_tls else None,
        bearer=options.auth_secret if options.lookupd_authorization else "",
        address_map=address_map,
    )


class Discovery:
    """Polls for one topic from `start` until `stop`.

    ``on_round`` gets the union of addresses of each round, and the errors of a round in which not
    one nsqlookupd answered, on the polling thread. Addresses are mapped by ``address_map`` (for
    broadcast addresses this machine cannot reach). Raises `ConfigurationError`.
    """

    def __init__(
        self,
        lookupd_http_addresses: Sequence[str],
        topic: str,
        options: ClientOptions,
        on_round: Callable[[set[Address], list[NsqError]], None],
        address_map: Mapping[str, str] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._urls = [http_url(a, LOOKUPD_HTTP_PORT) for a in lookupd_http_addresses]
        self._topic = topic
        self._options = options
        self._on_round = on_round
        self._access = http_access(options, self._urls, address_map)
        self._rng = rng or random.Random()
        self._changed = threading.Condition()
        self._next_at = 0.0
        self._early_not_before = 0.0
        self._is_stopped = False
        self._unknown_at: set[str] = set()
        self._thread = threading.Thread(target=self._run, name=f"nsq-lookup-{topic}", daemon=True)

    def start(self) -> None:
        """Start polling; the first round is at once."""
        self._thread.start()

    def stop(self) -> None:
        """Stop polling, without waiting for a round under way."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()

    def ask_soon(self) -> None:
        """Bring the next round forward: a connection was lost. From any thread."""
        with self._changed:
            at = max(time.monotonic() + EARLY_AFTER_S, self._early_not_before)
            if at < self._next_at:
                self._next_at = at
                self._early_not_before = at + EARLY_ROUNDS_APART_S
                self._changed.notify()

    def _run(self) -> None:
        workers = [_Asker(self._access.nsqlookupd(url)) for url in self._urls]
        while self._wait_for_turn():
            self._round(workers)
        for worker in workers:
            worker.close()

    def _wait_for_turn(self) -> bool:
        with self._changed:
            while not self._is_stopped:
                delay_s = self._next_at - time.monotonic()
                if delay_s <= 0:
                    self._next_at = time.monotonic() + self.next_delay_s()
                    return True
                self._changed.wait(delay_s)
        return False

    def next_delay_s(self) -> float:
        """Draw the delay to the next round, in seconds."""
        jitter = self._rng.uniform(0, self._options.lookupd_poll_jitter)
        return self._options.lookupd_poll_interval_s * (1 + jitter)

    def _round(self, askers: list[_Asker]) -> None:
        answers: queue.SimpleQueue[tuple[str, Lookup | NsqError]] = queue.SimpleQueue()
        # one that still hangs in the round before is not asked a second time
        asked = sum(asker.ask(self._topic, answers) for asker in askers)
        found: set[Address] = set()
        errors: list[NsqError] = []
        has_answer = False
        give_up_at = time.monotonic() + self._options.lookupd_poll_timeout_s + 0.5
        for answered in range(asked):
            try:
                url, answer = answers.get(timeout=max(0.0, give_up_at - time.monotonic()))
            except queue.Empty:
                late = DeadlineExceeded(
                    f"{asked - answered} of {asked} nsqlookupd did not answer in time"
                )
                errors.append(late)
                log.warning("lookup failed: %s", late)
                break
            if isinstance(answer, NsqError):
                errors.append(answer)
                log.warning("lookup failed: %s", answer)
            else:
                self._note_unknown(url, answer.is_known)
                found |= set(map(self._access.reachable, answer.nsqd))
                has_answer = True
        self._on_round(found, [] if has_answer else errors)

    def _note_unknown(self, url: str, is_known: bool) -> None:
        if is_known:
            self._unknown_at.discard(url)
        elif url not in self._unknown_at:
            self._unknown_at.add(url)
            log.info("%s does not know topic %s yet", url, self._topic)


class _Asker:
    """One nsqlookupd, asked on a thread of its own so that a hung one delays nobody."""

    def __init__(self, client: NsqlookupdHTTPClient) -> None:
        self._client = client
        self._busy = threading.Lock()

    def ask(self, topic: str, answers: queue.SimpleQueue[tuple[str, Lookup | NsqError]]) -> bool:
        """Send the answer to the queue; return False when the last one is still awaited."""
        if not self._busy.acquire(blocking=False):
            return False

        def ask() -> None:
            try:
                answer: Lookup | NsqError = self._client.lookup(topic)
            except NsqError as exc:
                answer = exc
            finally:
                self._busy.release()
            answers.put((self._client.url, answer))

        threading.Thread(target=ask, name="nsq-lookup-request", daemon=True).start()
        return True

    def close(self) -> None:
        self._client.close()
