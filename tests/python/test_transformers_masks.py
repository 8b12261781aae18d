"""Masks of encoders, of cross attention, and in models' own hands, beside eager attention."""

from __future__ import annotations

import sys
import warnings

import pytest
import torch
import transformers
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers import masking_utils as theirs

import flashmoe_science as fm
from flashmoe_science.transformers import masks
from tiny_models import compare

ours = sys.modules["flashmoe_science.transformers.attention"]

WIDTH = {"hidden_size": 32, "intermediate_size": 48}
SMALL = {**WIDTH, "vocab_size": 97, "num_hidden_layers": 2, "num_attention_heads": 4}
NO_DROPOUT = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}


def gemma_layers():
    heads = {"num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8}
    layers = ["sliding_attention", "full_attention"]
    return transformers.T5GemmaModuleConfig(**SMALL, **heads, sliding_window=4, layer_types=layers)


CONFIGS = {
    "bart": lambda: transformers.BartConfig(
        vocab_size=97, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, pad_token_id=1,
        max_position_embeddings=64, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2,
        forced_eos_token_id=None,
    ),
    "t5gemma": lambda: transformers.T5GemmaConfig(
        encoder=gemma_layers(), decoder=gemma_layers(), dropout_rate=0.0, attention_dropout=0.0
    ),
    "bert": lambda: transformers.BertConfig(**SMALL, **NO_DROPOUT),
    "bert decoder": lambda: transformers.BertConfig(
        **SMALL, **NO_DROPOUT, is_decoder=True, add_cross_attention=True
    ),
    "siglip": lambda: transformers.SiglipTextConfig(
        **SMALL, max_position_embeddings=64, bos_token_id=1, eos_token_id=1
    ),
    "align": lambda: transformers.AlignTextConfig(**SMALL, **NO_DROPOUT),
    "modernbert": lambda: transformers.ModernBertConfig(
        **SMALL, local_attention=8, global_attn_every_n_layers=2, pad_token_id=0, bos_token_id=1,
        eos_token_id=1, cls_token_id=1, sep_token_id=1, attention_dropout=0.0,
    ),
    "llama": lambda: transformers.LlamaConfig(**SMALL, num_key_value_heads=2),
    "bloom": lambda: transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4),
    "beit": lambda: transformers.BeitConfig(
        **WIDTH, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=4
    ),
    "siglip2": lambda: transformers.Siglip2VisionConfig(
        **WIDTH, num_hidden_layers=2, num_attention_heads=4, num_patches=16, patch_size=4
    ),
}  # fmt: skip
MODELS = {
    "bart": transformers.BartForConditionalGeneration,
    "t5gemma": transformers.T5GemmaModel,
    "bert": transformers.BertModel,
    "bert decoder": transformers.BertModel,
    "siglip": transformers.SiglipTextModel,
    "align": transformers.AlignTextModel,
    "modernbert": transformers.ModernBertModel,
    "llama": transformers.LlamaModel,
    "bloom": transformers.BloomModel,
    "beit": transformers.BeitModel,
    "siglip2": transformers.Siglip2VisionModel,
}


def model_with(name: str, implementation: str, dtype=torch.float32, **options):
    """The same weights each time, large enough for attention to matter."""
    config = CONFIGS[name]()
    for option, value in options.items():
        setattr(config, option, value)
    model = MODELS[name]._from_config(config, attn_implementation=implementation)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.15, generator=generator)
    return model.to(dtype).eval()


def tokens(rows: int = 3, length: int = 8, seed: int = 5) -> torch.Tensor:
    return torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(seed))


def padding(side: str) -> torch.Tensor:
    """1 where a token counts; 8 tokens of which the first row's all do."""
    mask = torch.ones(3, 8, dtype=torch.long)
    if side == "left":
        mask[1, :3] = mask[2, :5] = 0
    elif side == "right":
        mask[1, 5:] = mask[2, 3:] = 0
    elif side == "both ends":
        mask[1, :2] = mask[1, 6:] = mask[2, :1] = mask[2, 4:] = 0
    elif side == "holes":
        mask[1, 2:4] = mask[2, :1] = mask[2, 5] = 0
    return mask


SIDES = ["left", "right", "both ends", "holes"]


@pytest.fixture(autouse=True)
def registered():
    fm.register_attention()
    yield
    for interface in (AttentionInterface, AttentionMaskInterface):
        del interface._global_mapping["fm_attention"]


def answers(model, outputs=("last_hidden_state",), **inputs) -> dict[str, torch.Tensor]:
    """Results, those of padding too, and the gradients of all of them."""
    result = model(**inputs)
    found = {name: result[name] for name in outputs}
    sum(x.square().sum() for x in found.values()).backward()
    found = {name: x.detach() for name, x in found.items()}
    return found | {f"gradient of {n}": p.grad for n, p in model.named_parameters()}


