"""The embedded nsqd on a disk that fills up: its files stay whole, and it starts again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from plugins.embedded import EmbeddedServer
from plugins.servers import Serve

TOPICS = 200


def test_the_list_of_topics_stays_whole_on_a_disk_that_fills_up(
    small_disk: Path, serve: Serve
) -> None:
    nsqd = serve(EmbeddedServer(small_disk))
    for number in range(TOPICS):
        nsqd.create_topic(f"{number:040d}")
    nsqd.request("POST", f"/topic/pause?topic={0:040d}")  # writes nsqd.dat at once
    written = (small_disk / "nsqd.dat").read_bytes()
    assert len(json.loads(written)["topics"]) == TOPICS
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free - (8 << 10)))

    nsqd.request("POST", f"/topic/pause?topic={1:040d}")
    nsqd.kill()

    assert len(json.loads((small_disk / "nsqd.dat").read_bytes())["topics"]) == TOPICS
    nsqd.start()
    assert len(nsqd.stats()["topics"]) == TOPICS
