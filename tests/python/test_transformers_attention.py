"""Models of transformers with our attention beside their eager one, in float32 on the CPU."""

from __future__ import annotations

import sys

import pytest
import torch
import transformers
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers import masking_utils as theirs

import flashmoe_science as fm
from flashmoe_science.transformers import masks
from tiny_models import CONFIGS, SMALL, SOFTCAP, break_on_purpose, compare, model_with, tokens

ours = sys.modules["flashmoe_science.transformers.attention"]


def padding(side: str) -> torch.Tensor:
    """1 where a token counts."""
    mask = torch.ones(3, 17, dtype=torch.long)
    if side == "left":
        mask[0, :5] = mask[1, :11] = 0
    elif side == "right":
        mask[0, -5:] = mask[1, -11:] = 0
    elif side == "holes":  # as after a turn of a conversation that was padded on the right
        mask[0, 4:7] = mask[1, :2] = mask[1, 9] = 0
    return mask


def answers(model, side: str = "left") -> dict[str, torch.Tensor]:
    """Logits, every gradient of a training step, and the tokens written after a padded batch."""
    ids, mask = tokens(), padding(side)
    seen = mask.bool()
    # The first token after padding is predicted from padding, which sees nothing.
    counts = seen & torch.cat((seen[:, :1], seen[:, :-1]), -1)
    model.train()
    result = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(~counts, -100))
    result.loss.backward()
    found = {"logits": result.logits.detach()[seen], "loss": result.loss.detach()}
    found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    model.eval()
    found["tokens"] = written(model, ids, mask)
    return found


def written(model, ids, mask, **options) -> torch.Tensor:
    return model.generate(ids, attention_mask=mask, max_new_tokens=16, do_sample=False, **options)


@pytest.fixture
def registered():
    """Registered for a test alone."""
    assert "fm_attention" not in AttentionInterface(), "importing the package registers nothing"
    assert fm.register_attention() == fm.register_attention() == "fm_attention"
    yield
    for interface in (AttentionInterface, AttentionMaskInterface):
        del interface._global_mapping["fm_attention"]


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """Which of our functions were called, in order."""
    found = []
    for name in ("flash_attention", "flash_attention_varlen"):
        function = getattr(ours, name)

        def record(*args, name=name, function=function, **options):
            found.append(name)
            return function(*args, **options)

        monkeypatch.setattr(ours, name, record)
    return found


@pytest.mark.parametrize("name", CONFIGS | SOFTCAP)
def test_a_model_is_the_same_with_our_attention(name, registered, calls):
    want = answers(model_with(name, "eager"))
    assert not calls
    got = answers(model_with(name, "fm_attention"))
    # Two layers: a step of training and the prompt without their padding, then a token at a time.
    ragged, dense = ["flash_attention_varlen"] * 2, ["flash_attention"] * 2
    assert calls == ragged + ragged + 15 * dense
    compare(got, want)
    attention = [n for n in want if "self_attn" in n]
    assert len(attention) >= 8 and all((want[n] != 0).any() for n in attention)


@pytest.mark.parametrize("name", CONFIGS)
def test_broken_attention_would_be_found(name, registered, monkeypatch):
    want = answers(model_with(name, "eager"))
    break_on_purpose(monkeypatch, ours, name)
    got = answers(model_with(name, "fm_attention"))
    for part in ("logits", "tokens", "gradient of model.layers.0.self_attn.v_proj.weight"):
        with pytest.raises(AssertionError):
            compare(got[part], want[part])


