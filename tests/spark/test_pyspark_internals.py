"""What `pyspark_internals` relies on, by name: the first to fail with another PySpark."""

from __future__ import annotations

import inspect
import os
import re
import struct
from importlib.metadata import requires
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nsqtools.spark import pyspark_internals
from nsqtools.spark.pyspark_internals import (
    BEYOND,
    HANDSHAKE_PATH,
    OLDEST,
    QUERY_LOGGERS,
    count_block_managers,
    environment,
    has_context,
    parse_handshake,
    redirect_accumulator_errors,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

java_gateway = pytest.importorskip("pyspark.java_gateway")


def test_the_package_is_bounded_by_the_versions_that_were_tried() -> None:
    lines = [line for line in requires("nsqtools") or () if line.startswith("pyspark")]
    [pyspark] = [line for line in lines if re.search(r"extra == .spark.", line)]

    assert f">={'.'.join(map(str, OLDEST))}" in pyspark
    assert f"<{'.'.join(map(str, BEYOND))}" in pyspark


def test_no_other_module_uses_what_is_private_to_pyspark() -> None:
    package = Path(pyspark_internals.__file__).parent
    names = ("._gateway", "._jvm", "._jsc", "._active_spark_context", "_accumulatorServer")
    users = {
        path.name
        for path in package.rglob("*.py")
        if any(name in path.read_text("utf-8") for name in (*names, "java_gateway"))
    }

    assert users == {"pyspark_internals.py"}


def test_a_jvm_that_runs_is_found_by_two_variables() -> None:
    source = inspect.getsource(java_gateway.launch_gateway)

    assert 'if "PYSPARK_GATEWAY_PORT" in os.environ:' in source
    assert 'os.environ["PYSPARK_GATEWAY_SECRET"]' in source


def test_the_jvm_writes_its_handshake_where_the_variable_says() -> None:
    source = inspect.getsource(java_gateway.launch_gateway)

    assert f'env["{HANDSHAKE_PATH}"]' in source
    assert "read_int(info)" in source  # the port, big-endian
    assert "UTF8Deserializer().loads(info)" in source  # the secret, after its length
    assert parse_handshake(struct.pack(">ii", 40123, 6) + b"secret") == (40123, "secret")


def test_a_context_keeps_its_jvm_in_attributes_of_its_class() -> None:
    from pyspark import SparkContext

    assert {"_gateway", "_jvm", "_active_spark_context"} <= set(vars(SparkContext))


def test_the_loggers_of_queries_are_those_of_pyspark() -> None:
    from pyspark.errors.exceptions import base

    used = re.findall(r'PySparkLogger.getLogger\("(\w+)"\)', inspect.getsource(base))

    assert set(used) == set(QUERY_LOGGERS)


def test_a_session_has_what_is_asked_of_it(spark: SparkSession) -> None:
    context = spark.sparkContext
    said: list[str] = []

    redirect_accumulator_errors(context, said.append)
    context._accumulatorServer.handle_error(None, None)  # type: ignore[attr-defined]

    assert has_context()
    assert count_block_managers(context) == 1
    assert said == ["NoneType: None\n"]


def test_the_environment_is_restored() -> None:
    before = dict(os.environ)

    with environment({"NSQ_NEW": "1", "PATH": None}):
        assert os.environ["NSQ_NEW"] == "1"
        assert "PATH" not in os.environ

    assert dict(os.environ) == before
