"""One block run on meta as it would run under a plan: what works on which tensors, and whether its code follows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from composer3d import torch_compat
from composer3d_plugins.sharding.tensor_parallel.cuts import SEQUENCE, Unfollowed, cut_of, mark
from composer3d_plugins.sharding.tensor_parallel.following import Following
from composer3d_plugins.sharding.tensor_parallel.shapes import Placed
from composer3d_plugins.sharding.tensor_parallel.trace import (
    Call,
    Recorder,
    activation_of,
    in_training,
    on_meta,
    patched,
    replaced,
)
from composer3d_plugins.sharding.tensor_parallel.weights import kind_of

__all__ = ["SEQUENCE", "Rehearsal", "Roles", "computes_with_whole_sizes"]


@dataclass(kw_only=True)
class Roles:
    """What the linear layers of a block are taken for, by their FQNs in it.

    Attributes:
        expanding: Those whose results are cut, with the sizes of their parts.
        sequence_dim: The dim of activations that is cut outside of them, None if none is.
        local: Modules whose parameters have their gradients added up by their style.
    """

    expanding: dict[str, tuple[int, ...]]
    sequence_dim: int | None = None
    local: frozenset[str] = frozenset()


@dataclass(kw_only=True)
class Rehearsal:
    """What one run showed.

    Attributes:
        contracting: Layers that took cut features, with the layers these came from, and the parts they were cut in.
        local: Modules with parameters that worked on cut features without contracting them.
        whole: Modules that worked on whole features of a cut sequence, or where no sequence is cut.
        record: Functions and shapes.
        needs_following: Whether code alone, run on shares, would not get everything right.
    """

    block: nn.Module
    degree: int
    roles: Roles
    contracting: dict[str, tuple[frozenset[str], tuple[int, ...]]] = field(default_factory=dict)
    local: set[str] = field(default_factory=set)
    whole: set[str] = field(default_factory=set)
    record: list[Any] = field(default_factory=list)
    needs_following: bool = False

    def follow(self, call: Call, where: str) -> None:
        """Run with cut tensors followed.

        Raises:
            Unfollowed: The code does with cut features what cannot be done with them.
        """
        call = self._marked(call)
        following = Following(self.degree, where, record=self.record)
        with in_training(self.block), patched(self._answers(followed=True)), following:
            output = on_meta(self.block, call)
        self.needs_following = following.has_acted
        for leaf in torch_compat.tree_leaves(output):
            cut = cut_of(leaf)
            if cut is not None and cut.sources != {SEQUENCE}:
                raise Unfollowed("its result leaves the block", sources=cut.sources)
        if self.roles.sequence_dim is not None:
            self._refuse_outputs(output)

    def _refuse_outputs(self, output: Any) -> None:
        """The activation that is handed on is what a block returns, or the first of several."""
        first = output[0] if isinstance(output, tuple) and output else output
        for leaf in torch_compat.tree_leaves(output):
            if (cut_of(leaf) is None) == (leaf is first) and isinstance(leaf, Tensor):
                what = "whole" if leaf is first else "cut along the sequence beside its activation"
                raise Unfollowed(f"it returns a tensor that is {what}", sources=frozenset({SEQUENCE}))
        if not isinstance(first, Tensor):
            raise Unfollowed("it returns no activation first", sources=frozenset({SEQUENCE}))

    def run_plain(self, call: Call) -> None:
        """Run with tensors of a rank's size, and nothing followed; raises whatever the code raises then."""
        dim = self.roles.sequence_dim
        if dim is not None:
            call = _replaced(call, lambda x: x.narrow(dim, 0, x.shape[dim] // self.degree))
        with in_training(self.block), patched(self._answers(followed=False)), Recorder(self.record):
            on_meta(self.block, call)

    def _marked(self, call: Call) -> Call:
        dim = self.roles.sequence_dim
        if dim is None:
            return call

        def cut(x: Tensor) -> Tensor:
            if x.shape[dim] % self.degree:
                raise Unfollowed(f"a sequence of {x.shape[dim]} does not divide by tp = {self.degree}")
            share = x.narrow(dim, 0, x.shape[dim] // self.degree)
            placed = Placed(dim=dim, parts=(x.shape[dim],))
            return mark(share, placed=placed, degree=self.degree, sources=frozenset({SEQUENCE}))

        return _replaced(call, cut)

    def _answers(self, *, followed: bool) -> dict[nn.Module, Callable[..., Any]]:
        answers: dict[nn.Module, Callable[..., Any]] = {}
        for fqn, module in self.block.named_modules():
            kind = kind_of(module)
            if kind in ("linear", "transposed"):
                answers[module] = self._linear(fqn, module, followed)
            elif fqn and not list(module.children()):
                answers[module] = self._leaf(fqn, module)
        return answers

    def _leaf(self, fqn: str, module: nn.Module) -> Callable[..., Any]:
        forward = module.forward

        def answer(*args: Any, **kwargs: Any) -> Any:
            self._note(fqn, [list(args), kwargs])
            with torch.no_grad() if fqn in self.roles.local else contextlib.nullcontext():
                return forward(*args, **kwargs)

        return answer

    def _note(self, fqn: str, arguments: Any) -> None:
        cuts = [cut_of(leaf) for leaf in torch_compat.tree_leaves(arguments)]
        if any(cut is not None and not cut.is_sequence for cut in cuts):
            self.local.add(fqn)
        elif self.roles.sequence_dim is None or any(cut is not None for cut in cuts):
            self.whole.add(fqn)

    def _linear(self, fqn: str, module: Any, followed: bool) -> Callable[..., Any]:
        forward, (rows, columns) = module.forward, module.weight.shape
        inputs, outputs = (columns, rows) if kind_of(module) == "linear" else (rows, columns)

        def answer(x: Tensor) -> Tensor:
            cut = cut_of(x)
            contracts = self._contracts(fqn, x, inputs, followed)
            if not contracts and fqn not in self.roles.expanding:
                self._note(fqn, [x])
                with torch.no_grad() if fqn in self.roles.local else contextlib.nullcontext():
                    return forward(x)
            with torch_compat.without_torch_functions():
                sources = cut.sources if cut is not None else frozenset()
                if contracts:
                    if cut is not None:
                        self.contracting[fqn] = (sources, cut.placed.parts)
                    return self._contracted(x, outputs, followed)
                if sources - {SEQUENCE}:
                    raise Unfollowed(
                        f'"{fqn}" is not given all of a dim that it does not sum over', sources=frozenset({fqn})
                    )
                return self._expanded(fqn, x, outputs, followed)

        return answer

    def _contracts(self, fqn: str, x: Tensor, inputs: int, followed: bool) -> bool:
        cut = cut_of(x)
        if followed:
            is_features = cut is not None and cut.sources != {SEQUENCE}
            return is_features and cut is not None and cut.placed.dim == x.ndim - 1
        return x.shape[-1] * self.degree == inputs

    def _whole_shape(self, x: Tensor, followed: bool) -> list[int]:
        """Return the shape of an activation whose features are not cut, its sequence put together."""
        dim, cut, shape = self.roles.sequence_dim, cut_of(x), list(x.shape)
        if dim is None or (followed and cut is None):
            return shape
        if followed and cut is not None and cut.placed.dim != dim:
            raise Unfollowed("it works along the sequence", sources=frozenset({SEQUENCE}))
        shape[dim] *= self.degree
        return shape

    def _expanded(self, fqn: str, x: Tensor, outputs: int, followed: bool) -> Tensor:
        shape = [*self._whole_shape(x, followed)[:-1], outputs // self.degree]
        result = _differentiable(shape, x)
        if not followed:
            return result
        placed = Placed(dim=result.ndim - 1, parts=self.roles.expanding[fqn])
        return mark(result, placed=placed, degree=self.degree, sources=frozenset({fqn}))

    def _contracted(self, x: Tensor, outputs: int, followed: bool) -> Tensor:
        shape, dim = [*x.shape[:-1], outputs], self.roles.sequence_dim
        if dim is None:
            return _differentiable(shape, x)
        size = shape[dim]
        shape[dim] //= self.degree
        result = _differentiable(shape, x)
        placed = Placed(dim=dim, parts=(size,))
        return mark(result, placed=placed, degree=self.degree, sources=frozenset({SEQUENCE})) if followed else result


def _differentiable(shape: list[int], like: Tensor) -> Tensor:
    """Return a result of a layer with weights that are trained; no leaf, so that it may be changed in place."""
    return torch.empty(shape, dtype=like.dtype, device="meta", requires_grad=True).clone()


def computes_with_whole_sizes(block: nn.Module, *, roles: Roles, degree: int, call: Call) -> bool:
    """Tell whether a block's code needs its cut tensors followed: without, it does something else, or fails."""
    followed, plain = (Rehearsal(block=block, degree=degree, roles=roles) for _ in range(2))
    followed.follow(call, type(block).__name__)
    if followed.needs_following:
        return True
    try:
        plain.run_plain(call)
    except Exception:  # a model's own code may raise anything
        return True
    return followed.record != plain.record


def _replaced(call: Call, change: Callable[[Tensor], Tensor]) -> Call:
    """Change the activation that a block takes."""
    key = activation_of(call.args, call.kwargs)
    if key is None:
        raise Unfollowed("it takes no activation with a sequence", sources=frozenset({SEQUENCE}))
    args, kwargs = replaced(call.args, call.kwargs, key, change)
    return Call(args=args, kwargs=kwargs)
