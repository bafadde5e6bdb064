"""Durations and amounts of memory: accepted texts, and the advice in the messages for others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distflow.documents.quantities import duration_literal, parse_bytes, parse_duration


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        (90, 90),
        (1.5, 1.5),
        (0, 0),
        ("90s", 90),
        ("10m", 600),
        ("2h", 7200),
        ("14d", 14 * 86400),
        ("250ms", 0.25),
        ("5us", 5e-6),
        ("PT1H30M", 5400),
        ("P1D", 86400),
        ("P1DT0.5S", 86400.5),
    ],
)
def test_durations_are_converted_to_seconds(written: str | float, seconds: float) -> None:
    assert parse_duration(written) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("10h5m", "write it in one unit: `605m`"),
        ("90", "write `90s`"),
        ("1.5", "write `1500ms`"),
        ("2.0", "write `2s`"),
        ("9" * 400 + ".5", "has no unit"),
        ("1.2.3", "is not a duration"),
        (".", "is not a duration"),
        ("-5m", "is negative"),
        (-1, "is negative"),
        (float("nan"), "not a duration"),
        (float("inf"), "longer than 100 years"),
        ("9" * 30 + "d", "longer than 100 years"),
        (int("9" * 400), "longer than 100 years"),
        ("9" * 400 + "d", "longer than 100 years"),
        ("9" * 400 + "h5m", "has several units"),
        (True, "is not a duration"),
        ("", "is not a duration"),
        ("P", "is not a duration"),
        ("P1DT", "is not a duration"),
        ("m10", "is not a duration"),
        ("1.5h", "is not a duration"),
        ("10 m", "is not a duration"),
        ("１０m", "is not a duration"),
        ("10m\n", "is not a duration"),
    ],
)
def test_an_invalid_duration_is_refused_with_advice(written: str | float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_duration(written)


@given(st.integers(0, 10**13).map(lambda micros: micros / 1e6))
def test_the_literal_of_a_duration_is_parsed_to_the_same_duration(seconds: float) -> None:
    assert parse_duration(duration_literal(seconds)) == pytest.approx(seconds, abs=1e-6)


@pytest.mark.parametrize(
    ("written", "count"),
    [
        ("30Gi", 30 << 30),
        ("30G", 30 << 30),
        ("30GiB", 30 << 30),
        ("512Mi", 512 << 20),
        ("4K", 4096),
        ("1.5Ti", 3 << 39),
        ("1.1Gi", (11 << 30) // 10),
        ("7", 7),
        (7, 7),
        ("7B", 7),
        ("7m", 7),
    ],
)
def test_amounts_are_powers_of_1024(written: str | float, count: int) -> None:
    assert parse_bytes(written) == count


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("Gi30", "write `30Gi`"),
        ("30Qi", "use one of Ti, Gi, Mi, Ki, B"),
        ("30gi", "use one of"),
        ("-30Gi", "is negative"),
        (-1, "is negative"),
        (True, "is not a number of bytes"),
        ("", "is not a number of bytes"),
        ("30 Gi", "is not a number of bytes"),
        ("Gi", "is not a number of bytes"),
    ],
)
def test_an_invalid_amount_is_refused_with_advice(written: str | float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_bytes(written)


@given(st.integers(0, 10**15), st.sampled_from(["", "Ki", "Mi", "Gi", "Ti"]))
def test_whole_amounts_are_exact(number: int, unit: str) -> None:
    assert parse_bytes(f"{number}{unit}") == number << (10 * ["", "Ki", "Mi", "Gi", "Ti"].index(unit))
