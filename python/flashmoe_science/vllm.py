"""Attention of vLLM's models by our kernels: a backend that vLLM finds by itself.

Where this package is installed beside vLLM (0.19 to 0.32), the entry point
``vllm.general_plugins`` calls :func:`register` in each of its processes. ``--attention-backend
FLASHMOE`` then chooses it, before vLLM 0.32 ``CUSTOM``. Decodes and chunks of prompts go in
one call of :func:`flash_attention_paged`, which waits for nothing and so can be captured.

vLLM promises no contract to backends: all that we know of it is in this file. docs/serving.md says
what is supported.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from .paged import flash_attention_paged, kv_cache_append

# vLLM looks a backend up by its name, and took no new names before 0.32.
NAME = "FLASHMOE" if hasattr(AttentionBackendEnum, "register") else "CUSTOM"
ON_CPU = "FLASHMOE_VLLM_CPU"  # the environment variable that asks for our kernels on the CPU


def register() -> None:
    """Tells vLLM of this backend. May be called again and again."""
    path = f"{FlashMoeBackend.__module__}.{FlashMoeBackend.__qualname__}"
    if NAME not in AttentionBackendEnum.__members__:
        AttentionBackendEnum.register(NAME, path)
    elif NAME == "CUSTOM" and not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, path)
    # On the CPU vLLM lets nobody choose.
    if os.environ.get(ON_CPU) == "1":
        register_backend(AttentionBackendEnum.CPU_ATTN, path)


def _refuse(what: str) -> None:
    raise NotImplementedError(
        f"{what} is not supported by the attention of flashmoe_science; choose another backend "
        "with --attention-backend"
    )


class FlashMoeBackend(AttentionBackend):
    accept_output_buffer = True
    forward_includes_kv_cache_update = False
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]  # noqa: RUF012
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"]  # noqa: RUF012

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[FlashMoeImpl]:
        return FlashMoeImpl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, *more, **other
    ) -> tuple[int, ...]:
        """A row has the key of a head and its value. From vLLM 0.29 on it is always this."""
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @staticmethod
    def get_supported_kernel_block_sizes(*spec) -> list:
        return [MultipleOf(1)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 1 <= head_size <= 512

    @classmethod
    def supports_compute_capability(cls, capability) -> bool:
        return capability >= (7, 5)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # a request with more queries than its bound is NaN

    @classmethod
    def supports_combination(
        cls, head_size, dtype, kv_cache_dtype, *more, device_capability=None, **other
    ) -> str | None:
        return why_not(dtype, kv_cache_dtype, device_capability or (more[-1] if more else None))


def why_not(dtype: torch.dtype, kv_cache_dtype: str | None, capability) -> str | None:
    """Why our kernels have no such combination; capability is a GPU's (major, minor)."""
    sixteen = {"float16": torch.float16, "bfloat16": torch.bfloat16}
    if kv_cache_dtype in sixteen and sixteen[kv_cache_dtype] != dtype:
        return f"a {kv_cache_dtype} cache under {dtype} queries"
    if str(kv_cache_dtype).startswith("fp8") and dtype == torch.float32:
        return "an fp8 cache under float32 queries; use float16 or bfloat16"
    if capability is not None and dtype == torch.float32:
        return "float32 on a GPU; use float16 or bfloat16"
    if capability is not None and dtype == torch.bfloat16 and capability < (8, 0):
        return "bfloat16 below compute capability 8.0; use float16"
    return None


@dataclass
class Metadata:
    num_actual_tokens: int
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool


class Builder(AttentionMetadataBuilder[Metadata]):
    # Lengths are read on the device: a graph serves whatever fits the bounds it was captured with.
    _cudagraph_support = AttentionCGSupport.ALWAYS
    supports_update_block_table = True

    def __init__(self, *args, **kwargs) -> None:  # abstract in vLLM's class
        super().__init__(*args, **kwargs)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> Metadata:
        batch = common_attn_metadata
        asked = {"causal of each request": isinstance(batch.causal, Tensor)}
        for name in ("mm_req_doc_ranges", "rswa_prefix_lens"):
            asked[name] = getattr(batch, name, None) is not None
        for name, given in asked.items():
            if given:
                _refuse(name)
        return Metadata(
            batch.num_actual_tokens,
            batch.query_start_loc,
            batch.seq_lens,
            batch.block_table_tensor,
            batch.slot_mapping,
            batch.max_query_len,
            batch.max_seq_len,
            batch.causal,
        )

    def update_block_table(self, metadata, blk_table, slot_mapping) -> Metadata:
        return replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)


class FlashMoeImpl(AttentionImpl[Metadata]):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **more,
    ) -> None:
        asked = {"alibi_slopes": alibi_slopes, **more}
        if attn_type != AttentionType.DECODER:
            asked["attn_type"] = attn_type
        if kv_cache_dtype not in FlashMoeBackend.supported_kv_cache_dtypes:
            asked["kv_cache_dtype"] = kv_cache_dtype
        for name, value in asked.items():
            if value is not None and value is not False:
                _refuse(f"{name}={value!r}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.fp8 = kv_cache_dtype.startswith("fp8")
        self.options = {
            "window": None if sliding_window is None else (sliding_window - 1, -1),
            "scale": self.scale,
            "softcap": logits_soft_cap or None,
            "sinks": sinks,
        }

    def _caches(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """(blocks, heads, page, 2 D) of any strides as two of (blocks, page, heads, D)."""
        if self.fp8:
            kv_cache = kv_cache.view(torch.float8_e4m3fn)  # vLLM's are of uint8
        rows = kv_cache.transpose(1, 2)
        return rows[..., : self.head_size], rows[..., self.head_size :]

    def _scales(self, layer) -> dict[str, Tensor]:
        return {"k_scale": layer._k_scale, "v_scale": layer._v_scale} if self.fp8 else {}

    def do_kv_cache_update(
        self, layer, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        tokens = slot_mapping.shape[0]  # key and value may be padded to the size of a graph
        caches, scales = self._caches(kv_cache), self._scales(layer)
        kv_cache_append(key[:tokens], value[:tokens], *caches, slot_mapping, **scales)

    def forward(
        self,
        layer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor | None = None,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if output_scale is not None or output_block_scale is not None:
            _refuse("output_scale")
        if attn_metadata is None:  # vLLM measures how much memory a step takes
            return output.fill_(0)
        batch, tokens = attn_metadata, attn_metadata.num_actual_tokens
        flash_attention_paged(
            query[:tokens],
            *self._caches(kv_cache),
            batch.block_table,
            batch.seq_lens,
            cu_seqlens_q=batch.cu_seqlens_q,
            max_seqlen_q=batch.max_seqlen_q,
            max_seqlen_k=batch.max_seqlen_k,
            causal=batch.causal,
            out=output[:tokens],
            **self.options,
            **self._scales(layer),
        )
        return output
