"""Attention with a learned pair bias and its gradient: the example of the README."""

import torch

from flashmoe_science import explain, flash_attention

torch.manual_seed(0)
q, k, v = (torch.randn(2, 4, 30, 16, requires_grad=True) for _ in range(3))  # (B, H, atoms, D)
bias = torch.randn(4, 30, 30, requires_grad=True)  # one value per head and pair of atoms

out = flash_attention(q, k, v, bias=bias)
out.square().sum().backward()

print("out      ", tuple(out.shape))
print("dBias    ", tuple(bias.grad.shape), "reduced over the batch")
print(explain(q, k, v, bias=bias).splitlines()[2].strip())