@pytest.mark.parametrize("side", ["none", "right", "holes"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_padding_anywhere(name, side, registered):
    want, got = (answers(model_with(name, i), side) for i in ("eager", "fm_attention"))
    if side == "right":  # what comes after padding is predicted from it: see answers()
        del want["tokens"], got["tokens"]
    compare(got, want)


@pytest.mark.parametrize("name", CONFIGS)
def test_several_tokens_over_a_cache(name, registered):
    def logits(implementation):
        model, ids, mask = model_with(name, implementation), tokens(), padding("left")
        with torch.no_grad():
            first = model(input_ids=ids[:, :9], attention_mask=mask[:, :9], use_cache=True)
            cache = first.past_key_values
            return model(input_ids=ids[:, 9:], attention_mask=mask, past_key_values=cache).logits

    seen = padding("left")[:, 9:].bool()
    compare(logits("fm_attention")[seen], logits("eager")[seen])


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_static_caches(name, side, registered):
    options = {"cache_implementation": "static", "disable_compile": True}
    want, got = (
        written(model_with(name, i), tokens(), padding(side), **options)
        for i in ("eager", "fm_attention")
    )
    compare(got, want)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_packed_sequences(name, registered, calls):
    """Several in a row, told apart by positions that start again: each by itself."""
    ids = tokens()
    positions = torch.cat([torch.arange(n) for n in (5, 9, 3)]).expand(3, -1)
    model = model_with(name, "fm_attention")
    with torch.no_grad():
        got = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        assert calls == ["flash_attention_varlen"] * 2
        want = model(input_ids=ids[:, 5:14], use_cache=False).logits
    compare(got[:, 5:14], want)


def test_a_compiled_model(registered):
    ids, mask = tokens(), padding("left")
    model = model_with("gemma3", "fm_attention")
    torch._dynamo.reset()
    with torch.no_grad():
        want = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        run = torch.compile(model, backend="eager", fullgraph=True)
        got = run(input_ids=ids, attention_mask=mask, use_cache=False).logits
    compare(got[mask.bool()], want[mask.bool()])


def test_encoders_see_both_sides(registered):
    """A band around the diagonal in one layer, everything in the other, padding in neither."""
    sizes = {n: SMALL[n] for n in ("vocab_size", "hidden_size", "intermediate_size")}
    config = transformers.ModernBertConfig(
        **sizes, num_hidden_layers=2, num_attention_heads=4, local_attention=8,
        global_attn_every_n_layers=2, pad_token_id=0, initializer_range=0.1, bos_token_id=1,
        eos_token_id=1, cls_token_id=1, sep_token_id=1, max_position_embeddings=64,
        attention_dropout=0.0,
    )  # fmt: skip
    for side in ("none", "left", "right", "holes"):
        found = []
        for implementation in ("eager", "fm_attention"):
            torch.manual_seed(3)
            model = transformers.AutoModel.from_config(config, attn_implementation=implementation)
            mask = padding(side)
            with torch.no_grad():
                result = model.eval()(input_ids=tokens(), attention_mask=mask)
            found.append(result.last_hidden_state[mask.bool()])
        compare(*reversed(found))


# What becomes of a mask.


def prepare(function=theirs.causal_mask_function, mask=None, q=17, k=17, offset=None, **options):
    offset = k - q if offset is None else offset
    return masks.prepare(3, q, k, offset, 0, function, mask, **options)


def as_matrix(mask: masks.Mask, q: int, k: int) -> torch.Tensor:
    """What a Mask says, written out; by way of the kernels' own meaning of window and bias."""
    if mask.ragged is not None:
        ids = [torch.zeros(3 * n, dtype=torch.long) for n in (q, k)]
        bounds = (mask.ragged.cu_seqlens_q, mask.ragged.cu_seqlens_k)
        for each, cu, longest in zip(ids, bounds, mask.ragged.longest, strict=True):
            each[:] = torch.bucketize(torch.arange(len(each)), cu[1:], right=True)
            assert cu[-1] == len(each) and cu.diff().max() <= longest
        same = ids[0].view(3, q, 1) == ids[1].view(3, 1, k)
    else:
        same = torch.ones(3, q, k, dtype=torch.bool)
        if mask.bias is not None:
            same &= mask.bias[:, 0] == 0
    end = k if mask.key_lengths is None else int(mask.key_lengths)
    rows, keys = torch.arange(q)[:, None] + end - q, torch.arange(k)
    if mask.left >= 0:
        same &= keys >= rows - mask.left
    if mask.right >= 0:
        same &= keys <= rows + mask.right
    return same & (keys < end)


BANDS = {
    "causal": theirs.causal_mask_function,
    "window": theirs.sliding_window_causal_mask_function(5),
    "both sides": theirs.bidirectional_mask_function,
    "band": theirs.sliding_window_bidirectional_mask_function(4),
}


@pytest.mark.parametrize("side", ["none", "left", "right", "holes"])
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("q, offset", [(17, 0), (1, 16), (4, 13), (4, 9)])
def test_masks_mean_the_same(band, side, q, offset):
    """Beside transformers' matrix: all of it, but for padding's own rows in causal masks."""
    seen = padding(side).bool()
    mask = prepare(BANDS[band], seen, q, 17, offset)
    want = theirs.sdpa_mask(
        3, q, 17, offset, 0, BANDS[band], seen, allow_is_causal_skip=False
    ).expand(3, 1, q, 17)[:, 0]
    if band == "band" and offset + q < 17:  # keys after the last query, which it sees
        assert isinstance(mask, torch.Tensor) and torch.equal(mask[:, 0], want)
        return
    both_sides = band in ("both sides", "band")
    rows = torch.ones_like(seen[:, :q]) if both_sides else seen[:, offset : offset + q]
    assert torch.equal(as_matrix(mask, q, 17)[rows], want[rows])
    packed = band == "both sides" or (q == 17 and not both_sides)
    assert (mask.ragged is not None) == (packed and side in ("left", "right"))
    assert (mask.bias is not None) == (side != "none")


def test_a_mask_without_padding_costs_nothing():
    for mask in (None, padding("none").bool()):
        found = prepare(mask=mask)
        assert found.bias is None and found.ragged is None and found.key_lengths is None


def test_a_static_cache_is_read_up_to_its_end():
    """Its length is a tensor while it is decoded, and its unused end is no padding."""
    end = torch.tensor([6])
    found = prepare(mask=padding("none")[:, :7].bool(), q=1, k=17, offset=end)
    assert found.key_lengths.tolist() == [7] and found.bias is None
    assert found.contiguous() is found and prepare(mask=found) is found


@pytest.mark.parametrize("overlay", ["chunks", "images", "positions", "own"])
def test_masks_that_are_no_band_arrive_whole(overlay):
    causal, options = theirs.causal_mask_function, {}
    if overlay == "chunks":
        function = theirs.chunked_causal_mask_function(4, torch.zeros(3, dtype=torch.long))
    elif overlay == "images":
        blocks = torch.randint(-1, 2, (3, 17))
        function = theirs.or_masks(causal, theirs.blockwise_overlay(blocks))
    elif overlay == "positions":  # of several sequences, without saying that they are several
        if masks._REMAP is None:
            pytest.skip("transformers remaps positions from 5.23 on")
        function = masks._REMAP(causal, torch.arange(17).remainder(6).expand(3, -1))
    else:
        function, options = theirs.and_masks(causal, lambda b, h, q, k: k != 3), {"use_vmap": True}
    seen = padding("left").bool()
    want = theirs.sdpa_mask(3, 17, 17, 0, 0, function, seen, allow_is_causal_skip=False, **options)
    got = prepare(function, seen, **options)
    assert got.dtype == torch.bool and torch.equal(got, want)


def test_a_model_that_works_on_its_masks_gets_them_whole():
    seen = padding("left").bool()
    for q in (4, 17):
        skip = {"attention_mask": seen, "allow_is_causal_skip": False}
        want = theirs.sdpa_mask(3, q, 17, 17 - q, 0, **skip)
        assert torch.equal(prepare(mask=seen, q=q, allow_is_causal_skip=False), want)
    skip = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": True}  # an encoder's
    both = theirs.bidirectional_mask_function
    assert isinstance(prepare(both, seen, **skip), masks.Mask)
    for nothing in (None, torch.ones_like(seen)):
        assert prepare(both, nothing, **skip) is None
    skip["allow_is_bidirectional_skip"] = False
    assert isinstance(prepare(both, seen, **skip), torch.Tensor)


class Layer(nn.Module):
    is_causal = True


def attend(q, k, v, mask=None, module=None, **options):
    out, weights = ours._attend(module or Layer(), q, k, v, mask, **options)
    assert weights is None
    return out.transpose(1, 2)


def inputs(rows=5, keys=7, dtype=torch.float32):
    return [torch.randn(2, h, n, 8, dtype=dtype) for h, n in ((4, rows), (2, keys), (2, keys))]


def eager(q, k, v, bias, scale=8**-0.5):
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    return (scale * q @ k.mT + bias).softmax(-1) @ v


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16])
def test_a_mask_of_four_dimensions(dtype):
    """From a user, or where a model makes its own: it says everything, causal is not added."""
    q, k, v = inputs()
    seen = torch.rand(2, 1, 5, 7) < 0.6
    seen[..., 3] = True
    bias = torch.where(seen, 0.0, float("-inf"))
    mask = seen if dtype == torch.bool else bias.to(dtype)
    compare(attend(q, k, v, mask), eager(q, k, v, bias))


