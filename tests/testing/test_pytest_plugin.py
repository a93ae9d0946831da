"""The fixtures that users' own tests get, in runs of pytest of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from plugins.waiting import patience_s

PLUGIN = "nsqtools.testing.pytest_plugin"

RunPytest = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_pytest(tmp_path: Path) -> RunPytest:
    """Run pytest on the given files, as in a project that has nothing but this plugin."""

    def run(*arguments: str, **files: str) -> subprocess.CompletedProcess[str]:
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        command = [sys.executable, "-m", "pytest", "-p", PLUGIN, "-W", "error", "-q", *arguments]
        return subprocess.run(
            [*command, "-p", "no:cacheprovider", str(tmp_path)],
            cwd=tmp_path,
            env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""},
            capture_output=True,
            text=True,
            timeout=patience_s(30),
            check=False,
        )

    return run


def test_the_servers_live_for_a_run_with_flags_of_conftest_and_a_topic_for_a_test(
    run_pytest: RunPytest,
) -> None:
    done = run_pytest(
        conftest="""
            import pytest

            @pytest.fixture(scope="session")
            def nsqd_options():
                return {"max_msg_size": 10}
            """,
        test_it="""
            import pytest
            from nsqtools import Consumer, Producer, PublishRejected

            seen = []

            def passes_a_message(nsqd, topic, **addresses):
                with Producer(nsqd.tcp_address) as producer:
                    producer.publish(topic, b"hello")
                with Consumer(topic, "check", **addresses) as consumer:
                    for message in consumer:
                        message.finish()
                        assert message.body == b"hello"
                        break

            def test_flags(nsqd, nsq_topic):
                with Producer(nsqd.tcp_address) as producer, pytest.raises(PublishRejected):
                    producer.publish(nsq_topic, b"eleven byte")

            def test_direct(nsqd, nsq_topic):
                seen.append((nsqd.tcp_address, nsq_topic))
                passes_a_message(nsqd, nsq_topic, nsqd_tcp_addresses=nsqd.tcp_address)

            def test_found_through_nsqlookupd(nsqd, nsqlookupd, nsq_topic):
                seen.append((nsqd.tcp_address, nsq_topic))
                found = {"lookupd_http_addresses": nsqlookupd.http_address}
                passes_a_message(nsqd, nsq_topic, **found)

            def test_afterwards(nsqd):
                (first, topic1), (second, topic2) = seen
                assert first == second == nsqd.tcp_address
                assert topic1 != topic2

                import json, urllib.request
                stats = urllib.request.urlopen(f"http://{nsqd.http_address}/stats?format=json")
                assert json.load(stats)["topics"] == []

            def test_that_deletes_its_topic(nsqd, nsq_topic):
                import urllib.request
                url = f"http://{nsqd.http_address}/topic/delete?topic={nsq_topic}"
                urllib.request.urlopen(urllib.request.Request(url, method="POST"))
            """,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout


def test_a_run_that_uses_no_fixture_loads_nothing_of_the_package(run_pytest: RunPytest) -> None:
    done = run_pytest(
        test_it="""
            import sys

            def test_it():
                loaded = {name for name in sys.modules if name.startswith("nsqtools")}
                ours = {"", ".errors", ".testing", ".testing.pytest_plugin"}
                assert loaded == {f"nsqtools{name}" for name in ours}
            """
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr
