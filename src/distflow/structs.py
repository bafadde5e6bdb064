"""Copy frozen records of either kind: ``msgspec.Struct`` or dataclass.

The records that ``workflow query`` and ``workflow list`` import are structs, because Python needs 1 ms to define a frozen
dataclass and only 0.05 ms to define a struct. All other records are dataclasses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

__all__ = ["replace"]

if TYPE_CHECKING:
    from dataclasses import replace  # mypy checks the names and types of its arguments
else:

    def replace(record, /, **changes):
        """Return a copy of a frozen record with other values in the given fields."""
        if isinstance(record, msgspec.Struct):
            return msgspec.structs.replace(record, **changes)
        import dataclasses  # noqa: PLC0415

        return dataclasses.replace(record, **changes)
