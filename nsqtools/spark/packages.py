"""The jars that Spark needs besides its own, and its settings for object stores.

PySpark comes without Hadoop's connectors and without Delta. Spark fetches them from Maven when a
session first needs them, and keeps them below ``~/.ivy2``; where there is no network,
``--conf spark.jars=FILES`` names them, and nothing is fetched.

Credentials are found once, as for our own reading of the store (`archive.storage_objects`). The
JVM and the Python workers have them in their environment, and the executors of a cluster through a
file of settings that only this user can read: an argument of a command can be read by everybody.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from nsqtools.archive.location import Location, StoredPlace
from nsqtools.archive.storage_objects import S3Settings, s3_settings
from nsqtools.errors import ConfigurationError
from nsqtools.files.durable import replace_file

JARS, PACKAGES = "spark.jars", "spark.jars.packages"
CLASS_PATH = "spark.driver.extraClassPath"

HADOOP_AWS = ("org.apache.hadoop:hadoop-aws:{hadoop}", "software.amazon.awssdk:bundle:{sdk}")
HADOOP_AZURE = ("org.apache.hadoop:hadoop-azure:{hadoop}",)
SDK_OF_HADOOP = {"3.5.0": "2.35.4"}


def needed_packages(places: Iterable[Location], home: Path) -> list[str]:
    """Return the Maven coordinates for some places that ``home`` has no jars for.

    Raises `ConfigurationError` for what does not run with this version of Spark.
    """
    jars = [path.name for path in (home / "jars").glob("*.jar")]
    needed: list[str] = []
    schemes = {str(place).partition(":")[0] for place in places if isinstance(place, StoredPlace)}
    hadoop = _version(jars, "hadoop-client-api-")
    if schemes & {"s3", "s3a"} and not _has(jars, "hadoop-aws-"):
        if hadoop not in SDK_OF_HADOOP:
            raise ConfigurationError(
                f"no jars of s3a are known for Hadoop {hadoop or 'of an unknown version'}",
                hint="Name them with --conf spark.jars=FILES.",
            )
        sdk = SDK_OF_HADOOP[hadoop]
        needed += [each.format(hadoop=hadoop, sdk=sdk) for each in HADOOP_AWS]
    if schemes & {"az", "abfss"} and not _has(jars, "hadoop-azure-"):
        needed += [each.format(hadoop=hadoop) for each in HADOOP_AZURE]
    if "gs" in schemes and not _has(jars, "gcs-connector-"):
        raise ConfigurationError(
            "Spark needs Google's connector for gs:// places",
            hint="Name its jar: --conf spark.jars=gcs-connector-hadoop3-latest.jar.",
        )
    return needed


def known_jars(needed: Sequence[str]) -> list[str]:
    """Return the jars that these coordinates were, when a session fetched them; else nothing.

    In local mode they go on the class path: Spark would copy each one for every session.
    """
    try:
        jars = json.loads(_note_of(needed).read_text("utf-8"))
    except (OSError, ValueError):
        return []
    return jars if all(Path(jar).is_file() for jar in jars) else []


def beside_sparks_own(jars: Iterable[str], home: Path) -> list[str]:
    """Leave out what ``home`` has a jar of, of whatever version.

    The class path of a driver is searched before Spark's own jars, and Delta depends on a Jackson
    that Spark does not start with.
    """
    own = {_artifact(path.name) for path in (home / "jars").glob("*.jar")}
    return [jar for jar in jars if _artifact(Path(jar).name.partition("_")[2]) not in own]


def _artifact(name: str) -> str:
    """What a jar is of: ``delta-spark_4.2_2.13`` for ``delta-spark_4.2_2.13-4.4.0.jar``."""
    return re.split(r"-\d", name, maxsplit=1)[0]


def note_jars(needed: Sequence[str], jars: str) -> None:
    """Keep which jars Spark fetched for some coordinates; ``jars`` as its setting has them."""
    paths = [unquote(urlsplit(each).path) for each in jars.split(",")]
    note = _note_of(needed)
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        replace_file(note, json.dumps(paths).encode(), is_durable=False)
    except OSError:  # the next session fetches them again
        pass


def _note_of(needed: Sequence[str]) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    name = hashlib.sha256("\n".join(needed).encode()).hexdigest()[:16]
    return cache / "nsqtools" / f"jars-{name}.json"


def _has(jars: Iterable[str], name: str) -> bool:
    return any(jar.startswith(name) for jar in jars)


def _version(jars: Iterable[str], name: str) -> str:
    found = [jar.removeprefix(name).removesuffix(".jar") for jar in jars if jar.startswith(name)]
    return found[0] if found else ""


def store_conf(s3: S3Settings) -> dict[str, str]:
    """Return Spark's settings for s3a; it finds the secrets in the environment."""
    properties = {
        "fs.s3a.endpoint.region": s3.region,
        # the other kinds of streams need a jar more, and gain nothing for Parquet of this size
        "fs.s3a.input.stream.type": "classic",
    }
    if s3.endpoint:
        is_tls = not s3.endpoint.startswith("http://")
        properties |= {
            "fs.s3a.endpoint": s3.endpoint,
            "fs.s3a.path.style.access": "true",
            "fs.s3a.connection.ssl.enabled": str(is_tls).lower(),
        }
    return {f"spark.hadoop.{name}": value for name, value in properties.items()}


def store_environ(s3: S3Settings) -> dict[str, str]:
    """Return the variables that obstore and s3a find the same credentials by."""
    named = {
        "AWS_ENDPOINT_URL": s3.endpoint,
        "AWS_REGION": s3.region,
        "AWS_ACCESS_KEY_ID": s3.key_id,
        "AWS_SECRET_ACCESS_KEY": s3.secret,
        "AWS_SESSION_TOKEN": s3.token,
    }
    return {name: value for name, value in named.items() if value}


def stores(environ: Mapping[str, str], places: Iterable[Location]) -> S3Settings | None:
    """Return the settings of S3 when a place is in it."""
    schemes = {str(place).partition(":")[0] for place in places if isinstance(place, StoredPlace)}
    return s3_settings(environ=environ) if schemes & {"s3", "s3a"} else None
