"""The plan of a change, as people read it before they confirm it."""

import pytest

from nsqtools.cli.running.administering import format_plan
from nsqtools.cluster.admin import Action, Step


@pytest.mark.parametrize(
    ("messages", "loss"),
    [(0, ""), (1, ", 1 message is lost"), (2000, ", 2,000 messages are lost")],
)
def test_a_plan_counts_the_messages_that_are_lost(messages: int, loss: str) -> None:
    step = Step("nsqd", "nsqd-1:4151", Action.EMPTY, "clicks", messages=messages)

    assert format_plan([step]) == [f"empty topic clicks on nsqd nsqd-1:4151{loss}"]
