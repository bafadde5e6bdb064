"""The measurements of ``check_pool``, for those who show them."""

from __future__ import annotations

from distflow.backends.machines.checks.allreduce import AllReduce
from distflow.backends.machines.checks.checking import Checked
from distflow.backends.machines.checks.finding import Finding, Grade
from distflow.backends.machines.checks.measured import Measured, Pair
from distflow.backends.machines.checks.reachability import Verdict

__all__ = ["AllReduce", "Checked", "Finding", "Grade", "Measured", "Pair", "Verdict"]
