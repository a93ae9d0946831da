"""The text format of Prometheus, with escaped labels and help."""

from nsqtools.records.prometheus import Metric, encode_metrics


def test_each_metric_has_help_type_and_a_line_for_each_sample() -> None:
    depth = Metric(
        "nsq_depth", "gauge", "Messages\nin the queue.", [({"topic": 'a"b\\c\nd'}, 3), ({}, 0.5)]
    )
    assert encode_metrics([depth]).splitlines() == [
        r"# HELP nsq_depth Messages\nin the queue.",
        "# TYPE nsq_depth gauge",
        r'nsq_depth{topic="a\"b\\c\nd"} 3',
        "nsq_depth 0.5",
    ]
