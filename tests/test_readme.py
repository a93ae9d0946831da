"""The commands in README.md and the guides run, heading by heading.

A command must end with status 0, or 130 if it is interrupted. If the text shows the output, a
command must print exactly this output. Blocks without a language, and JSON, are excerpts that are
not run.
"""

import ast
import configparser
import json
import os
import random
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from inspect import signature
from pathlib import Path
from typing import Any

import httpx
import pytest
from plugins.certificates import Certificates
from plugins.cli import RunNsq, all_commands
from plugins.http_server import AuthServer, MakeServer
from plugins.ports import LOWEST
from plugins.readme import UNTIL_SIGNAL, Block, Command, Place, commands_of, parse, user_environment
from plugins.spark import RunSpark
from plugins.waiting import patience_s

from nsqtools.cli.commands import check as check_command
from nsqtools.cli.commands.go_utilities import UTILITIES
from nsqtools.cli.running import consuming
from nsqtools.records.envelope import Envelope, encode_many
from nsqtools.server.embedded import EmbeddedNsqd, EmbeddedNsqlookupd

CHECKOUT = Path(__file__).parents[1]
GUIDES = sorted((CHECKOUT / "man").glob("*.md"))
TEXTS = {path.name: path.read_text("utf-8") for path in [CHECKOUT / "README.md", *GUIDES]}
README = TEXTS["README.md"]
BLOCKS = [block for name, text in TEXTS.items() for block in parse(name, text)]
SHELL = ("sh", "console", "cron")
# Neither cron nor systemd searches ~/.local/bin, where pipx installs by default.
INSTALLED = "/usr/local/bin/nsq"
EXCERPTS = ("", "go", "json")  # test_migration_guide runs those of Go

NO_BUCKET = "tests/archive/test_stored_archives.py and tests/faults/test_archivers.py do"
NOT_RUN = {
    "tests/run": "it is what runs this test",
    "nsq web --lookupd": "it serves at a port that may be taken; tests/web runs it",
    "docker build": "there is no Docker engine; tests/docker runs the steps of the build",
    "$SPARK_HOME/sbin": "tests/spark/test_cluster.py runs a master and two workers",
    "nsq spark doctor --master": "tests/spark/test_cluster.py does",
    "nsq spark compact /mnt": "tests/spark/test_cluster.py runs jobs there",
    "pip install 'nsqtools[object-store]'": "it is installed",
    "pip install 'nsqtools[http]'": "it is installed",
    "nsq to-file -t clicks -c archive --output-dir /var/nsq --compression zstd": NO_BUCKET,
    **dict.fromkeys(("nsq archive info s3:", "nsq archive cat s3:", "nsq replay s3:"), NO_BUCKET),
}
VERDICTS = ("nsq check --lookupd-http-address lookup-1:4161", "nsq check --max-depth 10000")
"""Channels here have no consumers, so the exit status of `nsq check` is 1."""

MESSAGES, OLD = 30, 20  # each message is a process of nsq to-exec, and a request of nsq to-http
INSTALL = "Install"
TLS_AND_AUTH = "Use TLS and auth"
PROFILES = (TLS_AND_AUTH, "toml")
REPLAY = "Replay an archive"
SPARK_GUIDE = "nsq-spark.7.md"
TUTORIAL = "nsq-tutorial.7.md"
OPERATE_GUIDE = "nsq-operate.7.md"
# tests/archive/test_lake_guide.py runs the guide about lakes, and tests/schedule, tests/authd and
# tests/tasks run the guides about the scheduler, users and tasks
SCHEDULE_GUIDE = "nsq-schedule.7.md"
AUTH_GUIDE = "nsq-auth.7.md"
KUBERNETES_GUIDE = "nsq-kubernetes.7.md"  # tests/packaging validates its manifests
TASKS_GUIDE = "nsq-tasks.7.md"
OWN_TESTS = (
    TUTORIAL,
    OPERATE_GUIDE,
    SPARK_GUIDE,
    SCHEDULE_GUIDE,
    AUTH_GUIDE,
    KUBERNETES_GUIDE,
    TASKS_GUIDE,
    "nsq-lake.7.md",
    "nsq-config.5.md",
)
# An editable install may be older than the entry point of the plugin, so -p names it.
PYTEST = " -m pytest -q -p nsqtools.testing.pytest_plugin"