def beside_eager(name: str, dtype=torch.float32, options=None, **arguments):
    want, got = (
        answers(model_with(name, implementation, dtype, **options or {}), **arguments)
        for implementation in ("eager", "fm_attention")
    )
    torch.testing.assert_close(got, want, **tolerances(dtype))


def tolerances(dtype) -> dict:
    """Gradients are sums of thousands of terms of both signs."""
    return {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 2e-4, "atol": 2e-4}


# Cross attention, whose queries are other tokens than its keys.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("length", [7, 8])
def test_a_decoder_over_a_padded_encoder(length, side, dtype):
    """Its length, by chance the padded encoder's own, means nothing."""
    inputs = {"input_ids": tokens(), "decoder_input_ids": tokens(length=length, seed=6)}
    outputs = ("logits", "encoder_last_hidden_state")
    beside_eager("bart", dtype, outputs=outputs, attention_mask=padding(side), **inputs)


@pytest.mark.parametrize("length", [1, 9])
def test_a_decoder_shorter_or_longer_than_its_encoder(length):
    inputs = {"input_ids": tokens(), "decoder_input_ids": tokens(length=length, seed=6)}
    beside_eager("bart", outputs=("logits",), attention_mask=padding("both ends"), **inputs)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("length", [7, 8])
def test_bert_as_a_decoder(length, side):
    hidden = torch.randn(3, 8, 32, generator=torch.Generator().manual_seed(7))
    inputs = {"encoder_hidden_states": hidden, "encoder_attention_mask": padding(side)}
    beside_eager("bert decoder", input_ids=tokens(length=length), **inputs)


@pytest.mark.parametrize("length", [7, 8])
def test_t5gemma(length):
    """Its encoder's windows reach to both sides, and its softcaps take no sdpa."""
    inputs = {"input_ids": tokens(), "decoder_input_ids": tokens(length=length, seed=6)}
    beside_eager("t5gemma", attention_mask=padding("right"), **inputs)


def test_a_padded_encoder_while_decoding():
    ids, mask = tokens(), padding("left")
    options = {"max_new_tokens": 9, "num_beams": 2, "do_sample": False}
    want, got = (
        model_with("bart", implementation).generate(ids, attention_mask=mask, **options)
        for implementation in ("eager", "fm_attention")
    )
    compare(got, want)


def test_a_compiled_decoder_of_its_encoders_length():
    arguments = {
        "input_ids": tokens(),
        "attention_mask": padding("right"),
        "decoder_input_ids": tokens(seed=6),
        "use_cache": False,
    }
    torch._dynamo.reset()
    with torch.no_grad():
        want = model_with("bart", "eager")(**arguments).logits
        run = torch.compile(model_with("bart", "fm_attention"), backend="eager", fullgraph=True)
        compare(run(**arguments).logits, want)


# Encoders, whose padded tokens ask like others.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("side", SIDES)
def test_an_encoders_padding_asks_like_other_tokens(side, dtype):
    beside_eager("bert", dtype, input_ids=tokens(), attention_mask=padding(side))


@pytest.mark.parametrize("side", SIDES)
def test_a_model_that_pools_its_last_position(side):
    outputs = ("last_hidden_state", "pooler_output")
    beside_eager("siglip", outputs=outputs, input_ids=tokens(), attention_mask=padding(side))


@pytest.mark.parametrize("side", ["left", "right", "both ends"])
def test_padding_within_a_window_to_both_sides(side):
    """Padding asks there too, unless nothing that counts is near: its row is 0, as with sdpa."""
    ids, mask = tokens(), padding(side)
    with torch.no_grad():
        want, got = (
            model_with("modernbert", implementation)(ids, attention_mask=mask).last_hidden_state
            for implementation in ("sdpa", "fm_attention")
        )
    compare(got, want)


def test_a_sequence_of_nothing_but_padding():
    """Eager attention averages its values, the kernels give 0; its neighbours do not notice."""
    ids, mask = tokens(), padding("right")
    mask[1] = 0
    with torch.no_grad():
        want, got = (
            model_with("bert", implementation)(ids, attention_mask=mask).last_hidden_state
            for implementation in ("eager", "fm_attention")
        )
    assert got.isfinite().all()
    compare(got[[0, 2]], want[[0, 2]])


@pytest.mark.parametrize("side", ["none", "right"])
def test_a_decoder_made_bidirectional(side):
    """Its modules may still say that they are causal."""
    seen = padding(side).bool()
    config = CONFIGS["llama"]()
    config.is_causal, config._attn_implementation = False, "fm_attention"
    mask = theirs.create_causal_mask(config, torch.zeros(3, 8, 32), seen, None)
    assert isinstance(mask, masks.Mask) and (mask.left, mask.right) == (-1, -1)
    options = {"is_causal": False}
    beside_eager("llama", options=options, input_ids=tokens(), attention_mask=padding(side))


