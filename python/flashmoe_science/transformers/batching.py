"""Continuous batching of transformers (``model.generate_batch``) by our kernels.

transformers keeps keys and values in pages and calls a library of flash attention's functions over
them. It takes one by a name with "flash" in it, from a table of its own (``_lazy_imports``); here
our compat functions come into that table.
"""

from __future__ import annotations

from torch.compiler import is_compiling
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
from transformers import modeling_flash_attention_utils as flash
from transformers.integrations.flash_attention import flash_attention_forward

from ..compat import flash_attn as ours
from .masks import NO_LIMIT, band_of

# The 2 makes transformers decode by block tables, through flash_attn_with_kvcache.
NAME = "flashmoe_2"
PAGED = f"paged|{NAME}"  # how transformers before 5.22 calls it

_their_functions = _their_check = None  # what our hooks stand in front of, once registered


def _functions(implementation, *args, **kwargs):
    if implementation not in (NAME, PAGED):
        return _their_functions(implementation, *args, **kwargs)
    functions = (ours.flash_attn_func, ours.flash_attn_varlen_func, ours.flash_attn_with_kvcache)
    return *functions, flash._pad_input, flash._unpad_input


def _check(self, attn_implementation, *args, **kwargs):
    """Models with sinks list who may compute them; we are not in the list, and can."""
    if attn_implementation not in (NAME, PAGED):
        return _their_check(self, attn_implementation, *args, **kwargs)
    flash.lazy_import_flash_attention(attn_implementation)
    return attn_implementation


def _mask(mask_function=masking_utils.causal_mask_function, **kwargs):
    """Padding is all that flash attention's functions are told of a mask.

    torch.compile cannot look into a mask function; what it compiles is not checked.
    """
    band = (NO_LIMIT, 0) if is_compiling() else band_of(mask_function)
    if band is None or band[1] not in (0, NO_LIMIT):
        raise NotImplementedError(
            f"attn_implementation={NAME!r} has no mask beyond causal, sliding windows and padding; "
            "use register_attention() without continuous_batching for this model"
        )
    return masking_utils.flash_attention_mask(mask_function=mask_function, **kwargs)


def _paged_forward(module, *args, softcap=None, **kwargs):
    """transformers before 5.22 does not hand softcap on."""
    from transformers.integrations.flash_paged import paged_attention_forward

    if softcap is not None:
        raise NotImplementedError(
            f"{type(module).__name__} has a softcap, which continuous batching of this version of "
            "transformers leaves out; update it to 5.22"
        )
    return paged_attention_forward(module, *args, **kwargs)


def register() -> str:
    global _their_functions, _their_check
    if _their_functions is None:
        _their_functions, flash._lazy_imports = flash._lazy_imports, _functions
        _their_check = PreTrainedModel._check_and_adjust_attn_implementation
        PreTrainedModel._check_and_adjust_attn_implementation = _check
    AttentionInterface.register(NAME, flash_attention_forward)
    AttentionMaskInterface.register(NAME, _mask)
    if hasattr(flash, "lazy_import_paged_flash_attention"):
        AttentionInterface.register(PAGED, _paged_forward)
    return NAME
