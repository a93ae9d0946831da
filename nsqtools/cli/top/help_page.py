"""The help page of `nsq top`, which ``?`` shows. Pure."""

from __future__ import annotations

KEYS = (
    ("↑ ↓ j k, PgUp PgDn, Home End", "select a line"),
    ("Enter, →", "look into it: channels of a topic, consumers of a channel, topics of an nsqd"),
    ("Esc, ←, Backspace", "go back; at the beginning, clear the filter"),
    ("1 2 3, Tab", "all topics, all nsqd, all consumers"),
    ("n", "the selected topic or channel on each nsqd"),
    ("s S", "sort by the next column, by the one before"),
    ("r", "reverse the order"),
    ("/", "filter: words to find, and conditions on columns, such as depth>1000 clients=0"),
    ("c", "choose the columns"),
    ("space", "freeze the screen; selecting still works"),
    ("m", "leave the mouse to the terminal, to select text; again: take it"),
    ("Ctrl-Z, q", "suspend, quit"),
)
ACTION_KEYS = (
    ("p u", "pause, unpause the selected topic or channel"),
    ("e d", "empty, delete it; the name is to be typed"),
    ("t", "tail the topic, on an ephemeral channel: takes nothing from other channels"),
    ("v", "view some messages of a channel; the attempts of each grow by one"),
)
COLUMNS = (
    ("depth", "messages that wait in the queue; of a topic, before they reach its channels"),
    ("waiting", "the depth of a topic and of all its channels together"),
    ("in_flight", "messages that consumers have and have not finished"),
    ("deferred", "messages that wait until their delay is over"),
    ("ingress, egress, finish", "messages received, sent, finished, a second"),
    ("requeue", "messages requeued or timed out, a second"),
    ("requeued, timed_out", "since the queue was created or nsqd started"),
    ("e2e_ms", "ms from publishing to finishing, nsqd's highest percentile"),
    ("ready", "RDY: how many messages the consumer takes at once"),
    ("heap_mib", "memory in use by nsqd"),
    ("trend", "ingress at the last samples, the largest as a full bar"),
)
NOTES = (
    "A click selects a line, a second one opens it; a click on a heading sorts by it.",
    "An nsqd that does not answer is named, with the time since; its queues count for 5 s.",
    "Columns that do not fit are left out and named; what is cut ends with an ellipsis.",
)
KEY_WIDTH = 30


def _rows(rows: tuple[tuple[str, str], ...]) -> list[str]:
    return [f"  {name:{KEY_WIDTH}} {text}" for name, text in rows]


HELP = (
    "Keys",
    *_rows(KEYS),
    "",
    "Changes (with --allow-changes; a plan is shown first)",
    *_rows(ACTION_KEYS),
    "",
    "Columns",
    *_rows(COLUMNS),
    "",
    *NOTES,
)