@pytest.mark.parametrize("side", ["none", "right"])
def test_a_module_that_does_not_say_whether_it_is_causal(side):
    beside_eager("align", input_ids=tokens(), attention_mask=padding(side))


# Masks of another batch.


@pytest.mark.parametrize("rows", [1, 2, 6])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_padding_of_another_batch_is_refused(name, rows):
    mask = torch.ones(rows, 11, dtype=torch.long)
    mask[0, :4] = 0
    words = rf"attention_mask has shape \({rows}, 11\) for a batch of 3.*row for each sequence"
    with pytest.raises(ValueError, match=words):
        model_with(name, "fm_attention")(tokens(length=11), attention_mask=mask)


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_rows_without_padding_say_nothing(name, rows):
    ids, mask = tokens(), torch.ones(rows, 8, dtype=torch.long)
    with torch.no_grad():
        want = model_with(name, "eager")(ids).last_hidden_state
        got = model_with(name, "fm_attention")(ids, attention_mask=mask).last_hidden_state
    compare(got, want)


def test_a_mask_for_other_tokens_is_refused():
    """A model that folds its batch, or asks with fewer tokens, than its mask was made for."""
    mask = masks.prepare(3, 8, 8, 0, 0, theirs.bidirectional_mask_function, padding("left"))
    for shape in ((6, 4, 4, 8), (3, 4, 4, 8), (2, 4, 8, 8)):
        q = k = v = torch.randn(shape)
        with pytest.raises(ValueError, match=r"attention_mask is for .*\(3, 8, 8\)"):
            ours._attend(nn.Module(), q, k, v, mask)


# Models that work on their masks.


@pytest.mark.parametrize(
    "options",
    [{}, {"use_shared_relative_position_bias": True}, {"use_relative_position_bias": True}],
)
def test_a_model_that_adds_a_bias_to_its_mask(options):
    """BEiT has no mask, and adds its bias to one where it is given one."""
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(7))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is masked: no tensor is made
        beside_eager("beit", options=options, pixel_values=pixels)


@pytest.mark.parametrize("patches", [12, 16])
@pytest.mark.filterwarnings("ignore:the model works on its attention mask")
def test_a_model_that_repeats_its_mask_for_its_heads(patches):
    """Siglip 2 hands it to torch's own attention, to pool patches."""
    seen = torch.ones(2, 16, dtype=torch.long)
    seen[1, patches:] = 0
    inputs = {
        "pixel_values": torch.randn(2, 16, 48, generator=torch.Generator().manual_seed(7)),
        "pixel_attention_mask": seen,
        "spatial_shapes": torch.tensor([[4, 4], [patches // 4, 4]]),
    }
    beside_eager("siglip2", outputs=("last_hidden_state", "pooler_output"), **inputs)


@pytest.mark.parametrize("side", ["none", "left"])
def test_a_model_that_computes_its_attention_itself(side, recwarn):
    beside_eager("bloom", input_ids=tokens(), attention_mask=padding(side))
    words = [str(warning.message) for warning in recwarn]
    assert any("as BLOOM does, computes none of it by flashmoe_science" in w for w in words)


@pytest.mark.parametrize("side", ["none", "left", "holes"])
@pytest.mark.parametrize(
    "function", [theirs.causal_mask_function, theirs.sliding_window_causal_mask_function(3)]
)
@pytest.mark.filterwarnings("ignore:the model works on its attention mask")
def test_the_tensor_of_a_mask_is_eager_attentions(function, side):
    arguments = (3, 4, 8, 4, 0, function, padding(side).bool())
    mask, want = masks.prepare(*arguments), theirs.eager_mask(*arguments)
    assert "tensor" not in vars(mask)
    assert mask.shape == want.shape == (3, 1, 4, 8) and mask.to("cpu") is mask
    assert "tensor" not in vars(mask), "made before it was asked for"
    bias = torch.randn(3, 2, 4, 8)
    assert mask.dtype == want.dtype and mask.is_contiguous()
    assert torch.equal(bias + mask, bias + want) and torch.equal(mask + bias, bias + want)
    assert torch.equal(1 - mask, 1 - want) and torch.equal(mask[:, :, -1], want[:, :, -1])
    assert torch.equal(mask == 0, want == 0) and torch.equal(mask < -1, want < -1)
    assert torch.equal(torch.cat((mask, bias), 1), torch.cat((want, bias), 1))
    assert torch.equal(mask.expand(3, 2, -1, -1), want.expand(3, 2, -1, -1))
    assert torch.equal(torch.where(mask < 0, 1.0, bias), torch.where(want < 0, 1.0, bias))
    with pytest.raises(AttributeError, match="'Mask' object has no attribute 'widen'"):
        mask.widen()
