"""Matrix products by the faster of two libraries, where there is a choice.

On an x86 CPU PyTorch takes fp32 products from MKL, which leaves the AVX-512 units of AMD processors unused: 110
GFLOP/s on one core of a Zen 5, where oneDNN, the library that PyTorch takes for bf16 and in compiled graphs, does 250
(measured, 128 to 2048 columns). Both add up in fp32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# The operator is PyTorch's own but not public: where a release lacks it, everything goes the public way.
_ONEDNN = (
    torch.backends.mkldnn.is_available()
    and torch.backends.cpu.get_cpu_capability() == "AVX512"
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` for matrices, transposed views among them: x [N, in], weight [out, in] -> [N, out]."""
    if _onednn_takes(x):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]
    return F.linear(x, weight, bias)


def linear_each(x: Tensor, weight: Tensor) -> Tensor:
    """x[k] weight[k]ᵀ for every k: x [K, N, in], weight [K, out, in] -> [K, N, out]."""
    if _onednn_takes(x):
        return torch.stack([linear(own, by) for own, by in zip(x, weight, strict=True)])
    return torch.bmm(x, weight.mT)


def _onednn_takes(x: Tensor) -> bool:
    asks_gradient = x.requires_grad and torch.is_grad_enabled()  # this way there is no backward
    return _ONEDNN and x.dtype == torch.float32 and x.device.type == "cpu" and not asks_gradient
