"""Files that survive a power cut whole or not at all."""

from __future__ import annotations

import os
from typing import IO, Any

__all__ = ["publish"]


def publish(file: IO[Any], path: str) -> None:
    """Give a complete, open file its final name, once its content is on the disk.

    Without that order, a power cut can leave the name with no content or half of it. Raises ``OSError``.
    """
    file.flush()
    os.fsync(file.fileno())
    os.replace(file.name, path)
