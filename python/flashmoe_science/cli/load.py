"""Is the compiled library there? Every command asks before it uses it."""

from __future__ import annotations

import importlib

HOW_TO_BUILD = """\
Build it with `make build` in a checkout, or install the package with
`pip install --no-build-isolation .` into an environment that has torch >= 2.10."""


def problem() -> str | None:
    """What is wrong with the library and how to get it, or None when it works."""
    try:
        import torch

        importlib.import_module("flashmoe_science").flash_attention  # noqa: B018
        torch.ops.flashmoe.build_info()
    except Exception as error:  # a broken library fails in many ways, all meaning the same
        first = (str(error).strip() or type(error).__name__).rstrip(".")
        return f"The compiled library of flashmoe_science does not load: {first}.\n{HOW_TO_BUILD}"
    return None
