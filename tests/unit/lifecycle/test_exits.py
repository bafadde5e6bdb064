"""Exit codes: lists of them, their actions, and the code of each reason."""

from __future__ import annotations

import pytest

from distflow.lifecycle.exits import CODES, Action, ExitActions, action_of, exit_code_of, overlap, parse_codes
from distflow.lifecycle.states import Reason
from distflow.protocol.ends import signal_name


@pytest.mark.parametrize(
    ("text", "codes"),
    [("3", ((3, 3),)), ("0,1-10,16", ((0, 0), (1, 10), (16, 16))), ("3001,3006", ((3001, 3001), (3006, 3006)))],
)
def test_lists_of_codes_and_ranges_are_parsed(text: str, codes: tuple[tuple[int, int], ...]) -> None:
    assert parse_codes(text) == codes


@pytest.mark.parametrize("text", ["", "1,", "a", "1-23-4", "20-10", "1 - 2", "1, 2", "-1", "0x10", "99999", "1" * 5000, "٣"])
def test_an_invalid_list_of_codes_is_refused_with_a_remedy(text: str) -> None:
    with pytest.raises(ValueError, match=r"; ."):
        parse_codes(text)


def test_a_code_has_the_action_whose_list_contains_it() -> None:
    actions = ExitActions(complete=((0, 2),), fail=((3, 3),), reschedule=((4, 9), (3001, 3006)))
    assert [actions.action(code) for code in (1, 3, 4, 9, 10, 3003, None)] == [
        Action.COMPLETE, Action.FAIL, Action.RESCHEDULE, Action.RESCHEDULE, None, Action.RESCHEDULE, None,
    ]  # fmt: skip


def test_the_first_common_code_of_two_lists_is_found() -> None:
    assert overlap(((0, 5),), ((7, 9), (5, 6))) == 5
    assert overlap(((0, 4),), ((5, 9),)) is None


def test_every_reason_has_an_exit_code_or_none() -> None:
    assert set(CODES) == set(Reason)
    assert {reason: exit_code_of(reason, 7, 9, has_run=True) for reason in Reason} == {
        **CODES, Reason.EXIT_CODE: 7, Reason.SIGNAL: 137, Reason.DATA: 2012,
    }  # fmt: skip
    assert exit_code_of(Reason.DATA, None, None, has_run=False) == 2010
    assert exit_code_of(None, 0, None, has_run=True) == 0


def test_a_task_killed_for_lack_of_memory_also_has_the_action_of_sigkill() -> None:
    def action(actions: ExitActions, code: int | None, number: int | None, reason: Reason = Reason.OOM_KILLED) -> Action | None:
        return action_of(actions, reason, code, number, has_run=True)

    by_signal = ExitActions(reschedule=((137, 137),))
    assert action(by_signal, None, 9) is Action.RESCHEDULE
    assert action(by_signal, 137, None) is Action.RESCHEDULE
    assert action(by_signal, None, 9, Reason.EVICTED) is None
    assert action(ExitActions(fail=((3004, 3004),), reschedule=((137, 137),)), None, 9) is Action.FAIL


def test_signals_have_names() -> None:
    assert signal_name(9) == "SIGKILL"
    assert signal_name(63) == "signal 63"
