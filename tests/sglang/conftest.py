"""Fails at once, with the command to run, where the real SGLang is not set up."""

from __future__ import annotations

import pytest
from tests.sglang.installation import MODEL, PYTHON


@pytest.fixture(scope="session", autouse=True)
def set_up() -> None:
    if not PYTHON.exists() or not MODEL.exists():
        pytest.fail(
            "The real SGLang is not set up; run `bash tests/sglang/setup.sh` (make test-sglang does)."
        )
