"""What a GPU model can do: memory, memory bandwidth, dense bf16 arithmetic, each with its source.

Knows published figures and how people refer to a card ("a quarter of a B200"). Must never know which
GPUs this machine has (that is the fleet's business) nor how a model uses one (capacity.py).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from draftmill.errors import UserError

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU model.

    memory_bytes: total as the driver reports it (nvidia-smi memory.total), which is what SGLang reckons
    with; nominal_gb: the number in the product's name. bandwidth: bytes/s. bf16_flops: dense FLOP/s with
    fp32 accumulation, no sparsity. source: the document behind bandwidth and bf16_flops.
    """

    name: str
    nominal_gb: int
    memory_bytes: int
    bandwidth: float
    bf16_flops: float
    source: str


def _gpu(name: str, nominal_gb: int, memory_mib: int, tb_s: float, tflops: float, source: str) -> Gpu:
    return Gpu(name, nominal_gb, memory_mib * MIB, tb_s * 1e12, tflops * 1e12, source)


# Data sheets give tensor throughput with sparsity; the dense figure here is half of it.
GPUS: tuple[Gpu, ...] = (
    _gpu("B300", 288, 275040, 8.0, 2250, "NVIDIA DGX B300 data sheet (HGX B300, one of 8 GPUs)"),
    _gpu("GB200", 186, 189471, 8.0, 2500, "NVIDIA GB200 NVL72 data sheet (one of 72 GPUs)"),
    _gpu("B200", 192, 183359, 8.0, 2250, "NVIDIA DGX B200 data sheet (one of 8 GPUs)"),
    _gpu("GH200", 96, 97871, 4.0, 989.5, "NVIDIA GH200 Grace Hopper data sheet (HBM3)"),
    _gpu("H200", 141, 143771, 4.8, 989.5, "NVIDIA H200 Tensor Core GPU data sheet (SXM)"),
    _gpu("H100 NVL", 94, 95830, 3.9, 835.5, "NVIDIA H100 Tensor Core GPU data sheet (NVL)"),
    _gpu("H100 PCIe", 80, 81559, 2.0, 756.5, "NVIDIA H100 Tensor Core GPU data sheet (PCIe)"),
    _gpu("H100", 80, 81559, 3.35, 989.5, "NVIDIA H100 Tensor Core GPU data sheet (SXM)"),
    _gpu("H20", 96, 97871, 4.0, 148, "NVIDIA H20 product brief"),
    _gpu("A100 PCIe", 80, 81920, 1.935, 312, "NVIDIA A100 Tensor Core GPU data sheet (80 GB PCIe)"),
    _gpu("A100", 80, 81920, 2.039, 312, "NVIDIA A100 Tensor Core GPU data sheet (80 GB SXM)"),
    _gpu("A100 40GB", 40, 40960, 1.555, 312, "NVIDIA A100 Tensor Core GPU data sheet (40 GB)"),
    _gpu(
        "RTX PRO 6000",
        96,
        97887,
        1.792,
        503.8,
        "NVIDIA RTX Blackwell PRO architecture paper (workstation edition)",
    ),
    _gpu("RTX 6000 Ada", 48, 49140, 0.96, 364.2, "NVIDIA Ada architecture paper (RTX 6000 Ada Generation)"),
    _gpu("RTX A6000", 48, 49140, 0.768, 154.8, "NVIDIA RTX A6000 data sheet"),
    _gpu("L40S", 48, 46068, 0.864, 362.05, "NVIDIA L40S data sheet"),
    _gpu("L4", 24, 23034, 0.3, 121, "NVIDIA L4 data sheet"),
    _gpu("A10", 24, 23028, 0.6, 125, "NVIDIA A10 data sheet"),
    _gpu("RTX 5090", 32, 32607, 1.792, 209.5, "NVIDIA RTX Blackwell architecture paper (RTX 5090)"),
    _gpu("RTX 4090", 24, 24564, 1.008, 165.2, "NVIDIA Ada architecture paper (RTX 4090)"),
)


