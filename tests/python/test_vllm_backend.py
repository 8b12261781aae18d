"""The backend for vLLM with stand-ins for vLLM's classes; `make test-vllm` has vLLM itself."""

from __future__ import annotations

import enum
import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Generic, TypeVar

import pytest
import torch

from requests_in_flight import DIM, HEADS_K, HEADS_Q, NOBODY, Requests

M = TypeVar("M")


def stand_ins(new_names: bool) -> dict[str, ModuleType]:
    """What the file imports of vLLM: before 0.32, or since."""
    overrides = {}

    class Backends(enum.Enum):
        CPU_ATTN = "theirs.Cpu"
        CUSTOM = None

        def is_overridden(self):
            return self in overrides

    if new_names:
        members = {}

        def register(name, path):
            assert name not in members, "vLLM takes a name once"
            members[name] = path

        Backends = SimpleNamespace(
            CPU_ATTN="CPU_ATTN", CUSTOM="CUSTOM", __members__=members, register=register
        )

    class Builder(Generic[M]):
        def __init__(self, *args):
            self.args = args

    class Impl(Generic[M]):
        pass

    backend = ModuleType("vllm.v1.attention.backend")
    backend.AttentionBackend = type("AttentionBackend", (), {})
    backend.AttentionCGSupport = enum.Enum("AttentionCGSupport", ["NEVER", "ALWAYS"])
    backend.AttentionImpl = Impl
    backend.AttentionMetadataBuilder = Builder
    backend.AttentionType = SimpleNamespace(DECODER="decoder", ENCODER="enc")
    backend.MultipleOf = lambda base: ("multiple of", base)
    registry = ModuleType("vllm.v1.attention.backends.registry")
    registry.AttentionBackendEnum = Backends
    registry.register_backend = overrides.__setitem__
    registry.overrides = overrides
    names = ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends")
    return {name: ModuleType(name) for name in names} | {
        backend.__name__: backend,
        registry.__name__: registry,
    }


@pytest.fixture
def load(monkeypatch):
    """Imports our file anew beside the stand-ins."""

    def imported(new_names: bool = False) -> ModuleType:
        for name, module in stand_ins(new_names).items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.delitem(sys.modules, "flashmoe_science.vllm", raising=False)
        return importlib.import_module("flashmoe_science.vllm")

    monkeypatch.delenv("FLASHMOE_VLLM_CPU", raising=False)
    yield imported
    sys.modules.pop("flashmoe_science.vllm", None)


@pytest.fixture
def ours(load) -> ModuleType:
    return load()


PATH = "flashmoe_science.vllm.FlashMoeBackend"


def registry() -> ModuleType:
    return sys.modules["vllm.v1.attention.backends.registry"]


def test_registered_under_the_one_free_name(ours):
    ours.register()
    ours.register()
    assert registry().overrides == {registry().AttentionBackendEnum.CUSTOM: PATH}
    assert ours.FlashMoeBackend.get_name() == "CUSTOM"


def test_another_backend_keeps_the_name(ours):
    custom = registry().AttentionBackendEnum.CUSTOM
    registry().overrides[custom] = "somebody.Else"
    ours.register()
    assert registry().overrides == {custom: "somebody.Else"}


def test_registered_under_a_name_of_its_own(load):
    ours = load(new_names=True)
    ours.register()
    ours.register()
    assert registry().AttentionBackendEnum.__members__ == {"FLASHMOE": PATH}
    assert not registry().overrides and ours.FlashMoeBackend.get_name() == "FLASHMOE"


def test_on_the_cpu_only_who_asks_gets_it(ours, monkeypatch):
    theirs = registry().AttentionBackendEnum.CPU_ATTN
    ours.register()
    assert theirs not in registry().overrides
    monkeypatch.setenv("FLASHMOE_VLLM_CPU", "1")
    ours.register()
    assert registry().overrides[theirs] == PATH


# Caches as vLLM lays them out, all of them (blocks, heads, page, 2 D) to look at.


def head_major(blocks, page, dtype):
    return torch.empty(blocks, HEADS_K, page, 2 * DIM, dtype=dtype)


