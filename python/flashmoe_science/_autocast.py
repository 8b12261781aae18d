"""What torch.autocast asks of every operator."""

from __future__ import annotations

from torch import Tensor, float64, get_autocast_dtype, is_autocast_enabled
from torch._C import _is_any_autocast_enabled as any_autocast

__all__ = ["any_autocast", "cast"]


def cast(tensors: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """All in autocast's dtype, but for float64, as for F.linear and SDPA; differentiable.

    Costs a microsecond: ask ``any_autocast()`` first, which torch.compile cannot trace.
    """
    device = tensors[0].device.type
    if device not in ("cpu", "cuda") or not is_autocast_enabled(device):
        return tensors
    dtype = get_autocast_dtype(device)
    return tuple(
        x.to(dtype) if x is not None and x.is_floating_point() and x.dtype != float64 else x
        for x in tensors
    )
