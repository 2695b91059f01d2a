"""Functions that no table of the propagation knows are given whole sequences, whatever their shapes, or refused."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from composer3d_plugins.sharding.context_parallel.applied_functions import own_backwards
from support.sequence_models import Language
from support.sequence_steps import context, padded_batch, sequence_steps

import composer3d
from composer3d.propagation import is_elementwise, scripted_functions
from composer3d.testing import run_ranks


def _backward(ctx, grad):
    return grad.flip(1)


@torch.library.custom_op("composer3d_tests::backwards", mutates_args=())
def backwards(x: torch.Tensor) -> torch.Tensor:
    """Turn positions round: results have the shape of shards, and are not theirs."""
    return x.flip(1)


backwards.register_fake(torch.empty_like)
backwards.register_autograd(_backward)


class Turned(Language):
    """A custom operator along the sequence."""

    def attend(self, q, k, v, tokens):
        return F.scaled_dot_product_attention(q, k, v)

    def mixed(self, block, x, tokens):
        return super().mixed(block, backwards(x), tokens)


class Summed(torch.autograd.Function):
    """Sums of what came before, with a backward of its own: the same with every rank's positions, and wrong of them."""

    @staticmethod
    def forward(ctx, x):
        return x.cumsum(1)

    @staticmethod
    def backward(ctx, grad):
        return grad.flip(1).cumsum(1).flip(1)


class Scaled(torch.autograd.Function):
    """The same with every token."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class Inner(torch.nn.Module):
    """Applies a function with a backward of its own."""

    def forward(self, x):
        return Summed.apply(x)


def summed(x):
    """Call one through a function."""
    return _named(x)


_named = Summed.apply


class InnerByHelper(torch.nn.Module):
    def forward(self, x):
        return summed(x)


class Rowwise(torch.nn.Module):
    def forward(self, x):
        return Scaled.apply(x)


class Learned(torch.nn.Module):
    """The same with every token, by a parameter: it is not tried on numbers."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        return Scaled.apply(x) * self.scale


class HasInner(Turned):
    inner_class = Inner

    def __init__(self):
        super().__init__()
        self.inner = self.inner_class()

    def mixed(self, block, x, tokens):
        return Language.mixed(self, block, self.inner(x), tokens)


class HasHelper(HasInner):
    inner_class = InnerByHelper


class HasRowwise(HasInner):
    inner_class = Rowwise


class HasLearned(HasInner):
    inner_class = Learned


class Diagonal(Turned):
    """The diagonal of scores: of rows, a shard has the first columns of it."""

    def mixed(self, block, x, tokens):
        own = torch.diagonal(x @ x.mT, dim1=1, dim2=2)
        return Language.mixed(self, block, x, tokens) * own[..., None]


def test_unknown_functions_are_given_whole_sequences():
    cases = [(model, context(), padded_batch) for model in (Turned, Diagonal)]
    for found in run_ranks(sequence_steps, 2, cases):
        for loss, error, name, _ in found:
            assert max(loss, error) <= 1e-12, name


def test_unknown_functions_are_refused_by_name():
    with pytest.raises(composer3d.ComposerError) as caught:
        run_ranks(sequence_steps, 2, [(Turned, context(more='others = "refuse"\n'), padded_batch)])
    assert 'mixes positions, and others = "refuse" gathers nothing' in str(caught.value)
    assert "backwards" in str(caught.value)


@pytest.mark.parametrize("model", [HasInner, HasHelper, HasLearned])
def test_backwards_of_a_models_own_are_refused(model):
    with pytest.raises(composer3d.ComposerError) as caught:
        run_ranks(sequence_steps, 2, [(model, context(), padded_batch)])
    name = "Scaled" if model is HasLearned else "Summed"
    if model is not HasHelper:  # which has another name for it
        name += f" (test_context_parallel_unknown.py:{model.inner_class.forward.__code__.co_firstlineno + 1})"
    said = f'"inner" applies {name}, a torch.autograd.Function: which positions its backward reads cannot be seen; if'
    assert said in str(caught.value)


