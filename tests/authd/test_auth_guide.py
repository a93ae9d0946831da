"""The commands of nsq-auth(7), from top to bottom, with the servers that the guide starts."""

import shlex
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest
from plugins.cli import RunNsq
from plugins.daemons import GoNsqlookupd
from plugins.ports import ReservedPort
from plugins.readme import Command, Place, commands_of, parse, user_environment
from plugins.servers import MakeNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools.authd.authority import load_users

GUIDE = Path(__file__).parents[2] / "man" / "nsq-auth.7.md"


def test_the_guide_works_from_top_to_bottom(
    go_nsqd: MakeNsqd,
    lookupd: GoNsqlookupd,
    run_nsq: RunNsq,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ports = ReservedPort(), ReservedPort(), ReservedPort()
    place = Place(
        tmp_path,
        {
            "127.0.0.1:4160": lookupd.tcp_address,
            "127.0.0.1:4161": lookupd.http_address,
            "127.0.0.1:4181": f"127.0.0.1:{ports[0].number}",
            "127.0.0.1:4183": f"127.0.0.1:{ports[1].number}",
            "127.0.0.1:4171": f"127.0.0.1:{ports[2].number}",
        },
        user_environment(tmp_path),
    )
    monkeypatch.chdir(tmp_path)
    place.in_process["nsq"] = lambda words: run_nsq(words, env=place.environ)
    blocks = [block for block in parse(GUIDE.name, GUIDE.read_text()) if block.language == "sh"]
    commands = [command for block in blocks for command in commands_of(block)]
    assert len(commands) == 20
    servers = {
        "nsq authd serve": (ports[0], "http://127.0.0.1:4183/ping"),
        "nsq web": (ports[2], "http://127.0.0.1:4171/ping"),
    }
    processes = []
    outputs: dict[str, str] = {}
    with ExitStack() as cleanup:
        for port in ports:
            cleanup.callback(port.release)
        for command in commands:
            if name := next((name for name in servers if command.text.startswith(name)), ""):
                port, url = servers[name]
                text = f"exec {place.fit(command.text)} --listen 127.0.0.1:{port.number}"
                process = subprocess.Popen(["bash", "-c", text], cwd=tmp_path, env=place.environ)
                processes.append(process)
                cleanup.callback(process.wait)
                cleanup.callback(process.kill)
                wait_until(
                    lambda url=url: place.run(Command(f"curl -sf {url}"))[0] == 0,
                    what=f"{name} answers",
                    timeout_s=20,
                )
            elif command.text.startswith("nsqd "):
                nsqd = go_nsqd(*shlex.split(place.fit(command.text))[1:])
                place.stands_for["127.0.0.1:4150"] = nsqd.tcp_address
                nsqd.create_channel("orders.eu", "audit")
                nsqd.create_channel("salaries", "audit")
                wait_until(lambda: lookupd.producers("salaries"), what="it is registered")
                wait_until(lambda: lookupd.producers("orders.eu"), what="it is registered")
            else:
                status, output = place.run(command)
                assert status == 0, f"{command.text}\n{output}"
                assert "Traceback" not in output
                outputs[command.text] = output
        for process in processes:
            process.send_signal(signal.SIGTERM)
            assert process.wait(patience_s(20)) == 128 + signal.SIGTERM
    [listing] = [out for text, out in outputs.items() if text.startswith("nsq topic list")]
    assert "orders.eu" in listing
    assert not [text for text, out in outputs.items() if "salaries" in out]
    assert set(load_users(tmp_path / "users.toml").by_name) == {"ann", "bob"}
