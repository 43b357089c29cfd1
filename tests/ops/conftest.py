"""What the op tests share besides tests/conftest.py."""

from __future__ import annotations

from typing import Any

import pytest
from functions import Attend


@pytest.fixture
def attend(ops: Any, device: Any, workspaces: Any) -> Attend:
    """Calls of every attention function on the device under test."""
    return Attend(ops, device, workspaces)
