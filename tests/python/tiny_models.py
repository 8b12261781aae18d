"""Tiny models of transformers with random weights, large enough for attention to matter."""

from __future__ import annotations

import torch
import transformers
from torch import nn

SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}
# Shorter than the prompts, in the first of two layers.
WINDOW = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SMALL, **WINDOW),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SMALL, **WINDOW, num_local_experts=3, num_experts_per_tok=2, rope_parameters=ROPE
    ),
}
SOFTCAP = {
    "gemma2": lambda: transformers.Gemma2Config(**SMALL, **WINDOW, attn_logit_softcapping=2.0)
}


def model_with(name: str, implementation: str):
    """The same weights each time."""
    torch.manual_seed(3)
    config = (CONFIGS | SOFTCAP)[name]()
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter_name, parameter in model.named_parameters():
        if "sinks" in parameter_name:
            nn.init.normal_(parameter)
    model.set_attn_implementation(implementation)
    assert model.config._attn_implementation == implementation
    return model.float().eval()


def tokens(rows: int = 3, length: int = 17) -> torch.Tensor:
    return torch.randint(2, 256, (rows, length), generator=torch.Generator().manual_seed(5))


def compare(got, want) -> None:
    torch.testing.assert_close(got, want)  # torch's own idea of equal; tokens are integers


def break_on_purpose(monkeypatch, module, model: str) -> None:
    """Outputs times 0.9; of every other head in Gemma, which normalises the sum of all heads."""
    step = 2 if model == "gemma3" else 1
    for name, head_dim in (("flash_attention", -3), ("flash_attention_varlen", -2)):
        function = getattr(module, name)

        def broken(*args, function=function, dim=head_dim, **options):
            result = function(*args, **options)
            out = result[0] if isinstance(result, tuple) else result
            factors = torch.ones(out.shape[dim])
            factors[::step] = 0.9
            out = out * factors.view(-1, *[1] * (-1 - dim))
            return (out, *result[1:]) if isinstance(result, tuple) else out

        monkeypatch.setattr(module, name, broken)
