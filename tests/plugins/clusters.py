"""A small cluster: two nsqlookupd and two nsqd that are registered with both.

cluster       ``cluster.nsqds``, ``cluster.lookupds``; once with the Go daemons, once embedded
valid_json    reads the output of a command and validates it against a schema of nsq schema
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import jsonschema
import pytest
from plugins.daemons import EmbeddedLookupServer, GoNsqlookupd, Nsqlookupd
from plugins.servers import DataPath, EmbeddedServer, GoNsqd, Nsqd, Serve
from plugins.waiting import wait_until

from nsqtools.cli.commands.schema import read_schema

KINDS = [
    pytest.param((GoNsqd, GoNsqlookupd), id="real", marks=pytest.mark.real_nsqd),
    pytest.param((EmbeddedServer, EmbeddedLookupServer), id="embedded"),
]

ValidJson = Callable[[str, bytes], Any]


class RunningCluster(NamedTuple):
    """Daemons, and the options with their addresses for commands.

    ``start`` starts one more nsqd, which ``registers=`` with the first of the nsqlookupd.
    """

    nsqds: list[Nsqd]
    lookupds: list[Nsqlookupd]
    start: Callable[..., Nsqd]

    @property
    def lookupd_options(self) -> list[str]:
        return [f"--lookupd-http-address={lookupd.http_address}" for lookupd in self.lookupds]

    @property
    def nsqd_options(self) -> list[str]:
        return [f"--nsqd-http-address={nsqd.http_address}" for nsqd in self.nsqds]

    def wait_until_registered(self) -> None:
        counts = [len(self.nsqds)] * len(self.lookupds)
        wait_until(
            lambda: (
                [len(lookupd.json("/nodes")["producers"]) for lookupd in self.lookupds] == counts
            ),
            what="every nsqd is registered everywhere",
            timeout_s=20,
        )

    def wait_for_topic(self, topic: str, nodes: int) -> None:
        """Wait until every nsqlookupd lists ``nodes`` nsqd for the topic and for its channels.

        nsqd registers channels one after another.
        """
        channels = {
            channel["channel_name"]
            for nsqd in self.nsqds
            for found in nsqd.stats(topic)["topics"] or []
            for channel in found["channels"] or []
        }
        wait_until(
            lambda: all(
                len(lookupd.producers(topic)) == nodes
                and channels <= set(lookupd.json("/channels", topic=topic)["channels"])
                for lookupd in self.lookupds
            ),
            what=f"{nodes} nsqd are registered for {topic}, and {channels or 'no channel'}",
            timeout_s=20,
        )


@pytest.fixture(params=KINDS)
def cluster(request: pytest.FixtureRequest, data_path: DataPath, serve: Serve) -> RunningCluster:
    nsqd_kind, lookupd_kind = request.param
    lookupds = [serve(lookupd_kind()) for _ in range(2)]

    def start(*flags: str, registers: int = 2) -> Nsqd:
        registrations = [
            f"-lookupd-tcp-address={lookupd.tcp_address}" for lookupd in lookupds[:registers]
        ]
        daemon: Nsqd = serve(
            nsqd_kind(data_path(), "-broadcast-address=127.0.0.1", *registrations, *flags)
        )
        return daemon

    started = RunningCluster([start(), start()], lookupds, start)
    started.wait_until_registered()
    return started


def strict(schema: Any) -> Any:
    """The schema, but without additional properties.

    The published schema allows additional properties, because new ones may come; the tests must
    find every property in it.
    """
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    is_object = "properties" in schema and schema.get("type") == "object"
    closed = {"additionalProperties": False} if is_object else {}
    return closed | {key: strict(value) for key, value in schema.items()}


@pytest.fixture
def valid_json() -> ValidJson:
    def check(schema: str, text: bytes) -> Any:
        document = json.loads(text)
        jsonschema.validate(document, strict(read_schema(schema)))
        return document

    return check
