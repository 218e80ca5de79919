"""What the selected tests need of a fixture that trains for a whole file: a single case takes a single case's time."""

from __future__ import annotations

from typing import Any

import pytest


def needed(request: pytest.FixtureRequest, *parameters: str) -> set[Any] | None:
    """The values of these parameters in the selected tests of this file that use the fixture; tuples, if they are
    several. None: all, as one of the tests has no such parameter."""
    found = set()
    for item in request.session.items:
        if item.path == request.path and request.fixturename in getattr(item, "fixturenames", ()):
            given = item.callspec.params if hasattr(item, "callspec") else {}
            if not given.keys() >= set(parameters):
                return None
            values = tuple(given[name] for name in parameters)
            found.add(values if len(values) > 1 else values[0])
    return found
