"""The state of an archiver as a Prometheus text file (node exporter, textfile collector)."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nsqtools.archive.topic_writer import Totals

log = logging.getLogger("nsqtools")

PREFIX = "nsq_to_file_"


@dataclass(frozen=True, slots=True)
class TopicState:
    """What is told of a topic."""

    totals: Totals
    held: int = 0
    is_failing: bool = False


def render_metrics(topics: Mapping[str, TopicState], now_s: float) -> str:
    """Return the text, each metric with its type."""
    lines = []
    for name, kind, of in (
        ("messages_total", "counter", lambda state: state.totals.messages),
        ("bytes_total", "counter", lambda state: state.totals.bytes),
        ("files_total", "counter", lambda state: state.totals.files),
        ("already_written_total", "counter", lambda state: state.totals.already_written),
        ("write_failures_total", "counter", lambda state: state.totals.failures),
        ("ambiguous_bodies_total", "counter", lambda state: state.totals.ambiguous),
        ("held_messages", "gauge", lambda state: state.held),
        ("failing", "gauge", lambda state: int(state.is_failing)),
    ):
        lines.append(f"# TYPE {PREFIX}{name} {kind}")
        lines += [
            f'{PREFIX}{name}{{topic="{topic}"}} {of(state)}' for topic, state in topics.items()
        ]
    lines += [f"# TYPE {PREFIX}last_seen_seconds gauge", f"{PREFIX}last_seen_seconds {now_s:.3f}"]
    return "\n".join(lines) + "\n"


def write_metrics(path: Path, text: str) -> None:
    """Replace the file at once: its readers never see a part. A failure is logged."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(text, "utf-8")
        beside.replace(path)
    except OSError as exc:  # archiving is more important
        log.warning("cannot write %s (%s)", path, exc.strerror)
