"""Which GPUs this process may use, and how they are divided into slots of one server each.

A GPU is named by its UUID and never by its index: two allocations on one host may both call theirs 0. Where no
driver tells UUIDs (in many containers), a Slurm allocation's GPU is named by its number on its host.
"""

from __future__ import annotations

import csv
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from draftmill.errors import UserError
from draftmill.fleet import allocation

TRIES, PAUSE_S, ANSWER_S = 3, 1.0, 60  # of nvidia-smi
# What it says on a machine without GPUs, where it came with the system or the container.
NO_GPU = (
    "communicate with the NVIDIA driver", "No devices", "find libnvidia-ml", "NVML Shared library not found",
    "Driver Not Loaded", "Exec format error",
)  # fmt: skip


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one MIG instance (whose memory is then unknown, 0)."""

    uuid: str
    name: str
    memory_bytes: int
    index: str | None = None  # CUDA's name for it in this process, where that is not the UUID

    @property
    def device(self) -> str:
        """What CUDA_VISIBLE_DEVICES calls it."""
        return self.index or self.uuid


@dataclass(frozen=True)
class Slot:
    """Room for one server."""

    name: str
    gpus: tuple[Gpu, ...] = ()
    address: str | None = None  # of a server that somebody else runs (engine: attach)

    @property
    def gpu_name(self) -> str:
        """The GPUs' model name, ``cpu`` without any."""
        return self.gpus[0].name if self.gpus else "cpu"

    @property
    def hardware(self) -> str:
        """What a measurement on this slot holds for: the GPUs' model name, whether they are parts of one (MIG, of one
        size on a host that is set up as usual), and their number where it is not one."""
        part = " MIG" if self.gpus and self.gpus[0].uuid.startswith("MIG-") else ""
        number = f"{len(self.gpus)} × " if len(self.gpus) > 1 else ""
        return f"{number}{self.gpu_name}{part}"


@cache
def installed_gpus(expected: bool) -> tuple[tuple[Gpu, tuple[str, ...]], ...]:
    """All GPUs in the driver's order, each with the UUIDs of its MIG instances; none without a driver.

    ``expected``: a driver that finds no GPU is at fault. Raises UserError where GPUs there may be cannot be listed.
    """
    listed = _said_by_driver(
        ["--query-gpu=uuid,name,memory.total", "--format=csv,noheader,nounits"], expected
    )
    rows = list(csv.reader(listed.splitlines(), skipinitialspace=True))
    if not rows:
        return ()
    instances: dict[str, list[str]] = {}
    current = ""
    for line in _said_by_driver(["-L"], expected=True).splitlines():
        uuid = line.rpartition("UUID: ")[2].rstrip(") \t")
        if line.startswith("GPU "):
            current = uuid
        elif uuid.startswith("MIG-"):
            instances.setdefault(current, []).append(uuid)
    return tuple(
        (Gpu(uuid, name, _bytes(memory)), tuple(instances.get(uuid, ()))) for uuid, name, memory in rows
    )


def _bytes(mebibytes: str) -> int:
    """0 where the driver says "[N/A]", as it does for GPUs that share the host's memory."""
    try:
        return int(float(mebibytes)) << 20
    except ValueError:
        return 0


def _said_by_driver(words: list[str], expected: bool) -> str:
    """What nvidia-smi answers; asked again where it fails. Nothing where it is missing, or says that there is no GPU and
    none is expected."""
    if shutil.which("nvidia-smi") is None:
        return ""
    said = ""
    for attempt in range(TRIES):
        if attempt:
            time.sleep(PAUSE_S)
        try:
            done = subprocess.run(
                ["nvidia-smi", *words], capture_output=True, text=True, timeout=ANSWER_S, check=False
            )
        except subprocess.TimeoutExpired:
            said = f"no answer in {ANSWER_S} s"
            continue
        except OSError as fault:
            said = str(fault)
        else:
            said = " ".join((done.stdout + done.stderr).split())[-300:] or f"exit code {done.returncode}"
            if done.returncode == 0 and "No devices" not in said:
                return done.stdout
        if not expected and any(sign in said for sign in NO_GPU):
            return ""
    raise UserError(
        f"nvidia-smi cannot list the GPUs: {said}. Reset the GPU or start the machine anew until it works; "
        "to run on the CPU, set CUDA_VISIBLE_DEVICES to nothing."
    )


