"""A certificate authority for tests, and certificates that are right, or wrong in one way each.

They have what Python 3.13's strict verification asks for. RSA keys would take a second each.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)

LOOPBACK = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]


class Credentials(NamedTuple):
    """Paths of a PEM certificate and of its unencrypted PEM key."""

    cert: Path
    key: Path

    @property
    def nsqd_flags(self) -> tuple[str, str]:
        """Flags with which nsqd offers TLS with this certificate."""
        return f"-tls-cert={self.cert}", f"-tls-key={self.key}"


class Certificates(NamedTuple):
    """What the authority of the file `ca` has issued."""

    ca: Path
    other_ca: Path  # has issued nothing: who trusts only that one must refuse every server
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
        server=authority.issue("server"),
        expired_server=authority.issue("expired", until=NOW - DAY),
        wrong_host_server=authority.issue("wrong_host", [x509.DNSName("nsqd.example.org")]),
        client=authority.issue("client", []),
    )


class Authority:
    """Issues certificates into files of `directory`."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = common_name(f"nsqtools tests {name}")
        self.cert_path = directory / f"{name}.pem"
        basic = x509.BasicConstraints(ca=True, path_length=0)
        # digital signatures, certificates, and lists of revoked ones
        usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
        self._sign(self.cert_path, self._name, self._key, NOW + DAY, basic, usage)

    def issue(
        self,
        name: str,
        hosts: Sequence[x509.GeneralName] = LOOPBACK,
        until: datetime.datetime = NOW + DAY,
    ) -> Credentials:
        key = ec.generate_private_key(ec.SECP256R1())
        paths = Credentials(self._directory / f"{name}.pem", self._directory / f"{name}.key")
        extensions = [x509.SubjectAlternativeName(hosts)] if hosts else []
        self._sign(paths.cert, common_name(name), key, until, *extensions)
        form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        paths.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, *form))
        return paths

    def _sign(
        self,
        path: Path,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        until: datetime.datetime,
        *extensions: x509.ExtensionType,
    ) -> None:
        issuer = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        issued_by = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer)
        builder = x509.CertificateBuilder(self._name, subject, key.public_key())
        builder = builder.serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(NOW - 2 * DAY).not_valid_after(until)
        own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        for extension in (own, issued_by):
            builder = builder.add_extension(extension, critical=False)
        for extension in extensions:
            builder = builder.add_extension(extension, critical=subject == self._name)
        signed = builder.sign(self._key, hashes.SHA256())
        path.write_bytes(signed.public_bytes(serialization.Encoding.PEM))


def common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
