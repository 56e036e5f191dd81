"""Slots: which GPUs a run may use, by CUDA's own rules, and how they are divided."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftmill.errors import UserError
from draftmill.fleet.slots import Gpu, Slot, slots, visible_gpus

UUIDS = [f"GPU-{n:08x}-1111-2222-3333-444444444444" for n in (0xA0, 0xA1, 0xB0, 0xB1)]
MIGS = ("MIG-c7384736-a75d-5afc-978f-d2f1294409fd", "MIG-28aa9b23-0b9c-5b4e-b9b0-d6a5a0f0a3c1")
GIB = 1 << 30
PLAIN = tuple((Gpu(uuid, "NVIDIA H200", 141 * GIB), ()) for uuid in UUIDS)
DIVIDED = (PLAIN[0], (PLAIN[1][0], MIGS))


def seen(wanted: str | None, installed: Sequence[tuple[Gpu, tuple[str, ...]]] = PLAIN) -> list[str]:
    environment = {} if wanted is None else {"CUDA_VISIBLE_DEVICES": wanted}
    return [gpu.uuid for gpu in visible_gpus(environment, installed)]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("0", [0]),
        ("2,0", [2, 0]),
        (" 1 , 3 ", [1, 3]),
        ("0,0,1", [0, 1]),
        ("-1", []),
        ("1,-1,2", [1]),
        ("0,9,1", [0]),
        ("1,,2", [1]),
        ("none", []),
        ("NoDevFiles", []),
        ("²", []),
        ("0x1", []),
        (UUIDS[3], [3]),
        (f"{UUIDS[2]},{UUIDS[0]}", [2, 0]),
        ("GPU-000000b1", [3]),
        (f"1,{UUIDS[0]}", [1, 0]),
        ("GPU-ffffffff,0", []),
        ("gpu-000000b1", []),
    ],
)
def test_cuda_visible_devices(wanted: str | None, expected: list[int]) -> None:
    assert seen(wanted) == [UUIDS[at] for at in expected]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (None, [UUIDS[0], MIGS[0]]),
        (MIGS[1], [MIGS[1]]),
        (",".join(reversed(MIGS)), [MIGS[1], MIGS[0]]),
        ("MIG-28aa9b23", [MIGS[1]]),
        ("1", [MIGS[0]]),
        (UUIDS[1], [MIGS[0]]),
        (f"1,{MIGS[0]},0", [MIGS[0], UUIDS[0]]),
        ("MIG-00000000,0", []),
    ],
)
def test_mig_instances(wanted: str | None, expected: list[str]) -> None:
    """A divided GPU that is named as a whole is its first instance, so that no two slots share one."""
    assert seen(wanted, DIVIDED) == expected


def test_the_memory_of_an_instance_is_not_that_of_its_gpu() -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": MIGS[0]}, DIVIDED) == (Gpu(MIGS[0], "NVIDIA H200", 0),)


entries = st.sampled_from([*map(str, range(-1, 6)), *UUIDS, "GPU-0", "MIG-x", "", "all", " 2 ", "٣"])


@given(st.lists(entries, max_size=8))
def test_the_list_ends_at_the_first_entry_that_names_nothing(parts: list[str]) -> None:
    whole = seen(",".join(parts))
    assert len(set(whole)) == len(whole) and set(whole) <= set(UUIDS)
    for end in range(len(parts)):
        head = seen(",".join(parts[: end + 1]))
        assert whole[: len(head)] == head
        if not seen(parts[end]):
            assert head == whole
            break


# --- slots, with a real nvidia-smi command of our own making


LIST = f"""GPU 0: NVIDIA H200 (UUID: {UUIDS[0]})
GPU 1: NVIDIA H200 (UUID: {UUIDS[1]})
  MIG 3g.71gb     Device  0: (UUID: {MIGS[0]})
  MIG 3g.71gb     Device  1: (UUID: {MIGS[1]})
