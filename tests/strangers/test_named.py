"""The table of README.md names tests that exist."""

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_each_test_in_the_table_exists() -> None:
    names = re.findall(
        r"`([\w/]+\.(?:py|txt))(?:::(\w+))?` \|$", (HERE / "README.md").read_text(), re.M
    )
    assert len(names) > 15
    for file, test in names:
        text = (HERE.parent / file).read_text()
        assert f"def {test}(" in text if test else text, f"{file}::{test}"
