"""``nsq demo``: what the first command of the README runs."""

from __future__ import annotations

from plugins.cli import RunNsq


def test_every_step_shows_its_command_and_every_click_comes_out(run_nsq: RunNsq) -> None:
    result = run_nsq(["demo"])

    assert (result.status, result.err) == (0, "")
    lines = result.out.decode().splitlines()
    commands = [line.removeprefix("  $ ") for line in lines if line.startswith("  $ ")]
    assert commands == [
        "nsq nsqd",
        "cat clicks.log | nsq pub -t clicks",
        "nsq tail -t clicks -c demo -n 3",
        "nsq tail -t clicks -c demo --json --exit-idle 500ms",
    ]
    assert "    nsq: 5000 confirmed, 0 rejected, 0 unknown, 0 unsent" in lines
    assert any("4997 messages; with the 3 above, every click" in line for line in lines)