Serve = Callable[[str], Place]


def places() -> list[tuple[str, str]]:
    """The documents and headings with commands; the commands of Spark have their own test."""
    headings = (
        (block.document, block.heading)
        for block in BLOCKS
        if block.language not in EXCERPTS
        and UNTIL_SIGNAL not in block.text  # tests/client/test_guide.py runs it, to its end
        and block.heading not in (INSTALL, "Spark")
        and block.document not in OWN_TESTS
    )
    return list(dict.fromkeys(headings))


@pytest.fixture
def serve(
    tmp_path: Path,
    certificates: Certificates,
    auth_server: AuthServer,
    http_server: MakeServer,
    run_nsq: RunNsq,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[str], Place]]:
    """Make the place for the commands under a heading."""
    with ExitStack() as running:

        def make(heading: str) -> Place:
            options: dict[str, Any] = {}
            if heading == TLS_AND_AUTH:
                auth_server.allow("open sesame")
                options = {
                    "tls_cert": str(certificates.server.cert),
                    "tls_key": str(certificates.server.key),
                    "auth_http_address": (auth_server.address,),
                }
            lookupd = running.enter_context(EmbeddedNsqlookupd())
            options["lookupd_tcp_address"] = (lookupd.tcp_address,)
            nsqd = running.enter_context(EmbeddedNsqd(**options))
            place = make_place(tmp_path, nsqd, lookupd)
            monkeypatch.chdir(place.directory)
            window = signature(check_command.check).parameters["window"].default
            monkeypatch.setattr(window, "default_value", "500ms")  # the output does not scroll
            monkeypatch.setattr(consuming, "EMPTY_AFTER_S", 0.7)
            run_in_process(place, run_nsq)
            commands = "".join(block.text for block in BLOCKS if block.heading == heading)
            if "mirror-1" in commands:
                mirror = running.enter_context(EmbeddedNsqd())
                place.stands_for |= {"mirror-1:4150": mirror.tcp_address}
            if "hook-1" in commands:
                place.stands_for |= {"http://hook-1:8080": http_server().url}
            fill(nsqd)
            shutil.copy(certificates.ca, place.directory / "etc" / "ca.pem")
            if heading == TLS_AND_AUTH:  # the text shows the configuration file
                [profiles] = [b.text for b in BLOCKS if (b.heading, b.language) == PROFILES]
                config = place.directory / "home" / ".config" / "nsqtools" / "config.toml"
                config.parent.mkdir(parents=True)
                config.write_text(place.fit(profiles))
            if heading in (REPLAY, SPARK_GUIDE):
                archive = next(block for block in BLOCKS if block.language == "cron")
                assert place.run(commands_of(archive)[0])[0] == 0
                # Spark compacts no day that has not ended
                ns, nsqd_of_old = time.time_ns() - 2 * 86_400 * 10**9, "old:4150"
                ids = (b"%016x" % n for n in range(OLD))
                old = [Envelope("clicks", nsqd_of_old, id, ns, 1, b"old") for id in ids]
                path = place.directory / "archives" / "clicks.old.log"
                path.write_bytes(encode_many("clicks", nsqd_of_old, old))
            return place

        yield make


def run_in_process(place: Place, run_nsq: RunNsq) -> None:
    """Run the commands of nsq in this process, without their start-up."""
    place.in_process["nsq"] = lambda words: run_nsq(words, env=place.environ)


def make_place(directory: Path, nsqd: EmbeddedNsqd, lookupd: EmbeddedNsqlookupd) -> Place:
    home = directory / "home"
    for folder in (directory / "etc", directory / "archives"):
        folder.mkdir()
    (home / ".local/share/bash-completion/completions").mkdir(parents=True)
    (directory / "etc" / "secret").write_text("open sesame\n")
    (directory / "app.log").write_text("".join(f"line {n}\n" for n in range(100)))
    stands_for = {
        "127.0.0.1:4150": nsqd.tcp_address,
        "nsqd-1:4150": nsqd.tcp_address,
        "lookup-1:4161": lookupd.http_address,
        "/var/nsq": str(directory / "archives"),
        "/etc/nsq": str(directory / "etc"),
        "--listen-http 8080": "--listen-http 0",
        INSTALLED: "nsq",
    }
    environ = {"NSQ_NSQD_TCP_ADDRESS": nsqd.tcp_address, "NSQ_NSQD_HTTP_ADDRESS": nsqd.http_address}
    environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    return Place(directory, stands_for, user_environment(home) | environ)


