"""A wall clock that jumps: put this folder on PYTHONPATH and set CLOCK_JUMP="<monotonic s>:<offset s>".

From that monotonic moment on, `time.time` is off by the offset in every Python process that sees the variable, but
for Snakemake's own: its wait for a missing file ends at once when the clock jumps, which is not ours to cure.
"""

import os
import sys
import time

if "CLOCK_JUMP" in os.environ and "snakemake" not in sys.orig_argv:
    _moment, _offset = (float(part) for part in os.environ["CLOCK_JUMP"].split(":"))
    _true = time.time

    def _jumped() -> float:
        return _true() + (_offset if time.monotonic() >= _moment else 0.0)

    time.time = _jumped
