"""The substitute for `nc` on nodes without netcat."""

from __future__ import annotations

import pytest

from distflow.runtime.guard.netcat import main


@pytest.mark.parametrize(
    "arguments",
    [
        ["-z", "-w", "abc", "127.0.0.1", "1"],
        ["-zw", "-1", "127.0.0.1", "1"],
        ["-z", "127.0.0.1", "1", "-w"],
        ["-z", "127.0.0.1", "\u00b2"],
        ["-z", "127.0.0.1", "+1"],
        ["-z", "127.0.0.1", "1_0"],
        ["-z", "127.0.0.1", "65536"],
        ["-z", "127.0.0.1"],
        ["-u", "-z", "127.0.0.1", "1"],
        ["127.0.0.1", "1"],
    ],
)
def test_arguments_that_need_a_real_netcat_end_with_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "install netcat for other uses" in capsys.readouterr().err
