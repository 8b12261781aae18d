"""Attention of transformers' models by our kernels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..attention import flash_attention, flash_attention_varlen

__all__ = ["register_attention"]

# A name with "flash" in it, transformers would look for on its hub of kernels.
NAME = "fm_attention"


def _refuse(module: nn.Module, what: str, instead: str) -> None:
    raise NotImplementedError(
        f"{type(module).__name__} asks for {what}, which flashmoe_science has no kernel for; "
        f"{instead}"
    )


def _check(module: nn.Module, dropout: float, kwargs: dict) -> None:
    if dropout:
        instead = (
            "set attention_dropout (BERT: attention_probs_dropout_prob, GPT-2: attn_pdrop) to 0 in "
            "the model's config, or call model.eval()"
        )
        _refuse(module, f"dropout of attention weights ({dropout})", instead)
    for name in ("output_attentions", "head_mask"):
        value = kwargs.get(name)
        if value is not None and value is not False:
            _refuse(module, name, 'use attn_implementation="eager" for it')


def _as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """transformers' masks of four dimensions, true where a key is seen, or added to the scores."""
    if mask.dim() != 4:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}; a mask that a model hands to its "
            "attention has four dimensions, (B, 1 or H, Sq, Sk). Padding, (B, Sk), is for the model"
        )
    if mask.dtype == torch.bool:
        return torch.where(mask, torch.zeros((), dtype=dtype, device=mask.device), float("-inf"))
    return mask


def _sum(query: Tensor, *biases: Tensor | None) -> Tensor | None:
    given = [bias.to(query.device) for bias in biases if bias is not None]
    return _beside(query, sum(given[1:], given[0])) if given else None


def _beside(query: Tensor, x: Tensor) -> Tensor:
    """A bias or sinks in a dtype that our kernels take with these queries."""
    return x if x.dtype in (query.dtype, torch.float32) else x.to(query.dtype)


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As torch does for its own attention: everything but float64 goes in autocast's dtype."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def _band(mask) -> dict:
    """The options causal and window of a band around the diagonal."""
    return {"causal": mask.right == 0, "window": (mask.left, mask.right)}


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """A layer's attention, as AttentionInterface calls it: (B, H, S, D) in, (B, S, H, D) out.

    The mask says what a query sees, a sliding window too. Without one that is every key, as in
    eager attention, or up to the own one where the module says so.
    """
    from .masks import Mask

    _check(module, dropout, kwargs)
    query, key, value = _autocast(query, key, value)
    options = {"scale": scaling, "softcap": softcap}
    if s_aux is not None:
        options["sinks"] = _beside(query, s_aux)
    mask = attention_mask
    if mask is None:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", False)
        mask = Mask(right=0 if causal else -1)
    elif isinstance(mask, Tensor):
        mask = Mask(bias=_as_bias(mask, query.dtype))
    elif mask.ragged is not None and position_bias is None:
        return _attend_ragged(query, key, value, mask, options), None
    elif mask.is_packed:
        _refuse(module, "position_bias over packed sequences", "pad them instead")
    lengths = None if mask.key_lengths is None else mask.key_lengths.to(query.device)
    bias = _sum(query, position_bias, mask.bias)
    out = flash_attention(query, key, value, bias, key_lengths=lengths, **_band(mask), **options)
    return out.transpose(1, 2), None


def _attend_ragged(query: Tensor, key: Tensor, value: Tensor, mask, options: dict) -> Tensor:
    ragged, batch = mask.ragged, query.shape[0]
    given = (batch, query.shape[2], key.shape[2])
    if given != ragged.shape:
        raise ValueError(
            f"attention_mask is for (batch, queries, keys) of {ragged.shape}, and the layer's are "
            f"{given}; the model calls its attention with other tokens than its mask is for"
        )
    tokens = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    cu_seqlens = (x.to(query.device) for x in (ragged.cu_seqlens_q, ragged.cu_seqlens_k))
    out = flash_attention_varlen(*tokens, *cu_seqlens, *ragged.longest, **_band(mask), **options)
    return out.unflatten(0, (batch, -1))


def register_attention(continuous_batching: bool = False) -> str:
    """Puts our attention into transformers (5.17 or newer), and returns its name.

    For every model whose attention follows transformers' interface::

        model = AutoModelForCausalLM.from_pretrained(..., attn_implementation=register_attention())

    or ``model.set_attn_implementation("fm_attention")`` later: training, generation, padding on
    either side, packed sequences, sliding windows, sinks and softcap. What we cannot compute as the
    model means it (dropout of attention weights, ``output_attentions``) is refused when it is
    asked for.

    With ``continuous_batching`` the name is for ``model.generate_batch()``, whose keys and values
    lie in pages.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface

        from . import masks
    except ImportError as error:
        raise ImportError(
            "register_attention() needs transformers >= 5.17, whose models take attention and its "
            f"masks by name: pip install 'transformers>=5.17'. ({error})"
        ) from error
    if continuous_batching:
        from .batching import register

        return register()
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, masks.prepare)
    return NAME
