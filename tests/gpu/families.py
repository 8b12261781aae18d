"""Which kernel families there are to test, and what each takes."""

import torch

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
FAMILIES = {"sm80": ("fp16", "bf16"), "sm75": ("fp16",)}
