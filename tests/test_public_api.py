"""What `import nsqtools` offers: complete, lazy, documented."""

import ast
import inspect
import pickle
from pathlib import Path

import pytest

import nsqtools
from nsqtools import errors

PUBLIC = [name for name in nsqtools.__all__ if name != "__version__"]


def test_what_type_checkers_see_can_be_had() -> None:
    tree = ast.parse(Path(nsqtools.__file__).read_text("utf-8"))
    [checked] = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in checked.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.name for node in imports for alias in node.names}
    assert set(PUBLIC) == seen | set(errors.__all__)
    assert dir(nsqtools) == sorted(nsqtools.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Consumr'"):
        nsqtools.Consumr  # noqa: B018


def test_a_public_name_can_be_had_and_is_documented_with_its_methods() -> None:
    for name in PUBLIC:
        public = getattr(nsqtools, name)
        assert public.__name__ == name
        assert inspect.getdoc(public), name
        for member_name, member in vars(public).items():
            if not member_name.startswith("_") and callable(member):
                assert inspect.getdoc(member), f"{name}.{member_name}"


def test_every_error_has_a_category_and_a_place_in_the_tree() -> None:
    for name in errors.__all__:
        error = getattr(errors, name)
        assert issubclass(error, errors.NsqError)
        assert error.category in {"failed", "usage", "not_found", "connect", "refused"}
        assert name in (errors.__doc__ or "")


def test_an_error_comes_out_of_another_process_as_it_was() -> None:
    cause = errors.ServerError("E_BAD_MESSAGE", "too big", fatal=True, where="a:1")
    rejected = errors.PublishRejected("not published", cause=cause, hint="Split it.")
    late = errors.DeadlineExceeded("late", hint="Wait.")
    late.category = "failed"
    for error in (rejected, cause, late, errors.HTTPError("gone", status=404)):
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), copy.args) == (type(error), str(error), error.args)
        assert {**vars(copy), "cause": ""} == {**vars(error), "cause": ""}
    assert pickle.loads(pickle.dumps(rejected)).cause.code == "E_BAD_MESSAGE"