def token_major(blocks, page, dtype):
    return torch.empty(blocks, page, HEADS_K, 2 * DIM, dtype=dtype).transpose(1, 2)


def between_layers(blocks, page, dtype):
    return torch.empty(blocks, 3, HEADS_K, page, 2 * DIM, dtype=dtype)[:, 1]


def heads_first(blocks, page, dtype):
    return torch.empty(HEADS_K, blocks, page, 2 * DIM, dtype=dtype).transpose(0, 1)


LAYOUTS = [head_major, token_major, between_layers, heads_first]


def implementation(ours, **options):
    return ours.FlashMoeImpl(HEADS_Q, DIM, DIM**-0.5, num_kv_heads=HEADS_K, **options)


def metadata(ours, requests: Requests, padding: int = 0):
    """As vLLM's runner gives it; requests that pad a batch have no tokens."""
    cu = requests.cu_seqlens_q
    lengths = torch.tensor(requests.lengths, dtype=torch.int32)
    nobody = torch.full((padding, requests.table.shape[1]), NOBODY, dtype=torch.int32)
    common = SimpleNamespace(
        num_actual_tokens=int(cu[-1]),
        query_start_loc=torch.cat((cu, cu[-1:].expand(padding))),
        seq_lens=torch.cat((lengths, lengths.new_zeros(padding))),
        block_table_tensor=torch.cat((requests.table, nobody)),
        slot_mapping=None,
        max_query_len=max(requests.new),
        max_seq_len=requests.table.shape[1] * requests.page,
        causal=True,
    )
    return ours.Builder("spec", ["layer"], "config", "cpu").build(0, common)


def serve(ours, requests, kv_cache, layer=None, padding=0, **options):
    """Writes what was before, then a step: writes the new tokens and attends."""
    impl, layer = implementation(ours, **options), layer or SimpleNamespace()
    kv_cache.view(torch.uint8).fill_(0xFF)  # NaN, in every dtype
    for which in ("before", "new"):
        k, v, slots = requests.tokens(which)
        # Padded to the size of a graph: slots of -1, or fewer slots than keys.
        k, v = (torch.cat((x, x[:1].expand(padding + 2, -1, -1))) for x in (k, v))
        slots = torch.cat((slots, slots.new_full((padding,), -1)))
        impl.do_kv_cache_update(layer, k, v, kv_cache, slots)
    query = torch.cat(requests.q)
    query = torch.cat((query, query.new_ones(padding, HEADS_Q, DIM)))
    output = torch.full_like(query, float("nan"))
    batch = metadata(ours, requests, padding)
    assert impl.forward(layer, query, None, None, kv_cache, batch, output) is output
    return output[: batch.num_actual_tokens]


OPTIONS = {
    "plain": ({}, {}),
    "window": ({"sliding_window": 5}, {"window": (4, 0)}),
    "softcap": ({"logits_soft_cap": 1.5}, {"softcap": 1.5}),
    "no softcap": ({"logits_soft_cap": 0}, {}),
    "sinks": ({"sinks": torch.linspace(-1, 2, HEADS_Q)},) * 2,
}


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step(ours, layout, option, padding):
    theirs, same = OPTIONS[option]
    requests = Requests()
    cache = layout(requests.blocks, requests.page, torch.float32)
    got = serve(ours, requests, cache, padding=padding, **theirs)
    torch.testing.assert_close(got, requests.attention(**same))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scales", [(0.5, 0.25), ((0.5, 2.0), (1.0, 0.25))])
@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_a_step_over_an_fp8_cache(ours, name, scales, layout):
    """Bytes to vLLM, with a scale or one for each head; powers of two, exact in bfloat16."""
    requests = Requests(dtype=torch.bfloat16)
    cache = layout(requests.blocks, requests.page, torch.uint8)
    k_scale, v_scale = (torch.tensor(s) for s in scales)
    layer = SimpleNamespace(_k_scale=k_scale, _v_scale=v_scale)
    got = serve(ours, requests, cache, layer, kv_cache_dtype=name)

    def stored(x, scale):
        scale = scale.expand(HEADS_K)[:, None].bfloat16()
        return [(t / scale).to(torch.float8_e4m3fn).bfloat16() * scale for t in x]

    want = requests.attention(stored(requests.k, k_scale), stored(requests.v, v_scale))
    torch.testing.assert_close(got, want)
    assert (got != requests.attention()).any(), "the cache was not rounded"


