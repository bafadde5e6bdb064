"""Records that several threads create at the same time."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import enum, sys, threading
from msgspec import Struct
from distflow.structs import convert, decode_json

sys.setswitchinterval(1e-6)

class Letter(enum.Enum):
    A = "a"

class Inner(Struct, frozen=True):
    letter: Letter

class Outer(Struct, frozen=True):
    inner: Inner | None
    letters: tuple[str, ...]
    by_name: dict[str, Inner]
    letter: Letter

start = threading.Barrier(8)

def work(number):
    start.wait()
    if number % 2:
        convert({"inner": {"letter": "a"}, "letters": ["a"], "by_name": {"x": {"letter": "a"}}, "letter": "a"}, Outer)
    else:
        decode_json(b'{"inner": null, "letters": [], "by_name": {}, "letter": "a"}', Outer)

threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_several_threads_can_create_the_first_records_of_a_class() -> None:
    """Without the lock, msgspec crashes about every fifth of these processes."""
    assert [subprocess.run([sys.executable, "-c", CODE], check=False).returncode for _ in range(10)] == [0] * 10