def test_without_a_mask_the_module_says_whether_it_is_causal():
    q, k, v = inputs()
    bias = torch.ones(5, 7).tril(2).log()
    compare(attend(q, k, v, scaling=0.3), eager(q, k, v, bias, 0.3))
    everything = eager(q, k, v, torch.zeros(5, 7))
    compare(attend(q, k, v, is_causal=False), everything)
    compare(attend(q, k, v, module=nn.Module()), everything)  # eager attention hides nothing


@pytest.mark.parametrize("side", ["none", "left"])
def test_a_learned_bias_of_positions(side):
    q, k, v = (torch.randn(3, 4, 17, 8) for _ in range(3))
    learned = torch.randn(1, 4, 17, 17, requires_grad=True)
    seen = padding(side).bool()
    mask = prepare(theirs.bidirectional_mask_function, seen)
    bias = learned + torch.where(seen, 0.0, float("-inf"))[:, None, None]
    want = (8**-0.5 * q @ k.mT + bias).softmax(-1) @ v
    got = attend(q, k, v, mask, position_bias=learned)
    compare(got, want)
    gradients = (torch.autograd.grad(x.square().sum(), learned)[0] for x in (got, want))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def test_autocast_chooses_the_dtype():
    q, k, v = inputs()
    sinks = torch.randn(4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = attend(q, k, v.bfloat16(), s_aux=sinks.half())
    half = (x.bfloat16() for x in (q, k, v))
    assert torch.equal(got, attend(*half, s_aux=sinks.half().bfloat16()))


# What is refused.


@pytest.mark.parametrize(
    "options, words",
    [
        ({"dropout": 0.1}, r"dropout of attention weights \(0.1\).*attention_dropout \(BERT"),
        ({"dropout": 0.1}, "dropout.*attention_probs_dropout_prob.*attn_pdrop.* to 0"),
        ({"output_attentions": True}, 'output_attentions.*"eager"'),
        ({"head_mask": torch.ones(4)}, 'head_mask.*"eager"'),
    ],
)
def test_what_we_cannot_do_is_refused(options, words):
    with pytest.raises(NotImplementedError, match=f"Layer asks for {words}"):
        attend(*inputs(), **options)


def test_refused_in_a_model_too(registered):
    model = model_with("llama", "fm_attention")
    with pytest.raises(NotImplementedError, match="LlamaAttention asks for output_attentions"):
        model(input_ids=tokens(), output_attentions=True)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    model(input_ids=tokens())
    with pytest.raises(NotImplementedError, match=r"LlamaAttention asks for dropout.*model\.eval"):
        model.train()(input_ids=tokens())


def test_a_bias_over_packed_sequences_is_refused():
    ids = torch.tensor([[0] * 5 + [1] * 12]).expand(3, -1)
    packed = theirs.packed_sequence_mask_function(ids)
    mask = prepare(theirs.and_masks(theirs.causal_mask_function, packed))
    q, k, v = (torch.randn(3, 4, 17, 8) for _ in range(3))
    with pytest.raises(NotImplementedError, match="position_bias over packed sequences"):
        attend(q, k, v, mask, position_bias=torch.zeros(1, 4, 17, 17))


def test_a_mask_of_another_rank_is_refused():
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 7\).*four dimensions"):
        attend(*inputs(), torch.ones(2, 7, dtype=torch.bool))


def test_without_transformers_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"needs transformers >= 5\.17.*pip install"):
        fm.register_attention()
