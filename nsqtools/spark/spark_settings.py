"""The settings, environment, jars and log of a Spark session.

Spark reads its settings from many places. The settings of the user override ours, and variables
that would make pyspark start something else are removed from the environment.

PySpark does not include Hadoop's connectors. Spark fetches them from Maven when a session first
needs them, and stores them below ``~/.ivy2``. Without a network, ``--conf spark.jars=FILES`` names
them, and nothing is fetched.

Credentials are resolved once, as for our own access to the store (`archive.storage_objects`). The
JVM and the Python workers get them in their environment. The executors of a cluster get them in
settings that only this user can read, because every user can read the arguments of a command.
"""

from __future__ import annotations

import hashlib
import json
import locale
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

from nsqtools.archive.place import Place
from nsqtools.archive.storage_objects import S3Settings, s3_settings
from nsqtools.errors import ConfigurationError, NsqError
from nsqtools.files.durable import replace_file
from nsqtools.settings import user_folder

KEPT_LOGS = 20
LOG4J = Path(__file__).with_name("log4j2.properties")
JARS, PACKAGES = "spark.jars", "spark.jars.packages"
CLASS_PATH = "spark.driver.extraClassPath"
PUSHDOWN_CONF = "spark.sql.python.filterPushdown.enabled"

MISLEADING = (
    "PYSPARK_SUBMIT_ARGS",
    "PYSPARK_GATEWAY_PORT",
    "PYSPARK_GATEWAY_SECRET",
    "SPARK_REMOTE",
    "SPARK_CONNECT_MODE_ENABLED",
    "SPARK_API_MODE",
    "SPARK_TESTING",
)
"""Variables that would make pyspark ignore the settings."""


@dataclass(frozen=True)
class SparkSettings:
    """The settings of a session.

    ``master`` is ``local[*,4]`` (all cores, four attempts of a task) or a cluster:
    ``spark://host:7077``, ``yarn``, ``k8s://...``. ``driver_memory`` is the heap of the driver's
    JVM, in Java's form: ``2g``, ``800m``. ``conf`` has any settings of Spark, which override ours.
    ``places`` are read or written by Spark, which may need jars. ``python_places`` are used only in
    Python, and need only credentials. ``inherited`` are descriptors of locks, which the JVM keeps
    open, because it may outlive this process for a moment.

    Raises `ConfigurationError`.
    """

    master: str = "local[*,4]"
    app_name: str = "nsqtools"
    driver_memory: str = "2g"
    conf: Mapping[str, str] = field(default_factory=dict)
    log_file: Path | None = None
    places: tuple[Place, ...] = ()
    python_places: tuple[Place, ...] = ()
    inherited: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[1-9]\d*[kmgtKMGT]", self.driver_memory):
            raise ConfigurationError(
                f"driver memory {self.driver_memory!r} is not a size that Java reads",
                hint="Write 2g or 800m.",
            )
        if self.master.startswith("sc://"):
            raise ConfigurationError(
                f"{self.master} is a Spark Connect server, but nsq spark starts its own driver",
                hint="Give the cluster's own address: spark://HOST:7077, yarn or k8s://... In a "
                "Connect session of yours the formats work: nsqtools.spark.register(spark).",
            )

    @property
    def is_local(self) -> bool:
        """Whether driver and executors are one JVM on this machine."""
        return self.master == "local" or self.master.startswith("local[")

    @property
    def local_slots(self) -> int:
        """The number of parallel tasks in local mode, 0 for a cluster."""
        if not self.is_local:
            return 0
        match = re.match(r"local\[(\d+|\*)", self.master)
        if match is None:
            return 1
        return (os.cpu_count() or 1) if match[1] == "*" else int(match[1])

    @property
    def log_path(self) -> Path:
        """The file of Spark's messages."""
        return self.log_file or default_log_file()


@cache
def default_log_file() -> Path:
    """Return the log of this process, in the user's state directory, and remove old logs."""
    state = user_folder(os.environ, "XDG_STATE_HOME", ".local/state")
    directory = state / "nsqtools" / "spark"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        logs = sorted(directory.glob("*.log*"), key=lambda path: path.stat().st_mtime)
        for old in logs[: -KEPT_LOGS + 1]:
            old.unlink(missing_ok=True)
        if not os.access(directory, os.W_OK):
            raise PermissionError
    except OSError:  # A service may have no home. In /tmp a name must not be predictable.
        directory = Path(tempfile.mkdtemp(prefix="nsq-spark-log-"))
    return directory / f"nsq-spark-{os.getpid()}.log"


