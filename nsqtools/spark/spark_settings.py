"""What a Spark session is started with: settings, environment, jars, and where its log is.

Spark reads its settings from many places. Here is decided which of them count: ours, below those of
the user; and of the environment nothing that would make pyspark start something else.

PySpark comes without Hadoop's connectors. Spark fetches them from Maven when a session first needs
them, and keeps them below ``~/.ivy2``; where there is no network, ``--conf spark.jars=FILES`` names
them, and nothing is fetched.

Credentials are found once, as for our own reading of the store (`archive.storage_objects`). The
JVM and the Python workers have them in their environment, and the executors of a cluster through a
file of settings that only this user can read: an argument of a command can be read by everybody.
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
"""Variables that would make pyspark start something else than the settings ask for."""


@dataclass(frozen=True)
class SparkSettings:
    """Where Spark runs and with what.

    ``master`` is ``local[*,4]`` (all cores, a task is tried four times) or a cluster:
    ``spark://host:7077``, ``yarn``, ``k8s://...``. ``driver_memory`` is the heap of the JVM that is
    started beside this process, as Java has it: ``2g``, ``800m``. ``conf`` holds any of Spark's own
    settings and wins over ours. ``places`` are what the session reads and writes, as far as it
    needs jars for it; ``python_places`` need only credentials: no JVM reads or writes them.
    ``inherited`` are descriptors, of locks, that the JVM keeps open while it lives: it may outlive
    this process for a moment.

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
        """How many tasks run at a time in local mode; 0 where the cluster decides."""
        if not self.is_local:
            return 0
        found = re.match(r"local\[(\d+|\*)", self.master)
        if found is None:
            return 1
        return (os.cpu_count() or 1) if found[1] == "*" else int(found[1])

    @property
    def log_path(self) -> Path:
        """The file that Spark's messages go to."""
        return self.log_file or default_log_file()


@cache
def default_log_file() -> Path:
    """The log of this process's sessions, in the user's state directory; old ones are removed."""
    state = user_folder(os.environ, "XDG_STATE_HOME", ".local/state")
    directory = state / "nsqtools" / "spark"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        logs = sorted(directory.glob("*.log*"), key=lambda path: path.stat().st_mtime)
        for old in logs[: -KEPT_LOGS + 1]:
            old.unlink(missing_ok=True)
        if not os.access(directory, os.W_OK):
            raise PermissionError
    except OSError:  # a service may have no home; in /tmp no name must be predictable
        directory = Path(tempfile.mkdtemp(prefix="nsq-spark-log-"))
    return directory / f"nsq-spark-{os.getpid()}.log"


def spark_environ(settings: SparkSettings, scratch: Path, home: Path) -> dict[str, str | None]:
    """Variables for the JVM, which runs on the Java in ``home``, and for the Python workers."""
    environ: dict[str, str | None] = dict.fromkeys(MISLEADING)
    environ |= {"JAVA_HOME": str(home), "SPARK_HOME": str(spark_home())}
    environ["PYTHONSAFEPATH"] = "1"  # workers look for modules in the current directory first
    if locale.getencoding().upper() != "UTF-8":  # the JVM cannot have all names of files then
        environ["LC_ALL"] = "C.UTF-8"
    environ |= {"SPARK_LOCAL_DIRS": str(scratch), "PYSPARK_DRIVER_PYTHON": sys.executable}
    if settings.is_local or "PYSPARK_PYTHON" not in os.environ:
        environ["PYSPARK_PYTHON"] = sys.executable
    if settings.is_local:
        slots = str(settings.local_slots)  # a sink's rate is shared
        ours = {"NSQ_SPARK_SLOTS": slots, "SPARK_LOCAL_IP": "127.0.0.1"}
        environ |= {name: os.environ.get(name, ours[name]) for name in ours}
    return environ | store_credentials(settings)


def store_credentials(settings: SparkSettings) -> dict[str, str]:
    """The variables that name a store and have its secrets; none where no place is in one."""
    s3 = stores((*settings.places, *settings.python_places))
    return store_environ(s3) if s3 is not None else {}


def spark_home() -> Path:
    """``SPARK_HOME`` if it is of the version of the package, else the package itself."""
    import pyspark

    own = Path(pyspark.__file__).parent
    given = Path(os.environ.get("SPARK_HOME") or own)
    if any((given / "jars").glob(f"spark-core_*-{pyspark.__version__}.jar")):
        return given
    if not (own / "bin" / "spark-submit").exists():
        raise NsqError(
            f"the pyspark in {own} comes without Spark",
            hint="Uninstall pyspark-client, then: pip install 'nsqtools[spark]'",
        )
    return own


def spark_conf(settings: SparkSettings, scratch: Path) -> dict[str, str]:
    """Spark's settings: ours, under those of the user."""
    conf = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.warehouse.dir": (scratch / "warehouse").as_uri(),
        # A second attempt of a task that still runs would publish everything twice.
        "spark.speculation": "false",
        PUSHDOWN_CONF: "true",
    }
    if (s3 := stores(settings.places)) is not None:
        conf |= store_conf(s3)
    if settings.is_local:  # any user of this machine could reach Spark's ports
        conf["spark.authenticate"] = "true"
    conf.update(settings.conf)
    if JARS not in settings.conf:
        needed = needed_packages(settings.places, spark_home())
        if given := settings.conf.get(PACKAGES):
            needed.append(given)
        if settings.is_local and (jars := beside_sparks_own(known_jars(needed), spark_home())):
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
    """Return the Maven coordinates for some places that ``home`` has no jars for.

    Raises `ConfigurationError` for what does not run with this version of Spark.
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
        needed += [each.format(hadoop=hadoop, sdk=sdk) for each in HADOOP_AWS]
    if schemes & {"az", "abfss"} and not _version(jars, "hadoop-azure-"):
        needed += [each.format(hadoop=hadoop) for each in HADOOP_AZURE]
    if "gs" in schemes and not _version(jars, "gcs-connector-"):
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
    with suppress(OSError):  # the next session fetches them again
        note.parent.mkdir(parents=True, exist_ok=True)
        replace_file(note, json.dumps(paths).encode(), is_durable=False)


def _note_of(needed: Sequence[str]) -> Path:
    cache = user_folder(os.environ, "XDG_CACHE_HOME", ".cache")
    name = hashlib.sha256("\n".join(needed).encode()).hexdigest()[:16]
    return cache / "nsqtools" / f"jars-{name}.json"


def _version(jars: Iterable[str], name: str) -> str:
    found = (jar.removeprefix(name).removesuffix(".jar") for jar in jars if jar.startswith(name))
    return next(found, "")


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
    named = {f"AWS_{name.upper()}": value for name, value in s3.for_obstore().items()}
    if s3.endpoint:
        named["AWS_ENDPOINT_URL"] = named.pop("AWS_ENDPOINT")
    return named


def stores(places: Iterable[Place]) -> S3Settings | None:
    """Return the settings of S3 when a place is in it."""
    return s3_settings(environ=os.environ) if _schemes(places) & {"s3", "s3a"} else None


def _schemes(places: Iterable[Place]) -> set[str]:
    return {str(place).partition(":")[0] for place in places if place.is_remote}