"""


def slots_of(
    folder: Path, query: str, listing: str, environment: dict[str, str] | None = None, **operation: Any
) -> list[dict[str, Any]]:
    """The slots in a process that finds an nvidia-smi saying so (what it found is kept for a process's life)."""
    script = f"case \"$1\" in -L) cat <<'END'\n{listing}END\n;; *) cat <<'END'\n{query}END\n;; esac\n"
    return slots_with(folder, script, environment, **operation)


def slots_with(
    folder: Path, script: str, environment: dict[str, str] | None = None, **operation: Any
) -> list[dict[str, Any]]:
    """The slots where nvidia-smi is a shell script."""
    smi = folder / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\n{script}")
    smi.chmod(0o755)
    block = {"engine": "auto", "attach": [], "gpus_per_server": 1, "cpu_servers": 2, **operation}
    asking = (
        "import json, sys; from dataclasses import asdict; from draftmill.fleet import slots\n"
        "slots.PAUSE_S, slots.ANSWER_S = 0.05, 1\n"
        "print(json.dumps([asdict(s) for s in slots.slots(json.loads(sys.argv[1]))]))"
    )
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name != "CUDA_VISIBLE_DEVICES" and not name.startswith("SLURM_")
    }
    done = subprocess.run(
        [sys.executable, "-c", asking, json.dumps(block)],
        env={
            **inherited,
            "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            **(environment or {}),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def query_of(count: int, memory: str = "143771") -> str:
    return "".join(f"{uuid}, NVIDIA H200, {memory}\n" for uuid in UUIDS[:count])


def test_one_slot_for_every_gpu(tmp_path: Path) -> None:
    found = slots_of(tmp_path, query_of(4), "")
    assert [slot["gpus"] for slot in found] == [
        [{"uuid": uuid, "name": "NVIDIA H200", "memory_bytes": 143771 << 20, "index": None}] for uuid in UUIDS
    ]
    assert len({slot["name"] for slot in found}) == 4


def test_what_is_measured_on_one_gpu_does_not_hold_for_two_or_a_part() -> None:
    gpu, part = Gpu("GPU-1", "NVIDIA H200", 0), Gpu(MIGS[0], "NVIDIA H200", 0)
    found = [Slot("a", gpus).hardware for gpus in ((), (gpu,), (gpu, gpu), (part,))]
    assert found == ["cpu", "NVIDIA H200", "2 × NVIDIA H200", "NVIDIA H200 MIG"]


def test_gpus_that_fill_no_slot_stay_unused(tmp_path: Path) -> None:
    (slot,) = slots_of(tmp_path, query_of(3), "", gpus_per_server=2)
    assert [gpu["uuid"] for gpu in slot["gpus"]] == UUIDS[:2]


def test_the_installed_list_obeys_cuda_visible_devices_and_mig(tmp_path: Path) -> None:
    listing = LIST
    found = slots_of(tmp_path, query_of(2), listing, {"CUDA_VISIBLE_DEVICES": f"{MIGS[1]},0"})
    assert [slot["gpus"][0]["uuid"] for slot in found] == [MIGS[1], UUIDS[0]]


def test_a_gpu_without_a_memory_figure_is_a_gpu(tmp_path: Path) -> None:
    """Some share the host's memory, and the driver says so."""
    (slot,) = slots_of(tmp_path, query_of(1, "[N/A]"), "")
    assert slot["gpus"][0]["memory_bytes"] == 0


def test_no_visible_gpu_means_servers_on_the_cpu(tmp_path: Path) -> None:
    for query, environment in (("", {}), (query_of(2), {"CUDA_VISIBLE_DEVICES": ""})):
        found = slots_of(tmp_path, query, "", environment)
        assert [(slot["name"], slot["gpus"]) for slot in found] == [("cpu0", []), ("cpu1", [])]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        # Slurm hides the other jobs' GPUs, or does not
        ({"SLURM_JOB_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "0,1"}, [("2", "0"), ("3", "1")]),
        ({"SLURM_JOB_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "2,3"}, [("2", "2"), ("3", "3")]),
        ({"SLURM_JOB_GPUS": "2,3", "SLURM_STEP_GPUS": "3", "CUDA_VISIBLE_DEVICES": "0"}, [("3", "0")]),
        ({"SLURM_JOB_GPUS": "2,3"}, [("2", "2"), ("3", "3")]),
        ({"SLURM_JOB_GPUS": "2", "CUDA_VISIBLE_DEVICES": ""}, []),
        ({}, []),
    ],
)
def test_an_allocation_without_a_driver(
    tmp_path: Path, environment: dict[str, str], expected: list[tuple[str, str]]
) -> None:
    """The number on the host names the GPU; what CUDA calls it here may be another's name elsewhere."""
    found = slots_of(tmp_path, "", "", {"SLURM_JOB_ID": "7", **environment})
    gpus = [(gpu["uuid"], gpu["index"]) for slot in found for gpu in slot["gpus"]]
    assert gpus == [(f"GPU-{number}-{socket.gethostname()}", device) for number, device in expected]
    if not expected:
        assert [slot["name"] for slot in found] == ["job7-cpu0", "job7-cpu1"]


def test_where_a_driver_tells_uuids_slurm_is_not_asked(tmp_path: Path) -> None:
    (slot,) = slots_of(tmp_path, query_of(2), "", {"SLURM_JOB_GPUS": "5", "CUDA_VISIBLE_DEVICES": "1"})
    assert [gpu["uuid"] for gpu in slot["gpus"]] == [UUIDS[1]]


NO_DRIVER = 'echo "NVIDIA-SMI has failed because it couldn\'t communicate with the NVIDIA driver."; exit 9'
NO_DEVICE = "echo 'No devices were found'; exit 6"
NO_LIBRARY = 'echo "NVIDIA-SMI couldn\'t find libnvidia-ml.so library in your system."; exit 12'
MISMATCH = "echo 'Failed to initialize NVML: Driver/library version mismatch' >&2; exit 18"


@pytest.mark.parametrize("script", [NO_DRIVER, NO_DEVICE, NO_LIBRARY, "echo 'No devices were found'"])
def test_a_driver_that_finds_no_gpu_means_servers_on_the_cpu_unless_one_is_named(
    tmp_path: Path, script: str
) -> None:
    """Some machines and containers without a GPU have an nvidia-smi."""
    assert [slot["name"] for slot in slots_with(tmp_path, script)] == ["cpu0", "cpu1"]
    with pytest.raises(AssertionError, match="UserError: nvidia-smi cannot list the GPUs"):
        slots_with(tmp_path, script, {"CUDA_VISIBLE_DEVICES": "0"})


@pytest.mark.parametrize(
    ("script", "said"),
    [(MISMATCH, "version mismatch"), ("exit 255", "exit code 255"), ("exec sleep 20", "no answer in 1 s")],
)
@pytest.mark.parametrize("environment", [{}, {"SLURM_JOB_GPUS": "2", "CUDA_VISIBLE_DEVICES": "0"}])
def test_a_driver_that_fails_is_named_and_never_no_gpu(
    tmp_path: Path, script: str, said: str, environment: dict[str, str]
) -> None:
    with pytest.raises(AssertionError, match=f"UserError: nvidia-smi cannot list the GPUs: .*{said}"):
        slots_with(tmp_path, script, environment)


def test_a_driver_that_fails_once_is_asked_again(tmp_path: Path) -> None:
    once = f"if mkdir {tmp_path}/failed 2>/dev/null; then {MISMATCH}; fi\n"
    (slot,) = slots_with(tmp_path, once + f"[ \"$1\" = -L ] || echo '{query_of(1).strip()}'\n")
    assert [gpu["uuid"] for gpu in slot["gpus"]] == UUIDS[:1]


@pytest.mark.parametrize("hidden", ["", "-1", "NoDevFiles"])
def test_a_driver_that_fails_does_not_matter_where_all_gpus_are_hidden(tmp_path: Path, hidden: str) -> None:
    found = slots_with(tmp_path, MISMATCH, {"CUDA_VISIBLE_DEVICES": hidden})
    assert [slot["name"] for slot in found] == ["cpu0", "cpu1"]


def test_the_gpus_of_an_allocation_need_no_driver_that_finds_them(tmp_path: Path) -> None:
    """In a container that has nvidia-smi, but not the driver's own library."""
    allocated = {"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "2", "CUDA_VISIBLE_DEVICES": "0"}
    (slot,) = slots_with(tmp_path, NO_LIBRARY, allocated)
    assert slot["gpus"][0]["index"] == "0"


def test_slot_names_are_short_and_the_same_in_every_run(tmp_path: Path) -> None:
    (slot,) = slots_of(tmp_path, query_of(4), "", gpus_per_server=4)
    (again,) = slots_of(tmp_path, query_of(4), "", gpus_per_server=4)
    assert slot["name"] == again["name"] and len(slot["name"]) <= 50 and "/" not in slot["name"]


def test_attached_servers_are_slots_by_url() -> None:
    found = slots(
        {"engine": "attach", "attach": ["http://a:1/", "http://b:2"], "gpus_per_server": 1, "cpu_servers": 1}
    )
    assert [(slot.name, slot.address) for slot in found] == [
        ("attached0", "http://a:1"),
        ("attached1", "http://b:2"),
    ]


def test_more_gpus_a_server_than_there_are_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"UserError: operation\.gpus_per_server is 8, but only 2 GPU"):
        slots_of(tmp_path, query_of(2), "", gpus_per_server=8)
    assert issubclass(UserError, Exception)
