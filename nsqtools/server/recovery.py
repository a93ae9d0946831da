"""``--recover-only``: from the database of --durable to the files of the Go nsqd, and back.

A kill at any moment loses nothing. The next run removes the files of the killed one, after checking
that the database has all their messages. Other files and databases are renamed and kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

from nsqtools.errors import NotFoundError
from nsqtools.files.durable import copy_file, replace_file, sync_folder
from nsqtools.files.opening import closing_fd
from nsqtools.protocol.frames import MIN_MESSAGE_SIZE
from nsqtools.protocol.text import counted
from nsqtools.records.envelope import bounded_batches
from nsqtools.server.daemon_log import DaemonLog
from nsqtools.server.durable_database import (
    DurableQueue,
    MessageRow,
    all_rows,
    read_queues,
    remove_database,
)
from nsqtools.server.durable_path import DurablePath, named_database
from nsqtools.server.options import NsqdOptions
from nsqtools.server.queues.data_path import (
    FILE_NAME,
    Queues,
    encode_metadata,
    encode_topic,
    lock_data_path,
)
from nsqtools.server.queues.disk_queue import DiskQueue
from nsqtools.server.queues.message_buffer import encoded
from nsqtools.server.queues.queue_files import set_aside_name
from nsqtools.server.queues.queued_message import BODY_AT, ID_AT, new_messages, with_attempts
from nsqtools.server.stored_queues import (
    DUE_FILE,
    READ,
    SET_ASIDE,
    StoredPart,
    StoredQueue,
    StoredQueues,
    StoredRows,
    digest,
)

_MESSAGE_LIMIT = (1 << 31) - 1 - MIN_MESSAGE_SIZE  # the largest length of a record is an int32


def move_messages(options: NsqdOptions, log: DaemonLog) -> None:
    """Move the messages of the database to the files of the Go nsqd, or back with --durable.

    Raises `NsqError`, ``OSError``.
    """
    data_path = Path(options.data_path)
    with closing_fd(lock_data_path(data_path)):
        files = DurablePath(data_path, log)
        database, is_named = named_database(data_path)
        if database is None:
            files.remove_others(None)
            if options.durable:
                _adopt(data_path, files, log)
        elif options.durable:
            database = (opened := files.open()).path
            opened.close()
            # A run that was killed has named the database before it removed the files.
            if is_named:
                _clear_stored(data_path, database, log)
        else:
            _export(data_path, files, log, options.max_bytes_per_file)


def _export(data_path: Path, files: DurablePath, log: DaemonLog, max_bytes_per_file: int) -> None:
    database = files.open()
    path, queues = database.path, [queue for queue in database.queues if queue.name]
    database.close()
    _clear_stored(data_path, path, log)  # the files of an export that was killed
    due: dict[str, dict[str, int]] = {}
    written = 0
    for queue in queues:
        name = queue.name or ""
        disk = DiskQueue(
            name,
            data_path,
            max_bytes_per_file=max_bytes_per_file,
            max_msg_size=_MESSAGE_LIMIT,
            sync_every=1 << 62,  # only `close` syncs
            log=log,
            existing={},
        )
        rows = all_rows(path, queue.number)
        for batch in bounded_batches(rows, lambda row: len(row[4])):
            disk.put([encoded(with_attempts(frame, made) for _, _, _, made, frame in batch)])
            written += len(batch)
            for _, due_ns, _, _, frame in batch:
                if due_ns:
                    message_id = frame[ID_AT:BODY_AT].decode("latin-1")
                    due.setdefault(name, {})[message_id] = due_ns
        disk.close()
    replace_file(data_path / DUE_FILE, json.dumps(due).encode(), 0o600)
    # The queue files must be durable before nsqd.dat names them.
    sync_folder(data_path)
    topics = _encoded_topics({queue.name: queue.is_paused for queue in queues if queue.name})
    replace_file(data_path / FILE_NAME, encode_metadata(topics), 0o600)
    log.info(
        f"DURABLE: wrote {counted(written, 'message')} of {counted(len(queues), 'queue')} to files"
    )
    expected = sum(queue.waiting + queue.deferred for queue in queues)
    if written < expected:
        kept = files.set_aside(path, "damaged")
        log.error(
            f"DURABLE: {expected - written} of {expected} messages cannot be read; the database is "
            f"{kept} now"
        )
    else:
        remove_database(path)


def _encoded_topics(queues: Queues) -> Iterator[bytes]:
    channels: dict[str, list[tuple[str, bool]]] = {}
    for name in sorted(queues):
        topic, _, channel = name.partition(":")
        topic_channels = channels.setdefault(topic, [])
        if channel:
            topic_channels.append((channel, queues[name]))
    return (encode_topic(topic, queues.get(topic, False), channels[topic]) for topic in channels)


def _adopt(data_path: Path, files: DurablePath, log: DaemonLog) -> None:
    def note(where: str, problem: str) -> None:
        log.error(f"{where}: {problem}")

    copies: dict[str, Path] = {}

    def keep(where: str, problem: str) -> None:
        if where not in copies:
            copies[where] = set_aside_name(Path(where))
            copy_file(Path(where), copies[where])
        note(where, f"{problem}; {copies[where]} is a copy of it")

    def rows() -> Iterator[MessageRow]:
        for number, queue in enumerate(stored.queues, 1):
            due = stored.due.get(queue.name, {})
            parts = [part for part in queue.parts if part.state not in (READ, SET_ASIDE)]
            messages = (message for part in parts for message in part.messages(keep))
            for turn, (message_id, sent_ns, attempts, body, *_) in enumerate(messages, 1):
                [frame] = new_messages([body], [message_id], sent_ns)
                yield number, due.get(message_id.decode(), 0), turn, attempts, frame

    try:
        stored = StoredQueues(data_path, has_files_only=True)
    except NotFoundError:
        return  # an nsqd with --durable creates the database
    for problem in chain(stored.problems, *(queue.problems for queue in stored.queues)):
        note(*problem)
    queues = [
        DurableQueue(number, queue.name, queue.is_paused, 0, 0)
        for number, queue in enumerate(stored.queues, 1)
    ]
    path = files.begin(queues, rows())
    _clear(data_path, stored, lambda _, part: part.state != READ, log)
    log.info(f"DURABLE: brought {counted(len(queues), 'queue')} from files into {path}")


def _clear_stored(data_path: Path, database: Path, log: DaemonLog) -> None:
    """Remove the queue files whose messages a database has."""
    numbers = {queue.name: queue.number for queue in read_queues(database)}
    stored_digests: dict[str, set[bytes]] = {}

    def has_all(queue: StoredQueue, part: StoredPart) -> bool:
        problems: list[str] = []
        if queue.name not in stored_digests:
            rows = StoredRows(database, database, numbers.get(queue.name, 0), 0)
            messages = rows.messages(lambda *_: None)
            digests = {digest(queue.topic, message) for message in messages}
            # The parts of a queue come one after the other, so keep the digests of one queue only.
            stored_digests.clear()
            stored_digests[queue.name] = digests
        messages = part.messages(lambda _, problem: problems.append(problem))
        digests = stored_digests[queue.name]
        return all(digest(queue.topic, message) in digests for message in messages) and not problems

    _clear(data_path, StoredQueues(data_path, has_files_only=True), has_all, log)


def _clear(
    data_path: Path,
    stored: StoredQueues,
    is_stored: Callable[[StoredQueue, StoredPart], bool],
    log: DaemonLog,
) -> None:
    """Remove the queue files that are stored elsewhere, and set the others aside."""
    for queue in stored.queues:
        for part in queue.parts:
            if part.state == SET_ASIDE:
                continue
            if is_stored(queue, part):
                part.path.unlink()
            else:
                bad = set_aside_name(part.path)
                part.path.rename(bad)
                log.error(
                    f"DURABLE: {part.path} has messages that the database does not have, or that "
                    f"were read; it is {bad} now"
                )
        (data_path / f"{queue.name}.diskqueue.meta.dat").unlink(missing_ok=True)
    (data_path / DUE_FILE).unlink(missing_ok=True)
