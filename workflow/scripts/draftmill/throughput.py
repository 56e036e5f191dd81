"""How fast a setting should be: a model of decode steps and prefill passes on top of the roofline.

Knows three constants measured on one card; so its absolute rates hold for kernels like those, and the
ratios by which it ranks settings carry further. Must never know a running server.
"""

import math
from dataclasses import dataclass

from draftmill.architecture import Architecture
from draftmill.capacity import Capacity, Workload, obeyed_free_slots, roofline
from draftmill.gpus import Gpu
from draftmill.server_flags import UNKNOWN, Dialect, ServerFlags, resolved_overlap

# The time model's three measured constants (H200, Triton kernels, 64 layers; the recordings): a decode
# step reaches this share of the roofline, a prefill pass of this share of the arithmetic peak, and no
# pass without a CUDA graph is shorter than this a layer, since launching its kernels takes that long.
DECODE_EFFICIENCY = 0.62
PREFILL_EFFICIENCY = 0.6
LAUNCH_S_PER_LAYER = 1.6e-3
# --enable-prefill-delayer holds a prefill back for at most 30 decode steps.
DELAYER_STEPS = 30


@dataclass(frozen=True, slots=True)
class Estimate:
    """Output rate that the time model expects, and where a second goes.

    tok_s holds for kernels like those it was measured with; the ratio of two estimates carries further.
    """

    tok_s: float
    step_s: float
    prefill_share: float


def estimate(
    architecture: Architecture,
    gpu: Gpu,
    flags: ServerFlags,
    workload: Workload,
    have: Capacity,
    dialect: Dialect = UNKNOWN,
) -> Estimate:
    """The rate of a full server. A prefill pass stops decoding; one is due whenever an answer has ended.

    With b requests of L output tokens, b/L answers end a decode step, so without batching of prefills
    1 - exp(-b/L) passes fall on each. Holding them back until g slots are free makes it b/(L g), at the
    price of (g - 1)/2 slots that stand empty on average.
    """
    running = have.running
    if running <= 0:
        return Estimate(0.0, math.inf, 0.0)
    ending_per_request = 1 / max(workload.output_tokens, 1)
    passes = 1 - math.exp(-running * ending_per_request)
    group = _prefill_group(flags, have, running * ending_per_request, dialect, architecture)
    batch = float(running)
    if group > 1:
        batch = max(running - (group - 1) / 2, 1.0)
        passes = min(passes, batch * ending_per_request / group)
    line = roofline(architecture, gpu, flags, workload, round(batch))
    launch = architecture.layers * LAUNCH_S_PER_LAYER
    step = line.step_s / DECODE_EFFICIENCY
    if batch > have.graph_max_batch:
        step = max(step, launch)
    cached = workload.cached_share if flags.radix_cache else 0.0
    prompts = batch * ending_per_request / passes * workload.prompt_tokens * (1 - cached)
    compute = 2 * architecture.active_parameters * prompts / flags.tp / (gpu.bf16_flops * PREFILL_EFFICIENCY)
    prefill = passes * max(launch, compute)
    return Estimate(batch / (step + prefill), step, prefill / (step + prefill))


def _prefill_group(
    flags: ServerFlags, have: Capacity, ending_per_step: float, dialect: Dialect, architecture: Architecture
) -> float:
    group = 1.0
    if flags.min_free_slots is not None:
        group = float(obeyed_free_slots(flags.min_free_slots, have.max_running, dialect))
    if flags.prefill_delayer and resolved_overlap(flags, architecture.name, architecture.state is not None):
        group = max(group, DELAYER_STEPS * ending_per_step)
    return group
