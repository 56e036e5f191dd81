"""Which GPUs this process may use, and how they are divided into slots of one server each.

A GPU is named by its UUID and never by its index: two allocations on one host may both call theirs 0. Where no
driver tells UUIDs (in many containers), a Slurm allocation's GPU is named by its number on its host.
"""

from __future__ import annotations

import csv
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from draftmill.errors import UserError
from draftmill.fleet import allocation


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
def installed_gpus() -> tuple[tuple[Gpu, tuple[str, ...]], ...]:
    """All GPUs in the driver's order, each with the UUIDs of its MIG instances."""
    query = ["nvidia-smi", "--query-gpu=uuid,name,memory.total", "--format=csv,noheader,nounits"]
    rows = list(csv.reader(_output(query).splitlines(), skipinitialspace=True))
    instances: dict[str, list[str]] = {}
    current = ""
    for line in _output(["nvidia-smi", "-L"]).splitlines():
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


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


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


def slots(operation: Mapping[str, object], environment: Mapping[str, str] = os.environ) -> tuple[Slot, ...]:
    """The slots of this host for the config's ``operation`` block.

    GPUs that do not fill a slot of ``gpus_per_server`` stay unused. Without any GPU there are
    ``cpu_servers`` slots; with ``engine: attach`` one for every URL.
    """
    urls = operation["attach"]
    if operation["engine"] == "attach":
        assert isinstance(urls, list)
        return tuple(Slot(f"attached{i}", address=url.rstrip("/")) for i, url in enumerate(urls))
    installed = installed_gpus()
    gpus = visible_gpus(environment, installed) if installed else allocated_gpus(environment)
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
