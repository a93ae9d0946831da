"""Fixtures for pytest, present wherever nsqtools is installed. Nothing runs until one is used.

    nsqlookupd      an `EmbeddedNsqlookupd`, started once a run
    nsqd            an `EmbeddedNsqd` that registers there, started once a run
    nsqd_options    nsqd's flags, a dict: override it in conftest.py
    nsq_topic       the name of a topic that no other test uses; deleted after the test

A fixture of the same name in a conftest.py or a test module replaces the one here, as always in
pytest. Trap: every run of pytest on the machine imports this module, so it must import nothing but
pytest; servers are loaded by the fixture that starts them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from nsqtools.server.embedded import EmbeddedNsqd, EmbeddedNsqlookupd


@pytest.fixture(scope="session")
def nsqlookupd() -> Iterator[EmbeddedNsqlookupd]:
    """A whole nsqlookupd on free ports of 127.0.0.1, the same for all tests of the run."""
    from nsqtools.server.embedded import EmbeddedNsqlookupd

    with EmbeddedNsqlookupd() as lookupd:
        yield lookupd


@pytest.fixture(scope="session")
def nsqd_options() -> dict[str, Any]:
    """The flags of the fixture `nsqd`, with underscores, durations in seconds."""
    return {}


@pytest.fixture(scope="session")
def nsqd(nsqlookupd: EmbeddedNsqlookupd, nsqd_options: dict[str, Any]) -> Iterator[EmbeddedNsqd]:
    """A whole nsqd on free ports of 127.0.0.1, the same for all tests of the run."""
    from nsqtools.server.embedded import EmbeddedNsqd

    registers = {"lookupd_tcp_address": (nsqlookupd.tcp_address,)}
    with EmbeddedNsqd(**registers | nsqd_options) as daemon:
        yield daemon


@pytest.fixture
def nsq_topic(nsqd: EmbeddedNsqd) -> Iterator[str]:
    """A topic of `nsqd` that no other test uses. It is created here and deleted after the test."""
    import uuid

    from nsqtools.errors import HTTPError
    from nsqtools.http.http_api import NsqdHTTPClient

    topic = f"test-{uuid.uuid4().hex}"
    with NsqdHTTPClient(f"http://{nsqd.http_address}") as api:
        api.administer("create", topic)
        yield topic
        try:
            api.administer("delete", topic)
        except HTTPError as exc:
            if exc.category != "not_found":  # the test may have deleted it
                raise
