"""The Slurm allocation that this process runs in: which GPUs it holds, and when it ends.

Knows Slurm's environment and squeue. It must never know what the GPUs and the time are used for.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping


def job(environment: Mapping[str, str] = os.environ) -> str | None:
    """The job's id; None outside Slurm."""
    return environment.get("SLURM_JOB_ID")


def gpus(environment: Mapping[str, str] = os.environ) -> tuple[tuple[str, str], ...]:
    """(number on this host, CUDA's name for it in this process) of every GPU.

    They differ where Slurm hides the other jobs' GPUs: then each job counts its own from 0.
    """
    numbers = _listed(environment.get("SLURM_STEP_GPUS") or environment.get("SLURM_JOB_GPUS", ""))
    devices = (
        _listed(environment["CUDA_VISIBLE_DEVICES"]) if "CUDA_VISIBLE_DEVICES" in environment else numbers
    )
    return tuple(zip(numbers, devices, strict=False))  # the user may have left fewer visible


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def seconds_left() -> float | None:
    """Seconds to the allocation's time limit, as it is now; None without one, or where Slurm does not say.

    Slurm is asked, since its environment variable is new (23.02) and an administrator may move the limit.
    """
    name = job()
    if name is None:
        return None
    command = ["squeue", "--noheader", "--format=%L", f"--jobs={name}"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_duration(answer.strip())


def parse_duration(text: str) -> float | None:
    """The seconds of Slurm's ``[days-][hours:]minutes:seconds``; None for any word, as UNLIMITED."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def deadline() -> float:
    """When the allocation ends, on the monotonic clock; infinite without a limit."""
    left = seconds_left()
    return float("inf") if left is None else time.monotonic() + left
