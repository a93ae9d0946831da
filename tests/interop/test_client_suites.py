"""The suites of clients in other languages pass against the embedded daemons.

They are fetched from npm and crates.io, and are skipped without npm, cargo or a network.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from plugins.daemons import EmbeddedLookupServer
from plugins.http_server import AuthServer
from plugins.servers import AnyNsqd, Serve

pytestmark = pytest.mark.slow

NSQJS = "nsqjs@0.13.0"
# The imports of its suite; its package.json has more, for style and release.
NSQJS_NEEDS = "mocha@9 should@13 sinon@11 nock@13 async-retry@1 p-event@4 temp@0.9 snappystream@2"
TOKIO_NSQ = "0.14.0"


def fetch(command: list[str], folder: Path) -> str:
    """Run a package manager, or skip the test."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    if done.returncode:
        pytest.skip(f"{' '.join(command[:2])} failed: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout


def free_base() -> int:
    """Return a port that is followed by a thousand ports that are probably free as well."""
    for base in range(20_000, 30_000, 1_000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", base)):
                return base
    pytest.skip("no free range of ports")


def test_nsqjs_passes_its_own_suite(tmp_path: Path) -> None:
    fetch(["npm", "install", "--no-audit", "--no-fund", NSQJS, *NSQJS_NEEDS.split()], tmp_path)
    suite = tmp_path / "node_modules" / "nsqjs"
    integration = suite / "test" / "z_integration_test.js"
    base = free_base()
    text = integration.read_text().replace("PORT = 4150", f"PORT = {base}")
    integration.write_text(text.replace("PORT = 4151", f"PORT = {base + 1}"))
    (tmp_path / "bin").mkdir()
    nsqd = tmp_path / "bin" / "nsqd"
    nsqd.write_text(f'#!/bin/sh\nexec {sys.executable} -m nsqtools nsqd "$@"\n')
    nsqd.chmod(0o755)

    # The other files test the client alone, some of them against the clock.
    mocha = [tmp_path / "node_modules" / ".bin" / "mocha", "-R", "dot", "-t", "60000", integration]
    path = f"{nsqd.parent}:{os.environ['PATH']}"
    done = subprocess.run(
        mocha, cwd=suite, env=os.environ | {"PATH": path}, capture_output=True, timeout=600
    )
    assert done.returncode == 0, done.stdout.decode()
    assert b" passing" in done.stdout


def test_tokio_nsq_passes_its_own_suite(
    embedded_nsqd: AnyNsqd, serve: Serve, auth_server: AuthServer, tmp_path: Path
) -> None:
    outline = tmp_path / "outline"
    (outline / "src").mkdir(parents=True)
    (outline / "src" / "lib.rs").write_text("")
    package = '[package]\nname = "outline"\nversion = "0.1.0"\nedition = "2021"\n'
    (outline / "Cargo.toml").write_text(f'{package}[dependencies]\ntokio-nsq = "={TOKIO_NSQ}"\n')
    metadata = json.loads(fetch(["cargo", "metadata", "--format-version", "1"], outline))
    [crate] = [item for item in metadata["packages"] if item["name"] == "tokio-nsq"]
    suite = tmp_path / "suite"
    shutil.copytree(Path(crate["manifest_path"]).parent, suite)

    lookupd = serve(EmbeddedLookupServer())
    keys = [f"-tls-cert={suite}/keys/cert.pem", f"-tls-key={suite}/keys/key.pem"]
    nsqd = embedded_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}", *keys)
    auth_server.allow("secret")
    with_auth = embedded_nsqd(f"-auth-http-address={auth_server.address}")
    tests = suite / "tests" / "test_live.rs"
    text = tests.read_text().replace('"nsq:4150"', f'"{nsqd.tcp_address}"')
    text = text.replace("nsqwithauth:4150", with_auth.tcp_address)
    tests.write_text(text.replace("nsqlookupd:4161", lookupd.http_address))

    command = ["cargo", "test", "--test", "test_live"]
    done = subprocess.run(command, cwd=suite, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "10 passed" in done.stdout
