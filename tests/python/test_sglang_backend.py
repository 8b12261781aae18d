"""The plugin for SGLang with stand-ins for its documented base class. SGLang itself is not run."""

from __future__ import annotations

import enum
import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from requests_in_flight import DIM, HEADS_K, HEADS_Q, Requests

Mode = enum.Enum("Mode", ["EXTEND", "DECODE", "MIXED", "IDLE", "TARGET_VERIFY"])
Mode.is_decode = lambda self: self is Mode.DECODE
Mode.is_decode_or_idle = lambda self: self in (Mode.DECODE, Mode.IDLE)
Kind = enum.Enum("Kind", ["DECODER", "ENCODER_ONLY"])


class AttentionBackend:
    """What the base class does: calls forward_decode or forward_extend."""

    needs_cpu_seq_lens = True

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        decode = forward_batch.forward_mode.is_decode()
        run = self.forward_decode if decode else self.forward_extend
        return run(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)


@pytest.fixture
def ours(monkeypatch):
    """Our file, imported anew beside the stand-ins."""
    backends, choices = {}, ["triton"]
    registry = ModuleType("sglang.srt.layers.attention.attention_registry")
    registry.backends = backends
    registry.register_attention_backend = lambda name: lambda f: backends.setdefault(name, f)
    base = ModuleType("sglang.srt.layers.attention.base_attn_backend")
    base.AttentionBackend = AttentionBackend
    arguments = ModuleType("sglang.srt.server_args")
    arguments.ATTENTION_BACKEND_CHOICES = choices
    arguments.add_attention_backend_choices = choices.extend
    names = ("sglang", "sglang.srt", "sglang.srt.layers", "sglang.srt.layers.attention")
    for module in (*map(ModuleType, names), registry, base, arguments):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "flashmoe_science.sglang", raising=False)
    yield importlib.import_module("flashmoe_science.sglang")
    sys.modules.pop("flashmoe_science.sglang", None)


def test_registered_once(ours):
    ours.register()
    ours.register()
    registry = sys.modules["sglang.srt.layers.attention.attention_registry"]
    assert registry.backends == {"flashmoe": ours.FlashMoeBackend}
    choices = sys.modules["sglang.srt.server_args"].ATTENTION_BACKEND_CHOICES
    assert choices == ["triton", "flashmoe"]


class Pool:
    """Two tensors (slots, heads, dim); keys are divided by their scale before they are rounded."""

    def __init__(self, slots: int, dtype: torch.dtype) -> None:
        self.k, self.v = (torch.full((slots, HEADS_K, DIM), float("nan")).to(dtype) for _ in "kv")

    def get_key_buffer(self, layer_id: int):
        assert layer_id == 3
        return self.k

    def get_value_buffer(self, layer_id: int):
        return self.v

    def set_kv_buffer(self, layer, slots, k, v, k_scale=None, v_scale=None):
        for buffer, x, scale in ((self.k, k, k_scale), (self.v, v, v_scale)):
            assert x.shape[1:] == buffer.shape[1:]
            buffer[slots] = (x if scale is None else x / scale).to(buffer.dtype)


def layer(**more):
    usual = {
        "layer_id": 3, "tp_q_head_num": HEADS_Q, "tp_k_head_num": HEADS_K, "qk_head_dim": DIM,
        "v_head_dim": DIM, "scaling": DIM**-0.5, "logit_cap": 0.0, "sliding_window_size": -1,
        "k_scale": None, "v_scale": None, "is_cross_attention": False, "use_irope": False,
        "attn_type": Kind.DECODER, "pos_encoding_mode": "NONE", "logit_capping_method": "tanh",
        "xai_temperature_len": -1,
    }  # fmt: skip
    return SimpleNamespace(**{**usual, **more})


def runner(requests: Requests, pool: Pool, rows: torch.Tensor, **more):
    """rows: which row of SGLang's table each request has."""
    table = torch.full((rows.max() + 2, 40), 1 << 20, dtype=torch.int32)
    for i, row in enumerate(rows):
        table[row, : requests.lengths[i]] = requests.slots(i).int()
    usual = {
        "req_to_token_pool": SimpleNamespace(req_to_token=table),
        "token_to_kv_pool": pool,
        "model_config": SimpleNamespace(context_len=36),
        "spec_algorithm": SimpleNamespace(is_speculative=lambda: False),
    }
    return SimpleNamespace(**{**usual, **more})


def batch(requests: Requests, rows, mode: Mode):
    return SimpleNamespace(
        forward_mode=mode,
        batch_size=len(rows),
        req_pool_indices=rows,
        seq_lens=torch.tensor(requests.lengths),
        extend_seq_lens=torch.tensor(requests.new),
        extend_seq_lens_cpu=list(requests.new),
        extend_prefix_lens_cpu=list(requests.before),
        out_cache_loc=requests.tokens("new")[2],
    )


