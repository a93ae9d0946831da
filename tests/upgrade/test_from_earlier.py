"""This version continues after a crash of an earlier one, without lost or duplicate messages.

`scenes.py` describes the directories in ``left_by_0_1`` and so on.
"""

import json
import os
import re
import tarfile
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

import deltalake
import pytest
from plugins.archives import finished_files, lines_of, messages_of, to_file, unfinished
from plugins.cli import Result, RunNsq
from plugins.servers import EmbeddedServer, Serve
from plugins.spark import RunSpark, SparkSession
from plugins.waiting import wait_until
from upgrade.scenes import (
    CHANNEL,
    FINISHED,
    FORMS,
    IN_FLIGHT,
    MESSAGES,
    SCENES,
    SMALL,
    TOO_LARGE,
    TOPIC,
    Scene,
    body,
)

EVERY_BODY = [body(number) for number in range(MESSAGES)]


def of_each_version(*names: str, versions: Collection[str] = SCENES) -> pytest.MarkDecorator:
    """Run a test with the named scenes of each of the versions."""
    scenes = [Scene(version, name) for version in versions for name in SCENES[version]]
    chosen = [scene for scene in scenes if scene.name in names]
    return pytest.mark.parametrize("left", chosen, ids=str, indirect=True)


@pytest.fixture
def scene(request: pytest.FixtureRequest) -> Scene:
    chosen: Scene = request.node.callspec.params["left"]
    return chosen


@pytest.fixture
def left(scene: Scene) -> Iterator[Path]:
    """The directory of a scene, as if the crash had just happened."""
    with scene.scratch() as directory, tarfile.open(scene.kept) as archive:
        archive.extractall(directory, filter="data")
        for path in directory.rglob("*.journal"):
            os.utime(path)  # Journals are used for a week.
        for path in directory.rglob("*.tmp"):
            os.utime(path, (0, 0))  # Leftovers are removed after a day.
        yield directory


@pytest.fixture
def nsqd(left: Path, scene: Scene, serve: Serve) -> EmbeddedServer:
    """An nsqd with the data of the scene, at its address."""
    return serve(EmbeddedServer(left / "nsqd", f"--tcp-address={scene.address}"))


HOST = ["--until-empty", "--host-identifier", "host"]


@of_each_version(*FORMS)
def test_an_archive_is_continued_without_lost_or_duplicate_messages(
    left: Path, nsqd: EmbeddedServer, run_nsq: RunNsq, scene: Scene
) -> None:
    archive = left / "archive"
    assert unfinished(nsqd, TOPIC, CHANNEL) > 0
    result = run_nsq(to_file(nsqd.tcp_address, archive, *HOST, *FORMS[scene.name]))
    assert result.status == 0, result.err
    written = lines_of(archive)
    if "jsonl" in scene.name:
        written = [message["body"] for message in messages_of(archive)]
    assert sorted(written) == EVERY_BODY


@of_each_version("upload")
def test_an_upload_stores_each_file_once(left: Path, nsqd: EmbeddedServer, run_nsq: RunNsq) -> None:
    archive, store = left / "archive", left / "store"
    killed = [path for path in store.iterdir() if path.suffix == ".tmp"]
    assert killed
    result = run_nsq(to_file(nsqd.tcp_address, archive, *HOST, "--gzip", "--upload", str(store)))
    assert result.status == 0, result.err
    assert sorted(message["body"] for message in messages_of(store)) == EVERY_BODY
    assert len(finished_files(store)) == len(finished_files(archive))
    assert not any(path.exists() for path in killed)  # They are older than a day.


@of_each_version("nsqd")
@pytest.mark.usefixtures("left")
def test_nsqd_reads_each_message_that_was_on_disk(nsqd: EmbeddedServer, run_nsq: RunNsq) -> None:
    wait_until(lambda: unfinished(nsqd, TOPIC, CHANNEL) == MESSAGES, what="all messages")
    topics = {topic["topic_name"]: topic for topic in nsqd.stats()["topics"]}
    assert drained(nsqd, run_nsq) == EVERY_BODY
    assert topics["paused"]["paused"]


@pytest.mark.parametrize("flag", ["--durable", "--recover-only"])
@of_each_version("nsqd-durable", versions=["0.2"])
def test_a_durable_log_is_refused_with_a_hint(left: Path, run_nsq: RunNsq, flag: str) -> None:
    names = sorted(path.name for path in (left / "nsqd").iterdir())
    ports = ["--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0"]
    result = run_nsq(["nsqd", f"--data-path={left / 'nsqd'}", flag, *ports])
    assert result.status == 1
    assert "has a log of --durable that nsqtools 0.2 wrote" in result.err
    assert "`nsq nsqd --recover-only` of nsqtools 0.2" in result.err
    assert sorted(path.name for path in (left / "nsqd").iterdir()) == names


