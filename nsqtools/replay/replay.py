"""Publish archived messages again, for ``nsq replay``.

Messages are merged by time, selected, and published in batches, each to the topic it came from or
to the one it is sent to. With a checkpoint the batches go one by one: the next begins when the one
before is confirmed and written down. Without, they follow each other without a pause.

The merge has few files open and none loaded: a file is opened when it comes to its beginning, which
its index tells, or its first message. Messages of one file keep the order in which they were
written: it is that of their times but for redeliveries. Bare bodies have no time; their files come
first, one after the other.

A batch with messages that nsqd may not have ends a replay with a checkpoint: it begins with that
batch again the next time.

A checkpoint (`Checkpoint`) is replaced whole and fsynced after each batch, so an interrupted replay
continues where it stopped: nothing is left out, and at most the one batch under way is doubled. A
file is known by its writer, its number and its first member, which it keeps wherever it is moved or
uploaded to: by the path alone it would begin again there, and another file that gets the path would
be taken for it. Two machines of one image can use the same writer and number, so the member is
needed, too. A file without an index, or with one of an early version, is known by its path; so were
all of them in version 1.
"""

from __future__ import annotations

import heapq
import json
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from nsqtools.archive.finding import ArchiveFile
from nsqtools.archive.layout import EVER, TimeRange, owner_of
from nsqtools.archive.reader import OnDamage, read_messages
from nsqtools.archive.storage import failing
from nsqtools.client.options import ClientOptions
from nsqtools.errors import ConfigurationError, NsqError, OutputError
from nsqtools.files.durable import replace_file
from nsqtools.protocol.names import check_topic
from nsqtools.publish.pacing import Pace, RateLimit
from nsqtools.publish.publish_job import BATCH_BYTES, BATCH_RECORDS
from nsqtools.publish.publisher import (
    PublishBatch,
    PublishCounts,
    Publisher,
    PublishOptions,
    PublishOutcome,
)
from nsqtools.publish.unsent_files import UnsentFiles
from nsqtools.records.envelope import Envelope, encode_many

VERSION = 2
READABLE = (1, VERSION)


class Archived(NamedTuple):
    """A message, the number of its file among those given, and its own number in it, from 1."""

    file: int
    number: int
    message: Envelope


def merge(
    archives: Sequence[ArchiveFile],
    on_damage: OnDamage,
    *,
    delimiter: bytes = b"\n",
    within: TimeRange = EVER,
) -> Iterator[Archived]:
    """Iterate over all messages. Raises `OutputError` for a file that cannot be read."""
    begins = sorted(
        (_begin(archive, delimiter), file)
        for file, archive in enumerate(archives)
        if archive.may_have(within)
    )
    begins.reverse()
    heads: list[tuple[int, int, int, Envelope, Iterator[Envelope]]] = []

    def push(file: int, number: int, messages: Iterator[Envelope]) -> None:
        message = next(messages, None)
        if message is not None:
            heapq.heappush(heads, (message.timestamp_ns, file, number, message, messages))

    while heads or begins:
        while begins and (not heads or begins[-1] < heads[0][:2]):
            _, file = begins.pop()
            messages = read_messages(archives[file], on_damage, delimiter=delimiter, within=within)
            push(file, 1, messages)
        if heads:
            _, file, number, message, messages = heapq.heappop(heads)
            yield Archived(file, number, message)
            push(file, number + 1, messages)


def _begin(archive: ArchiveFile, delimiter: bytes) -> int:
    """The time of a file's first message; 0 where it has none."""
    if (begins_ns := archive.begins_ns) is not None:
        return begins_ns
    messages = read_messages(archive, lambda path, problem: None, delimiter=delimiter)
    first = next(messages, None)
    return first.timestamp_ns if first else 0


STOP_CHECK_S = 0.2


@dataclass(frozen=True, slots=True)
class MessageSelection:
    """Which messages are replayed, and where to.

    ``topics`` maps a topic to the one its messages go to; the key "" is for all others, and for
    bare bodies, which have none.
    """

    within: TimeRange = EVER
    keep: Callable[[Envelope], bool] | None = None
    dedupe: bool = False
    topics: Mapping[str, str] = field(default_factory=dict)
    delimiter: bytes = b"\n"

    def __post_init__(self) -> None:
        for topic in self.topics.values():
            check_topic(topic)

    def target(self, message: Envelope) -> str:
        """Return the topic that a message goes to. Raises `ConfigurationError` when it has none."""
        target = self.topics.get(message.topic) or self.topics.get("") or message.topic
        if not target:
            raise ConfigurationError(
                "the files have bare bodies, which name no topic", hint="Give --topic."
            )
        return target


