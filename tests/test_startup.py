"""Start-up is a feature: the tests check the modules that a command loads, not its time.

Times vary on a busy machine, but the set of loaded modules does not. ``tests/benchmarks startup``
prints the times.
"""

import json
import subprocess
import sys

import pytest
from plugins.cli import all_commands
from plugins.waiting import patience_s

_HEAVY = """asyncio email httptools httpx http pydantic pygments pyspark rich snappy ssl starlette
textual tomllib"""
HEAVY = set(_HEAVY.split())
LIBRARY = "client.connection server archive cluster http publish spark transport"

PARSED = [name for name, command in all_commands().items() if not command.raw]


def modules_after(code: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after ``code``."""
    probe = (
        "import os, sys\n"
        "real = os.fdopen(os.dup(1), 'w')\n"
        "os.dup2(os.open(os.devnull, os.O_WRONLY), 1)\n"
        f"{code}\n"
        "print(*sys.modules, file=real, flush=True)"
    )
    done = subprocess.check_output([sys.executable, "-c", probe], timeout=patience_s(30))
    return set(done.decode().split())


def modules_after_nsq(*arguments: str) -> set[str]:
    return modules_after(
        f"from nsqtools.cli.main import main\nassert main({json.dumps(arguments)}) == 0"
    )


def test_the_package_and_its_clients_load_only_needed_modules() -> None:
    loaded = modules_after("import nsqtools") - modules_after("")
    assert loaded == {"nsqtools", "nsqtools.errors", "__future__"}
    clients = "Consumer('t', 'c', nsqd_tcp_addresses=['localhost'])", "Producer('localhost')"
    loaded = modules_after(
        "import nsqtools\n" + "\n".join(f"nsqtools.{client}" for client in clients)
    )
    assert loaded & (HEAVY | {"typer", "subprocess"}) == set()


@pytest.mark.parametrize("arguments", ["--version", "--help", "completion bash"])
def test_version_help_and_completion_load_no_typer(arguments: str) -> None:
    unwanted = HEAVY | {"typer", "typing", "dataclasses", "logging", "enum", "re"}

    assert modules_after_nsq(*arguments.split()) & unwanted <= modules_after("")


def test_no_help_page_loads_a_heavy_module() -> None:
    """One process shows all pages, because a loaded module stays loaded for the later ones."""
    pages = [[*name.split(), "--help"] for name in PARSED]
    loaded = modules_after(
        f"from nsqtools.cli.main import main\nfor page in {pages!r}: assert main(page) == 0"
    )

    assert loaded & (HEAVY | {f"nsqtools.{name}" for name in LIBRARY.split()}) == set()


@pytest.mark.parametrize("daemon", ["nsqd", "nsqlookupd"])
def test_a_daemon_that_only_prints_loads_no_server(daemon: str) -> None:
    serving = {f"nsqtools.server.{name}" for name in ("protocol_v2", "queues", "embedded")}
    serving.add("nsqtools.http.http_server")
    loaded = modules_after(
        "from nsqtools.cli.main import main\n"
        f"for flag in ('--help', '-help', '--version'): assert main([{daemon!r}, flag]) == 0"
    )

    assert loaded & (HEAVY | serving) == set()


def test_a_command_that_only_prints_loads_no_other_command() -> None:
    loaded = modules_after_nsq("config", "show", "--json")

    assert loaded & HEAVY == set()
    commands = {name for name in loaded if name.startswith("nsqtools.cli.commands.")}
    assert commands == {"nsqtools.cli.commands.config"}


def test_the_schemas_are_listed_without_docstrings() -> None:
    command = [sys.executable, "-OO", "-m", "nsqtools", "schema"]
    assert b"stat" in subprocess.check_output(command, timeout=patience_s(30))
