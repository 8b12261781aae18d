"""Writes a tiny model of random weights for vLLM to load: run by check.py."""

from __future__ import annotations

import sys

import torch
import transformers

SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.1,  # smaller ones and attention would not matter to the tokens
}
CONFIGS = {
    "qwen3": lambda: transformers.Qwen3Config(
        **SMALL, num_hidden_layers=4, tie_word_embeddings=False
    ),
    # A sliding window in every other layer, and scores that are capped.
    "gemma2": lambda: transformers.Gemma2Config(
        **SMALL, num_hidden_layers=4, sliding_window=24, attn_logit_softcapping=2.0,
        query_pre_attn_scalar=32,
    ),
}  # fmt: skip


def main() -> None:
    name, folder = sys.argv[1:]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())
    model.float().save_pretrained(folder)


if __name__ == "__main__":
    main()
