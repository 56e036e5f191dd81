"""A wall clock that jumps: put this folder on PYTHONPATH and set CLOCK_JUMP="<monotonic s>:<offset s>".

From that monotonic moment on, `time.time` is off by the offset in every Python process that sees the variable.
"""

import os
import time

if "CLOCK_JUMP" in os.environ:
    _moment, _offset = (float(part) for part in os.environ["CLOCK_JUMP"].split(":"))
    _true = time.time

    def _jumped() -> float:
        return _true() + (_offset if time.monotonic() >= _moment else 0.0)

    time.time = _jumped