def fill(nsqd: EmbeddedNsqd) -> None:
    """Create the topics of a site, with messages in every channel of the texts."""
    named = r'(?:-c |--channel |"clicks", ")([a-z]+)'
    channels = set(re.findall(named, "".join(TEXTS.values())))
    assert {"archive", "sqlite"} <= channels
    clicks = [json.dumps({"n": n, "page": "/checkout"}) for n in range(MESSAGES)]
    # one client, because every client reads all certificates of the machine
    with httpx.Client(base_url=f"http://{nsqd.http_address}", timeout=patience_s(5)) as api:
        for topic in ("clicks", "views", "events", "orders"):
            api.post(f"/topic/create?topic={topic}").raise_for_status()
            for channel in channels:
                api.post(f"/channel/create?topic={topic}&channel={channel}").raise_for_status()
        for topic in ("clicks", "views"):
            api.post(f"/mpub?topic={topic}", content="\n".join(clicks)).raise_for_status()


@pytest.mark.parametrize(("document", "heading"), places())
def test_the_commands_under_a_heading_work(document: str, heading: str, serve: Serve) -> None:
    run_all([b for b in BLOCKS if (b.document, b.heading) == (document, heading)], serve(heading))


def test_the_tutorial_works_from_top_to_bottom(serve: Serve) -> None:
    run_all([block for block in BLOCKS if block.document == TUTORIAL], serve(TUTORIAL))


