"""Which archives are not needed any more, and their end.

An archive may go when every message in it is of a partition that was verified with this very file
among its inputs, and whose Parquet files are still there. One that was read with damage stays, and
so does what only may be an archive: a file of bare bodies that nsq to-file did not write.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from nsqtools.archive.layout import index_of
from nsqtools.errors import OutputError
from nsqtools.files.durable import sync_folder
from nsqtools.spark.jobs.compaction.inventory import UNDATED, Content, Slot
from nsqtools.spark.jobs.compaction.layout import Output
from nsqtools.spark.jobs.compaction.manifest import Input, Manifest, missing_files
from nsqtools.spark.jobs.compaction.plan import Selection


@dataclass(frozen=True, slots=True)
class Deletable:
    """The archives that may be deleted, and for each that may not the reason."""

    contents: tuple[Content, ...]
    kept: Mapping[str, str]

    @property
    def bytes(self) -> int:
        """How much space they take."""
        return sum(content.size for content in self.contents)

    @property
    def messages(self) -> int:
        """How many messages are in them."""
        return sum(content.total for content in self.contents)


def deletable(
    contents: Sequence[Content],
    manifests: Mapping[Slot, Manifest],
    output: Output,
    selection: Selection,
    *,
    assumed: Iterable[Slot] = (),
) -> Deletable:
    """Look at the finished files that are wholly within the selection.

    ``assumed`` are partitions that a run would make: with them it says what it would delete.
    """
    assumed = set(assumed)
    broken = {
        slot: missing
        for slot, manifest in manifests.items()
        if slot not in assumed and (missing := missing_files(output, manifest))
    }
    known = {slot: manifest.known for slot, manifest in manifests.items()}
    chosen: list[Content] = []
    kept = {}
    for content in contents:
        if content.is_in_progress or not all(map(selection.has, content.messages)):
            continue
        reasons = [
            reason
            for slot in content.messages
            if slot not in assumed and (reason := _why_not(content, slot, known, broken))
        ]
        reasons = [*_why_never(content), *reasons]
        if reasons:
            kept[str(content.path)] = reasons[0]
        else:
            chosen.append(content)
    return Deletable(tuple(chosen), kept)


def _why_never(content: Content) -> Iterator[str]:
    if content.damage:
        yield content.damage
    if not content.messages:
        yield "it is empty"
    if UNDATED in content.messages and not content.has_index:
        yield "it has neither messages nor an index: it may be anything"


def _why_not(
    content: Content,
    slot: Slot,
    known: Mapping[Slot, Mapping[str, Input]],
    broken: Mapping[Slot, Sequence[str]],
) -> str:
    name = f"{slot.topic} on {slot.day}" if slot.day else "bare bodies"
    taken = known.get(slot, {}).get(content.key)
    if taken is None or not taken.is_of(content):
        return f"not all of it is compacted: {name}"
    if taken.is_damaged:
        return "it was read with damage"
    if slot in broken:
        return f"{broken[slot][0]} is missing"
    return ""


def delete(contents: Iterable[Content]) -> list[str]:
    """Delete archives with their indexes; return those that changed meanwhile, which stay.

    Raises `OutputError`.
    """
    changed = []
    for content in contents:
        try:
            status = content.path.stat()
            if (status.st_size, status.st_mtime_ns) != (content.size, content.mtime_ns):
                changed.append(str(content.path))
                continue
            content.path.unlink()
            index_of(content.path).unlink(missing_ok=True)
            sync_folder(content.path.parent)
        except OSError as exc:
            raise OutputError(f"cannot delete {content.path} ({exc.strerror})") from exc
    return changed
