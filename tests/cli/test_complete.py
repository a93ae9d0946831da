"""``nsq __complete``: names for shells, quick, and silent when there is nobody to ask."""

from __future__ import annotations

import time
from collections.abc import Callable

from plugins.cli import RunNsq
from plugins.clusters import RunningCluster
from plugins.http_api import Nsqd
from plugins.waiting import wait_until


def test_names_come_from_nsqd(run_nsq: RunNsq, any_nsqd: Callable[..., Nsqd]) -> None:
    nsqd = any_nsqd()
    nsqd.create_channel("views", "live")
    nsqd.create_channel("clicks", "arch")
    env = {"NSQ_NSQD_HTTP_ADDRESS": nsqd.http_address}

    assert run_nsq(["__complete", "topics"], env=env) == (0, b"clicks\nviews\n", "")
    assert run_nsq(["__complete", "channels"], env=env) == (0, b"arch\nlive\n", "")
    assert run_nsq(["__complete", "channels", "-t", "views"], env=env) == (0, b"live\n", "")


def test_names_come_from_nsqlookupd_also_when_no_nsqd_is_left(
    run_nsq: RunNsq, cluster: RunningCluster
) -> None:
    cluster.nsqds[0].create_channel("clicks", "arch")
    for lookupd in cluster.lookupds:
        wait_until(
            lambda lookupd=lookupd: lookupd.json("/channels", topic="clicks")["channels"],
            what="the channel is registered",
        )
    for nsqd in cluster.nsqds:
        nsqd.kill()

    topics = run_nsq(["__complete", "topics", *cluster.lookupd_options])
    channels = run_nsq(["__complete", "channels", "-t", "clicks", *cluster.lookupd_options])

    assert (topics.out, channels.out) == (b"clicks\n", b"arch\n")


def test_it_is_silent_and_quick_when_nobody_answers(run_nsq: RunNsq, deaf_address: str) -> None:
    began_s = time.monotonic()
    deaf = run_nsq(["__complete", "topics", f"--nsqd-http-address={deaf_address}"])
    took_s = time.monotonic() - began_s
    nobody = run_nsq(["__complete", "channels", "--lookupd-http-address=127.0.0.1:1"])

    assert deaf == nobody == (0, b"", "")
    assert took_s < 5  # the time-out is one second; the rest is Python on a busy machine


def test_no_list_of_commands_shows_it(run_nsq: RunNsq) -> None:
    assert b"__complete" not in run_nsq(["--help"]).out
    assert "__complete" not in run_nsq(["__complet"]).err.splitlines()[-1]
