"""``--recover-only``: from the database of --durable to the files of Go's nsqd, and back.

Killed at any moment it loses nothing: what nsqd.dat does not name is removed, or written again, by
the next run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

from nsqtools.errors import NotFoundError
from nsqtools.files.durable import copy_file, replace_file, sync_folder
from nsqtools.files.opening import closing_fd
from nsqtools.protocol.frames import MIN_MESSAGE_SIZE
from nsqtools.server.daemon_log import DaemonLog
from nsqtools.server.durable_database import DurableQueue, Row, all_rows, remove
from nsqtools.server.durable_path import DurablePath, named_database
from nsqtools.server.options import NsqdOptions
from nsqtools.server.queues.backlog import encoded
from nsqtools.server.queues.data_path import (
    FILE_NAME,
    Queues,
    encode_metadata,
    encode_topic,
    lock_data_path,
)
from nsqtools.server.queues.disk_queue import DiskQueue
from nsqtools.server.queues.queue_files import QUEUE_FILE
from nsqtools.server.queues.queued_message import BODY_AT, ID_AT, new_messages, with_attempts
from nsqtools.server.stored_queues import DUE_FILE, READ, SET_ASIDE, StoredQueues

_MESSAGE_LIMIT = (1 << 31) - 1 - MIN_MESSAGE_SIZE
_AT_ONCE = 1000


def recover(options: NsqdOptions, log: DaemonLog) -> None:
    """Write what is in the database to the files of Go's nsqd, or the other way with --durable.

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
            files.open().close()
            if is_named:
                _remove_queue_files(data_path)  # of one that was killed when it had brought them in
        else:
            _export(data_path, files, log, options.max_bytes_per_file)


def _export(data_path: Path, files: DurablePath, log: DaemonLog, max_bytes_per_file: int) -> None:
    database = files.open()
    path, queues = database.path, [each for each in database.queues if each.name]
    database.close()
    _remove_queue_files(data_path)  # of an export that was killed
    due: dict[str, dict[str, int]] = {}
    written = 0
    for queue in queues:
        name = queue.name or ""
        disk = DiskQueue(
            name,
            data_path,
            max_bytes_per_file=max_bytes_per_file,
            max_msg_size=_MESSAGE_LIMIT,
            sync_every=1 << 62,  # at the end
            log=log,
            found={},
        )
        rows = all_rows(path, queue.number)
        while some := list(islice(rows, _AT_ONCE)):
            disk.put([encoded(with_attempts(frame, made) for _, _, _, made, frame in some)])
            written += len(some)
            for _, due_ns, _, _, frame in some:
                if due_ns:
                    message_id = frame[ID_AT:BODY_AT].decode("latin-1")
                    due.setdefault(name, {})[message_id] = due_ns
        disk.close()
    replace_file(data_path / DUE_FILE, json.dumps(due).encode(), 0o600)
    sync_folder(data_path)
    topics = _encoded_topics({each.name: each.is_paused for each in queues if each.name})
    replace_file(data_path / FILE_NAME, encode_metadata(topics), 0o600)
    remove(path)
    log.info(f"DURABLE: wrote {written} messages of {len(queues)} queues to files")


def _encoded_topics(queues: Queues) -> Iterator[bytes]:
    channels: dict[str, list[tuple[str, bool]]] = {}
    for name in sorted(queues):
        topic, _, channel = name.partition(":")
        found = channels.setdefault(topic, [])
        if channel:
            found.append((channel, queues[name]))
    return (encode_topic(each, queues.get(each, False), channels[each]) for each in channels)


def _adopt(data_path: Path, files: DurablePath, log: DaemonLog) -> None:
    def note(where: str, problem: str) -> None:
        log.error(f"{where}: {problem}")

    def keep(where: str, problem: str) -> None:
        note(where, f"{problem}; {where}.bad is a copy of it")
        copy_file(Path(where), Path(f"{where}.bad"))

    def rows() -> Iterator[Row]:
        for number, queue in enumerate(stored.queues, 1):
            due = stored.due.get(queue.name, {})
            parts = [each for each in queue.parts if each.state not in (READ, SET_ASIDE)]
            messages = (message for part in parts for message in part.messages(keep))
            for turn, (message_id, sent_ns, attempts, body, *_) in enumerate(messages, 1):
                [frame] = new_messages([body], [message_id], sent_ns)
                yield number, due.get(message_id.decode(), 0), turn, attempts, frame

    try:
        stored = StoredQueues(data_path)
    except NotFoundError:
        return  # an nsqd with --durable begins a database
    for problem in chain(stored.problems, *(each.problems for each in stored.queues)):
        note(*problem)
    queues = [
        DurableQueue(number, each.name, each.is_paused, 0, 0)
        for number, each in enumerate(stored.queues, 1)
    ]
    path = files.begin(queues, rows())
    _remove_queue_files(data_path)
    log.info(f"DURABLE: brought {len(queues)} queues from files into {path}")


def _remove_queue_files(data_path: Path) -> None:
    for path in list(data_path.iterdir()):
        match = QUEUE_FILE.fullmatch(path.name)
        if path.name == DUE_FILE or (match and not match[3]):
            path.unlink()
