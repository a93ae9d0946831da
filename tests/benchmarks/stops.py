"""Count the modules that a reader has to visit to follow one message through a command.

    python tests/benchmarks/stops.py [--list]

A stop is a module of nsqtools of which a function runs, on any thread, between the command line and
the exit. Code that runs during imports does not count.
"""

import inspect
import os
import subprocess
import sys
import threading
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

TOPIC = "stops"
MOST = {"tail": 43, "pub": 35, "to-file": 59}
"""The most modules that a reader can follow."""
SECONDS = 60.0


def followed(arguments: list[str]) -> list[str]:
    """The modules whose functions run in ``nsq ARGUMENTS``, called in this process."""
    visited: set[str] = set()

    def on_event(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_globals.get("__name__", "")
        # the bodies of modules and classes have no locals of their own
        is_function = frame.f_code.co_flags & inspect.CO_NEWLOCALS
        is_ours = event == "call" and is_function and name.startswith("nsqtools.")
        if is_ours and name not in visited and not declares(frame):
            visited.add(name)

    from nsqtools.cli.main import main

    threading.setprofile(on_event)
    sys.setprofile(on_event)
    try:
        status = main(arguments)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert status == 0, f"nsq {' '.join(arguments)} ended with {status}"
    return sorted(visited)


def declares(frame: FrameType | None) -> bool:
    """Whether ``frame`` runs because a module of nsqtools is being imported."""
    while frame := frame and frame.f_back:
        is_ours = frame.f_globals.get("__name__", "").startswith("nsqtools.")
        if is_ours and frame.f_code.co_name == "<module>":
            return True
    return False


def in_a_process(arguments: list[str], stdin: str = "") -> list[str]:
    """`followed`, in a fresh interpreter."""
    command = [sys.executable, __file__, "--follow", *arguments]
    env = {**os.environ, "XDG_CONFIG_HOME": "/nowhere"}
    done = subprocess.run(
        command, env=env, input=stdin, capture_output=True, text=True, timeout=SECONDS, check=True
    )
    return done.stderr.splitlines()[-1].split()


def measure() -> dict[str, list[str]]:
    from nsqtools.server.embedded import EmbeddedNsqd

    with EmbeddedNsqd() as server, TemporaryDirectory() as directory:
        nsqd = ["--nsqd-tcp-address", server.tcp_address]
        modules = {"pub": in_a_process(["pub", "-t", TOPIC, *nsqd], "one\ntwo\n")}
        archive = ["to-file", "-t", TOPIC, "-n", "2", "--output-dir", directory]
        both = [*nsqd, "--nsqd-http-address", server.http_address]
        modules["to-file"] = in_a_process([*archive, *both])
        in_a_process(["pub", "-t", TOPIC, *nsqd], "three\n")
        modules["tail"] = in_a_process(["tail", "-t", TOPIC, "-n", "1", "-c", "nsq_to_file", *both])
    return modules


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--follow"]:
        print(*followed(arguments[1:]), file=sys.stderr)
        return
    measured = measure()
    print(f"{'command':10} {'most':>4} {'now':>4}")
    for name, most in MOST.items():
        print(f"{name:10} {most:4} {len(measured[name]):4}")
    for name, modules in measured.items() if "--list" in arguments else ():
        print(f"\n{name}:", *modules, sep="\n  ")


if __name__ == "__main__":
    main(sys.argv[1:])
