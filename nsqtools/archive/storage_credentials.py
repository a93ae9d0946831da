"""How S3 is reached: endpoint, region and credentials, found once for obstore and s3a.

They come from the options given, then from the environment (the names that every AWS tool uses),
then from the profile in ``~/.aws``. Without keys in any of them obstore asks as it does by itself:
a web identity, the container's or the machine's role. For a profile that needs more than keys (SSO,
another role) boto3 is asked, where it is installed.

What an S3-compatible store needs is its endpoint: ``AWS_ENDPOINT_URL``. It is addressed by path,
not by host name, because a private store rarely has a DNS name for each bucket.
"""

from __future__ import annotations

import configparser
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

DEFAULT_REGION = "us-east-1"


@dataclass(frozen=True, slots=True)
class S3Settings:
    """``endpoint`` "" is Amazon's own. Without ``key_id`` somebody else provides credentials."""

    endpoint: str = ""
    region: str = DEFAULT_REGION
    key_id: str = ""
    secret: str = ""
    token: str = ""
    ca_file: str = ""
    credential_provider: Any = None

    def __repr__(self) -> str:
        """Show no secret."""
        return f"S3Settings({self.endpoint!r}, {self.region!r}, {self.key_id!r})"

    def for_obstore(self) -> dict[str, str]:
        """Return them as settings of obstore's S3Store."""
        named = {
            "endpoint": self.endpoint,
            "region": self.region,
            "access_key_id": self.key_id,
            "secret_access_key": self.secret,
            "session_token": self.token,
        }
        return {name: value for name, value in named.items() if value}

    def for_hadoop(self) -> dict[str, str]:
        """Return them as properties of Hadoop's s3a; without keys it finds them as we do."""
        properties = {"fs.s3a.endpoint.region": self.region}
        if self.endpoint:
            is_tls = not self.endpoint.startswith("http://")
            properties |= {
                "fs.s3a.endpoint": self.endpoint,
                "fs.s3a.path.style.access": "true",
                "fs.s3a.connection.ssl.enabled": str(is_tls).lower(),
            }
        if not self.key_id:
            return properties
        kind = "Temporary" if self.token else "Simple"
        provider = f"org.apache.hadoop.fs.s3a.{kind}AWSCredentialsProvider"
        keys = {
            "fs.s3a.aws.credentials.provider": provider,
            "fs.s3a.access.key": self.key_id,
            "fs.s3a.secret.key": self.secret,
            "fs.s3a.session.token": self.token,
        }
        return properties | {name: value for name, value in keys.items() if value}


def credential_files(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the files that credentials of any store are read from, there or not.

    Those that obstore reads itself, and again when it needs to, are not among them.
    """
    environ = os.environ if environ is None else environ
    home = Path(environ.get("HOME") or "/nonexistent")
    gcloud = home / ".config/gcloud/application_default_credentials.json"
    defaults = {
        "AWS_CONFIG_FILE": home / ".aws/config",
        "AWS_SHARED_CREDENTIALS_FILE": home / ".aws/credentials",
        "AWS_CA_BUNDLE": "",
        "GOOGLE_APPLICATION_CREDENTIALS": gcloud,
        "GOOGLE_SERVICE_ACCOUNT": "",
    }
    found = (environ.get(variable) or str(path) for variable, path in defaults.items())
    return [path for path in found if path]


def s3_settings(
    options: Mapping[str, str] | None = None, environ: Mapping[str, str] | None = None
) -> S3Settings:
    """Return the settings of S3. ``options`` are obstore's, by its short names."""
    options = options or {}
    environ = os.environ if environ is None else environ
    profile = _profile(environ)

    def find(name: str, *variables: str) -> str:
        """The first that is not empty: the option, the variables, the profile's line."""
        option = name.removeprefix("aws_").removesuffix("_url")
        found = (options.get(option), *map(environ.get, variables), profile.get(name))
        return next(filter(None, found), "")

    settings = S3Settings(
        endpoint=find("endpoint_url", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
        region=find("region", "AWS_REGION", "AWS_DEFAULT_REGION") or DEFAULT_REGION,
        ca_file=find("ca_bundle", "AWS_CA_BUNDLE"),
    )
    for source in (_keys_of(options), _keys_of(environ), _keys_of(profile)):
        if source[0] and source[1]:
            return replace(settings, key_id=source[0], secret=source[1], token=source[2])
    if profile:
        return replace(settings, credential_provider=_boto3_provider(environ))
    return settings


def _keys_of(source: Mapping[str, str]) -> tuple[str, ...]:
    """Return id, secret and token, which stand together: those of two sources do not mix."""
    return tuple(
        next(
            (source[name] for name in (key, f"aws_{key}", f"AWS_{key.upper()}") if name in source),
            "",
        )
        for key in ("access_key_id", "secret_access_key", "session_token")
    )


def _profile(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what the files in ``~/.aws`` say of the profile; nothing where there are none."""
    home = Path(environ.get("HOME") or "/nonexistent") / ".aws"
    name = environ.get("AWS_PROFILE") or "default"
    found: dict[str, str] = {}
    for variable, file, section in (
        ("AWS_CONFIG_FILE", "config", name if name == "default" else f"profile {name}"),
        ("AWS_SHARED_CREDENTIALS_FILE", "credentials", name),
    ):
        parser = configparser.RawConfigParser()
        try:
            parser.read(environ.get(variable) or home / file, encoding="utf-8")
            found |= dict(parser.items(section))
        except (configparser.Error, OSError, ValueError):
            continue  # as if it were not there: obstore says what is missing
    return found


def _boto3_provider(environ: Mapping[str, str]) -> Any:
    try:
        import boto3
        from obstore.auth.boto3 import Boto3CredentialProvider

        return Boto3CredentialProvider(
            boto3.session.Session(profile_name=environ.get("AWS_PROFILE"))
        )
    except Exception:  # not installed, or the profile does not do: obstore tries its own ways
        return None
