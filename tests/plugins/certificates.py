"""A certificate authority for tests, with valid certificates and ones with a single fault each.

They have the extensions that Python 3.13's strict verification requires.
"""

import datetime
from pathlib import Path
from typing import NamedTuple

import pytest
import trustme

NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)

LOOPBACK = ("localhost", "127.0.0.1")


class Credentials(NamedTuple):
    """Paths of a PEM certificate and of its unencrypted PEM key."""

    cert: Path
    key: Path

    @property
    def nsqd_flags(self) -> tuple[str, str]:
        """Flags with which nsqd offers TLS with this certificate."""
        return f"-tls-cert={self.cert}", f"-tls-key={self.key}"


class Certificates(NamedTuple):
    """The certificates that the authority of the file `ca` has issued."""

    ca: Path
    other_ca: Path  # a client that trusts only this one must refuse every server
    server: Credentials  # for localhost and 127.0.0.1
    expired_server: Credentials
    wrong_host_server: Credentials  # for nsqd.example.org
    client: Credentials  # its common name is "client"


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    directory = tmp_path_factory.mktemp("certificates")
    authority = Authority(directory, "ca")
    return Certificates(
        ca=authority.cert_path,
        other_ca=Authority(directory, "other_ca").cert_path,
        server=authority.issue("server", *LOOPBACK),
        expired_server=authority.issue("expired", *LOOPBACK, until=NOW - DAY),
        wrong_host_server=authority.issue("wrong_host", "nsqd.example.org"),
        client=authority.issue("client", "client.example.org"),
    )


class Authority:
    """Issues certificates into files of `directory`."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._ca = trustme.CA(organization_name=f"nsqtools tests {name}")
        self.cert_path = directory / f"{name}.pem"
        self._ca.cert_pem.write_to_path(str(self.cert_path))

    def issue(self, name: str, *hosts: str, until: datetime.datetime = NOW + DAY) -> Credentials:
        issued = self._ca.issue_cert(
            *hosts, common_name=name, not_before=NOW - 2 * DAY, not_after=until
        )
        paths = Credentials(self._directory / f"{name}.pem", self._directory / f"{name}.key")
        issued.cert_chain_pems[0].write_to_path(str(paths.cert))
        issued.private_key_pem.write_to_path(str(paths.key))
        return paths
