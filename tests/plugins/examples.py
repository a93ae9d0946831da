"""The size of tests: small in an ordinary run, large in a long or thorough one.

    @pytest.mark.parametrize("kills", [2, slow(50)])  # ``-m slow`` runs the second

``NSQTOOLS_TEST_THOROUGH=1 tests/run tests/fuzz`` tries twenty times as many examples of hypothesis.
A test with its own number of examples has ``@settings(max_examples=examples(75))``.
"""

import os
from functools import partial

import pytest
from hypothesis import HealthCheck, settings

ORDINARY = 50
THOROUGH_FACTOR = 20

slow = partial(pytest.param, marks=pytest.mark.slow)


def examples(ordinary: int) -> int:
    """The number of examples in this run, if an ordinary run has ``ordinary`` of them."""
    is_thorough = os.environ.get("NSQTOOLS_TEST_THOROUGH", "0") != "0"
    return ordinary * THOROUGH_FACTOR if is_thorough else ordinary


# On a busy machine, slow examples and their slow generation are not failures.
settings.register_profile(
    "nsqtools",
    deadline=None,
    max_examples=examples(ORDINARY),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("nsqtools")
