"""The public names of `import nsqtools` are complete, lazy and documented."""

import ast
import concurrent.futures
import inspect
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

import nsqtools
from nsqtools import aio, errors, testing

PUBLIC = [name for name in nsqtools.__all__ if name != "__version__"]


def test_names_for_type_checkers_can_be_imported() -> None:
    tree = ast.parse(Path(nsqtools.__file__).read_text("utf-8"))
    [checked] = [n for n in tree.body if isinstance(n, ast.If) and isinstance(n.test, ast.Name)]
    imports = [node for node in checked.body if isinstance(node, ast.ImportFrom)]
    names = {alias.name for node in imports for alias in node.names}
    assert set(PUBLIC) == names | set(errors.__all__)
    assert dir(nsqtools) == sorted(nsqtools.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Consumr'"):
        nsqtools.Consumr  # noqa: B018


def test_a_public_name_exists_and_is_documented_with_its_methods() -> None:
    for name in PUBLIC:
        public = getattr(nsqtools, name)
        assert public.__name__ == name
        assert inspect.getdoc(public), name
        for member_name, member in vars(public).items():
            if not member_name.startswith("_") and callable(member):
                assert inspect.getdoc(member), f"{name}.{member_name}"


BATCH = {"finish", "nsqd", "requeue", "topic"}
MESSAGE = BATCH | {"attempts", "body", "deadline", "id", "is_answered", "received_at"}
MESSAGE |= {"timestamp_ns", "touch"}
PUBLICATION = {"bodies", "defer_s", "error", "errors", "is_settled", "size", "submitted_at"}
PUBLICATION |= {"topic", "wait", *dir(concurrent.futures.Future())}
PUBLICATION -= {"set_exception", "set_result", "set_running_or_notify_cancel"}
CONSUMER = {"abort", "batches", "begin_stop", "channel", "connections", "connections_by_topic"}
CONSUMER |= {"errors", "health", "is_starved", "next_batch", "options", "pause"}
CONSUMER |= {
    "resume",
    "run",
    "set_max_in_flight",
    "start",
    "stats",
    "stop",
    "topics",
    "wait_for_end",
}
PRODUCER = {"flush", "health", "nsqd", "on_published", "options", "publish", "publish_deferred"}
PRODUCER |= {"publish_many", "repeated", "retried", "start", "stop", "submit"}
FORMER = {
    nsqtools.Batch: ["source"],
    nsqtools.Consumer: [
        *["backlog", "gather", "had_turns", "has_tried_all", "is_delivered"],
        *["look_before_subscribing", "look_up_soon", "raise_failure"],
    ],
    nsqtools.Message: ["give_up"],
    nsqtools.Producer: ["checked_parts", "end_retries", "has_room", "patience_s", "split"],
    nsqtools.Publication: ["call_back", "set_exception", "set_result"],
}
"""Public names of 0.3 that only nsqtools itself uses."""


def public_objects() -> Iterator[tuple[object, set[str]]]:
    for face in (nsqtools, aio):
        yield face.Consumer("topic", "channel", nsqd_tcp_addresses="127.0.0.1:1"), CONSUMER
        yield face.Producer("127.0.0.1:1"), PRODUCER
    batch = testing.fake_batch([b"body"])
    yield batch, BATCH | {*dir([])}
    yield batch[0], MESSAGE | {"answers", "has_backoff", "requeue_delay_s"}
    yield testing.FakeProducer().submit("topic", [b"body"]), PUBLICATION


def test_threads_and_asyncio_have_the_same_public_names() -> None:
    for public, names in public_objects():
        assert {name for name in dir(public) if name[0] != "_"} == {
            name for name in names if name[0] != "_"
        }


def test_a_name_that_became_private_works_with_a_warning() -> None:
    for public, _ in public_objects():
        for name in next((FORMER[kind] for kind in type(public).__mro__ if kind in FORMER), []):
            with pytest.warns(DeprecationWarning, match=rf"{name} is private and will be removed"):
                former = getattr(public, name)
            assert former == getattr(public, f"_{name}")


def test_every_error_has_a_category_and_a_place_in_the_tree() -> None:
    for name in errors.__all__:
        error = getattr(errors, name)
        assert issubclass(error, errors.NsqError)
        assert error.category in {"failed", "usage", "not_found", "connect", "refused"}
        assert name in (errors.__doc__ or "")


def test_an_error_is_unchanged_after_pickling() -> None:
    cause = errors.ServerError("E_BAD_MESSAGE", "too big", fatal=True, where="a:1")
    rejected = errors.PublishRejected("not published", cause=cause, hint="Split it.")
    late = errors.DeadlineExceeded("late", hint="Wait.")
    late.category = "failed"
    for error in (rejected, cause, late, errors.HTTPError("gone", status=404)):
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), copy.args) == (type(error), str(error), error.args)
        assert {**vars(copy), "cause": ""} == {**vars(error), "cause": ""}
    assert pickle.loads(pickle.dumps(rejected)).cause.code == "E_BAD_MESSAGE"
