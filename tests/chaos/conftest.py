"""Real hosts for chaos: those of the scenarios."""

from __future__ import annotations

from scenarios.conftest import cli, lab

__all__ = ["cli", "lab"]