def visible_gpus(
    environment: Mapping[str, str], installed: Sequence[tuple[Gpu, tuple[str, ...]]]
) -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves: indices, UUIDs or their beginnings, MIG instances.

    As CUDA does, the list ends at the first entry that names nothing; an empty list means no GPU.
    """
    wanted = environment.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return tuple(_usable(gpu, instances) for gpu, instances in installed)
    found: list[Gpu] = []
    for entry in (part.strip() for part in wanted.split(",")):
        gpu = _named(entry, installed)
        if gpu is None:
            break
        if gpu not in found:
            found.append(gpu)
    return tuple(found)


def _usable(gpu: Gpu, instances: Sequence[str]) -> Gpu:
    """What CUDA uses of a GPU that is named as a whole: its first MIG instance, where it is divided."""
    return Gpu(instances[0], gpu.name, 0) if instances else gpu


def _named(entry: str, installed: Sequence[tuple[Gpu, tuple[str, ...]]]) -> Gpu | None:
    if entry.isdecimal():
        return _usable(*installed[int(entry)]) if int(entry) < len(installed) else None
    if entry.startswith("GPU-"):
        return next((_usable(*one) for one in installed if one[0].uuid.startswith(entry)), None)
    for gpu, instances in installed:
        for instance in instances:
            if entry.startswith("MIG-") and instance.startswith(entry):
                return Gpu(instance, gpu.name, 0)
    return None


def allocated_gpus(environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The GPUs of a Slurm allocation, by their numbers on this host."""
    host = socket.gethostname()
    return tuple(
        Gpu(f"GPU-{number}-{host}", "GPU", 0, device) for number, device in allocation.gpus(environment)
    )


def _gpus_here(environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    wanted = environment.get("CUDA_VISIBLE_DEVICES")
    if wanted is not None and not _names_a_gpu(wanted.partition(",")[0].strip()):
        return ()  # whatever the driver says
    allocated = allocated_gpus(environment)
    installed = installed_gpus(expected=wanted is not None and not allocated)
    return visible_gpus(environment, installed) if installed else allocated


def _names_a_gpu(entry: str) -> bool:
    return entry.isdecimal() or entry.startswith(("GPU-", "MIG-"))


def slots(operation: Mapping[str, object], environment: Mapping[str, str] = os.environ) -> tuple[Slot, ...]:
    """The slots of this host for the config's ``operation`` block.

    GPUs that do not fill a slot of ``gpus_per_server`` stay unused. Without any GPU there are
    ``cpu_servers`` slots; with ``engine: attach`` one for every URL. Raises UserError when the GPUs are too few, or
    cannot be listed.
    """
    urls = operation["attach"]
    if operation["engine"] == "attach":
        assert isinstance(urls, list)
        return tuple(Slot(f"attached{i}", address=url.rstrip("/")) for i, url in enumerate(urls))
    gpus = _gpus_here(environment)
    size = operation["gpus_per_server"]
    assert isinstance(size, int)
    if gpus and len(gpus) < size:
        raise UserError(
            f"operation.gpus_per_server is {size}, but only {len(gpus)} GPU(s) are visible here; "
            "lower it, or widen CUDA_VISIBLE_DEVICES."
        )
    if gpus:
        groups = [gpus[i : i + size] for i in range(0, len(gpus) - size + 1, size)]
        return tuple(Slot(_slot_name(group), tuple(group)) for group in groups)
    servers = operation["cpu_servers"]
    assert isinstance(servers, int)
    name = allocation.job(environment)
    owner = "" if name is None else f"job{name}-"  # allocations on one host have a cpu0 each
    return tuple(Slot(f"{owner}cpu{i}") for i in range(servers))


def _slot_name(group: Sequence[Gpu]) -> str:
    """The first UUID's first block: short enough for a socket's path, and the same in every run."""
    return "-".join(gpu.uuid.replace("GPU-", "gpu").replace("MIG-", "mig")[:11] for gpu in group[:4])
