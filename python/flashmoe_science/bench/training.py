"""Training steps of small models of transformers, through enable_sdpa() and without it.

Such a model's kernels are short, and the host is what its steps wait for: timed are whole forward
and backward passes that follow each other, host and device together, as a training loop has them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flashmoe_science import enable_sdpa, explain
from flashmoe_science.bench.case import Case, Implementation, Tensors, Workload

SDPA = "sdpa"  # PyTorch's, whose choice among its backends it is
WIDTH, HEADS, LAYERS, WORDS = 512, 8, 4, 1024


def _llama(length: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": WIDTH, "intermediate_size": 1408, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS // 2}
    return LlamaForCausalLM, LlamaConfig(
        vocab_size=WORDS, **sizes, **heads, max_position_embeddings=length, use_cache=False
    )


def _gpt2(length: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": length}
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    words = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel, GPT2Config(**words, **sizes, **no_dropout, use_cache=False)


def _bert(length: int) -> Any:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": LAYERS}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM, BertConfig(
        vocab_size=WORDS, **sizes, num_attention_heads=HEADS, max_position_embeddings=length,
        **no_dropout,
    )  # fmt: skip


# How to make each, and whether it is causal.
MODELS: dict[str, tuple[Callable[[int], Any], bool]] = {
    "llama": (_llama, True), "gpt2": (_gpt2, True), "bert": (_bert, False),
}  # fmt: skip


@dataclass(frozen=True)
class TrainingShape:
    """model, B, S: which model, and how many sequences of how many tokens it gets."""

    model: str
    batch: int
    length: int

    options = frozenset()  # it has no more than these

    @classmethod
    def parse(cls, text: str) -> TrainingShape:
        """Reads "llama,4,512"."""
        model, *sizes = text.split(",")
        right = len(sizes) == 2 and all(size.isdecimal() and int(size) for size in sizes)
        if model not in MODELS or not right:
            raise ValueError(
                f"shape {text!r}: expected model,batch,length with a model of {', '.join(MODELS)} "
                "and sizes of at least 1, for example llama,4,512"
            )
        return cls(model, *map(int, sizes))

    def __str__(self) -> str:
        return f"{self.model},{self.batch},{self.length}"


@dataclass(frozen=True)
class TrainingCase(Case):
    """Leaves are the model's parameters, by name, the output its logits."""

    @property
    def heads(self) -> int:
        return 1  # a part of a model is no smaller model

    group = heads

    @property
    def judges_largest_of_gradients(self) -> bool:
        """A weight's gradient is a sum over all tokens, through all layers: one wrong number of
        attention is nowhere in it, and its largest error is luck. (H200, bf16, BERT's shape: one
        of ours and one of SDPA's were past the limit; our root mean squares within 0.76 of it.)
        """
        return False

    def kept_bytes(self, backward: bool) -> None:
        """What layers keep is the model's business."""


class Model:
    """A model of transformers that computes with whatever parameters a call brings."""

    def __init__(self, shape: TrainingShape, dtype: torch.dtype, device: torch.device) -> None:
        make, _ = MODELS[shape.model]
        kind, config = make(shape.length)
        self.module = kind._from_config(config, attn_implementation="sdpa").to(device, dtype)
        for module in self.module.modules():
            # A key's bias adds the same to all scores of a row: a gradient of nothing but rounding.
            if isinstance(getattr(module, "key", None), torch.nn.Linear):
                module.key.bias = None
        names: dict[torch.Tensor, str] = {}
        self.places: list[tuple[torch.nn.Module, str, str]] = []
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            owner, _, attribute = name.rpartition(".")
            first = names.setdefault(parameter, name)  # of one that is tied: another's name
            self.places.append((self.module.get_submodule(owner), attribute, first))
        self.parameters = {name: parameter.detach() for parameter, name in names.items()}
        self.ids = torch.randint(WORDS, (shape.batch, shape.length), device=device)
        self.bound: Tensors | None = None

    def logits(self, leaves: Tensors) -> torch.Tensor:
        if self.bound is not leaves:  # once for all calls of a turn
            for module, attribute, name in self.places:
                module._parameters[attribute] = leaves[name]
            self.bound = leaves
        return self.module(input_ids=self.ids).logits


def flops_of(model: Model, shape: TrainingShape, causal: bool) -> float:
    """Of the forward pass: two for each weight that a token is multiplied by, and attention's."""
    weights = 0
    for module in model.module.modules():
        weight = getattr(module, "weight", None)
        if weight is not None and weight.dim() == 2 and not isinstance(module, torch.nn.Embedding):
            weights += weight.numel()
    seen = shape.length / 2 if causal else shape.length
    return shape.batch * shape.length * (2.0 * weights + LAYERS * 4.0 * seen * WIDTH)


def make_training(shape: TrainingShape, dtype: torch.dtype, device: torch.device) -> TrainingCase:
    """A step with our attention through the hook, beside one with PyTorch's own."""
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("workload training needs transformers: pip install transformers")
    model, (_, causal) = Model(shape, dtype, device), MODELS[shape.model]

    def explain_layer(leaves: Tensors, backward: bool) -> str:
        size = (shape.batch, HEADS, shape.length, WIDTH // HEADS)
        q = torch.empty(size, dtype=dtype, device=device)
        return explain(q, q, q, causal=causal, backward=backward)

    return TrainingCase(
        leaves=model.parameters,
        grad=torch.randn(shape.batch, shape.length, WORDS, device=device).to(dtype),
        scores=LAYERS * shape.batch * HEADS * shape.length**2,
        flops=flops_of(model, shape, causal),
        ours=Implementation(model.logits, explain=explain_layer, around=enable_sdpa),
        reference=Implementation(model.logits, backend="math"),
        peers={SDPA: Implementation(model.logits)},
        keywords={"model": shape.model},
    )


TRAINING_WORKLOADS = {
    "training": Workload(
        "a training step of a small transformers model, its SDPA ours by enable_sdpa(); wall time",
        {
            "cpu": tuple(f"{name},1,64" for name in MODELS),
            "cuda": tuple(f"{name},4,512" for name in MODELS),
        },
        make_training,
        operator="training step",
        shape_type=TrainingShape,
        sizes="model,B,S",
        backward_flops=2.0,
        options=frozenset(),
        peers_on={device: (SDPA,) for device in ("cpu", "cuda")},
        passes=("fwd+bwd",),
        waits_for_host=True,
    ),
}
