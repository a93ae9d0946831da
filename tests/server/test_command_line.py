"""Flags in Go's syntax, the TOML file, and how the daemon starts and stops in the foreground."""

import re
import signal
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from plugins.certificates import Certificates
from plugins.cli import RunNsq
from plugins.daemons import EmbeddedNsqdProcess
from plugins.servers import DataPath, GoProgram, Serve
from plugins.waiting import patience_s

from nsqtools.errors import ConfigurationError
from nsqtools.server import EmbeddedNsqd
from nsqtools.server.go_flags import FlagError, flags_of, parse_flags, read_config
from nsqtools.server.options import NsqdOptions

FLAGS = flags_of(NsqdOptions, {"worker-id": "[deprecated] use --node-id"})
LATENCY = "e2e-processing-latency-percentile"


READ: dict[str, dict[str, object]] = {
    "": {},
    "-max-rdy-count 5": {"max_rdy_count": 5},
    "--max-rdy-count=5": {"max_rdy_count": 5},
    "-max-rdy-count=0x1_0 -max-msg-size=010": {"max_rdy_count": 16, "max_msg_size": 8},
    "-msg-timeout=1h30m": {"msg_timeout": 5400.0},
    "-output-buffer-timeout 250us": {"output_buffer_timeout": 0.00025},
    "-snappy -deflate=f": {"snappy": True, "deflate": False},
    "-tls-required": {"tls_required": 2},
    "-tls-required=TCP-https": {"tls_required": 1},
    "-tls-min-version=TLS1.2": {"tls_min_version": 0x0303},
    "-log-level=WARN": {"log_level": "warn"},
    "-lookupd-tcp-address=a:1 --lookupd-tcp-address b:2": {"lookupd_tcp_address": ("a:1", "b:2")},
    f"-{LATENCY}=1.0,0.5 -{LATENCY}=.9": {LATENCY.replace("-", "_"): (1.0, 0.5, 0.9)},
    "-data-path -x": {"data_path": "-x"},
    "-data-path=": {"data_path": ""},
    "-verbose -worker-id": {},
    "-max-rdy-count=5 word -max-rdy-count=6": {"max_rdy_count": 5},
    "-- -nonsense": {},
    "-": {},
    "-max-rdy-count=1 -max-rdy-count=2": {"max_rdy_count": 2},
}


@pytest.mark.parametrize("line", READ)
def test_flags_are_parsed_as_by_go(line: str) -> None:
    assert parse_flags(FLAGS, line.split()).options == READ[line]


REFUSED = """
    -nonsense ---max-rdy-count=5 -=5 -max-rdy-count -max-rdy-count=five -max-rdy-count=1e3
    -max-rdy-count= -max-rdy-count=99999999999999999999 -msg-timeout=5 -msg-timeout=5x -msg-timeout=
    -snappy=yes -max-depth=5 -tls-required=maybe -tls-min-version=ssl3.0 -log-level=loud
"""


# Go uses other words for numbers that are too large or missing, and shows the position
OTHER_WORDS = re.compile(r".*(99999|-count=$|-max-depth).*")
SAME_WORDS = [words for words in REFUSED.split() if not OTHER_WORDS.fullmatch(words)]
SAME_WORDS_OF_NSQLOOKUPD = """
    -nonsense -tombstone-lifetime=5 -log-level=loud -data-path=/tmp ---version -tcp-address
    -version=maybe
"""


def test_refusals_usage_and_version_are_those_of_go(run_nsq: RunNsq, go_program: GoProgram) -> None:
    refused = {"nsqd": SAME_WORDS, "nsqlookupd": SAME_WORDS_OF_NSQLOOKUPD.split()}
    for program, arguments in refused.items():
        for argument in ("-h", *arguments):
            go = subprocess.run([go_program(program), argument], capture_output=True, text=True)
            result = run_nsq([program, argument])

            assert (result.status, result.out) == (go.returncode, b""), argument
            assert go.returncode == (0 if argument == "-h" else 2), argument
            # The usage marks our own flags. Go's usage lists ssl3.0, which it refuses.
            usage = re.sub(r"  -.*\n    \t\[not in Go's nsqd\].*\n", "", result.err)
            assert usage == go.stderr.replace("'ssl3.0', ", ""), argument
        version = run_nsq([program, "-version"])
        assert (version.status, version.err) == (0, "")
        assert re.fullmatch(rf"{program} v1\.3\.0 \(built w/python[\d.]+\)\n", version.out.decode())
    for argument in set(REFUSED.split()) - set(SAME_WORDS):
        with pytest.raises(FlagError):
            parse_flags(FLAGS, [argument])