def test_broken_outputs_would_be_found(ours, monkeypatch):
    attend = ours.flash_attention_paged
    monkeypatch.setattr(
        ours, "flash_attention_paged", lambda *a, out, **k: attend(*a, out=out, **k).mul_(0.9)
    )
    requests = Requests()
    got = serve(ours, requests, head_major(requests.blocks, requests.page, torch.float32))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(got, requests.attention())


def test_measuring_memory_gives_zeros(ours):
    output = torch.full((3, HEADS_Q, DIM), float("nan"))
    found = implementation(ours).forward(None, None, None, None, None, None, output)
    assert found is output and output.eq(0).all()


def test_another_table_for_layers_with_another_cache(ours):
    requests = Requests()
    batch, table = metadata(ours, requests), requests.table.clone()
    slots = torch.arange(3)
    other = ours.Builder().update_block_table(batch, table, slots)
    assert other.block_table is table and other.slot_mapping is slots
    assert batch.block_table is not table and other.seq_lens is batch.seq_lens


def test_what_vllm_is_told(ours):
    backend = ours.FlashMoeBackend
    assert backend.get_impl_cls() is ours.FlashMoeImpl and backend.get_builder_cls() is ours.Builder
    assert backend.get_kv_cache_shape(9, 16, HEADS_K, DIM, "auto") == (9, HEADS_K, 16, 2 * DIM)
    always = sys.modules["vllm.v1.attention.backend"].AttentionCGSupport.ALWAYS
    assert ours.Builder._cudagraph_support is always
    assert [backend.supports_head_size(n) for n in (0, 1, 256, 512, 513)] == [0, 1, 1, 1, 0]
    assert [backend.supports_compute_capability(c) for c in ((7, 0), (7, 5), (9, 0))] == [0, 1, 1]
    half, bf16, single = torch.float16, torch.bfloat16, torch.float32
    legal = [
        (half, "auto", (7, 5)), (bf16, "auto", (8, 0)), (bf16, "bfloat16", (9, 0)),
        (bf16, "fp8", (9, 0)), (half, "fp8_e4m3", (7, 5)), (single, "auto", None),
    ]  # fmt: skip
    for dtype, cache, chip in legal:
        assert (
            backend.supports_combination(DIM, dtype, cache, 16, False, False, False, chip) is None
        )
    refused = [
        (single, "auto", (9, 0), "float32 on a GPU"),
        (single, "fp8", None, "fp8 cache under float32"),
        (bf16, "auto", (7, 5), "compute capability 8.0"),
        (bf16, "float16", (9, 0), "a float16 cache"),
    ]
    for dtype, cache, chip, why in refused:
        found = backend.supports_combination(DIM, dtype, cache, 16, False, False, False, chip)
        assert why in found


@pytest.mark.parametrize(
    "options, words",
    [
        ({"alibi_slopes": [0.5]}, r"alibi_slopes=\[0.5\]"),
        ({"attn_type": "enc"}, "attn_type='enc'"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype='fp8_e5m2'"),
        ({"use_alibi_sqrt": True}, "use_alibi_sqrt=True"),
    ],
)
def test_what_we_cannot_do_is_refused(ours, options, words):
    with pytest.raises(NotImplementedError, match=f"{words} is not supported.*--attention-backend"):
        implementation(ours, **options)
    implementation(ours, use_alibi_sqrt=False)


def test_batches_we_cannot_do_are_refused(ours):
    builder = ours.Builder()
    common = SimpleNamespace(causal=torch.ones(2))
    with pytest.raises(NotImplementedError, match="causal of each request"):
        builder.build(0, common)
    common = SimpleNamespace(causal=True, mm_req_doc_ranges={0: [(1, 3)]})
    with pytest.raises(NotImplementedError, match="mm_req_doc_ranges"):
        builder.build(0, common)
    with pytest.raises(NotImplementedError, match="output_scale"):
        implementation(ours).forward(*[None] * 7, output_scale=torch.ones(()))