def test_the_guide_for_operators_works_from_top_to_bottom(
    tmp_path: Path, run_nsq: RunNsq, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its daemons are processes at the ports of the guide, with free ports HHHNN for 41NN."""
    place = Place(tmp_path, {"127.0.0.1:41": f"127.0.0.1:{free_hundred()}"})
    lookupd = place.fit("127.0.0.1:4161")
    place.environ = user_environment(tmp_path) | {"NSQ_LOOKUPD_HTTP_ADDRESS": lookupd}
    monkeypatch.chdir(place.directory)
    run_in_process(place, run_nsq)
    try:
        run_all([block for block in BLOCKS if block.document == OPERATE_GUIDE], place)
    except BaseException:
        place.run(Command("kill -9 $(cat *.pid)"))
        raise


def free_hundred() -> int:
    """Return HHH such that the ports HHHNN of the guide are free.

    They are below the ports that other tests reserve.
    """
    used = {int(port) for port in re.findall(r"127\.0\.0\.1:41(\d\d)", TEXTS[OPERATE_GUIDE])}
    assert len(used) > 5
    for hundred in random.sample(range(100, LOWEST // 100), 20):
        with ExitStack() as bound, suppress(OSError):
            for port in used:
                listener = bound.enter_context(socket.socket())
                listener.bind(("127.0.0.1", hundred * 100 + port))
            return hundred
    raise AssertionError("no ports are free")


def test_the_guide_for_spark(
    serve: Serve, spark_env: dict[str, str], run_spark: RunSpark, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands share the session of the tests: a JVM for each would take most of the time."""
    from pyspark.sql import SparkSession

    place = serve(SPARK_GUIDE)
    variables = spark_env.keys() & {"JAVA_HOME", "JAVA_TOOL_OPTIONS", "SPARK_HOME"}
    place.environ |= {name: spark_env[name] for name in variables}
    for name in ("NSQ_NSQD_TCP_ADDRESS", "NSQ_NSQD_HTTP_ADDRESS"):
        monkeypatch.setenv(name, place.environ[name])

    by_spark = {"nsq spark": lambda words: run_spark(*words)}
    place.in_process = by_spark | place.in_process  # the first matching prefix counts
    blocks = [block for block in BLOCKS if block.document == SPARK_GUIDE]
    run_all([block for block in blocks if block.language in SHELL], place)
    monkeypatch.setattr(SparkSession, "stop", lambda session: None)
    [script] = [block.text for block in blocks if block.language == "python"]
    exec(compile(place.fit(script), SPARK_GUIDE, "exec"), {})

    for topic, messages in {"clicks-again": OLD, "clicks-by-spark": MESSAGES}.items():
        _, output = place.run(Command(f"nsq topic info {topic} --json"))
        assert json.loads(output)["nodes"][0]["messages"] == messages


def test_the_spark_commands_of_readme_are_in_the_guide() -> None:
    ran = {c.text for b in BLOCKS if b.document == SPARK_GUIDE for c in commands_of(b)}
    [block] = [b for b in BLOCKS if (b.document, b.heading) == ("README.md", "Spark")]

    assert {command.text for command in commands_of(block)} <= ran


def run_all(blocks: list[Block], place: Place) -> None:
    for block in blocks:
        if block.language in SHELL:
            for command in commands_of(block):
                if not command.text.startswith(tuple(NOT_RUN)):
                    check(command, block, place)
        elif block.language == "python":
            (place.directory / "recipe.py").write_text(place.fit(block.text))
            if module := re.match(r"# (\w+\.py)\n", block.text):  # for the commands that follow
                (place.directory / module[1]).write_text(block.text)
            options = PYTEST if "def test_" in block.text else ""
            check(Command(f"{shlex.quote(sys.executable)}{options} recipe.py"), block, place)
        elif block.language == "ini":
            check_unit(block, place)
        else:
            expected = (*EXCERPTS, "toml")
            assert block.language in expected, f"{block.document}, line {block.line}"


def check(command: Command, block: Block, place: Place) -> None:
    # the image's entry point is nsq, so a container's command line is that of nsq
    docker = r"docker run (?:--?[a-z]+(?:[ =]host)? |-v \S+ )*nsqtools"
    status, output = place.run(command._replace(text=re.sub(docker, "nsq", command.text)))
    expected = int(command.text in VERDICTS)
    if command.runs_until_interrupted:  # nsqd's own status is 0
        expected = 0 if command.text.startswith("nsq nsqd") else 130
    context = f"{block.document}, line {block.line}: {command.text}\n{output}"
    assert status == expected, context
    assert "Traceback" not in output, context
    if command.output is not None:
        assert timeless(output) == timeless(place.fit(command.output)), context


def timeless(output: str) -> str:
    """Replace dates, and measured seconds, which vary on a busy machine."""
    output = re.sub(r"(?:\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d UTC", "DATE", output)
    return re.sub(r"\bin \d+ s\b", "in N s", output)


def test_cron_and_systemd_find_the_command() -> None:
    lines = [
        command.text
        for block in BLOCKS
        if block.language == "cron"
        for command in commands_of(block)
    ]
    for document in TEXTS.values():
        lines += re.findall(r"^ExecStart=(.*)", document, re.MULTILINE)
    assert len(lines) >= 3
    assert all(line.startswith(f"{INSTALLED} ") for line in lines), lines


def check_unit(block: Block, place: Place) -> None:
    """Run the command of a unit until SIGTERM, and expect its SuccessExitStatus."""
    unit = configparser.ConfigParser()
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(block.text)
    service = unit["Service"]
    notify = place.directory / "notify"
    environ = {**place.environ, "NOTIFY_SOCKET": str(notify)}
    command = ["bash", "-c", f"exec {place.fit(service['ExecStart'])}"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(notify))
        systemd.settimeout(patience_s(20))
        with subprocess.Popen(
            command, cwd=place.directory, env=environ, stderr=subprocess.PIPE, text=True
        ) as process:
            try:
                assert systemd.recv(100) == b"READY=1"
            finally:
                process.terminate()
            _, stderr = process.communicate(timeout=patience_s(20))
    assert process.returncode == int(service["SuccessExitStatus"]), stderr
    written = list((place.directory / "archives").glob("clicks.*.log.gz"))
    assert len(written) == 1, stderr


def test_the_first_command_needs_only_python(tmp_path: Path) -> None:
    block = next(block for block in BLOCKS if block.heading == INSTALL)
    if not (CHECKOUT / ".git").exists():
        pytest.skip("this is no git checkout")
    files = subprocess.check_output(["git", "ls-files"], cwd=CHECKOUT, text=True)
    for name in files.splitlines():
        if (CHECKOUT / name).exists():
            (tmp_path / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(CHECKOUT / name, tmp_path / "clone" / name)
    programs, home = tmp_path / "bin", tmp_path / "home"
    programs.mkdir()
    home.mkdir()
    # a PATH with only the system's programs and this Python
    (programs / "python3").symlink_to(Path(sys.base_prefix) / "bin" / "python3")
    kept = {k: v for k, v in os.environ.items() if k.startswith(("PIP_", "SSL_", "http", "HTTP"))}
    env = kept | {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(home)}
    options = {"cwd": tmp_path / "clone", "env": env, "timeout": patience_s(80)}
    done = subprocess.run(["bash", "-c", block.text], capture_output=True, **options)
    assert done.returncode == 0, done.stderr.decode()
    assert b"Everything was there" in done.stdout


def test_readme_is_short_and_every_link_has_a_target() -> None:
    assert len(README.encode()) < 10_000
    for name, text in TEXTS.items():
        folder = CHECKOUT if name == "README.md" else CHECKOUT / "man"
        for target in re.findall(r"\]\(([^)]+)\)", text):
            assert "://" in target or (folder / target).exists(), f"{name}: {target}"
    assert all(f"(man/{path.name})" in README for path in GUIDES)
    assert all(f"({name}.md)" in README for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY"))


def test_contributing_names_existing_paths_and_explains_every_package() -> None:
    text = (CHECKOUT / "CONTRIBUTING.md").read_text("utf-8")
    named = set(re.findall(r"(?<![\w/.])(?:nsqtools|tests|man)/[\w/.-]+\w", text))
    made_up = {"nsqtools/cli/commands/NAME.py", "man/NAME.7.md"}

    assert len(named) > 10
    assert [path for path in named - made_up if not (CHECKOUT / path).exists()] == []
    tree = text.partition("## The tree")[2].partition("```\n\n")[0]
    for path in (CHECKOUT / "nsqtools").glob("*/__init__.py"):
        assert re.search(rf"\b{path.parent.name}\b", tree), path


def test_each_decision_in_contributing_is_in_the_named_module() -> None:
    text = (CHECKOUT / "CONTRIBUTING.md").read_text("utf-8")
    table = text.partition("## Where decisions are made")[2].partition("\n## ")[0]
    homes = re.findall(r"`([\w/]+\.py)`: ((?:`[\w.]+`(?:, )?)+)", table)
    assert len(homes) > 15
    for path, names in homes:
        tree = ast.parse((CHECKOUT / "nsqtools" / path).read_text("utf-8"))
        kinds = (ast.ClassDef, ast.FunctionDef)
        definitions = {node.name: node for node in tree.body if isinstance(node, kinds)}
        for name in re.findall(r"`([\w.]+)`", names):
            owner, _, method = name.partition(".")
            members = {getattr(node, "name", None) for node in ast.walk(definitions[owner])}
            assert not method or method in members, f"{path}: {name}"


def test_each_go_utility_has_a_table_of_flags_and_existing_options(
    run_nsq: RunNsq,
) -> None:
    """tests/interop/test_go_command_lines.py checks that the flags are complete."""
    programs, migration = set(), TEXTS["nsq-migration.7.md"]
    for table in re.findall(r"^\| \w+ \| `nsq .*\n(?:\|.*\n)+", migration, re.MULTILINE):
        (program, command), _, *rows = (
            line.strip("| ").split(" | ", 1) for line in table.splitlines()
        )
        _, *words = command.strip("`").split()
        programs.add(program)
        flags = re.findall(r"`(-[a-z-]+|-n)`", " ".join(left for left, _ in rows))
        assert set(flags) == {f"-{flag}" for flag in UTILITIES[program]}
        assert " ".join(words) in all_commands()
        help_page = run_nsq([*words, "--help"], env={"COLUMNS": "100"}).out.decode()
        for option in re.findall(r"`(--[a-z-]+)", " ".join(right for _, right in rows)):
            assert re.search(rf"{option}\b", help_page), option
    assert programs == set(UTILITIES)
