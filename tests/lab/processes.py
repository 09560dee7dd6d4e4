"""Processes that tests begin."""

from __future__ import annotations

import os


def unmeasured() -> dict[str, str]:
    """The environment without what makes a process count its coverage: one with little disk cannot write that down."""
    return {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
