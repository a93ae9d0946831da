"""The commands of nsq-schedule(7), from top to bottom, with the scheduler that the guide starts."""

import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path

from plugins.archives import unfinished
from plugins.readme import Place, commands_of, parse, user_environment
from plugins.servers import AnyNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools.client.producer import Producer

GUIDE = Path(__file__).parents[2] / "man" / "nsq-schedule.7.md"


def test_the_guide_works_from_top_to_bottom(any_nsqd: AnyNsqd, tmp_path: Path) -> None:
    nsqd = any_nsqd()
    nsqd.create_channel("orders", "check")
    place = Place(
        tmp_path,
        {
            "/var/lib/nsq-schedule": str(tmp_path / "data"),
            "2026-12-24T18:00Z": "2199-12-24T18:00Z",  # the guide's date will be in the past
            "127.0.0.1:4151": nsqd.http_address,
        },
        user_environment(tmp_path) | {"NSQ_NSQD_TCP_ADDRESS": nsqd.tcp_address},
    )
    blocks = [block for block in parse(GUIDE.name, GUIDE.read_text()) if block.language == "sh"]
    commands = [command for block in blocks for command in commands_of(block)]
    serve, remaining = commands[0], commands[1:]
    assert serve.text.startswith("nsq schedule serve")
    with ExitStack() as cleanup:
        words = ["bash", "-c", f"exec {place.fit(serve.text)}"]
        process = subprocess.Popen(words, cwd=tmp_path, env=place.environ)
        cleanup.callback(process.wait)
        cleanup.callback(process.kill)
        listing = next(command for command in remaining if "schedule list" in command.text)

        def listed() -> str:
            return place.run(listing)[1]

        for command in remaining:
            if command is listing:
                wait_until(lambda: listed().count("\n") == 5, what=f"four entries: {listed()}")
            status, output = place.run(command)
            assert status == 0, f"{command.text}\n{output}"
        wait_until(lambda: "order-42" not in listed(), what="it is cancelled")
        with Producer(nsqd.tcp_address) as producer:  # the request of curl, in place of 90 minutes
            producer.publish("nsq.schedule", b'{"topic": "orders", "body": "x", "at": "+0s"}')
        wait_until(lambda: unfinished(nsqd, "orders", "check") == 1, what="it is published")
        process.send_signal(signal.SIGTERM)
        assert process.wait(patience_s(20)) == 128 + signal.SIGTERM
