"""One block run on meta as it would run under a plan: what works on which tensors, and what its code does with them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from composer3d import torch_compat
from composer3d_plugins.sharding.tensor_parallel.cuts import SEQUENCE, Unfollowed, cut_of, mark, unmark
from composer3d_plugins.sharding.tensor_parallel.following import Following
from composer3d_plugins.sharding.tensor_parallel.records import Record
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

__all__ = ["SEQUENCE", "Code", "Rehearsal", "Roles", "sized"]


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


@dataclass(frozen=True, kw_only=True)
class Code:
    """How the code of a block is run on shares.

    Args:
        sizes: This rank's values of attributes that are sizes of the whole model, by module and name.
        followed: Modules whose code is followed.
        apart: Modules that draw on nothing but cut tensors.
    """

    sizes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    followed: frozenset[str] = frozenset()
    apart: frozenset[str] = frozenset()


@dataclass(kw_only=True)
class Rehearsal:
    """What one run showed.

    Attributes:
        contracting: Layers that took cut features, with the layers these came from, and the parts they were cut in.
        local: Modules with parameters that worked on cut features without contracting them.
        whole: Modules that worked on whole features of a cut sequence, or where no sequence is cut.
        record: What it did.
    """

    block: nn.Module
    degree: int
    roles: Roles
    contracting: dict[str, tuple[frozenset[str], tuple[int, ...]]] = field(default_factory=dict)
    local: set[str] = field(default_factory=set)
    whole: set[str] = field(default_factory=set)
    record: Record = field(default_factory=Record)
    _following: Following | None = None
    _recorder: Recorder | None = None

    def follow(self, call: Call, where: str) -> None:
        """Run with cut tensors followed.

        Raises:
            Unfollowed: The code does with cut features what cannot be done with them.
        """
        call = self._marked(call.fresh())
        self._following = Following(self.degree, where, record=self.record)
        with in_training(self.block), patched(self._answers(Code())), self._following:
            output = on_meta(self.block, call)
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

    def run_as(self, code: Code, call: Call) -> None:
        """Run with tensors of a rank's size; raises whatever the code raises then."""
        call, dim = call.fresh(), self.roles.sequence_dim
        if dim is not None:
            call = _replaced(call, lambda x: x.narrow(dim, 0, x.shape[dim] // self.degree))
        self._recorder = Recorder(self.record)
        with in_training(self.block), sized(self.block, code.sizes), patched(self._answers(code)), self._recorder:
            on_meta(self.block, call)

    def _followed(self, fqn: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a module's forward in which cut tensors are followed, while they are not around it."""
        recorder = self._recorder
        assert recorder is not None, "the code around it is recorded"

        def answer(*args: Any, **kwargs: Any) -> Any:
            with torch_compat.without_torch_functions():
                call = Call(args=args, kwargs=kwargs)
                if activation_of(args, kwargs) is not None:
                    call = self._marked(call, is_share=True)
            self._following, recorder.is_paused = Following(self.degree, fqn, record=self.record), True
            try:
                with self._following:
                    output = forward(*call.args, **call.kwargs)
            finally:
                self._following, recorder.is_paused = None, False
            with torch_compat.without_torch_functions():
                for leaf in torch_compat.tree_leaves([call.args, dict(call.kwargs)]):
                    unmark(leaf)
                for leaf in torch_compat.tree_leaves(output):
                    if (cut := cut_of(leaf)) is not None and not cut.is_sequence:
                        raise Unfollowed("its result leaves the module", sources=cut.sources)
                    unmark(leaf)
            return output

        return answer

    def _marked(self, call: Call, *, is_share: bool = False) -> Call:
        dim = self.roles.sequence_dim
        if dim is None:
            return call

        def cut(x: Tensor) -> Tensor:
            if not is_share and x.shape[dim] % self.degree:
                raise Unfollowed(f"a sequence of {x.shape[dim]} does not divide by tp = {self.degree}")
            share = x if is_share else x.narrow(dim, 0, x.shape[dim] // self.degree)
            placed = Placed(dim=dim, parts=(share.shape[dim] * self.degree,))
            return mark(share, placed=placed, degree=self.degree, sources=frozenset({SEQUENCE}))

        return _replaced(call, cut)

    def _answers(self, code: Code) -> dict[nn.Module, Callable[..., Any]]:
        answers: dict[nn.Module, Callable[..., Any]] = {}
        for fqn, module in self.block.named_modules():
            if kind_of(module) in ("linear", "transposed"):
                answer = self._linear(fqn, module)
            elif fqn and not list(module.children()):
                answer = self._leaf(fqn, module)
            else:
                answer = module.forward
            if fqn in code.apart:
                answer = self._apart(answer)
            if fqn in code.followed:
                answer = self._followed(fqn, answer)
            answers[module] = self._placed(fqn, answer)
        return answers

    def _placed(self, fqn: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def answer(*args: Any, **kwargs: Any) -> Any:
            self.record.enter(fqn)
            try:
                return forward(*args, **kwargs)
            finally:
                self.record.leave()

        return answer

    def _apart(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def answer(*args: Any, **kwargs: Any) -> Any:
            with self.record.drawing_apart():
                return forward(*args, **kwargs)

        return answer

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

    def _linear(self, fqn: str, module: Any) -> Callable[..., Any]:
        forward, (rows, columns) = module.forward, module.weight.shape
        inputs, outputs = (columns, rows) if kind_of(module) == "linear" else (rows, columns)

        def answer(x: Tensor) -> Tensor:
            cut = cut_of(x)
            contracts = self._contracts(fqn, x, inputs)
            if not contracts and fqn not in self.roles.expanding:
                self._note(fqn, [x])
                with torch.no_grad() if fqn in self.roles.local else contextlib.nullcontext():
                    return forward(x)
            with torch_compat.without_torch_functions():
                sources = cut.sources if cut is not None else frozenset()
                if not contracts and sources - {SEQUENCE}:
                    raise Unfollowed(
                        f'"{fqn}" is not given all of a dim that it does not sum over', sources=frozenset({fqn})
                    )
                if contracts and cut is not None:
                    self.contracting[fqn] = (sources, cut.placed.parts)
                result = self._contracted(x, outputs) if contracts else self._expanded(fqn, x, outputs)
                self.record.note(f"{fqn} {contracts}", [x], {}, result)
                return result

        return answer

    def _contracts(self, fqn: str, x: Tensor, inputs: int) -> bool:
        cut = cut_of(x)
        if self._following is not None:
            is_features = cut is not None and cut.sources != {SEQUENCE}
            return is_features and cut is not None and cut.placed.dim == x.ndim - 1
        return x.shape[-1] * self.degree == inputs

    def _whole_shape(self, x: Tensor) -> list[int]:
        """Return the shape of an activation whose features are not cut, its sequence put together."""
        dim, cut, shape = self.roles.sequence_dim, cut_of(x), list(x.shape)
        followed = self._following is not None
        if dim is None or (followed and cut is None):
            return shape
        if followed and cut is not None and cut.placed.dim != dim:
            raise Unfollowed("it works along the sequence", sources=frozenset({SEQUENCE}))
        shape[dim] *= self.degree
        return shape

    def _expanded(self, fqn: str, x: Tensor, outputs: int) -> Tensor:
        shape = [*self._whole_shape(x)[:-1], outputs // self.degree]
        result = _differentiable(shape, x)
        if self._following is None:
            return result
        placed = Placed(dim=result.ndim - 1, parts=self.roles.expanding[fqn])
        return mark(result, placed=placed, degree=self.degree, sources=frozenset({fqn}))

    def _contracted(self, x: Tensor, outputs: int) -> Tensor:
        shape, dim = [*x.shape[:-1], outputs], self.roles.sequence_dim
        if dim is None:
            return _differentiable(shape, x)
        size = shape[dim]
        shape[dim] //= self.degree
        result = _differentiable(shape, x)
        placed = Placed(dim=dim, parts=(size,))
        if self._following is None:
            return result
        return mark(result, placed=placed, degree=self.degree, sources=frozenset({SEQUENCE}))


def _differentiable(shape: list[int], like: Tensor) -> Tensor:
    """Return a result of a layer with weights that are trained; no leaf, so that it may be changed in place."""
    return torch.empty(shape, dtype=like.dtype, device="meta", requires_grad=True).clone()


@contextlib.contextmanager
def sized(block: nn.Module, sizes: Mapping[tuple[str, str], int]) -> Iterator[None]:
    """Give attributes of a block's modules other values inside."""
    modules = {fqn: block.get_submodule(fqn) for fqn, _ in sizes}
    before = {key: vars(modules[key[0]])[key[1]] for key in sizes}
    try:
        for (fqn, name), value in sizes.items():
            setattr(modules[fqn], name, value)
        yield
    finally:
        for (fqn, name), value in before.items():
            setattr(modules[fqn], name, value)


def _replaced(call: Call, change: Callable[[Tensor], Tensor]) -> Call:
    """Change the activation that a block takes."""
    key = activation_of(call.args, call.kwargs)
    if key is None:
        raise Unfollowed("it takes no activation with a sequence", sources=frozenset({SEQUENCE}))
    args, kwargs = replaced(call.args, call.kwargs, key, change)
    return Call(args=args, kwargs=kwargs)
