"""Models of transformers with our experts beside their own, in float32 on the CPU."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers.integrations.moe import ExpertsInterface

import flashmoe_science as fm

ours = sys.modules["flashmoe_science.transformers.experts"]

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.3,  # so that the experts matter to the logits
}
CONFIGS = {
    "qwen3_moe": lambda **more: transformers.Qwen3MoeConfig(
        **SMALL, num_experts=6, moe_intermediate_size=24, intermediate_size=48, head_dim=8,
        norm_topk_prob=True, output_router_logits=True, **more,
    ),
    "mixtral": lambda **more: transformers.MixtralConfig(
        **SMALL, num_local_experts=4, intermediate_size=40, output_router_logits=True, **more
    ),
}  # fmt: skip


def model_with(config, implementation: str):
    """The same weights each time."""
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.set_experts_implementation(implementation)
    assert model.config._experts_implementation == implementation
    return model.float()


def tokens():
    return torch.randint(2, 96, (3, 11), generator=torch.Generator().manual_seed(5))


def answers(model) -> dict[str, torch.Tensor]:
    """Logits, loss (with the router's own), every gradient, and what it writes."""
    ids = tokens()
    model.train()
    result = model(input_ids=ids, labels=ids)
    result.loss.backward()
    found = {"logits": result.logits.detach(), "loss": result.loss.detach()}
    found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    model.eval()
    written = model.generate(ids[:, :4], max_new_tokens=12, do_sample=False)
    return found | {"tokens": written}


def compare(got, want) -> None:
    assert got.keys() == want.keys()
    assert torch.equal(got["tokens"], want["tokens"]), "tokens"
    torch.testing.assert_close(got, want)  # torch's own idea of equal in float32


@pytest.fixture
def registered():
    """Registered for a test alone, whoever did so before."""
    ExpertsInterface._global_mapping.pop("flashmoe", None)
    assert fm.register_experts() == "flashmoe"
    yield
    del ExpertsInterface._global_mapping["flashmoe"]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_is_the_same_with_our_experts(name, registered, monkeypatch):
    called = []
    monkeypatch.setattr(ours, "moe", lambda *a, **k: called.append(a[5]) or fm.moe(*a, **k))
    want = answers(model_with(CONFIGS[name](), "eager"))
    assert not called
    got = answers(model_with(CONFIGS[name](), "flashmoe"))
    # Two layers: one pass for the loss, and one for each new token.
    assert called == ["swiglu"] * 2 * (1 + 12)
    compare(got, want)
    experts = [n for n in want if "gate_up_proj" in n or "down_proj" in n]
    assert len(experts) == 4 and all((want[n] != 0).any() for n in experts)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("broken", ["wrong activation", "last weight", "off by a little", "zero"])
def test_broken_experts_would_be_found(name, broken, registered, monkeypatch):
    def wrong(x, gate_up, down, ids, weights, activation, **biases):
        if broken == "wrong activation":
            return fm.moe(x, gate_up, down, ids, weights, "geglu", **biases)
        if broken == "last weight":
            return fm.moe(x, gate_up, down, ids, weights.flip(-1), activation, **biases)
        out = fm.moe(x, gate_up, down, ids, weights, activation, **biases)
        return 0 * out if broken == "zero" else 1.001 * out

    monkeypatch.setattr(ours, "moe", wrong)
    want = answers(model_with(CONFIGS[name](), "eager"))
    with pytest.raises(AssertionError):
        compare(answers(model_with(CONFIGS[name](), "flashmoe")), want)


def test_a_compiled_model(registered):
    ids = tokens()
    model = model_with(CONFIGS["qwen3_moe"](), "flashmoe").eval()
    torch._dynamo.reset()
    with torch.no_grad():
        want = model(input_ids=ids).logits
        got = torch.compile(model, backend="aot_eager", fullgraph=True)(input_ids=ids).logits
    torch.testing.assert_close(got, want)


# Experts of every kind that the interface knows, as modules of their own.


def experts_module(activation: str | None = "silu", E=4, d=16, n=12, apply_gate=None, **kind):
    """Experts as a model of transformers has them, with its eager forward as a loop."""
    gated, transposed = kind.get("has_gate", True), kind.get("is_transposed", False)
    up = "gate_up_proj" if gated else "up_proj"

    class Experts(torch.nn.Module):
        def __init__(self, config) -> None:
            super().__init__()
            self.num_experts = E
            rows = 2 * n if gated else n
            shapes = {up: (E, rows, d), "down_proj": (E, d, n)}
            for name, shape in shapes.items():
                weight = 0.4 * torch.randn(shape)
                weight = weight.mT.contiguous() if transposed else weight
                setattr(self, name, torch.nn.Parameter(weight))
                if kind.get("has_bias"):
                    setattr(self, f"{name}_bias", torch.nn.Parameter(torch.randn(shape[:2])))
            if activation is not None:
                self.act_fn = transformers.activations.ACT2FN[activation]

        def forward(self, hidden_states, top_k_index, top_k_weights):
            raise AssertionError("the loop is not asked for here")

    if apply_gate is not None:
        Experts._apply_gate = apply_gate
    decorated = transformers.integrations.use_experts_implementation(**kind)(Experts)
    return decorated(transformers.PretrainedConfig())


KINDS = {
    "gate": {},
    "no gate": {"has_gate": False},
    "transposed": {"is_transposed": True},
    "biases": {"has_bias": True},
    "biases, transposed, no gate": {"has_bias": True, "is_transposed": True, "has_gate": False},
}


@pytest.mark.parametrize("activation", ["silu", "swish", "gelu", "gelu_python", "relu"])
@pytest.mark.parametrize("kind", KINDS)
def test_experts_of_every_kind(kind, activation, registered):
    """Beside transformers' batched_mm, which has all of them."""
    module = experts_module(activation, **KINDS[kind])
    x, weights = torch.randn(9, 16, requires_grad=True), torch.rand(9, 2, requires_grad=True)
    ids = torch.rand(9, 4).argsort(-1)[:, :2]
    inputs, results = [x, weights, *module.parameters()], []
    for name in ("batched_mm", "flashmoe"):
        module.config._experts_implementation = name
        out = module(x, ids, weights)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "kind, words",
    [
        ({"activation": "gelu_new"}, "has the activation NewGELUActivation"),
        ({"activation": "gelu_pytorch_tanh"}, "has the activation GELUTanh"),
        ({"activation": "relu2"}, "has the activation ReLUSquaredActivation"),
        ({"is_concatenated": False}, "interleaves the rows of gate and up"),
        ({"has_post_expert_norm": True}, "normalizes the result"),
        ({"apply_gate": lambda self, x: x.chunk(2, -1)[0]}, "has a gate of its own"),
        ({"apply_gate": lambda self, x: x, "activation": None}, "has a gate of its own"),
    ],
)
def test_what_we_would_get_wrong_is_refused(kind, words, registered):
    module = experts_module(**kind)
    module.config._experts_implementation = "flashmoe"
    with pytest.raises(NotImplementedError, match=f'Experts {words}.*"eager"'):
        module(torch.randn(3, 16), torch.zeros(3, 1).long(), torch.ones(3, 1))


def test_importing_the_package_registers_nothing():
    code = """
import flashmoe_science
from transformers.integrations.moe import ExpertsInterface
from transformers.modeling_utils import AttentionInterface
for interface in (ExpertsInterface(), AttentionInterface()):
    assert not [name for name in interface if "flashmoe" in name or name.startswith("fm_")]
"""
    package = str(Path(fm.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": package}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_without_transformers_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)
    with pytest.raises(ImportError, match=r"needs transformers >= 5\.17.*pip install"):
        fm.register_experts()


def test_a_version_whose_experts_say_too_little_is_refused(monkeypatch):
    """As 5.0's did, which failed when a model was called."""
    moe = importlib.import_module("transformers.integrations.moe")
    monkeypatch.setattr(moe, "use_experts_implementation", lambda experts_class=None: None)
    with pytest.raises(ImportError, match=r"needs transformers >= 5\.17.*how their weights lie"):
        fm.register_experts()
