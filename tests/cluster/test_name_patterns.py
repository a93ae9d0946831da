"""One language of patterns: globs, and regular expressions between slashes."""

from __future__ import annotations

import pytest

from nsqtools.cluster.topics import is_pattern, matches, select
from nsqtools.errors import ConfigurationError, NotFoundError

TOPICS = {"orders", "orders-eu", "orders.us", "web_1", "web_2", "app"}


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("orders", ["orders"]),
        ("orders*", ["orders", "orders-eu", "orders.us"]),
        ("orders.*", ["orders.us"]),
        ("web_?", ["web_1", "web_2"]),
        ("web_[2-9]", ["web_2"]),
        ("/^orders/", ["orders", "orders-eu", "orders.us"]),
        ("/^(web|app)/", ["app", "web_1", "web_2"]),
        ("/eu$/", ["orders-eu"]),
    ],
)
def test_a_pattern_is_a_glob_or_a_regular_expression_between_slashes(
    pattern: str, names: list[str]
) -> None:
    assert select("topic", [pattern], TOPICS) == names
    assert sorted(name for name in TOPICS if matches(name, [pattern])) == names


def test_what_matches_nothing_is_not_found_and_a_regular_expression_is_recognized() -> None:
    with pytest.raises(NotFoundError, match=r"no topic matches web\.\*") as caught:
        select("topic", ["web.*"], TOPICS)

    assert caught.value.hint == "This is a glob; write '/web.*/' for a regular expression."
    with pytest.raises(NotFoundError, match="no topic matches /nothing/"):
        select("topic", ["/nothing/"], TOPICS)


def test_a_regular_expression_that_is_none_is_an_error_of_usage() -> None:
    with pytest.raises(ConfigurationError, match=r"invalid regular expression /\(/"):
        select("topic", ["/(/"], TOPICS)


def test_no_name_is_taken_for_a_pattern() -> None:
    assert not is_pattern("orders.us_1-2#ephemeral")
    assert is_pattern("/orders/")