def serve(ours, requests, mode, graph=False, dtype=None, sinks=None, **options):
    rows = torch.randperm(len(requests.new)) + 1
    pool = Pool(requests.blocks * requests.page, dtype or requests.dtype)
    backend, this = ours.FlashMoeBackend(runner(requests, pool, rows)), layer(**options)
    k, v, slots = requests.tokens("before")
    pool.set_kv_buffer(this, slots, k, v, this.k_scale, this.v_scale)
    step = batch(requests, rows, mode)
    if graph:
        backend.init_cuda_graph_state(len(rows) + 3, 64)
        backend.init_forward_metadata_out_graph(step, in_capture=True)
        backend.init_forward_metadata_in_graph(step)
    else:
        backend.init_forward_metadata(step)
    k, v, _ = requests.tokens("new")
    inputs = (x.flatten(1) for x in (torch.cat(requests.q), k, v))
    more = {} if sinks is None else {"sinks": sinks}
    out = backend.forward(*inputs, this, step, **more)
    assert out.shape == (sum(requests.new), HEADS_Q * DIM)
    return out.view(-1, HEADS_Q, DIM)


SINKS = torch.linspace(-1, 2, HEADS_Q)
OPTIONS = {
    "plain": ({}, {}),
    "window": ({"sliding_window_size": 4}, {"window": (4, 0)}),
    "softcap": ({"logit_cap": 1.5}, {"softcap": 1.5}),
    "sinks": ({"sinks": SINKS}, {"sinks": SINKS}),
}


@pytest.mark.parametrize("mode", [Mode.EXTEND, Mode.MIXED])
@pytest.mark.parametrize("option", OPTIONS)
def test_prompts_and_decodes(ours, option, mode):
    theirs, same = OPTIONS[option]
    requests = Requests(page=1)
    torch.testing.assert_close(serve(ours, requests, mode, **theirs), requests.attention(**same))


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("option", OPTIONS)
def test_decodes(ours, option, graph):
    theirs, same = OPTIONS[option]
    requests = Requests(before=(6, 0, 19), new=(1, 1, 1), page=1)
    got = serve(ours, requests, Mode.DECODE, graph, **theirs)
    torch.testing.assert_close(got, requests.attention(**same))


def test_pages_of_several_tokens_are_read_token_by_token(ours):
    requests = Requests(page=16)
    torch.testing.assert_close(serve(ours, requests, Mode.EXTEND), requests.attention())


def test_an_fp8_cache(ours):
    requests = Requests(dtype=torch.bfloat16, page=1)
    scales = {"k_scale": torch.tensor(0.5), "v_scale": torch.tensor(0.25)}
    got = serve(ours, requests, Mode.EXTEND, dtype=torch.float8_e4m3fn, **scales)
    k, v = (
        [(t / s).to(torch.float8_e4m3fn).bfloat16() * s.bfloat16() for t in x]
        for x, s in zip((requests.k, requests.v), scales.values(), strict=True)
    )
    torch.testing.assert_close(got, requests.attention(k, v))


def test_broken_outputs_would_be_found(ours, monkeypatch):
    attend = ours.flash_attention_paged
    monkeypatch.setattr(ours, "flash_attention_paged", lambda *a, **k: 0.9 * attend(*a, **k))
    requests = Requests(page=1)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(serve(ours, requests, Mode.EXTEND), requests.attention())


@pytest.mark.parametrize(
    "options, words",
    [
        ({"is_cross_attention": True}, "cross attention"),
        ({"attn_type": Kind.ENCODER_ONLY}, "attention of type Kind.ENCODER_ONLY"),
        ({"use_irope": True}, "use_irope"),
        ({"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode=ALIBI"),
        ({"logit_capping_method": "sigmoid"}, "logit_capping_method=sigmoid"),
        ({"xai_temperature_len": 8}, "xai_temperature_len"),
    ],
)
def test_layers_we_cannot_do_are_refused(ours, options, words):
    with pytest.raises(NotImplementedError, match=f"{words}.*choose another --attention-backend"):
        serve(ours, Requests(page=1), Mode.EXTEND, **options)


def test_what_else_is_refused(ours):
    requests = Requests(page=1)
    rows, pool = torch.arange(len(requests.new)), Pool(requests.blocks, torch.float32)
    speculative = SimpleNamespace(is_speculative=lambda: True)
    with pytest.raises(NotImplementedError, match="speculative decoding"):
        ours.FlashMoeBackend(runner(requests, pool, rows, spec_algorithm=speculative))
    two = SimpleNamespace(swa_kv_pool=pool)
    with pytest.raises(NotImplementedError, match="--disable-hybrid-swa-memory"):
        ours.FlashMoeBackend(runner(requests, two, rows))
    backend = ours.FlashMoeBackend(runner(requests, pool, rows))
    step = batch(requests, rows, Mode.TARGET_VERIFY)
    with pytest.raises(NotImplementedError, match="forward mode TARGET_VERIFY"):
        backend.init_forward_metadata(step)
    with pytest.raises(NotImplementedError, match="a graph of forward mode TARGET_VERIFY"):
        backend.init_forward_metadata_out_graph(step)
    with pytest.raises(NotImplementedError, match="q_rope"):
        backend.forward_extend(None, None, None, layer(), step, q_rope=torch.ones(1))
