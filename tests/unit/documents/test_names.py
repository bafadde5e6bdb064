from __future__ import annotations

import pytest

from distflow.documents.urls import parse_dataset
from distflow.errors import InputError


@pytest.mark.parametrize(
    ("text", "expected"),
    [("mnist", ("mnist", None)), ("mnist:latest", ("mnist", None)), ("My-Set_1:12", ("My-Set_1", 12))],
)
def test_a_name_and_its_version(text: str, expected: tuple[str, int | None]) -> None:
    assert parse_dataset(text) == expected


@pytest.mark.parametrize("text", ["", "a/b", "../a", "a:", "a:0", "a:01", "a:best", "a:b:c", "a b", "a:99999999999"])
def test_what_is_no_name(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_dataset(text)
    assert caught.value.hint
