"""Every flag of the NSQ utilities: the same command line for the Go program and for ours.

The tests fail if no command line here has a flag of the Go program, or if we do not support it.
"""

import gzip
import inspect
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from plugins.archives import unfinished
from plugins.clients import bodies_in
from plugins.daemons import GO_PROGRAMS, GoNsqd, GoNsqlookupd
from plugins.http_server import MakeServer
from plugins.in_process import Result
from plugins.ports import ReservedPort
from plugins.waiting import patience_s, wait_until

from nsqtools.cli.commands.compat import go_main
from nsqtools.cli.commands.go_utilities import UTILITIES
from nsqtools.cli.commands.shells import explain

pytestmark = pytest.mark.real_nsqd

DEADLINE_S = patience_s(20.0)
SIDES = ("go", "ours")
OURS = "import sys; from nsqtools.cli.main import main; sys.argv[0] = '{}'; sys.exit(main())"


def tried(name: str) -> set[str]:
    """The flags in the source of the functions here that run a utility."""
    functions = filter(inspect.isfunction, globals().values())
    sources = [
        source
        for source in map(inspect.getsource, functions)
        if re.search(rf"\b{name}[ (]", source)
    ]
    return {*re.findall(r"(?<![\w-])--?([a-z][a-z-]*)", "".join(sources)), "version"}


class World(NamedTuple):
    """Daemons for all tests of this file; each test has its own topics."""

    nsqd: GoNsqd
    lookupd: GoNsqlookupd

    def command(self, side: str, line: str) -> list[str]:
        """The words of a command line; SIDE, NSQD and LOOKUPD in it are filled in."""
        line = line.replace("LOOKUPD", self.lookupd.http_address).replace("SIDE", side)
        name, *arguments = shlex.split(line.replace("NSQD", self.nsqd.tcp_address))
        if side == "go":
            return [str(GO_PROGRAMS / name), *arguments]
        return [sys.executable, "-c", OURS.format(name), *arguments]

    def drain(self, side: str, line: str, *topics: str) -> Result:
        """Run a command line until the side's channel of each topic is empty, then stop it."""
        ended = run(
            self.command(side, line), until=lambda: all(self.is_empty(t, side) for t in topics)
        )
        assert ended.status == 0, ended.err
        return ended

    def fill(self, topic: str, *bodies: bytes, channels: tuple[str, ...] = SIDES) -> None:
        for channel in channels:
            self.nsqd.create_channel(topic, channel)
        if bodies:
            self.nsqd.publish(topic, *bodies)
        wait_until(lambda: self.lookupd.producers(topic), what=f"{topic} registered")

    def is_empty(self, topic: str, channel: str) -> bool:
        try:
            return not (self.nsqd.depth(topic) or unfinished(self.nsqd, topic, channel))
        except LookupError:
            return False


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with GoNsqlookupd() as lookupd:
        register = f"-lookupd-tcp-address={lookupd.tcp_address}"
        with GoNsqd(tmp_path_factory.mktemp("nsqd"), register) as nsqd:
            yield World(nsqd, lookupd)


def run(
    command: list[str], stdin: bytes = b"", until: Callable[[], object] | None = None
) -> Result:
    """Run a program to its end, or until a condition is true and then stop it with SIGTERM."""
    with running(command) as process:
        if until is not None:
            wait_until(until, what=" ".join(command), timeout_s=15)
            process.send_signal(signal.SIGTERM)
        out, err = process.communicate(stdin, timeout=DEADLINE_S)
    return Result(process.returncode, out, err.decode())


@contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program, and kill it at the end."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("name", UTILITIES)
def test_every_flag_of_the_go_program_is_supported_and_tested(name: str) -> None:
    help = subprocess.run([GO_PROGRAMS / name, "-h"], capture_output=True, check=False).stderr
    theirs = set(re.findall(r"^  -([a-z-]+)", help.decode(), re.MULTILINE))

    assert set(UTILITIES[name]) == theirs
    assert theirs <= tried(name)
    for entry in re.split(r"^  -", help.decode(), flags=re.MULTILINE)[1:]:
        flag = UTILITIES[name][re.match(r"[a-z-]+", entry)[0]]  # type: ignore[index]
        default = re.search(r"\(default (?!is )(.*?)\)\s*$", entry)
        if default is not None:
            our_default = flag.kind.show(flag.default).replace("\n", "\\n")
            assert default[1].strip('"') == our_default.strip('"'), entry


