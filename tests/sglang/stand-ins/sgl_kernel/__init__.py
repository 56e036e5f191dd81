"""Stand-in for SGLang's compiled kernels, of which PyPI has no CPU build.

SGLang imports many names from here at start-up, but on the CPU plain serving calls none of them
(speculative decoding and moves of the KV cache would). Every name exists; calling one fails loudly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):  # dunders are questions about the module, not kernels
        raise AttributeError(name)

    def missing(*_args: object, **_options: object) -> NoReturn:
        raise NotImplementedError(f"the kernel sgl_kernel.{name} has no CPU build; it cannot run here")

    return missing
