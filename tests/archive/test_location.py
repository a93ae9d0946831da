"""Paths and URLs: local paths are parsed alike everywhere, unsupported ones are refused early."""

from pathlib import Path

import pytest

from nsqtools.archive.place_url import parse_place
from nsqtools.cli.options.spark_options import location

LOCAL = {"/var/nsq": "/var/nsq", "relative/x": "relative/x", "./s3a:/bucket": "s3a:/bucket"}
LOCAL |= {"topic:clicks/x": "topic:clicks/x", "file:///var/a%20b": "/var/a b"}
LOCAL |= dict.fromkeys(("file:/var/nsq", "FILE://localhost/var/nsq"), "/var/nsq")
LOCAL |= {"file:///var/clicks#ephemeral?": "/var/clicks#ephemeral?"}


def test_a_local_path_is_parsed_and_has_a_url_without_escapes_for_spark() -> None:
    assert {text: location(text) for text in LOCAL} == {text: Path(LOCAL[text]) for text in LOCAL}
    assert parse_place("/lake/topic=a%2Fb x").hadoop_url == "file:///lake/topic=a%2Fb x"


OTHERS = "hdfs:///x webhdfs://name:9870/lake s3n://bucket/x http://h/x dbfs:/x wasb://x s3://"
HOSTS = ["hdfs://name/lake", str(Path("hdfs://name/lake")), "file://host/x", "file://host"]


@pytest.mark.parametrize("text", ["", *OTHERS.split(), *HOSTS])
def test_an_unsupported_place_is_refused(text: str) -> None:
    for parse in (parse_place, location):
        with pytest.raises(ValueError, match=r"not supported|empty|names no|must not contain"):
            parse(text)


AZURE = "abfss://c@a.dfs.core.windows.net/x"
STORES = {"s3://b": ("s3://b", "s3a://b"), "S3A://b//x/y/": ("s3a://b/x/y", "s3a://b/x/y")}
STORES |= {"gs://b/x": ("gs://b/x", "gs://b/x"), AZURE: (AZURE, AZURE)}
STORES |= {str(Path("s3://b/x")): ("s3://b/x", "s3a://b/x")}


def test_a_store_is_parsed_and_has_a_url_for_spark() -> None:
    places = {text: parse_place(text) for text in STORES}
    assert {text: (str(at), at.hadoop_url) for text, at in places.items()} == STORES
    for text in STORES:
        with pytest.raises(ValueError, match="only a directory is supported here"):
            location(text)
