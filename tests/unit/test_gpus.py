"""The GPU table and the ways a person refers to a card."""

import pytest

from draftmill.errors import UserError
from draftmill.gpus import GIB, GPUS, Gpu, find_gpu, gpu_with_memory, memory_bytes_of, parse_reference


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_rows_are_whole_and_plausible(gpu: Gpu) -> None:
    assert gpu.source
    assert 0.85 * gpu.nominal_gb < gpu.memory_bytes / GIB <= 1.01 * gpu.nominal_gb
    assert 0.2e12 < gpu.bandwidth <= 8e12
    assert 100e12 < gpu.bf16_flops < 3000e12
    assert find_gpu(f"NVIDIA {gpu.name}", gpu.memory_bytes) == gpu


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-PCIE-80GB", "A100 PCIe"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
    ],
)
def test_names_of_the_driver_are_found(driver: str, name: str) -> None:
    found = find_gpu(driver)
    assert found is not None and found.name == name


def test_memory_tells_variants_of_one_name_apart() -> None:
    found = find_gpu("NVIDIA A100-SXM4-40GB", 40960 << 20)
    assert found is not None and found.name == "A100 40GB"


def test_a_size_as_sold_is_the_total_that_the_driver_reports() -> None:
    assert memory_bytes_of(141) == 143771 << 20
    assert memory_bytes_of(100) == 100 * GIB
    h200, sold_by_several = gpu_with_memory(141), gpu_with_memory(80)
    assert h200 is not None and h200.name == "H200"
    assert sold_by_several is None
    with pytest.raises(UserError, match="no size"):
        memory_bytes_of(0)


@pytest.mark.parametrize(
    ("said", "share"),
    [
        ("a quarter of a B200", 0.25),
        ("25% of a B200", 0.25),
        ("0.25 B200", 0.25),
        ("half of a B200", 0.5),
        ("two thirds of a B200", 2 / 3),
        ("B200", 1.0),
        ({"gpu": "B200", "share": 0.25}, 0.25),
        ({"gpu": "NVIDIA B200"}, 1.0),
    ],
)
def test_shares_of_a_card(said: object, share: float) -> None:
    reference = parse_reference(said)
    assert reference is not None and reference.gpu is not None
    assert reference.gpu.name == "B200" and reference.share == pytest.approx(share)


@pytest.mark.parametrize("said", [6250, 6250.0, "6250", "6,250 tok/s", "6250 tokens/s"])
def test_plain_rates(said: object) -> None:
    reference = parse_reference(said)
    assert reference is not None and reference.tok_s == 6250


def test_no_reference_is_none() -> None:
    assert parse_reference(None) is None


@pytest.mark.parametrize(
    "said",
    [
        "fast",
        "a quarter of a horse",
        0,
        -5,
        True,
        [],
        {"gpu": "X1"},
        {"gpu": "B200", "share": 0},
        "purple of a B200",
        "",
    ],
)
def test_what_is_no_reference_is_said(said: object) -> None:
    with pytest.raises(UserError, match="reference"):
        parse_reference(said)
