"""Lets the CUDA build of torchvision import beside a torch without CUDA (CPU runs only, by PYTHONPATH).

The torchvision on PyPI registers shapes for two operators that its compiled half, which does not load
here, should have declared. Declaring them just before torchvision is imported is all it needs: no
image ever reaches them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

SIGNATURE = "(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor"


class _BeforeTorchvision:
    """A finder that finds nothing: it only sees the first import of torchvision coming."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            for operator in ("nms", "qnms"):
                if not hasattr(torch.ops.torchvision, operator):
                    torch.library.define(f"torchvision::{operator}", SIGNATURE)
        return None


sys.meta_path.insert(0, _BeforeTorchvision())