def spark_environ(settings: SparkSettings, scratch: Path, home: Path) -> dict[str, str | None]:
    """Return variables for the JVM, which runs on the Java in ``home``, and the Python workers."""
    environ: dict[str, str | None] = dict.fromkeys(MISLEADING)
    spark = without_zip(spark_home(), scratch) if settings.is_local else spark_home()
    environ |= {"JAVA_HOME": str(home), "SPARK_HOME": str(spark)}
    # Without this, workers import modules from the current directory first.
    environ["PYTHONSAFEPATH"] = "1"
    if locale.getencoding().upper() != "UTF-8":  # The JVM could not open all names of files.
        environ["LC_ALL"] = "C.UTF-8"
    environ |= {"SPARK_LOCAL_DIRS": str(scratch), "PYSPARK_DRIVER_PYTHON": sys.executable}
    if settings.is_local or "PYSPARK_PYTHON" not in os.environ:
        environ["PYSPARK_PYTHON"] = sys.executable
    if settings.is_local:
        slots = str(settings.local_slots)  # The tasks of a sink share its rate.
        defaults = {"NSQ_SPARK_SLOTS": slots, "SPARK_LOCAL_IP": "127.0.0.1"}
        environ |= {name: os.environ.get(name, value) for name, value in defaults.items()}
    return environ | store_credentials(settings)


def store_credentials(settings: SparkSettings) -> dict[str, str]:
    """Return the variables with the endpoint and secrets of S3, if a place is in it."""
    s3 = stores((*settings.places, *settings.python_places))
    return store_environ(s3) if s3 is not None else {}


def spark_home() -> Path:
    """Return ``SPARK_HOME`` if it has the version of the package, otherwise the package itself."""
    import pyspark

    package = Path(pyspark.__file__).parent
    home = Path(os.environ.get("SPARK_HOME") or package)
    if any((home / "jars").glob(f"spark-core_*-{pyspark.__version__}.jar")):
        return home
    if not (package / "bin" / "spark-submit").exists():
        raise NsqError(
            f"the pyspark in {package} comes without Spark",
            hint="Uninstall pyspark-client, then: pip install 'nsqtools[spark]'",
        )
    return package


def without_zip(home: Path, scratch: Path) -> Path:
    """Return a Spark home like ``home`` whose Python workers import the installed pyspark.

    Spark makes them import from the zip in its home. It has no bytecode, so each of the three to
    six Python processes of a session would compile the modules again, for 0.7 s.
    """
    if not (home / "python" / "lib" / "pyspark.zip").exists():
        return home
    links = scratch / "spark"
    links.mkdir()
    for entry in home.iterdir():
        if entry.name != "python":
            (links / entry.name).symlink_to(entry)
    return links


def spark_conf(settings: SparkSettings, scratch: Path) -> dict[str, str]:
    """Return Spark's settings: ours, overridden by those of the user."""
    conf = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.warehouse.dir": (scratch / "warehouse").as_uri(),
        # A second attempt of a running task would publish everything twice.
        "spark.speculation": "false",
        PUSHDOWN_CONF: "true",
    }
    if (s3 := stores(settings.places)) is not None:
        conf |= store_conf(s3)
    if settings.is_local:  # Every user of this machine can connect to Spark's ports.
        conf["spark.authenticate"] = "true"
    conf.update(settings.conf)
    if JARS not in settings.conf:
        needed = needed_packages(settings.places, spark_home())
        if packages := settings.conf.get(PACKAGES):
            needed.append(packages)
        if settings.is_local and (jars := without_spark_jars(cached_jars(needed), spark_home())):
            conf[CLASS_PATH] = ":".join(filter(None, [conf.get(CLASS_PATH), *jars]))
        elif needed:
            conf[PACKAGES] = ",".join(needed)
    java_options = [
        f'-Djava.io.tmpdir="{scratch}"',
        f'-Dnsq.spark.log="{settings.log_path.absolute()}"',
        conf.get("spark.driver.extraJavaOptions", ""),
    ]
    conf_dir = Path(os.environ.get("SPARK_CONF_DIR") or spark_home() / "conf")
    if not (conf_dir / LOG4J.name).exists():
        java_options.insert(0, f'-Dlog4j2.configurationFile="{LOG4J.as_uri()}"')
    return conf | {
        "spark.driver.extraJavaOptions": " ".join(java_options).strip(),
        "spark.master": settings.master,
        "spark.app.name": settings.app_name,
        "spark.driver.memory": settings.driver_memory,
    }


# -- jars and object stores ---------------------------------------------------------------------


