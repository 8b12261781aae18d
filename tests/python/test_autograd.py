"""Every public function is asked for all that autograd and torch.func offer: right, or refused.

What is right is compared with plain torch math in float64; what is refused says so and what to do.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.autograd.forward_ad as fwd
from torch import func
from torch.autograd import functional
from torch.utils.checkpoint import checkpoint

import flashmoe_science as fm
from autograd_subjects import SUBJECTS, weights
from flashmoe_science.compat import flash_attn

FORWARD_MODE = "no forward-mode derivative yet.*INSTEAD"
SECOND = "no second derivative yet.*INSTEAD"
THIRD = "no third derivative.*INSTEAD"
FORWARD_TWICE = "no forward mode over forward mode.*INSTEAD"
NO_VMAP = "has no vmap yet.*(one call|pass the batch)"

EXPLANATIONS = {"explain", "explain_append", "explain_moe", "explain_paged"}
NO_TENSORS = {*EXPLANATIONS, "register_experts", "register_attention"}
# They refuse every derivative, which test_paged.py, test_append.py and test_compat_cache.py ask of.
FORWARD_ONLY = {"flash_attention_paged", "kv_cache_append", "flash_attn_with_kvcache"}


def test_every_public_function_is_asked():
    public = {*fm.__all__, *flash_attn.__all__}
    asked = {name.partition(",")[0] for name in SUBJECTS}
    assert asked | NO_TENSORS | FORWARD_ONLY == public


# The requests: of a function of tensors with one vector as its result.


def flat(call: Callable) -> Callable:
    """All results in one vector: what has a Jacobian."""
    return lambda *inputs: torch.cat([x.flatten() for x in call(*inputs)[:2]])


def loss(f):
    def weighted(*inputs):
        result = f(*inputs)
        return (weights(result) * result.square()).sum()

    return weighted


def leaves(inputs):
    return tuple(x.detach().clone().requires_grad_() for x in inputs)


def gradients(f, inputs):
    inputs = leaves(inputs)
    return torch.autograd.grad(loss(f)(*inputs), inputs)


def backward(f, inputs):
    inputs = leaves(inputs)
    loss(f)(*inputs).backward()
    return [x.grad for x in inputs]


def batched_gradients(f, inputs):
    inputs = leaves(inputs)
    result = f(*inputs)
    seeds = torch.eye(result.numel(), dtype=result.dtype)[:3]
    return torch.autograd.grad(result, inputs, seeds, is_grads_batched=True)


def hooked(context):
    def ask(f, inputs):
        with context():
            return gradients(f, inputs)

    return ask


def packing():
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x)


def checkpointed(f, inputs):
    return gradients(lambda *x: checkpoint(f, *x, use_reentrant=False), inputs)


def gradcheck(f, inputs):
    assert torch.autograd.gradcheck(f, leaves(inputs))
    return ()


def gradcheck_forward(f, inputs):
    assert torch.autograd.gradcheck(f, leaves(inputs), check_forward_ad=True, fast_mode=True)
    return ()


def everything(n):
    return tuple(range(n))


def func_vjp(f, inputs):
    result, pull = func.vjp(f, *inputs)
    return result, *pull(weights(result))


def per_sample(f, inputs):
    """vmap of grad, over one input after the other, the mapped dimension anywhere in it."""
    grad, results = func.grad(loss(f), everything(len(inputs))), []
    for i, x in enumerate(inputs):
        for dim in (0, 1, -1):
            samples = torch.stack([x, 2 * x, x.flip(0)], dim)
            dims = [None] * len(inputs)
            dims[i] = dim
            batch = (*inputs[:i], samples, *inputs[i + 1 :])
            results += func.vmap(grad, tuple(dims))(*batch)
    return results


def mapped(f, inputs):
    return [func.vmap(f)(*(torch.stack([x, x.flip(0), -x]) for x in inputs))]


def mapped_in_part(f, inputs):
    """Only the last input, the bias where there is one, has the mapped dimension; in chunks."""
    *rest, last = inputs
    dims = (*(None for _ in rest), 1)
    samples = torch.stack([last, last.flip(0), -last], 1)
    return [func.vmap(f, dims, chunk_size=2)(*rest, samples)]


def mapped_twice(f, inputs):
    samples = (torch.stack([torch.stack([x, -x]), torch.stack([x, 2 * x])]) for x in inputs)
    return [func.vmap(func.vmap(f))(*samples)]


def gradient_of_mapped(f, inputs):
    samples = tuple(torch.stack([x, x.flip(0), -x]) for x in inputs)
    return func.grad(loss(func.vmap(f)), everything(len(inputs)))(*samples)


def gradient_of_value(f, inputs):
    """The value that an inner gradient leaves behind is no constant to the outer one."""

    def value(*x):
        return func.grad_and_value(loss(f))(*x)[1]

    return func.grad(value, everything(len(inputs)))(*inputs)


def functional_call(f, inputs):
    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.query = torch.nn.Parameter(torch.zeros_like(inputs[0]))

        def forward(self, *rest):
            return loss(f)(self.query, *rest)

    module = Module()

    def call(query):
        return func.functional_call(module, {"query": query}, inputs[1:])

    return [func.grad(call)(inputs[0])]


def second_gradients(f, inputs):
    inputs = leaves(inputs)
    grads = torch.autograd.grad(loss(f)(*inputs), inputs, create_graph=True)
    return torch.autograd.grad(sum(x.square().sum() for x in grads), inputs)


def gradgradcheck(f, inputs):
    assert torch.autograd.gradgradcheck(f, leaves(inputs), fast_mode=True)
    return ()


def third_gradients(f, inputs):
    inputs = leaves(inputs)
    grads = torch.autograd.grad(loss(f)(*inputs), inputs, create_graph=True)
    grads = torch.autograd.grad(loss(lambda *x: x[0])(*grads), inputs, create_graph=True)
    return torch.autograd.grad(grads[0].square().sum(), inputs)


def grad_of(f):
    """A number made of the gradient of a number."""
    return lambda x: (weights(x) * func.grad(f)(x)).sum()


def jvp_along(f):
    return lambda x: func.jvp(f, (x,), (weights(x).cos(),))[1]


def map_over(f):
    return lambda x: func.vmap(f)(torch.stack([x, -x])).sum()


def gradients_of(*transforms):
    """One transform of another, the last one of a loss, as functions of the first input."""

    def ask(f, inputs):
        def asked(x):
            return loss(f)(x, *inputs[1:])

        for transform in reversed(transforms):
            asked = transform(asked)
        return [asked(inputs[0])]

    return ask


def gradient_of_gradient(f, inputs):
    def first(*x):
        return sum(y.square().sum() for y in func.grad(loss(f), everything(len(x)))(*x))

    return func.grad(first, everything(len(inputs)))(*inputs)


def dual(at, context=torch.enable_grad, requires_grad=False):
    """A tangent of one input; the result with its own."""

    def ask(f, inputs):
        with fwd.dual_level(), context():
            x = [y.detach().requires_grad_(requires_grad) for y in inputs]
            x[at] = fwd.make_dual(x[at], weights(x[at]))
            primal, tangent = fwd.unpack_dual(f(*x))
            return primal.detach(), None if tangent is None else tangent.detach()

    return ask


def dual_gradient(create_graph):
    """The tangent arrives from behind, with the gradient of the result."""

    def ask(f, inputs):
        inputs = leaves(inputs)
        result = f(*inputs)
        with fwd.dual_level():
            seed = fwd.make_dual(torch.ones_like(result), weights(result))
            grads = torch.autograd.grad(result, inputs, seed, create_graph=create_graph)
            return [fwd.unpack_dual(x).tangent.detach() for x in grads]

    return ask


def func_jvp(f, inputs):
    return func.jvp(f, inputs, tuple(weights(x) for x in inputs))


def jvp_of_one(f, inputs):
    def call(q):
        return f(q, *inputs[1:])

    return func.jvp(call, inputs[:1], (weights(inputs[0]),))


def jvp_of_gradient(f, inputs):
    return jvp_of_one(lambda *x: func.grad(loss(f))(*x), inputs)


def gradient_of_jvp(f, inputs):
    return [func.grad(lambda q: jvp_of_one(f, (q, *inputs[1:]))[1].sum())(inputs[0])]


def jvp_of_mapped(f, inputs):
    return jvp_of_one(func.vmap(f), tuple(torch.stack([x, -x]) for x in inputs))


def mapped_second(f, inputs):
    samples = torch.stack([inputs[0], -inputs[0]], 1)
    return [func.vmap(lambda x: gradients_of(grad_of, grad_of)(f, (x, *inputs[1:])), 1)(samples)[0]]


def mapped_jvp(f, inputs):
    samples = torch.stack([inputs[0], -inputs[0]], 1)
    return func.vmap(lambda x: jvp_of_one(f, (x, *inputs[1:])), 1)(samples)


def linearize(f, inputs):
    result, push = func.linearize(f, *inputs)
    return result, push(*(weights(x) for x in inputs))


def compiled(ask, backend="aot_eager"):
    def of_compiled(f, inputs):
        torch._dynamo.reset()
        return ask(torch.compile(f, backend=backend), inputs)

    return of_compiled


def inside_compiled(ask):
    def all_compiled(f, inputs):
        torch._dynamo.reset()
        return torch.compile(lambda *x: ask(f, x), backend="eager")(*inputs)

    return all_compiled


def twice(which):
    return lambda f, inputs: which(loss(f), inputs, tuple(weights(x) for x in inputs))[1]


RIGHT = {
    "autograd.grad": gradients,
    "backward": backward,
    "autograd.grad, is_grads_batched": batched_gradients,
    "gradcheck": gradcheck,
    "detect_anomaly": hooked(torch.autograd.detect_anomaly),
    "saved_tensors_hooks": hooked(packing),
    "save_on_cpu": hooked(torch.autograd.graph.save_on_cpu),
    "checkpoint": checkpointed,
    "functional.vjp": lambda f, x: functional.vjp(loss(f), x)[1],
    "functional.jacobian": functional.jacobian,
    "functional.jacobian, vectorized": lambda f, x: functional.jacobian(f, x, vectorize=True),
    "func.grad": lambda f, x: func.grad(loss(f), everything(len(x)))(*x),
    "func.grad_and_value": lambda f, x: func.grad_and_value(loss(f), everything(len(x)))(*x)[0],
    "func.grad of func.grad_and_value's value": gradient_of_value,
    "func.functional_call": functional_call,
    "func.functionalize": lambda f, x: [func.functionalize(f)(*x)],
    "func.vjp": func_vjp,
    "a compiled function": compiled(lambda f, x: [f(*x)]),
    "autograd.grad of a compiled function": compiled(gradients),
    "a compiled func.grad": inside_compiled(lambda f, x: [func.grad(loss(f))(*x)]),
    "forward_ad in inference mode": dual(0, torch.inference_mode),  # torch drops the tangent too
}


# Refused where there is no vmap.
MAPS = {
    "func.jacrev": lambda f, x: func.jacrev(f, everything(len(x)))(*x),
    "func.jacrev, in chunks": lambda f, x: [func.jacrev(f, chunk_size=2)(*x)],
    "func.vmap": mapped,
    "func.vmap of one input": mapped_in_part,
    "func.vmap of func.vmap": mapped_twice,
    "func.vmap of func.grad": per_sample,
    "func.grad of func.vmap": gradient_of_mapped,
}
# Given where there are second derivatives and forward mode, else refused in these words.
TWICE = {
    **{f"forward_ad of input {i}": (dual(i), FORWARD_MODE) for i in range(4)},
    "forward_ad without gradients": (dual(0, torch.no_grad), FORWARD_MODE),
    "forward_ad of what requires gradients": (dual(0, requires_grad=True), FORWARD_MODE),
    "forward_ad of a gradient": (dual_gradient(False), FORWARD_MODE),
    "forward_ad of a recorded gradient": (dual_gradient(True), FORWARD_MODE),
    "forward_ad of a compiled function": (compiled(dual(0), "eager"), FORWARD_MODE),
    "gradcheck, forward mode": (gradcheck_forward, FORWARD_MODE),
    "functional.jacobian, forward mode": (
        lambda f, x: functional.jacobian(f, x, vectorize=True, strategy="forward-mode"),
        FORWARD_MODE,
    ),
    "func.jvp": (func_jvp, FORWARD_MODE),
    "func.jvp of one input": (jvp_of_one, FORWARD_MODE),
    "func.jvp of func.grad": (jvp_of_gradient, FORWARD_MODE),
    "func.grad of func.jvp": (gradient_of_jvp, FORWARD_MODE),
    "func.jvp of a compiled function": (compiled(func_jvp), FORWARD_MODE),
    "a compiled func.jvp": (inside_compiled(jvp_of_one), FORWARD_MODE),
    # torch has this for no autograd.Function.
    "func.functionalize of func.grad": (
        lambda f, x: [func.functionalize(func.grad(loss(f)))(*x)],
        "Functionalize rule for custom_function_call",
    ),
    "func.linearize": (linearize, FORWARD_MODE),
    "autograd.grad twice": (second_gradients, SECOND),
    "gradgradcheck": (gradgradcheck, SECOND),
    "functional.jvp": (twice(functional.jvp), SECOND),
    "functional.hvp": (twice(functional.hvp), SECOND),
    "functional.vhp": (twice(functional.vhp), SECOND),
    "functional.hessian": (lambda f, x: functional.hessian(loss(f), x), SECOND),
    "func.grad of func.grad": (gradient_of_gradient, SECOND),
}
TWICE_MAPS = {
    "func.jvp of func.vmap": (jvp_of_mapped, f"{FORWARD_MODE}|{NO_VMAP}"),
    "func.jacfwd": (lambda f, x: func.jacfwd(f, everything(len(x)))(*x), FORWARD_MODE),
    "func.hessian": (
        lambda f, x: func.hessian(loss(f), everything(len(x)))(*x),
        f"{FORWARD_MODE}|{SECOND}|{NO_VMAP}",
    ),
    "func.jacrev of func.grad": (
        lambda f, x: func.jacrev(func.grad(loss(f)))(*x),
        f"{SECOND}|{NO_VMAP}",
    ),
    "func.jacrev of func.jacrev": (
        lambda f, x: func.jacrev(func.jacrev(loss(f)))(*x),
        f"{SECOND}|{NO_VMAP}",
    ),
    "func.vmap of func.grad of func.grad": (mapped_second, f"{SECOND}|{NO_VMAP}"),
    "func.vmap of func.jvp": (mapped_jvp, f"{FORWARD_MODE}|{NO_VMAP}"),
}
# Refused by all.
REFUSED = {
    "autograd.grad three times": (third_gradients, f"{THIRD}|{SECOND}"),
    "func.grad, three times": (gradients_of(grad_of, grad_of, grad_of), f"{THIRD}|{SECOND}"),
    "func.jvp of func.jvp": (gradients_of(jvp_along, jvp_along), f"{FORWARD_TWICE}|{FORWARD_MODE}"),
    "func.jacfwd of func.jacfwd": (
        lambda f, x: func.jacfwd(func.jacfwd(loss(f)))(*x),
        f"{FORWARD_TWICE}|{FORWARD_MODE}|{NO_VMAP}",
    ),
}
ASKED = {*RIGHT, *MAPS, *TWICE, *TWICE_MAPS, *REFUSED}
TWICE_ALL = TWICE | TWICE_MAPS
# Of modules, or of tensors outside of any function.
NOT_ASKED = {"replace_all_batch_norm_modules_", "stack_module_state", "debug_unwrap"}


@pytest.mark.parametrize("module", [func, functional], ids=["func", "functional"])
def test_everything_torch_offers_is_asked(module):
    prefix = module.__name__.rpartition(".")[2]
    asked = {name for name in module.__all__ if any(f"{prefix}.{name}" in x for x in ASKED)}
    assert asked | NOT_ASKED >= set(module.__all__)


def same(got, want):
    """As the nested tuples of a Jacobian of several inputs."""
    if isinstance(want, torch.Tensor) or want is None:
        assert (got is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
        return
    for a, b in zip(got, want, strict=True):
        same(a, b)


def given(subject):
    """What a subject is asked, and gives or refuses for want of a vmap."""
    return RIGHT | MAPS | ({k: v for k, (v, _) in TWICE_ALL.items()} if subject.twice else {})


def refused(subject):
    return REFUSED if subject.twice else TWICE_ALL | REFUSED


def questions(asked):
    """(name, request) of all subjects, but for inputs that they do not have."""
    return [
        (name, request_)
        for name, subject in SUBJECTS.items()
        for request_ in asked(subject)
        if request_ not in [f"forward_ad of input {i}" for i in range(len(subject.shapes), 4)]
    ]


@pytest.mark.parametrize("name, request_", questions(given))
def test_what_is_given_is_right(name, request_):
    subject = SUBJECTS[name]
    ask = given(subject)[request_]
    if not subject.vmap and request_ in MAPS | TWICE_MAPS:
        with pytest.raises(NotImplementedError, match=NO_VMAP):
            ask(flat(subject.ours), subject.inputs())
        return
    want = ask(flat(subject.math), subject.inputs())
    with subject.context():
        same(ask(flat(subject.ours), subject.inputs()), want)


@pytest.mark.parametrize("name, request_", questions(refused))
def test_what_is_not_there_is_refused(name, request_):
    subject = SUBJECTS[name]
    ask, words = refused(subject)[request_]
    words = words.replace("INSTEAD", subject.instead)
    with subject.context(), pytest.raises(RuntimeError, match=f"(?s){words}"):
        ask(flat(subject.ours), subject.inputs())


@pytest.mark.parametrize("depth", [2, 3])
def test_transforms_of_transforms_are_right_or_refused(depth):
    """A derivative that a level of torch.func does not hear of would be a silent zero."""
    subject, right = SUBJECTS["flash_attention"], 0
    inputs = tuple(x[:1, :, :2] for x in subject.inputs()[:3])
    for transforms in product((grad_of, jvp_along, map_over), repeat=depth):
        names = " of ".join(x.__name__ for x in transforms)
        derivatives = sum(x is not map_over for x in transforms)
        ask = gradients_of(*transforms)
        try:
            got = ask(flat(subject.ours), inputs)
        except NotImplementedError as error:
            assert derivatives > 2 or transforms.count(jvp_along) == 2, f"{names}: {error}"
            continue
        same(got, ask(flat(subject.math), inputs))
        right += 1
    assert right == {2: 8, 3: 16}[depth]


def test_a_tangent_of_something_else_does_no_harm():
    """Attention inside a dual level, of tensors that have no tangent, is as right as outside."""
    subject = SUBJECTS["flash_attention"]
    q, k, v, bias = leaves(subject.inputs())
    want = gradients(flat(subject.ours), (q, k, v, bias))
    with fwd.dual_level():
        x = fwd.make_dual(torch.ones(3), torch.ones(3))
        assert fwd.unpack_dual(x.exp()).tangent is not None
        same(gradients(flat(subject.ours), (q, k, v, bias)), want)
    _, tangent = func.jvp(
        lambda x: x.square().sum() + flat(subject.ours)(q, k, v, bias).sum(),
        (torch.ones(3, dtype=torch.float64),),
        (torch.ones(3, dtype=torch.float64),),
    )
    assert tangent == 6


def explained_with_a_tangent(ask, q):
    with fwd.dual_level():
        ask(fwd.make_dual(q, q))


EXPLAINED = {
    "requires_grad": lambda ask, q: ask(q.requires_grad_()),
    "forward_ad": explained_with_a_tangent,
    "func.grad": lambda ask, q: func.grad(ask)(q),
    "func.jvp": lambda ask, q: func.jvp(ask, (q,), (q,)),
}


@pytest.mark.parametrize("how", EXPLAINED)
def test_explain_answers_inside_every_transform(how):
    q, k, v, bias = SUBJECTS["flash_attention"].inputs()
    said = []

    def ask(q):
        said.append(fm.explain(q, k, v, bias=bias))
        return q.sum()

    EXPLAINED[how](ask, q.clone())
    assert said == [fm.explain(q, k, v, bias=bias)]


def test_explain_inside_vmap_is_about_all_samples():
    q, k, v, bias = (torch.stack([x] * 3) for x in SUBJECTS["flash_attention"].inputs())
    said = []

    def ask(q, k, v, bias):
        said.append(fm.explain(q, k, v, bias=bias))
        return q

    func.vmap(ask)(q, k, v, bias)
    assert said == [fm.explain(q, k, v, bias=bias.unsqueeze(1))]