@of_each_version("nsqd-durable", versions=["0.3"])
def test_a_durable_nsqd_serves_each_unfinished_message(
    left: Path, scene: Scene, serve: Serve, run_nsq: RunNsq
) -> None:
    nsqd = serve(EmbeddedServer(left / "nsqd", f"--tcp-address={scene.address}", "--durable"))
    consumed = (left / "finished").read_bytes().splitlines()
    assert len(consumed) == FINISHED
    assert unfinished(nsqd, "later", "later") == 1
    assert sorted(drained(nsqd, run_nsq) + consumed) == EVERY_BODY
    assert f"rewriting {left / 'nsqd'}/nsqd.durable." in nsqd.log


@of_each_version("landing")
def test_a_landing_commits_each_message_once(
    left: Path, nsqd: EmbeddedServer, run_nsq: RunNsq
) -> None:
    table = str(left / "lake")
    store = ["--store", "delta", "--upload", table, "--body", "json"]
    result = run_nsq(to_file(nsqd.tcp_address, left / "archive", *HOST, *store))
    assert result.status in (0, 6), result.err  # The bodies are not JSON objects.
    bodies = run_nsq(["archive", "cat", table, "--bodies"]).out.splitlines()
    assert sorted(bodies) == EVERY_BODY


@of_each_version("table")
def test_a_table_keeps_the_columns_of_its_fields(left: Path, run_nsq: RunNsq) -> None:
    """``id`` and ``user id`` of clicks have the columns body_id and user_id since 0.3."""
    log = left / "archive-clicks" / "clicks.log"
    later = left / "later" / "clicks.log"
    later.parent.mkdir()
    later.write_bytes(log.read_bytes().replace(b'"id": "0', b'"id": "2'))  # different messages
    table = left / "lake"
    names = deltalake.DeltaTable(table).schema().to_arrow().names
    into = ["-o", str(table), "--store", "delta", "--body", "json"]
    result = run_nsq(["archive", "convert", str(later.parent), *into])
    assert result.status == 0, result.err
    clicks = deltalake.DeltaTable(table).to_pyarrow_table(filters=[("topic", "=", "clicks")])
    assert sorted(clicks.column_names) == sorted(names)
    assert [clicks.num_rows - clicks[name].null_count for name in ("body_id", "user_id")] == [
        400
    ] * 2


@of_each_version("table")
def test_a_table_is_converted_to_a_table_per_topic(left: Path, run_nsq: RunNsq) -> None:
    old, new = left / "lake", left / "new"
    into = ["-o", f"{new}/{{topic}}", "--store", "delta", "--body", "json"]
    for _ in range(2):
        result = run_nsq(["archive", "convert", str(old), *into])
        assert result.status in (0, 6), result.err
    old_bodies, new_bodies = (run_nsq(["archive", "cat", str(place)]).out for place in (old, new))
    assert sorted(old_bodies.splitlines()) == sorted(new_bodies.splitlines())
    clicks = deltalake.DeltaTable(new / "clicks").to_pyarrow_table()
    assert clicks["body_id"].null_count == 0


@of_each_version("pub")
def test_pub_continues_its_file(left: Path, nsqd: EmbeddedServer, run_nsq: RunNsq) -> None:
    published = unfinished(nsqd, TOPIC, CHANNEL)
    checkpointed = json.loads((left / "checkpoint.json").read_text())["offset"] // len(
        body(0) + b"\n"
    )
    assert 0 < checkpointed <= published < MESSAGES
    checkpoint = ["--checkpoint", str(left / "checkpoint.json")]
    to = ["--nsqd-tcp-address", nsqd.tcp_address]
    result = run_nsq(["pub", "-t", TOPIC, "-f", str(left / "input.txt"), *checkpoint, *to])
    assert result.status == 0, result.err
    assert drained(nsqd, run_nsq) == sorted(EVERY_BODY + EVERY_BODY[checkpointed:published])


@of_each_version("to-http")
def test_dead_letters_are_appended(left: Path, nsqd: EmbeddedServer, run_nsq: RunNsq) -> None:
    dead = left / "dead.jsonl"
    refused = f"http://{nsqd.http_address}/pub"  # without a topic: 400
    result = forward(["to-http", "--post", refused], nsqd, left, run_nsq)
    assert result.status == 6, result.err
    redriven = run_nsq(["redrive", str(dead), "--nsqd-tcp-address", nsqd.tcp_address])
    assert redriven.status == 0, redriven.err
    published = drained(nsqd, run_nsq)
    assert sorted(set(published)) == EVERY_BODY
    assert len(published) - MESSAGES <= IN_FLIGHT


