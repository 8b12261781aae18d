"""Continuous batching of transformers (generate_batch) by our kernels, on the CPU."""

from __future__ import annotations

import inspect
import sys

import pytest
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers import masking_utils as theirs
from transformers import modeling_flash_attention_utils as flash
from transformers.generation import continuous_batching

import flashmoe_science as fm
from flashmoe_science.compat import flash_attn as compat
from tiny_models import CONFIGS, SOFTCAP, break_on_purpose, compare, model_with, tokens

NAME = "flashmoe_2"
PROMPTS = [tokens(1, length)[0].tolist() for length in (3, 17, 9, 30)]
PREFIXED = hasattr(flash, "lazy_import_paged_flash_attention")  # before 5.22: "paged|" names


@pytest.fixture
def registered(monkeypatch):
    """Registered for a test alone, hooks and all."""
    lazy, check = flash._lazy_imports, PreTrainedModel._check_and_adjust_attn_implementation
    assert fm.register_attention(continuous_batching=True) == NAME
    assert fm.register_attention(continuous_batching=True) == NAME
    # Without psutil transformers 5.17 takes a CPU to have no memory.
    cache = sys.modules["transformers.generation.continuous_batching.cache"]
    memory = (torch.device("cpu"), 1 << 30, 0, 0)
    monkeypatch.setattr(cache, "get_device_and_memory_breakdown", lambda: memory, raising=False)
    yield
    for interface in (AttentionInterface, AttentionMaskInterface):
        for name in (NAME, f"paged|{NAME}"):
            interface._global_mapping.pop(name, None)
    flash._lazy_imports, flash._loaded_implementation = lazy, None
    PreTrainedModel._check_and_adjust_attn_implementation = check
    batching = sys.modules["flashmoe_science.transformers.batching"]
    batching._their_functions = batching._their_check = None


def alone(name: str) -> list[list[int]]:
    """What each prompt is answered by eager attention."""
    model = model_with(name, "eager")
    options = {"max_new_tokens": 8, "do_sample": False}
    return [model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in PROMPTS]


def together(name: str, **more) -> list[list[int]]:
    """The prompts in flight at once, over pages of 16 tokens, at most 24 tokens in a step."""
    sizes = {"block_size" if PREFIXED else "page_size": 16, "num_blocks": 24}
    settings = transformers.ContinuousBatchingConfig(
        **sizes, max_batch_tokens=24, use_cuda_graph=False, use_async_batching=False, **more
    )
    generation = transformers.GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1)
    answers = model_with(name, NAME).generate_batch(
        PROMPTS,
        generation_config=generation,
        continuous_batching_config=settings,
        progress_bar=False,
    )
    order = sorted(answers, key=lambda request: int(request.split("_")[-1]))
    return [answers[request].generated_tokens for request in order]


@pytest.mark.parametrize("name", CONFIGS)
def test_requests_in_flight(name, registered):
    assert together(name) == alone(name)


@pytest.mark.parametrize("name", CONFIGS)
def test_broken_attention_would_be_found(name, registered, monkeypatch):
    break_on_purpose(monkeypatch, compat, name)
    assert together(name) != alone(name)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_decoding_by_block_tables(name, registered, monkeypatch):
    """As on a GPU: flash_attn_with_kvcache appends and attends."""
    called = []
    function = compat.flash_attn_with_kvcache

    def with_kvcache(q, *args, block_table=None, **options):
        called.append(tuple(q.shape))
        return function(q, *args, block_table=block_table, **options)

    with_kvcache.__signature__ = inspect.signature(function)
    monkeypatch.setattr(compat, "flash_attn_with_kvcache", with_kvcache)
    here = continuous_batching.initialization
    monkeypatch.setattr(here, "ensure_decode_fast_path_is_available", lambda *args: None)
    got = together(name, max_blocks_per_request=4)
    assert called and {shape[1:] for shape in called} == {(1, 4, 16)}
    assert got == alone(name)


def test_softcap(registered):
    """transformers hands it on from 5.22 on; before, what it would leave out is refused."""
    if not PREFIXED:
        assert together("gemma2") == alone("gemma2")
        return
    batching = sys.modules["flashmoe_science.transformers.batching"]
    with pytest.raises(NotImplementedError, match=r"Linear has a softcap.*5\.22"):
        batching._paged_forward(torch.nn.Linear(1, 1), softcap=2.0)


@pytest.mark.parametrize("name", CONFIGS | SOFTCAP)
def test_the_name_works_without_pages_too(name, registered):
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    logits = []
    for implementation in ("eager", NAME):
        with torch.no_grad():
            model = model_with(name, implementation)
            logits.append(model(input_ids=ids, attention_mask=mask).logits[mask.bool()])
    compare(*logits)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_packed_sequences_without_pages(name, registered):
    ids, positions = tokens(1), torch.cat([torch.arange(n) for n in (5, 9, 3)])[None]
    model = model_with(name, NAME)
    with torch.no_grad():
        got = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        want = model(input_ids=ids[:, 5:14], use_cache=False).logits
    compare(got[:, 5:14], want)


def test_masks_that_flash_attention_cannot_say_are_refused(registered):
    mask = AttentionMaskInterface()[NAME]
    sizes = {"batch_size": 1, "q_length": 4, "kv_length": 4}
    assert mask(**sizes) is None
    for function in (
        theirs.or_masks(theirs.causal_mask_function, lambda b, h, q, k: k == 0),
        theirs.sliding_window_bidirectional_mask_function(2),
    ):
        with pytest.raises(NotImplementedError, match="without continuous_batching"):
            mask(**sizes, mask_function=function)


def test_other_names_go_where_they_went(registered, monkeypatch):
    batching = sys.modules["flashmoe_science.transformers.batching"]
    asked = []
    monkeypatch.setattr(batching, "_their_functions", lambda *args, **_: asked.append(args[0]))
    monkeypatch.setattr(batching, "_their_check", lambda self, name, *_, **__: asked.append(name))
    flash._lazy_imports("flash_attention_2")
    PreTrainedModel._check_and_adjust_attn_implementation(None, "sdpa")
    assert asked == ["flash_attention_2", "sdpa"]
