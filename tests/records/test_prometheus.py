"""Prometheus' text format: what its parser reads back is what was given."""

from __future__ import annotations

from nsqtools.records.prometheus import Metric, encode_metrics


def test_each_metric_has_help_type_and_a_line_for_each_sample() -> None:
    depth = Metric(
        "nsq_depth", "gauge", "Messages\nin the queue.", [({"topic": "a"}, 3), ({}, 0.5)]
    )

    assert encode_metrics([depth]).splitlines() == [
        r"# HELP nsq_depth Messages\nin the queue.",
        "# TYPE nsq_depth gauge",
        'nsq_depth{topic="a"} 3',
        "nsq_depth 0.5",
    ]


def test_label_values_are_escaped() -> None:
    text = encode_metrics([Metric("m", "gauge", "", [({"x": 'a"b\\c\nd'}, 1)])])

    assert text.splitlines()[-1] == r'm{x="a\"b\\c\nd"} 1'