@of_each_version("to-nsq")
def test_forwarders_continue(
    left: Path, nsqd: EmbeddedServer, run_nsq: RunNsq, serve: Serve
) -> None:
    destination = serve(EmbeddedServer(left / "destination", *SMALL))
    to = ["to-nsq", "--destination-nsqd-tcp-address", destination.tcp_address]
    result = forward(to, nsqd, left, run_nsq)
    assert result.status == 6, result.err
    delivered = Counter(drained(destination, run_nsq))
    dead = [json.loads(line)["body"] for line in (left / "dead.jsonl").read_text().splitlines()]
    assert sorted(delivered) == EVERY_BODY
    assert sorted(set(dead)) == [body.decode() for body in TOO_LARGE]
    assert delivered.total() + len(dead) - MESSAGES - len(TOO_LARGE) <= IN_FLIGHT


def forward(command: list[str], nsqd: EmbeddedServer, left: Path, run_nsq: RunNsq) -> Result:
    where = ["-t", TOPIC, "-c", CHANNEL, "--nsqd-tcp-address", nsqd.tcp_address]
    return run_nsq(
        [*command, *where, "--until-empty", "--dead-letter-file", str(left / "dead.jsonl")]
    )


@of_each_version("replay")
def test_replay_continues_its_checkpoint(left: Path, nsqd: EmbeddedServer, run_nsq: RunNsq) -> None:
    published = unfinished(nsqd, TOPIC, CHANNEL)
    assert 0 < published < MESSAGES
    checkpoint = ["--checkpoint", str(left / "checkpoint.json")]
    to = ["--nsqd-tcp-address", nsqd.tcp_address]
    replayed = run_nsq(["replay", "--yes", str(left / "archive"), *checkpoint, *to])
    assert replayed.status == 0, replayed.err
    assert unfinished(nsqd, TOPIC, CHANNEL) == MESSAGES
    assert drained(nsqd, run_nsq) == EVERY_BODY


INTO = "--output {left}/lake --checkpoint {left}/checkpoint --once"
JOBS = {
    "spark-ingest": f"ingest {{left}}/archive {INTO}",
    "spark-topic": f"ingest -t {TOPIC} -c {CHANNEL} --nsqd-tcp-address {{nsqd}} {INTO}",
    "spark-compact": "compact {left}/archive --output {left}/lake --open-days --yes",
}


@of_each_version(*JOBS)
def test_a_spark_job_continues_from_its_checkpoint_spool_or_drafts(
    left: Path,
    scene: Scene,
    request: pytest.FixtureRequest,
    spark: SparkSession,
    run_spark: RunSpark,
) -> None:
    is_topic, lake = scene.name == "spark-topic", str(left / "lake")
    nsqd = request.getfixturevalue("nsqd") if is_topic else None
    assert is_topic or 0 < spark.read.parquet(lake).count() < MESSAGES
    for path in left.glob("later/*"):
        path.rename(left / "archive" / path.name)
    result = run_spark(*JOBS[scene.name].format(left=left, nsqd=scene.address).split())
    assert result.status == 0, result.err
    rows = spark.read.parquet(lake).select("body").collect()
    bodies = [row.body.encode() if isinstance(row.body, str) else bytes(row.body) for row in rows]
    assert sorted(bodies) == EVERY_BODY  # Bodies are text since 0.3.
    assert nsqd is None or unfinished(nsqd, TOPIC, CHANNEL) == 0


@of_each_version("spark-replay")
def test_a_replay_on_spark_continues_from_its_ledger(
    left: Path, nsqd: EmbeddedServer, run_spark: RunSpark, run_nsq: RunNsq
) -> None:
    where = ["--ledger", left / "ledger", "--nsqd-tcp-address", nsqd.tcp_address]
    result = run_spark("replay", left / "archive", *where)
    assert result.status == 0, result.err
    repeated = re.search(r"up to (\d+) twice", result.err)
    published = drained(nsqd, run_nsq)
    assert sorted(set(published)) == EVERY_BODY
    assert len(published) - MESSAGES <= (int(repeated[1]) if repeated else 0) <= 100


def drained(nsqd: EmbeddedServer, run_nsq: RunNsq) -> list[bytes]:
    where = ["--nsqd-tcp-address", nsqd.tcp_address]
    count = str(unfinished(nsqd, TOPIC, CHANNEL))
    result = run_nsq(["tail", "-t", TOPIC, "-c", CHANNEL, *where, "-n", count])
    return sorted(result.out.splitlines())
