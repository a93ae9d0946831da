"""One Spark session for all tests of a run, and what the tests do where there is none.

    spark          a session in this process, two cores; shared, so leave it as you found it
    shared_session commands that start Spark get that session
    run_spark      runs ``nsq spark ARGS`` in this process, with it, to its end
    spark_env      the environment for ``nsq spark`` in a process of its own
    spark_settings the settings of `spark`, whose log an error would name

A test that uses one of them is skipped where pyspark, pyarrow or Java is missing; with ``CI=true``
it fails, so that a green run proves what it seems to prove.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from plugins.in_process import Result
from plugins.servers import need

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from nsqtools.spark.spark_settings import SparkSettings

SPARK_FIXTURES = {"spark", "spark_env"}

RunSpark = Callable[..., Result]


@pytest.fixture(scope="session")
def spark_settings(tmp_path_factory: pytest.TempPathFactory, quick_jvm: str) -> SparkSettings:
    from nsqtools.spark.spark_settings import SparkSettings

    log_file = tmp_path_factory.mktemp("spark-log") / "spark.log"
    conf = {"spark.sql.shuffle.partitions": "2", "spark.driver.extraJavaOptions": quick_jvm}
    return SparkSettings("local[2,4]", "tests", "1g", conf, log_file)


@pytest.fixture(scope="session")
def spark(spark_settings: SparkSettings) -> Iterator[SparkSession]:
    from nsqtools.spark.session import spark_session

    with pytest.MonkeyPatch.context() as patch:
        for name in ("JAVA_TOOL_OPTIONS", "SPARK_CONF_DIR", "SPARK_LOCAL_DIRS", "SPARK_HOME"):
            patch.delenv(name, raising=False)
        with spark_session(spark_settings) as session:
            yield session


@pytest.fixture
def shared_session(
    spark: SparkSession,
    spark_settings: SparkSettings,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    from nsqtools.spark import session
    from nsqtools.spark.failures import spark_errors

    @contextmanager
    def shared(settings: SparkSettings) -> Iterator[SparkSession]:
        with spark_errors(spark_settings):
            yield spark

    monkeypatch.setattr(session, "spark_session", shared)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def run_spark(
    shared_session: None, capfd: pytest.CaptureFixture[str], own_logging: None
) -> RunSpark:
    from nsqtools.cli.main import main

    def run(*arguments: object) -> Result:
        capfd.readouterr()
        status = main(["spark", *map(str, arguments)])
        out, err = capfd.readouterr()
        assert "This is a bug" not in err, err
        return Result(status, out.encode(), err)

    return run


@pytest.fixture
def spark_env(nsq_env: dict[str, str], quick_jvm: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("JAVA_HOME",) if name in os.environ}
    return nsq_env | kept | {"JAVA_TOOL_OPTIONS": quick_jvm}


REASON = pytest.StashKey[str]()
"""Why Spark cannot run here; empty when it can."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if not SPARK_FIXTURES & set(getattr(item, "fixturenames", ())):
        return
    stash = item.session.stash
    if REASON not in stash:
        from nsqtools.errors import NsqError
        from nsqtools.spark.java import find_java
        from nsqtools.spark.session import require_pyspark

        stash[REASON] = ""
        try:
            require_pyspark()
            find_java(os.environ)
        except NsqError as error:
            stash[REASON] = f"{error}. {error.hint}"
    need(stash[REASON])