class Replay:
    """`run` on one thread; `stop` from any.

    ``speed`` None is as fast as nsqd takes them, ``rate`` 0 without limit, ``count`` the most to
    publish. With ``dry_run`` nothing
    is published, and what would be counts as confirmed. ``unsent`` gets each message that did not
    end as confirmed, as a line of JSON. ``show`` is called after each batch.
    """

    def __init__(
        self,
        archives: Sequence[ArchiveFile],
        addresses: Sequence[str],
        selection: MessageSelection,
        *,
        client_options: ClientOptions,
        options: PublishOptions,
        speed: float | None = None,
        rate: float = 0,
        count: int | None = None,
        dry_run: bool = False,
        checkpoint: Checkpoint | None = None,
        on_damage: OnDamage,
        unsent: UnsentFiles | None = None,
        show: Callable[[], None] = lambda: None,
        publisher: Publisher | None = None,
    ) -> None:
        self.read = 0
        self.repeated = 0
        self.planned: dict[str, int] = {}  # messages by target topic
        self._archives = archives
        self._selection = selection
        self._client_options = client_options
        self._pace = Pace(speed) if speed is not None else None
        self._rate = RateLimit(rate, time.monotonic()) if rate else None
        self._count = count
        self._dry_run = dry_run
        self._checkpoint = checkpoint
        self._on_damage = on_damage
        self._unsent = unsent
        self._show = show
        self._seen: set[tuple[str, str, bytes]] = set()
        self._stopped = threading.Event()
        self._publisher = publisher or Publisher(
            addresses, client_options, options, self._stopped.is_set
        )

    def stop(self) -> None:
        """Stop after the batch that is being published."""
        self._stopped.set()

    @property
    def counts(self) -> PublishCounts:
        """The outcomes of all topics together."""
        if self._dry_run:
            return replace(self._publisher.counts, confirmed=sum(self.planned.values()))
        return self._publisher.counts

    @property
    def counts_by_nsqd(self) -> Mapping[str, PublishCounts]:
        """The outcomes on each nsqd, where every message goes to several."""
        return self._publisher.counts_by_nsqd

    @property
    def last_error(self) -> NsqError | None:
        """The latest reason why something was not published."""
        return self._publisher.last_error

    @property
    def total(self) -> int | None:
        """How many messages there are to read, if all files have an index."""
        counts = [archive.messages for archive in self._archives]
        return None if None in counts else sum(count or 0 for count in counts)

    # -- running --------------------------------------------------------------------------------

    def run(self) -> None:
        """Replay everything selected. Raises `OutputError` and `ConfigurationError`."""
        try:
            for batch in self._batches():
                if not self._publish(batch):
                    break
        finally:
            self._publisher.finish()

    def _batches(self) -> Iterator[list[Archived]]:
        """Messages to publish together: a full batch, or what is due before a pause."""
        batch: list[Archived] = []
        size = 0
        for archived in islice(self._selected(), self._count):
            if batch and self._is_early(archived.message):
                yield batch
                batch, size = [], 0
            self._wait_until_due(archived.message)
            if self._stopped.is_set():
                break
            batch.append(archived)
            size += len(archived.message.body)
            if len(batch) >= self._allowance() or size >= BATCH_BYTES:
                yield batch
                batch, size = [], 0
        if batch and not self._stopped.is_set():
            yield batch

    def _selected(self) -> Iterator[Archived]:
        """The messages that are to be published; `read` counts all that were looked at."""
        selection, checkpoint = self._selection, self._checkpoint
        # numbers in a checkpoint are those of all messages of a file
        within = EVER if checkpoint else selection.within
        done = [checkpoint.count_of(each) if checkpoint else 0 for each in self._archives]
        for archived in merge(
            self._archives, self._on_damage, delimiter=selection.delimiter, within=within
        ):
            self.read += 1
            message = archived.message
            is_new = not selection.dedupe or self._is_new(message)
            if archived.number <= done[archived.file]:
                continue
            if not is_new or not selection.within.has(message.timestamp_ns):
                continue
            if selection.keep is None or selection.keep(message):
                yield archived

    def _is_new(self, message: Envelope) -> bool:
        if not message.id:
            return True
        identity = (message.topic, message.nsqd, message.id)
        before = len(self._seen)
        self._seen.add(identity)
        self.repeated += before == len(self._seen)
        return before != len(self._seen)

    # -- pace -----------------------------------------------------------------------------------

    def _allowance(self) -> int:
        if self._rate is None:
            return BATCH_RECORDS
        return max(1, min(BATCH_RECORDS, self._rate.allowance(time.monotonic())))

    def _is_early(self, message: Envelope) -> bool:
        now = time.monotonic()
        return self._pace is not None and self._pace.due_at(message.timestamp_ns, now) > now

    def _wait_until_due(self, message: Envelope) -> None:
        if self._pace is not None:
            due_at = self._pace.due_at(message.timestamp_ns, time.monotonic())
            self._stopped.wait(max(0.0, due_at - time.monotonic()))

    def _take_turn(self, count: int) -> None:
        """Wait until the rate allows a batch."""
        if self._rate is not None:
            self._stopped.wait(self._rate.wait_s(time.monotonic()))
            self._rate.took(count)

    # -- publishing -----------------------------------------------------------------------------

    def _publish(self, batch: list[Archived]) -> bool:
        """Publish a batch; return whether to continue."""
        self._take_turn(len(batch))
        by_topic: dict[str, list[Envelope]] = {}
        for archived in batch:
            target = self._selection.target(archived.message)
            if self._is_publishable(archived.message):
                by_topic.setdefault(target, []).append(archived.message)
        for topic, messages in by_topic.items():
            self.planned[topic] = self.planned.get(topic, 0) + len(messages)
            if not self._dry_run:
                self._publish_to(topic, messages)
        self._show()
        if self._checkpoint is not None and not self._dry_run:
            return self._confirm(batch, self._checkpoint)
        return not self._publisher.has_given_up

    def _publish_to(self, topic: str, messages: list[Envelope]) -> None:
        def hand_out_unconfirmed(batch: PublishBatch) -> None:
            for index in sorted(batch.failures):
                lacking = [nsqd for nsqd, places in batch.missing.items() if index in places]
                self._hand_out(messages[index], lacking)

        bodies = [message.body for message in messages]
        self._publisher.publish(topic, bodies, hand_out_unconfirmed, origins=messages)

    def _confirm(self, batch: list[Archived], checkpoint: Checkpoint) -> bool:
        self._publisher.drain()
        counts = self.counts
        if counts.unsent or counts.unknown:
            return False
        if self._unsent is not None:
            self._unsent.sync()  # a message that was rejected is nowhere else once this is passed
        for archived in batch:
            checkpoint.settle(self._archives[archived.file], archived.number)
        checkpoint.save()
        return True

    def _is_publishable(self, message: Envelope) -> bool:
        if not message.body:
            self._publisher.counts.skipped += 1
            return False
        if len(message.body) > self._client_options.publish_max_msg_size:
            self._publisher.count_unsendable(PublishOutcome.REJECTED)
            self._hand_out(message)
            return False
        return True

    def _hand_out(self, message: Envelope, lacking: Collection[str] | None = None) -> None:
        if self._unsent is not None:
            self._unsent.write(_line(message), lacking)


