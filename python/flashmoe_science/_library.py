"""Loads the compiled library and tells torch the shapes of what its ops return."""

from __future__ import annotations

from pathlib import Path

import torch

LIBRARY = Path(__file__).parent / "lib" / "libflashmoe_torch.so"


def _load() -> None:
    if not LIBRARY.exists():
        raise ImportError(
            f"flashmoe_science: {LIBRARY} is missing. In a checkout run `make build`; "
            "otherwise reinstall the package with `pip install --no-build-isolation .`"
        )
    try:
        torch.ops.load_library(LIBRARY)
    except OSError as error:
        raise ImportError(
            f"flashmoe_science: cannot load {LIBRARY} with torch {torch.__version__} "
            f"(2.10 or newer is needed): {error}"
        ) from error


_load()


def _check_devices(first: str, here: torch.Tensor, **tensors) -> None:
    """A fake kernel is also what runs when a meta tensor stands among real ones."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != here.device:
            raise RuntimeError(
                f"{name} is on {tensor.device} and {first} on {here.device}; "
                f"move it with .to({first}.device)"
            )


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What sums are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _gradients(likes, wanted) -> tuple[torch.Tensor, ...]:
    """One for each tensor, empty where it is not wanted."""
    return tuple(
        torch.empty_like(like) if want else like.new_empty((0,))
        for like, want in zip(likes, wanted, strict=True)
    )


def _check_attention_devices(q, k, v, bias, sinks, key_lengths, cu_q, cu_k, **more) -> None:
    lengths = {"key_lengths": key_lengths, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    _check_devices("query", q, key=k, value=v, bias=bias, sinks=sinks, **lengths, **more)


def _attention_results(query, value) -> tuple[torch.Tensor, torch.Tensor]:
    if query.shape[-1] == value.shape[-1]:
        out = torch.empty_like(query)
    else:
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    return out, query.new_empty(query.shape[:-1], dtype=_wide(query.dtype))


@torch.library.register_fake("flashmoe::attention")
@torch.library.register_fake("flashmoe::attention_forward")
def _attention_fake(query, key, value, bias, sinks, key_lengths, cu_q, cu_k, *options):
    seed = options[-1]
    _check_attention_devices(query, key, value, bias, sinks, key_lengths, cu_q, cu_k, seed=seed)
    return _attention_results(query, value)


@torch.library.register_fake("flashmoe::attention_backward")
@torch.library.register_fake("flashmoe::attention_gradients")
def _attention_backward_fake(
    grad_out, grad_lse, out, lse, query, key, value, bias, sinks, key_lengths, cu_q, cu_k, *rest
):
    results = {"out": out, "lse": lse, "grad_out": grad_out, "grad_lse": grad_lse}
    _check_attention_devices(query, key, value, bias, sinks, key_lengths, cu_q, cu_k, **results)
    inputs, needs, (*_, seed) = (query, key, value, bias, sinks), rest[-5:], rest[:-5]
    _check_devices("query", query, seed=seed)
    return _gradients(
        (query if x is None else x for x in inputs),
        (need and x is not None for x, need in zip(inputs, needs, strict=True)),
    )


@torch.library.register_fake("flashmoe::attention_backward_plain")
def _plain_backward_fake(grad_out, query, key, value, bias, out, lse, causal, scale, *needs):
    results = {"grad_out": grad_out, "out": out, "lse": lse}
    _check_devices("query", query, key=key, value=value, bias=bias, **results)
    inputs = (query, key, value, query if bias is None else bias)
    return _gradients(inputs, (*needs[:3], needs[3] and bias is not None))


def _check_paged_devices(query, *arguments, **results) -> None:
    names = ("k_cache", "v_cache", "block_table", "seq_lens", "cu_seqlens_q", "sinks", "k_scale")
    tensors = dict(zip((*names, "v_scale"), arguments, strict=False))
    _check_devices("query", query, **tensors, **results)


@torch.library.register_fake("flashmoe::attention_paged")
@torch.library.register_fake("flashmoe::attention_paged_unchecked")
def _attention_paged_fake(query, k_cache, v_cache, *rest):
    _check_paged_devices(query, k_cache, v_cache, *rest)
    out, lse = _attention_results(query, v_cache)
    return out, lse if rest[-1] else query.new_empty((0,), dtype=torch.float32)


@torch.library.register_fake("flashmoe::attention_paged_out")
@torch.library.register_fake("flashmoe::attention_paged_out_unchecked")
def _attention_paged_out_fake(*arguments):
    *inputs, out, lse = arguments
    _check_paged_devices(*inputs, out=out, lse=lse)


@torch.library.register_fake("flashmoe::cache_append")
@torch.library.register_fake("flashmoe::cache_append_unchecked")
def _cache_append_fake(key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale):
    caches = {"k_cache": k_cache, "v_cache": v_cache, "slot_mapping": slot_mapping}
    _check_devices("key", key, value=value, **caches, k_scale=k_scale, v_scale=v_scale)


_TANGENTS = ("tangent_query", "tangent_key", "tangent_value", "tangent_bias", "tangent_sinks")


@torch.library.register_fake("flashmoe::attention_tangent")
def _attention_tangent_fake(*args):
    names = (*_TANGENTS, "out", "lse")
    first, call = args[: len(names)], args[len(names) :]
    _check_devices("query", call[0], **dict(zip(names, first, strict=True)))
    return _attention_fake(*call)


@torch.library.register_fake("flashmoe::attention_second")
def _attention_second_fake(*args):
    names = (*_TANGENTS, "tangent_out", "tangent_lse")
    first, call = args[: len(names)], args[len(names) :]
    _check_devices("query", call[4], **dict(zip(names, first, strict=True)))
    return _attention_backward_fake(*call)


GATED = ("swiglu", "geglu", "reglu")


def _check_moe_devices(x, gate_up, down, up_bias, down_bias, ids, weights, **more) -> None:
    parameters = {"gate_up": gate_up, "down": down, "up_bias": up_bias, "down_bias": down_bias}
    _check_devices("x", x, **parameters, ids=ids, weights=weights, **more)


@torch.library.register_fake("flashmoe::moe")
@torch.library.register_fake("flashmoe::moe_forward")
def _moe_fake(x, gate_up, down, up_bias, down_bias, ids, weights, activation, keep):
    _check_moe_devices(x, gate_up, down, up_bias, down_bias, ids, weights)
    out = x.new_empty(x.shape)
    if not keep:
        return out, x.new_empty((0,)), x.new_empty((0,), dtype=torch.int32)
    pairs, gates, inner = ids.shape[0] * ids.shape[1], 1 + (activation in GATED), down.shape[2]
    # CUDA kernels want rows at multiples of 16 bytes.
    row = (inner + 7) // 8 * 8 if x.is_cuda and x.dtype.itemsize == 2 else inner
    pre = x.new_empty_strided((pairs, gates, inner), (gates * row, row, 1))
    return out, pre, x.new_empty((gate_up.shape[0] + 1 + pairs,), dtype=torch.int32)


@torch.library.register_fake("flashmoe::moe_backward")
def _moe_backward_fake(
    grad_out, pre, routing, x, gate_up, down, up_bias, down_bias, ids, weights, activation, *needs
):
    kept = {"grad_out": grad_out, "pre": pre, "routing": routing}
    _check_moe_devices(x, gate_up, down, up_bias, down_bias, ids, weights, **kept)
    absent = (x, x, x, x, x, x.new_empty((0,), dtype=_wide(x.dtype)))
    inputs = (x, gate_up, down, up_bias, down_bias, weights)
    return _gradients(
        (like if given is None else given for given, like in zip(inputs, absent, strict=True)),
        (need and given is not None for given, need in zip(inputs, needs, strict=True)),
    )


@torch.library.register_fake("flashmoe::route")
@torch.library.register_fake("flashmoe::route_forward")
def _route_fake(logits, bias, k, scoring, normalize):
    _check_devices("logits", logits, bias=bias)
    shape = (logits.shape[0], k)
    wide = _wide(logits.dtype)
    return logits.new_empty(shape, dtype=wide), logits.new_empty(shape, dtype=torch.int32)


@torch.library.register_fake("flashmoe::route_backward")
def _route_backward_fake(grad_weights, logits, ids, scoring, normalize):
    _check_devices("logits", logits, grad_weights=grad_weights, ids=ids)
    return torch.empty_like(logits)


forward = torch.ops.flashmoe.attention_forward.default
backward = torch.ops.flashmoe.attention_backward.default
gradients = torch.ops.flashmoe.attention_gradients.default
tangent = torch.ops.flashmoe.attention_tangent.default
second = torch.ops.flashmoe.attention_second.default
attention = torch.ops.flashmoe.attention.default

# Attention as a node in C++ (src/torch/attention_node.cc); None where this torch has another op
# under that name.
_NODE = (
    "aten::_scaled_dot_product_fused_attention_overrideable(Tensor query, Tensor key, "
    "Tensor value, Tensor? attn_bias=None, float dropout_p=0., bool is_causal=False, "
    "bool return_debug_mask=False, *, float? scale=None) -> (Tensor output, Tensor logsumexp, "
    "Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, Tensor philox_seed, "
    "Tensor philox_offset, Tensor debug_attn_mask)",
    "aten::_scaled_dot_product_fused_attention_overrideable_backward(Tensor grad_out, "
    "Tensor query, Tensor key, Tensor value, Tensor attn_bias, bool[4] grad_input_mask, "
    "Tensor out, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, "
    "SymInt max_k, float dropout_p, bool is_causal, Tensor philox_seed, Tensor philox_offset, *, "
    "float? scale=None) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, "
    "Tensor grad_attn_bias)",
)


def _find_node(schemas: tuple[str, ...]):
    for schema in schemas:
        name = schema[len("aten::") : schema.index("(")]
        packet = getattr(torch.ops.aten, name, None)
        if packet is None or str(packet.default._schema) != schema:
            return None
    return torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default


node = _find_node(_NODE)
explain = torch.ops.flashmoe.explain.default

explain_paged = torch.ops.flashmoe.explain_paged.default
explain_append = torch.ops.flashmoe.explain_append.default

moe_forward = torch.ops.flashmoe.moe_forward.default
moe_backward = torch.ops.flashmoe.moe_backward.default
moe = torch.ops.flashmoe.moe.default
explain_moe = torch.ops.flashmoe.explain_moe.default
route_forward = torch.ops.flashmoe.route_forward.default
route_backward = torch.ops.flashmoe.route_backward.default
route = torch.ops.flashmoe.route.default