@pytest.mark.parametrize("name", UTILITIES)
def test_usage_errors_and_versions_match_the_go_programs(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (["-nonsense"], ["-h"], [], ["-topic"], ["-topic=a", "-channel=c"]):
        theirs = subprocess.run(
            [GO_PROGRAMS / name, *arguments], capture_output=True, stdin=subprocess.DEVNULL
        )
        assert go_main(name, arguments) == theirs.returncode, arguments
        capsys.readouterr()
    if "version" in UTILITIES[name]:
        version = subprocess.check_output([GO_PROGRAMS / name, "-version"], text=True)
        assert go_main(name, ["--version=true"]) == 0
        assert capsys.readouterr().out.startswith(version.rsplit(" (")[0].strip())


def test_tail(world: World) -> None:
    for topic in ("tail.a", "tail.b"):
        world.fill(topic, b"one", b"\xfftwo")
    printed = {}
    for side in SIDES:
        line = """nsq_tail -topic tail.a --topic=tail.b -print-topic -channel SIDE -max-in-flight=1
            -consumer-opt client_id,SIDE -consumer-opt=snappy -nsqd-tcp-address NSQD"""
        printed[side] = sorted(world.drain(side, line, "tail.a", "tail.b").out.splitlines())
    assert printed["ours"] == printed["go"]
    assert printed["ours"][0] == b"tail.a | one"


def test_tail_waits_for_a_topic(world: World) -> None:
    for side in SIDES:
        topic = f"later.{side}"
        line = f"""nsq_tail -topic {topic} -channel c -n 1 -lookupd-http-address LOOKUPD
            -consumer-opt lookupd_poll_interval,100ms"""
        with running(world.command(side, line)) as process:
            time.sleep(0.3)
            assert process.poll() is None
            world.nsqd.publish(topic, b"at last")
            out, err = process.communicate(timeout=DEADLINE_S)
        assert (process.returncode, out) == (0, b"at last\n"), err.decode()


def test_to_nsq(world: World) -> None:
    seconds = []
    for side in SIDES:
        line = """to_nsq -topic pub.SIDE -delimiter=, -rate 20 -nsqd-tcp-address NSQD
            -producer-opt snappy"""
        began = time.monotonic()
        ended = run(world.command(side, line), b"".join(b"%d," % number for number in range(14)))
        seconds.append(time.monotonic() - began)
        assert ended.status == 0, ended.err
        assert bodies_in(world.nsqd, f"pub.{side}", 14) == sorted(b"%d" % n for n in range(14))
    assert min(seconds) > 0.5
    assert go_main("to_nsq", ["-topic=t", "-nsqd-tcp-address=a:1", "-delimiter=ab"]) == 1


def test_to_nsq_ends_without_nsqd(world: World) -> None:
    for side in SIDES:
        line = "to_nsq -topic=away -nsqd-tcp-address=127.0.0.1:1"
        with running(world.command(side, line)) as process:
            process.stdin.write(b"one\n")
            process.stdin.flush()
            assert process.wait(DEADLINE_S) == 1  # although its input stays open
            assert b"connection refused" in process.communicate()[1]


def test_nsqadmin(world: World) -> None:
    world.fill("admin", b"one")
    answers = {}
    for side in SIDES:
        address = f"127.0.0.1:{ReservedPort().number}"
        line = f"""nsqadmin -http-address={address} -base-path=/nsq -acl-http-header=X-User
            -lookupd-http-address=LOOKUPD -http-client-connect-timeout=1s -log-level=warn
            -http-client-request-timeout=2s -verbose"""
        with running(world.command(side, line)):

            def topics(url: str = f"http://{address}/nsq/api/topics") -> object:
                with suppress(httpx.HTTPError):
                    return httpx.get(url).json()
                return None

            answers[side] = wait_until(topics, what="an answer")
    assert answers["ours"] == answers["go"]


def test_flags_of_nsqadmin_become_options_of_nsq_web_or_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["-nsqd-http-address=h:4151", "-http-client-tls-cert=c.pem"]
    flags += ["-http-client-tls-key=k.pem", "-http-client-tls-root-ca-file=ca.pem"]
    flags += ["-http-client-tls-insecure-skip-verify", "-notification-http-endpoint=http://n/"]
    [line, _] = explain("nsqadmin", flags)
    assert line == (
        "nsq web --listen 0.0.0.0:4171 --acl-http-header X-Forwarded-User"
        " --notification-http-endpoint http://n/ --nsqd-http-address h:4151 --tls-ca-file ca.pem"
        " --tls-cert c.pem --tls-key k.pem --tls-insecure --timeout 5s --verbose"
    )
    [line, _] = explain("nsqadmin", [*flags, "-http-address=127.0.0.1:4171"])
    assert " --allow-changes " in line
    refused = """-allow-config-from-cidr=10.0.0.0/8 -config=c -dev-static-dir=d -graphite-url=g
        -log-prefix=p -proxy-graphite -statsd-counter-format=c -statsd-gauge-format=g
        -statsd-interval=30s -statsd-prefix=p -admin-user=ann"""
    for flag in refused.split():
        assert go_main("nsqadmin", [*flags, flag]) == 1  # unlike nsqadmin itself
        assert flag.partition("=")[0] in capsys.readouterr().err


def test_an_unknown_client_option_is_a_usage_error(world: World) -> None:
    for name, flag in product(UTILITIES, ("consumer-opt", "producer-opt")):
        if flag in UTILITIES[name] and name != "nsq_to_file":
            line = f"{name} -topic=t -nsqd-tcp-address=127.0.0.1:1 -{flag}=no_such,1"
            theirs, ours = (run(world.command(side, line)) for side in SIDES)
            assert (ours.status, theirs.status) == (2, 2), name
            assert ours.err.splitlines()[0] == theirs.err.splitlines()[0]


def test_stat(world: World) -> None:
    world.fill("stat", b"one", b"two")
    for address in (
        f"-nsqd-http-address {world.nsqd.http_address}",
        "-lookupd-http-address LOOKUPD",
    ):
        line = f"""nsq_stat -topic stat -channel go -count 2 -interval=200ms {address}
            -http-client-connect-timeout=1s -http-client-request-timeout 3s"""
        theirs, ours = (run(world.command(side, line)) for side in SIDES)

        assert (ours.status, ours.out) == (theirs.status, theirs.out), ours.err
        assert ours.out.count(b"\n") == 4


def files_below(directory: Path) -> dict[str, tuple[int, bytes]]:
    """The files with their modes and text, without hidden files, which only we write."""
    files = {}
    for path in directory.rglob("*"):
        if path.is_file() and not path.name.startswith("."):
            read = gzip.open if path.suffix == ".gz" else open
            with read(path, "rb") as file:
                files[str(path.relative_to(directory))] = (path.stat().st_mode, file.read())
    return files


def words(files: dict[str, tuple[int, bytes]]) -> list[bytes]:
    return sorted(word for _, text in files.values() for word in text.split())


def nsq_to_file(directory: Path, more: str) -> str:
    directory.mkdir(exist_ok=True)
    place = "" if "-lookupd" in more else "-nsqd-tcp-address NSQD"
    return f"nsq_to_file -output-dir {directory} -channel SIDE -sync-interval=100ms {place} {more}"


def test_file_names_and_text(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    world.fill("file", b"first")
    flags = """-topic file -filename-format '<TOPIC>/<HOST><REV>.<DATETIME>.txt'
        -datetime-format %Y%m%d%Z%z -host-identifier 'box-<SHORT_HOST>' -max-in-flight 10
        -consumer-opt msg_timeout,10s -log-level=fatal -log-prefix 'x '"""
    for body in (b"second", b"third"):
        for side in SIDES:
            world.drain(side, nsq_to_file(tmp_path / side, flags), "file")
        world.nsqd.publish("file", body)
    theirs, ours = (files_below(tmp_path / side) for side in SIDES)

    [(name, (mode, _))] = theirs.items()
    assert re.fullmatch(r"file/box-[^/]+\.\d{8}JST\+0900\.txt", name)
    # we never append to a file: the second run begins another one
    assert ours.keys() == {name, name.replace(".txt", "-000001.txt")}
    assert {file_mode for file_mode, _ in ours.values()} == {mode}
    assert words(ours) == words(theirs)


def test_compressed_files_have_revs_and_come_from_a_work_dir(world: World, tmp_path: Path) -> None:
    world.fill("gz", *(b"%04d" % number for number in range(30)))
    for side in SIDES:
        work = tmp_path / f"{side}.work"
        work.mkdir()
        flags = f"""-topic=gz -gzip=true -gzip-level 9 -rotate-size=49 -work-dir {work}
            -filename-format '<TOPIC><REV>.log' -max-in-flight=30"""
        world.drain(side, nsq_to_file(tmp_path / side, flags), "gz")
        assert files_below(work) == {}
    theirs, ours = (files_below(tmp_path / side) for side in SIDES)

    assert sorted(theirs)[:3] == ["gz-000000.log.gz", "gz-000001.log.gz", "gz-000002.log.gz"]
    # messages that are synced together may exceed the size; none of our files is empty
    *full, last = sorted(ours)
    assert all(len(ours[name][1]) >= 49 for name in full)
    assert last == f"gz-{len(full):06d}.log.gz"
    assert words(ours) == words(theirs)


def test_a_pattern_selects_topics_and_filters_named_ones(world: World, tmp_path: Path) -> None:
    for topic in ("pat.a", "pat.b", "other"):
        world.fill(topic, b"x")
    flags = """-lookupd-http-address LOOKUPD -topic-pattern ^pat -topic-refresh=100ms
        -http-client-connect-timeout=1s -http-client-request-timeout=2s
        '-filename-format=<TOPIC>.log' """
    for side in SIDES:
        world.drain(side, nsq_to_file(tmp_path / f"{side}0", flags), "pat.a", "pat.b")
        world.fill("pat.b", b"y")
        named_flags = f"{flags} -topic=pat.b -topic other"
        world.drain(side, nsq_to_file(tmp_path / f"{side}1", named_flags), "pat.b")
        assert set(files_below(tmp_path / f"{side}0")) == {"pat.a.log", "pat.b.log"}
        assert set(files_below(tmp_path / f"{side}1")) == {"pat.b.log"}
    assert world.nsqd.depth("other", "ours") == world.nsqd.depth("other", "go")


def test_files_are_rotated_by_age_even_if_empty(world: World, tmp_path: Path) -> None:
    world.fill("age", channels=("go", "ours"))
    flags = "-topic=age -rotate-interval=200ms '-filename-format=<TOPIC><REV>.log'"
    for side in SIDES:
        directory, skipping = tmp_path / side, tmp_path / f"{side}.skip"
        command = world.command(side, nsq_to_file(directory, flags))
        assert run(command, until=lambda d=directory: len(files_below(d)) >= 3).status == 0
        assert "age-000001.log" in files_below(directory)
        command = world.command(side, nsq_to_file(skipping, f"{flags} -skip-empty-files"))

        def has_consumed_for_a_while(side: str = side) -> bool:
            clients = world.nsqd.channel_stats("age", side)["clients"]
            return any(time.time() - client["connect_ts"] > 1.5 for client in clients)

        ended = run(command, until=has_consumed_for_a_while)
        assert (ended.status, files_below(skipping)) == (0, {}), ended.err


def test_mirror(world: World) -> None:
    for topic in ("from.a", "from.b"):
        world.fill(topic, b"1", b"\xff2")
    for side in SIDES:
        line = """nsq_to_nsq -topic=from.a -topic=from.b -channel SIDE -destination-topic to.SIDE
            -mode=round-robin -destination-nsqd-tcp-address NSQD -max-in-flight=5
            -consumer-opt=snappy -producer-opt snappy,true -status-every=0 -nsqd-tcp-address NSQD"""
        world.drain(side, line, "from.a", "from.b")
        assert bodies_in(world.nsqd, f"to.{side}", 4) == [b"1", b"1", b"\xff2", b"\xff2"]


def test_mirror_by_json_fields(world: World) -> None:
    world.fill("json", b'{"a":"1","b":"x"}', b'{"a":2,"c":1}', b'{"c":1}', b'{"a":1,"d":[]}')
    for side in SIDES:
        line = """nsq_to_nsq -topic=json -channel SIDE -destination-topic json.SIDE
            -require-json-field=a -require-json-value 1 -whitelist-json-field=b
            -whitelist-json-field=a -destination-nsqd-tcp-address NSQD
            -lookupd-http-address LOOKUPD -consumer-opt default_requeue_delay,0s
            -consumer-opt=max_backoff_duration,0s"""
        world.drain(side, line, "json")
        mirrored = [body.replace(b" ", b"") for body in bodies_in(world.nsqd, f"json.{side}", 2)]
        assert mirrored == [b'{"a":"1","b":"x"}', b'{"a":1}']


def test_post(world: World, http_server: MakeServer) -> None:
    world.fill("post", b"one", b"\xff{two}")
    posted = {}
    for side in SIDES:
        server = http_server()
        line = f"""nsq_to_http -topic=post -channel SIDE -n=2 -post '{server.url}/a{{b}}?c=%20'
            -content-type=text/plain -header 'X-One: 1:{{2}}' --header=X-Two:2 -header=X-Two:3
            -header=Host:x -mode epsilon-greedy -status-every=1 -http-client-connect-timeout=1s
            -max-in-flight=7 -http-client-request-timeout 5s -consumer-opt msg_timeout,9s
            -nsqd-tcp-address NSQD"""
        world.drain(side, line, "post")
        headers = ("Content-Type", "X-One", "X-Two", "User-Agent", "Content-Length")
        posted[side] = sorted(
            (
                request.method,
                request.target,
                request.body,
                *(request.headers[name] for name in headers),
            )
            for request in server.requests
        )
        assert all(request.headers["Host"] in server.url for request in server.requests)
    assert [request[1:] for request in posted["ours"]] == [request[1:] for request in posted["go"]]
    assert len(posted["ours"]) == 2


def test_the_other_modes_send_to_each_address(world: World, http_server: MakeServer) -> None:
    for mode, side in product(("multicast", ""), SIDES):
        topic = f"mode.{mode}.{side}"
        world.fill(topic, b"one", b"two", channels=(side,))
        servers = [http_server(), http_server()]
        posts = " ".join(f"-post={server.url}" for server in servers)
        line = f"""nsq_to_http -topic {topic} -channel SIDE -mode '{mode}' -nsqd-tcp-address NSQD
            {posts}"""
        world.drain(side, line, topic)
        assert [server.bodies for server in servers] == [[b"one", b"two"]] * 2, (mode, side)


def test_get(world: World, http_server: MakeServer) -> None:
    world.fill("get", b"a/b=c&d", b"\xff")
    for side in SIDES:
        server = http_server()
        line = f"""nsq_to_http -topic=get -channel SIDE -get {server.url}/?m=%s
            -lookupd-http-address LOOKUPD"""
        world.drain(side, line, "get")
        targets = sorted(request.target for request in server.requests)
        assert targets == ["/?m=%FF", "/?m=a%2Fb%3Dc%26d"]
        assert {request.method for request in server.requests} == {"GET"}

        world.fill("sample", b"never sent", channels=(side,))
        world.drain(side, f"{line.replace('=get', '=sample')} -sample=0", "sample")
        assert len(server.requests) == 2
    assert go_main("nsq_to_http", ["-topic=t", "-nsqd-tcp-address=a:1", "-get=http://a/"]) == 1