def _line(message: Envelope) -> bytes:
    return encode_many(message.topic, message.nsqd, [message])


# -- the checkpoint --------------------------------------------------------------------------------


class Checkpoint:
    """Reads ``path`` if it is there. Raises `ConfigurationError` for one that is not ours."""

    def __init__(self, path: Path) -> None:
        self.done: dict[str, int] = {}
        self._path = path.absolute()
        try:
            content = json.loads(self._path.read_bytes())
            if content["version"] not in READABLE:
                raise ValueError
            self.done = {str(name): int(count) for name, count in content["done"].items()}
        except FileNotFoundError:
            pass
        except OSError as exc:
            raise OutputError(f"cannot read {path} ({exc.strerror})") from exc
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigurationError(
                f"{path} is not the checkpoint of a replay", hint="Give another file."
            ) from None

    def count_of(self, archive: ArchiveFile) -> int:
        """Return how many messages of a file are done."""
        return max(self.done.get(name, 0) for name in {key_of(archive), path_of(archive)})

    def settle(self, archive: ArchiveFile, count: int) -> None:
        """Note how many messages of a file are done; `save` makes it durable."""
        self.done.pop(path_of(archive), None)
        self.done[key_of(archive)] = count

    def save(self) -> None:
        """Make it durable. Raises `OutputError`."""
        content = json.dumps({"version": VERSION, "done": self.done}, indent=1).encode()
        with failing("write", self._path):
            replace_file(self._path, content)


def key_of(archive: ArchiveFile) -> str:
    """Return what a file is known by."""
    if archive.head is None or not archive.members:
        return path_of(archive)
    writer, number = archive.head
    _, length, messages, min_ts, max_ts = archive.members[0]
    return f"{writer} {number} {length} {messages} {min_ts} {max_ts}"


def path_of(archive: ArchiveFile) -> str:
    """Return the path or URL, the same for a file in progress and when it is finished."""
    if archive.is_in_progress:
        return str(owner_of(archive.path.absolute()))
    return archive.shown if archive.is_remote else str(archive.path.absolute())