def test_backwards_of_a_models_own_may_be_rowwise():
    """As the manifest says of a module with parameters; without any it is tried on numbers."""
    rowwise = [(HasLearned, context(more='rowwise = ["inner"]\n'), padded_batch), (HasRowwise, context(), padded_batch)]
    for found in run_ranks(sequence_steps, 2, rowwise):
        for loss, error, *_ in found:
            assert max(loss, error) <= 1e-12


def scripted(function):
    """Have torch.jit compile a function; torch advises against it, and people's code has it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(function)


@scripted
def pooled(x: torch.Tensor) -> torch.Tensor:
    return x.mean(1)


@scripted
def gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def pool(x):
    """Call a compiled function."""
    return pooled(x)


class Classifier(Language):
    """Pools positions, so that a shard in place of the whole is no error of sizes."""

    def attend(self, q, k, v, tokens):
        return F.scaled_dot_product_attention(q, k, v)

    def pool(self, x):
        return pool(x)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.layers:
            x = x + self.mixed(block, x, tokens)
        return self.head(self.pool(x))


class OneByOne(Classifier):
    """Pools a sample at a time, in a function that torch.vmap transforms."""

    def pool(self, x):
        return torch.vmap(lambda sample: sample.mean(0))(x)


class Steepest(Classifier):
    """Pools what torch.func differentiates by."""

    def pool(self, x):
        return x.mean(1) + torch.func.grad(lambda y: y.mean(1).square().sum())(x).mean(1)


class Attributed(Classifier):
    """Has a compiled function as an attribute of its class."""

    pool = staticmethod(pooled)


class Forward(Turned):
    """Differentiates forward, what torch.func calls jvp, and maps a function over whole positions."""

    def mixed(self, block, x, tokens):
        at = torch.arange(x.shape[1])
        seen = torch.vmap(lambda query: query >= at)(at).to(x.dtype)
        _, slope = torch.func.jvp(torch.tanh, (x,), (torch.ones_like(x),))
        return Language.mixed(self, block, slope + seen @ x, tokens)


class ByArray(Turned):
    """Goes through NumPy's arrays, of tokens and of activations."""

    def mixed(self, block, x, tokens):
        before = torch.from_numpy((tokens.numpy() != 0).cumsum(1)).to(x.dtype)
        mean = torch.from_numpy(x.detach().numpy().mean(1, keepdims=True))
        return Language.mixed(self, block, x + before[..., None] + mean, tokens)


def of_samples():
    """Tokens, and a class of each sample."""
    (tokens,), kwargs, targets = padded_batch()
    return (tokens,), kwargs, targets[:, 5]


TRANSFORMED = "of a sequence that is sharded: what is done there cannot be seen"
SCRIPTED = "calls pooled, which torch.jit has compiled: which positions it reads cannot be seen"


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Classifier, f"the model's own code {SCRIPTED}"),
        (Attributed, f"the model's own code {SCRIPTED}"),
        (OneByOne, TRANSFORMED),
        (Steepest, TRANSFORMED),
    ],
)
def test_code_that_no_mode_sees_is_refused(model, said):
    with pytest.raises(composer3d.ComposerError) as caught:
        run_ranks(sequence_steps, 2, [(model, context(), of_samples)])
    assert said in str(caught.value)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own, of jvp
def test_arrays_and_forward_differentiation_are_those_of_one_device():
    for found in run_ranks(sequence_steps, 2, [(model, context(), padded_batch) for model in (Forward, ByArray)]):
        for loss, error, name, _ in found:
            assert max(loss, error) <= 1e-12, name


class Replaced(Inner):
    def forward(self, x):
        return x.cumsum(1)


class Calling(Inner):
    def forward(self, x):
        return super().forward(x)


def test_methods_that_a_class_replaces_are_none_of_its_code():
    assert own_backwards(Replaced()) == {}
    assert own_backwards(Calling()) == {"": {Summed: False}}


def test_compiled_functions_are_found_and_told_from_those_of_each_number():
    assert scripted_functions(Classifier()) == {"": pooled}
    assert scripted_functions(Turned()) == scripted_functions(OneByOne()) == {}
    assert is_elementwise(gelu) and not is_elementwise(pooled)