def find_gpu(name: str, memory_bytes: int | None = None) -> Gpu | None:
    """The row for a name as the driver or a person writes it ("NVIDIA H100 80GB HBM3"), or None.

    Every word of the row's name must be there. memory_bytes tells variants of one name apart.
    """
    words = set(re.findall(r"[a-z]+\d*[a-z]*|\d+[a-z]*", name.lower()))
    hits = [gpu for gpu in GPUS if set(gpu.name.lower().split()) <= words]
    if memory_bytes is not None and len(hits) > 1:
        hits = [g for g in hits if abs(g.memory_bytes - memory_bytes) < 0.1 * g.memory_bytes] or hits
    return max(hits, key=lambda gpu: len(gpu.name.split()), default=None)


def gpu_with_memory(memory_gb: float) -> Gpu | None:
    """The only row whose nominal size is this many GB, or None where several or none are."""
    hits = [gpu for gpu in GPUS if abs(gpu.nominal_gb - memory_gb) < 0.5]
    return hits[0] if len(hits) == 1 else None


def memory_bytes_of(memory_gb: float) -> int:
    """Bytes of a card sold with that many GB.

    Cards are sold by a rounded number; where all cards of that size report the same total, it is
    that total, else memory_gb GiB, which is nearer to the drivers' totals than 10^9 bytes.
    """
    if memory_gb <= 0:
        raise UserError(f"a GPU memory of {memory_gb} GB is no size: give GB above 0, for example 80")
    totals = {gpu.memory_bytes for gpu in GPUS if abs(gpu.nominal_gb - memory_gb) < 0.5}
    return totals.pop() if len(totals) == 1 else round(memory_gb * GIB)


@dataclass(frozen=True, slots=True)
class Reference:
    """What a user expects of one server: tok/s, or a share of a GPU model."""

    tok_s: float | None = None
    gpu: Gpu | None = None
    share: float = 1.0

    def __str__(self) -> str:
        if self.gpu is None:
            return f"{self.tok_s:,.0f} tok/s"
        return f"{self.share:.0%} of a {self.gpu.name}"


_SHARES = {"quarter": 0.25, "third": 1 / 3, "half": 0.5, "fifth": 0.2, "eighth": 0.125, "tenth": 0.1}


def parse_reference(value: object) -> Reference | None:
    """A reference as the config or a person states it, or None for None.

    Accepts tok/s (6250, "6250 tok/s"), {gpu: B200, share: 0.25}, and words: "a quarter of a B200",
    "25% of a B200", "0.25 B200", "two thirds of an H100", "B200". Raises UserError otherwise.
    """
    if value is None:
        return None
    wrong = UserError(
        f"the reference {value!r} is not understood: give tok/s, {{gpu: B200, share: 0.25}} or 'a quarter of a B200'"
    )
    if isinstance(value, Mapping):
        gpu = find_gpu(str(value.get("gpu", "")))
        share = value.get("share", 1.0)
        if gpu is None:
            raise UserError(f"the reference GPU {value.get('gpu')!r} is not in the table of gpus.py")
        if isinstance(share, bool) or not isinstance(share, int | float) or share <= 0:
            raise UserError(f"the reference share {share!r} is no share: give a number above 0")
        return Reference(gpu=gpu, share=float(share))
    if isinstance(value, int | float) and not isinstance(value, bool):
        if value <= 0:
            raise wrong
        return Reference(tok_s=float(value))
    if not isinstance(value, str):
        raise wrong
    text = value.strip().lower()
    rate = re.fullmatch(r"([\d.,]+)\s*(?:tok(?:ens?)?\s*/\s*s)?", text)
    if rate:
        number = float(rate[1].replace(",", ""))
        if number > 0:
            return Reference(tok_s=number)
        raise wrong
    before, of, after = text.partition(" of ")
    if not of:
        number_first = re.match(r"(\d*\.\d+|\d+(?:\.\d+)?\s*%)\s+(.+)", text)
        before, after = (number_first[1], number_first[2]) if number_first else ("", text)
    gpu = find_gpu(re.sub(r"^(an?|the)\s+", "", after.strip()))
    share = _share(before.strip())
    if gpu is None or share is None:
        raise wrong
    return Reference(gpu=gpu, share=share)


def _share(words: str) -> float | None:
    if not words:
        return 1.0
    number = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*(%?)", words)
    if number:
        share = float(number[1]) / (100 if number[2] else 1)
        return share if share > 0 else None
    counts = {"a": 1, "an": 1, "one": 1, "two": 2, "three": 3}
    first, _, rest = words.rpartition(" ")
    part = _SHARES.get(rest) or _SHARES.get(rest.removesuffix("s"))
    return None if part is None else counts.get(first, 1) * part