HADOOP_AWS = ("org.apache.hadoop:hadoop-aws:{hadoop}", "software.amazon.awssdk:bundle:{sdk}")
HADOOP_AZURE = ("org.apache.hadoop:hadoop-azure:{hadoop}",)
SDK_OF_HADOOP = {"3.5.0": "2.35.4"}


def needed_packages(places: Iterable[Place], home: Path) -> list[str]:
    """Return the Maven coordinates that the places need in addition to the jars in ``home``.

    Raises `ConfigurationError` if this version of Spark does not support a place.
    """
    jars = [path.name for path in (home / "jars").glob("*.jar")]
    needed: list[str] = []
    schemes = _schemes(places)
    hadoop = _version(jars, "hadoop-client-api-")
    if schemes & {"s3", "s3a"} and not _version(jars, "hadoop-aws-"):
        if hadoop not in SDK_OF_HADOOP:
            raise ConfigurationError(
                f"no jars of s3a are known for Hadoop {hadoop or 'of an unknown version'}",
                hint="Name them with --conf spark.jars=FILES.",
            )
        sdk = SDK_OF_HADOOP[hadoop]
        needed += [package.format(hadoop=hadoop, sdk=sdk) for package in HADOOP_AWS]
    if schemes & {"az", "abfss"} and not _version(jars, "hadoop-azure-"):
        needed += [package.format(hadoop=hadoop) for package in HADOOP_AZURE]
    if "gs" in schemes and not _version(jars, "gcs-connector-"):
        raise ConfigurationError(
            "Spark needs Google's connector for gs:// places",
            hint="Name its jar: --conf spark.jars=gcs-connector-hadoop3-latest.jar.",
        )
    return needed


def cached_jars(needed: Sequence[str]) -> list[str]:
    """Return the jars of these coordinates if an earlier session has fetched them.

    In local mode they are on the class path, because Spark would copy them for every session.
    """
    try:
        jars = json.loads(_jar_list(needed).read_text("utf-8"))
    except (OSError, ValueError):
        return []
    return jars if all(Path(jar).is_file() for jar in jars) else []


def without_spark_jars(jars: Iterable[str], home: Path) -> list[str]:
    """Remove the jars of which ``home`` has any version.

    The class path of a driver is searched before Spark's own jars, and Delta depends on a Jackson
    with which Spark does not start.
    """
    artifacts = {_artifact(path.name) for path in (home / "jars").glob("*.jar")}
    return [jar for jar in jars if _artifact(Path(jar).name.partition("_")[2]) not in artifacts]


def _artifact(name: str) -> str:
    """Return the name without version: ``delta-spark_4.2_2.13-4.4.0.jar`` is
    ``delta-spark_4.2_2.13``."""
    return re.split(r"-\d", name, maxsplit=1)[0]


def cache_jars(needed: Sequence[str], jars: str) -> None:
    """Store the jars that Spark fetched for these coordinates, given as in its setting."""
    paths = [unquote(urlsplit(url).path) for url in jars.split(",")]
    file = _jar_list(needed)
    with suppress(OSError):  # Without the list, the next session fetches the jars again.
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, json.dumps(paths).encode(), is_durable=False)


def _jar_list(needed: Sequence[str]) -> Path:
    cache = user_folder(os.environ, "XDG_CACHE_HOME", ".cache")
    name = hashlib.sha256("\n".join(needed).encode()).hexdigest()[:16]
    return cache / "nsqtools" / f"jars-{name}.json"


def _version(jars: Iterable[str], name: str) -> str:
    return next((jar[len(name) : -len(".jar")] for jar in jars if jar.startswith(name)), "")


def store_conf(s3: S3Settings) -> dict[str, str]:
    """Return Spark's settings for s3a, without the secrets, which are in the environment."""
    properties = {
        "fs.s3a.endpoint.region": s3.region,
        # The other kinds of streams need another jar, and are not faster for Parquet of this size.
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
    """Return the variables with the credentials for obstore and s3a."""
    environ = {f"AWS_{name.upper()}": value for name, value in s3.for_obstore().items()}
    if s3.endpoint:
        environ["AWS_ENDPOINT_URL"] = environ.pop("AWS_ENDPOINT")
    return environ


def stores(places: Iterable[Place]) -> S3Settings | None:
    """Return the settings of S3 if a place is in it."""
    return s3_settings(environ=os.environ) if _schemes(places) & {"s3", "s3a"} else None


def _schemes(places: Iterable[Place]) -> set[str]:
    return {str(place).partition(":")[0] for place in places if place.is_remote}
