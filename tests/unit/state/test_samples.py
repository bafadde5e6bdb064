"""Resource samples: invalid or too many samples from a node, their files, and thinning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distflow.state.logs import LogSource
from distflow.state.mirror import Mirror
from distflow.state.samples import ResourceSamples, last_samples, parse_samples, read_samples, thinned

HEADER = b'{"columns":["time","system/cpu/usage","system/gpu0/utilization"],"limits":{"system/cpu/limit":8}}'


@pytest.mark.parametrize(
    ("line", "times"),
    [
        (b"[3,1,2]", [3]),
        (b"[3]", [3]),
        (b"[3,1,2,3,4,5,6]", [3]),
        (b'[3,"x",{"a":1}]', [3]),
        (b"[3,true,1e300]", [3]),
        (b"[3,1,1e999]", []),
        (b"[3,1" + b"0" * 400 + b"]", [3]),
        (b"[null,1,2]", []),
        (b'["3",1,2]', []),
        (b"[true,1,2]", []),
        (b"[]", []),
        (b"[3,1", []),
        (b"NaN", []),
        (b"7", []),
        (b"\xff\xfe", []),
        (b"[" * 100000, []),
        (b'{"columns": 5, "limits": 7}', []),
    ],
)
def test_lines_that_are_not_samples_are_ignored(line: bytes, times: list[float]) -> None:
    found, series, _ = parse_samples([b"[1,9,9]", HEADER, line])
    assert found == times
    assert all(len(values) == len(times) for values in series.values())
    assert all(value is None or abs(value) <= 1e300 for values in series.values() for value in values)


@pytest.mark.parametrize(
    "name",
    ["loss", "system/", "system/a/b/c", "system/\x1b[31m/x", "system/<b>/x", "system/" + "a" * 99, 7, None, ["system/a"]],
)
def test_series_with_invalid_names_are_ignored(name: object) -> None:
    header = json.dumps({"columns": ["time", name, "system/cpu/usage"], "limits": {"system/<b>": 1, "system/a": "x"}}).encode()
    times, series, limits = parse_samples([header, b"[1,2,3]"])
    assert (times, series, limits) == ([1], {"system/cpu/usage": [3]}, {})


def test_the_number_of_series_is_limited() -> None:
    headers = [
        json.dumps({"columns": ["time", *(f"system/a{group}/b{one}" for one in range(900))]}).encode() for group in range(4)
    ]
    _, series, _ = parse_samples([line for header in headers for line in (header, b"[1,2]")])
    assert len(series) <= 1024


def test_the_number_of_values_is_limited() -> None:
    names = [f"system/a{number}" for number in range(1000)]
    wide = json.dumps({"columns": ["time", *names]}).encode()
    times, series, _ = parse_samples([wide, *([b"[1]"] * 20000)])
    assert 0 < len(times) * len(series) <= (8 << 20) + 1000
    narrow = b'{"columns":["time","system/b"]}'
    times, series, _ = parse_samples([narrow, *([b"[1,2]"] * 20000), wide, b"[1]"])
    assert len(times) * len(series) <= (8 << 20) + 1000


def test_a_mirror_ignores_samples_beyond_the_size_limit(tmp_path: Path) -> None:
    mirror, attempt = Mirror(tmp_path), "w/g/t/0"
    assert mirror.resume_position(attempt, "samples") == ("output.samples", 0)
    mirror.write(attempt, "output.samples", 0, HEADER + b"\n[1,2,3]\n")
    mirror.write(attempt, "output.samples", 40 << 20, b"x")
    assert (tmp_path / attempt / "output.samples").read_bytes() == HEADER + b"\n[1,2,3]\n"
    with pytest.raises(ValueError, match="not a file of"):
        mirror.write(attempt, "output-5-1.samples", 0, b"x")


def test_last_samples_reads_only_the_end_of_a_long_file(tmp_path: Path) -> None:
    source = LogSource("t", 0, tmp_path)
    assert last_samples(source) is read_samples(source) is None
    rows = [HEADER if second % 100 == 0 else b"[%d,%d,%d]" % (second, second, second) for second in range(20000)]
    (tmp_path / "output.samples").write_bytes(b"\n".join(rows) + b"\n[20000,")
    whole, end = read_samples(source), last_samples(source)
    assert whole is not None
    assert end is not None
    assert (whole.times[0], whole.times[-1], len(whole.times)) == (1, 19999, 19800)
    assert end.times[-1] == 19999
    assert 100 < len(end.times) < 10000
    assert end.latest() == whole.latest() == {"system/cpu/usage": 19999, "system/gpu0/utilization": 19999}


def test_thinned_samples_are_means() -> None:
    values: list[float | None] = [1.0, 3.0, None, 5.0, None, None]
    samples = ResourceSamples(task="t", attempt=0, times=[1, 2, 3, 4, 5, 6], series={"system/cpu/usage": values}, limits={})
    few = thinned(samples, 3)
    assert (few.times, few.series) == ([2, 4, 6], {"system/cpu/usage": [2, 5, None]})
    assert thinned(samples, 6) is samples