CONFIG: dict[str, dict[str, object]] = {
    'msg_timeout = "2s"': {"msg_timeout": 2.0},
    "msg_timeout = 2000": {"msg_timeout": 2.0},
    **{key: {"max_rdy_count": 5} for key in ("max_rdy_count = 5", 'max_rdy_count = "5"')},
    **{key: {"snappy": False} for key in ("snappy = false", 'snappy = "false"')},
    "deflate = 0": {"deflate": False},
    "\ufeffid = 7": {"node_id": 7},  # as some editors on Windows start a file
    "node_id = 7": {},
    'nsqlookupd_tcp_addresses = ["a:1", "b:2"]': {"lookupd_tcp_address": ("a:1", "b:2")},
    'nsqlookupd_tcp_addresses = "a:1,b:2"': {"lookupd_tcp_address": ("a:1", "b:2")},
    "e2e_processing_latency_percentiles = [1.0]": {"e2e_processing_latency_percentile": (1,)},
    "tls_required = true": {"tls_required": 2},
    'tls_required = "tcp-https"': {"tls_required": 1},
    'tls_min_version = ""': {"tls_min_version": 0x0301},
    'log_level = "Debug"': {"log_level": "debug"},
    "nonsense = 1\nmem-queue-size = 5": {},
}
BAD_LINES = """max_rdy_count = 1.5; msg_timeout = 1.5; msg_timeout = "5"; snappy = "maybe"; =;
    log_level = 5; overflow_policy = "refuse"; nsqlookupd_tcp_addresses = [1.5]"""


@pytest.mark.parametrize("line", [*CONFIG, *map(str.strip, BAD_LINES.split(";"))])
def test_a_config_file_is_read_or_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "nsqd.toml"
    path.write_text(line)

    with nullcontext() if line in CONFIG else pytest.raises(ConfigurationError):
        assert read_config(str(path), NsqdOptions) == CONFIG[line]


def test_an_option_of_addresses_accepts_a_string_and_tls_required_a_bool() -> None:
    options = NsqdOptions(lookupd_tcp_address="a:1", auth_http_address="b:2")  # type: ignore[arg-type]
    assert (options.lookupd_tcp_address, options.auth_http_address) == (("a:1",), ("b:2",))
    assert NsqdOptions(tls_required=True, tls_cert="c", tls_key="k").tls_required == 2


def test_an_encrypted_key_does_not_prompt_for_its_password(
    certificates: Certificates, tmp_path: Path
) -> None:
    key = serialization.load_pem_private_key(certificates.server.key.read_bytes(), None)
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    encrypted = tmp_path / "key"
    encrypted.write_bytes(
        key.private_bytes(pem, form, serialization.BestAvailableEncryption(b"secret"))
    )
    command = [sys.executable, "-m", "nsqtools", "nsqd", f"-data-path={tmp_path}"]
    command += [f"-tls-cert={certificates.server.cert}", f"-tls-key={encrypted}"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, text=True
    ) as nsqd:
        assert nsqd.wait(patience_s(20)) == 1
        assert nsqd.stderr is not None
        assert "failed to build TLS config" in nsqd.stderr.read()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_the_daemon_raises_the_file_limit_logs_like_go_and_stops_on_a_signal(
    data_path: DataPath, serve: Serve, tmp_path: Path, number: int
) -> None:
    """The command line overrides the options of a file."""

    class Limited(EmbeddedNsqdProcess):
        def _command(self) -> list[str | Path]:
            return ["sh", "-c", 'ulimit -Sn 256; exec "$@"', "sh", *super()._command()]

    config = tmp_path / "nsqd.cfg"
    config.write_text('log_prefix = "[x] "\ntcp_address = "127.0.0.1:1"\nunknown = true\n')
    nsqd = serve(Limited(data_path(), f"-config={config}", "-verbose"))
    limits = Path(f"/proc/{nsqd.pid}/limits").read_text()
    limit = re.search(r"^Max open files +(\d+) +(\d+)", limits, re.MULTILINE)
    assert limit
    assert limit[1] == limit[2] != "256"

    lines = nsqd.log.splitlines()
    pattern = r"\[x\] \d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d{6} (INFO|WARNING): \S.*"
    assert [line for line in lines if not re.fullmatch(pattern, line)] == []
    assert re.search(r"INFO: nsqd v\d+\.\d+\.\d+ \(built w/\S+\)$", lines[0])
    deprecated = "WARNING: the flag -verbose is deprecated and has no effect"
    assert any(line.endswith(deprecated) for line in lines)
    assert any(f"TCP: listening on {nsqd.tcp_address}" in line for line in lines)

    nsqd.create_topic("t")
    process = nsqd._process
    process.send_signal(number)
    assert process.wait(patience_s(20)) == 0
    assert b'"name":"t"' in (nsqd.data_path / "nsqd.dat").read_bytes()


def test_unix_sockets_are_served_and_removed(tmp_path: Path) -> None:
    paths = {name: str(tmp_path / name) for name in ("tcp", "http")}
    with EmbeddedNsqd(tcp_address=paths["tcp"], http_address=paths["http"]) as nsqd:
        assert (nsqd.tcp_address, nsqd.http_address) == (paths["tcp"], paths["http"])
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(paths["tcp"])
            client.sendall(b"  V2PUB t\n\0\0\0\1x")
            assert client.recv(100) == b"\0\0\0\x06\0\0\0\0OK"
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(paths["http"])
            client.sendall(b"GET /info HTTP/1.0\r\n\r\n")
            answer = client.makefile("rb").read()
        assert b'"http_port":-1,"tcp_port":-1' in answer
    assert list(tmp_path.iterdir()) == []
