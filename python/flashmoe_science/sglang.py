"""Attention of SGLang's models by our kernels: a plugin that SGLang finds by itself.

Where this package is installed beside SGLang (0.5.23), the entry point ``sglang.srt.plugins`` calls
:func:`register` in each of its processes, and ``--attention-backend flashmoe`` chooses it. The
cache is read in pages of one token, whatever SGLang's page size: its table has the slot of each.

Written to SGLang's documented base class and tested with stand-ins of it, never inside SGLang.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
from torch import Tensor

from .paged import flash_attention_paged

NAME = "flashmoe"


def register() -> None:
    """Tells SGLang of this backend. May be called again and again."""
    register_attention_backend(NAME)(FlashMoeBackend)
    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])


def _refuse(what: str, instead: str = "choose another --attention-backend") -> None:
    raise NotImplementedError(f"{what} is not supported by --attention-backend {NAME}; {instead}")


def _check_layer(layer) -> None:
    asked = {
        "cross attention": layer.is_cross_attention,
        f"attention of type {layer.attn_type}": getattr(layer.attn_type, "name", "") != "DECODER",
        "attention in chunks (use_irope)": layer.use_irope,
        f"pos_encoding_mode={layer.pos_encoding_mode}": layer.pos_encoding_mode != "NONE",
        f"logit_capping_method={layer.logit_capping_method}": layer.logit_capping_method != "tanh",
        "xai_temperature_len": layer.xai_temperature_len > 0,
    }
    for what, given in asked.items():
        if given:
            _refuse(what)


@dataclass
class Metadata:
    block_table: Tensor  # (B, keys at most): the slot of each token
    seq_lens: Tensor
    cu_seqlens_q: Tensor | None = None  # one new token of each request
    max_seqlen_q: int = 1


class FlashMoeBackend(AttentionBackend):
    needs_cpu_seq_lens = False  # lengths are read on the device

    def __init__(self, runner) -> None:
        super().__init__()
        if runner.spec_algorithm.is_speculative():
            _refuse("speculative decoding")
        if hasattr(runner.token_to_kv_pool, "swa_kv_pool"):
            instead = "start SGLang with --disable-hybrid-swa-memory"
            _refuse("a second pool for layers with a window", instead)
        self.req_to_token = runner.req_to_token_pool.req_to_token  # (requests, tokens)
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.context = min(runner.model_config.context_len, self.req_to_token.shape[1])
        self.forward_metadata = None
        self.graph_table = None

    def init_forward_metadata(self, forward_batch) -> None:
        """Without a graph."""
        mode, requests = forward_batch.forward_mode, forward_batch.req_pool_indices
        if mode.is_decode_or_idle():
            table = self.req_to_token[requests, : self.context]
            self.forward_metadata = Metadata(table, forward_batch.seq_lens)
            return
        if mode.name not in ("EXTEND", "MIXED"):
            _refuse(f"forward mode {mode.name}")
        queries, before = forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu
        longest = max((sum(pair) for pair in zip(queries, before, strict=True)), default=0)
        cu_seqlens = F.pad(forward_batch.extend_seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
        table = self.req_to_token[requests, :longest]
        longest_q = max(queries, default=0)
        self.forward_metadata = Metadata(table, forward_batch.seq_lens, cu_seqlens, longest_q)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        shape, device = (max_bs, self.context), self.req_to_token.device
        self.graph_table = torch.zeros(shape, dtype=self.req_to_token.dtype, device=device)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata_out_graph(self, forward_batch, in_capture: bool = False) -> None:
        if not forward_batch.forward_mode.is_decode_or_idle():
            _refuse(f"a graph of forward mode {forward_batch.forward_mode.name}")
        table = self.graph_table[: forward_batch.batch_size]
        self.forward_metadata = Metadata(table, forward_batch.seq_lens)

    def init_forward_metadata_in_graph(self, forward_batch) -> None:
        rows = forward_batch.req_pool_indices
        table = self.graph_table[: forward_batch.batch_size]
        torch.index_select(self.req_to_token[:, : self.context], 0, rows, out=table)

    def forward_extend(
        self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None, **kwargs
    ) -> Tensor:
        _check_layer(layer)
        for name, value in kwargs.items():
            if value is not None and value is not False:
                _refuse(name)
        pool, batch = self.token_to_kv_pool, self.forward_metadata
        if save_kv_cache and k is not None:
            heads = (-1, layer.tp_k_head_num)
            k, v = k.view(*heads, layer.qk_head_dim), v.view(*heads, layer.v_head_dim)
            slots, scales = forward_batch.out_cache_loc, (layer.k_scale, layer.v_scale)
            pool.set_kv_buffer(layer, slots, k, v, *scales)
        k_cache, v_cache = (
            buffer(layer.layer_id)[:, None]  # (slots, 1, heads, dim): pages of one token
            for buffer in (pool.get_key_buffer, pool.get_value_buffer)
        )
        fp8 = k_cache.dtype == torch.float8_e4m3fn
        out = flash_attention_paged(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            k_cache,
            v_cache,
            batch.block_table,
            batch.seq_lens,
            cu_seqlens_q=batch.cu_seqlens_q,
            max_seqlen_q=batch.max_seqlen_q,
            max_seqlen_k=batch.block_table.shape[1],
            window=(layer.sliding_window_size, -1) if layer.sliding_window_size >= 0 else None,
            scale=layer.scaling,
            softcap=layer.logit_cap or None,
            sinks=sinks,
            k_scale=layer.k_scale if fp8 else None,
            v_scale=layer.v_scale if fp8 else None,
        )
        return out.flatten(1)

    forward_decode = forward_extend
