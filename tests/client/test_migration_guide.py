"""The programs of nsq-migration(7), for each library, against a real nsqd."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from plugins.archives import unfinished
from plugins.clients import bodies_in
from plugins.readme import parse
from plugins.servers import GoNsqd
from plugins.waiting import patience_s, wait_until

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "man" / "nsq-migration.7.md"
BLOCKS = [block for block in parse(GUIDE.name, GUIDE.read_text("utf-8")) if "import" in block.text]
LIBRARIES = ["nsq", "nsqtools", "gnsq", "go"]


def command_for(library: str, text: str, directory: Path) -> list[str | Path]:
    if library != "go":
        pytest.importorskip(library)
        return [sys.executable, "-c", text]
    if shutil.which("go") is None:
        pytest.skip("no Go toolchain")
    (directory / "main.go").write_text(text)
    program = directory / "program"
    build = ["go", "build", "-o", program, directory / "main.go"]
    subprocess.run(build, cwd=ROOT / "tests" / "go", check=True, timeout=patience_s(120))
    return [program]


def test_every_library_has_a_program() -> None:
    assert len(BLOCKS) == len(LIBRARIES)


@pytest.mark.real_nsqd
@pytest.mark.parametrize("library", LIBRARIES)
def test_the_programs_do_the_same(library: str, nsqd: GoNsqd, tmp_path: Path) -> None:
    text = BLOCKS[LIBRARIES.index(library)].text.replace("127.0.0.1:4150", nsqd.tcp_address)
    command = command_for(library, text, tmp_path)
    nsqd.create_topic("invoices")
    nsqd.create_channel("orders", "billing")
    nsqd.publish("orders", *[b"%d" % number for number in range(20)])
    with subprocess.Popen(command, stderr=subprocess.PIPE, cwd=tmp_path) as program:
        try:
            wait_until(lambda: nsqd.depth("invoices") == 20, what="the invoices")
            wait_until(lambda: unfinished(nsqd, "orders", "billing") == 0, what="the orders")
            program.send_signal(signal.SIGTERM)
            program.wait(patience_s(20))
        finally:
            program.kill()
    assert bodies_in(nsqd, "invoices", 20) == sorted(b"invoice of %d" % n for n in range(20))
    if library == "nsqtools":
        assert program.returncode == 0
