"""Dry run of one block on meta under a plan: the modules that work on each tensor, and the operations of its code."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from composer3d import torch_compat
from composer3d.propagation import (
    SEQUENCE,
    SMALL,
    Call,
    Placed,
    Products,
    Propagation,
    PropagationError,
    Record,
    RegisteredHooks,
    activation_of,
    first_of,
    in_mode,
    kind_of,
    mark,
    on_meta,
    patched,
    replaced,
    spec_of,
    unmark,
    unseen,
)
from composer3d_plugins.sharding.tensor_parallel.local_weights import tried
from composer3d_plugins.sharding.tensor_parallel.module_activations import SeenActivations
from composer3d_plugins.sharding.tensor_parallel.module_roles import Code, Roles, sized

__all__ = ["BlockDryRun"]


@dataclass(kw_only=True)
class BlockDryRun:
    """Observations of one dry run.

    Attributes:
        contracting: Layers that took sharded features, with the layers these came from, and the parts they were sharded
            in.
        local: Modules with parameters that worked on sharded features without contracting them.
        whole: Modules that worked on all features, by the sharded dims of their inputs, None for one that was whole.
        moving: Modules for whose functions something was gathered or narrowed.
        along: Linear layers that took a sharded sequence, or reduce-scatter to one.
        unsharded: Linear layers that took the full sequence although activations are sharded.
        given: As in `Code`.
        products: Of parameters that code multiplies.
        record: What it did.
        activations: What its modules were given, and returned.
    """

    block: nn.Module
    degree: int
    roles: Roles
    training: bool = True
    contracting: dict[str, tuple[frozenset[str], tuple[int, ...]]] = field(default_factory=dict)
    local: set[str] = field(default_factory=set)
    whole: dict[str, set[int | None]] = field(default_factory=dict)
    moving: set[str] = field(default_factory=set)
    along: set[str] = field(default_factory=set)
    unsharded: set[str] = field(default_factory=set)
    given: dict[str, tuple[bool, ...]] = field(default_factory=dict)
    products: Products = field(default_factory=Products)
    record: Record = field(default_factory=Record)
    activations: SeenActivations = field(default_factory=SeenActivations)
    # What gathered modules are given, and what it was gathered from.
    _wholes: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _has_values: bool = False
    _called: dict[str, bool] = field(default_factory=dict)  # whether a linear layer contracts
    _propagation: Propagation | None = None

    def propagate(self, call: Call, where: str) -> None:
        """Run with sharded tensors propagated.

        Raises:
            PropagationError: The code does with sharded features what cannot be done with them.
        """
        self._has_values = call.has_values
        call = self._marked(call.fresh())
        self._propagation = Propagation(self.degree, where, record=self.record)
        self.products = self._propagation.products
        hooks, mode = RegisteredHooks(), in_mode(self.block, training=self.training)
        try:
            with mode, patched(self._answers(Code())), self._propagation, hooks:
                output = on_meta(self.block, call)
            hooks.settle()
        except PropagationError:
            raise
        except Exception as error:  # a model's own code may raise anything
            raise PropagationError.of_code(error) from error
        for leaf in torch_compat.tree_leaves(output):
            spec = spec_of(leaf)
            if spec is not None and spec.sources != {SEQUENCE}:
                raise PropagationError("its result leaves the block", sources=spec.sources)
        if self.roles.sequence_dim is not None:
            self._refuse_outputs(output)

    def _refuse_outputs(self, output: Any) -> None:
        """Refuse sharded outputs: the activation is what a block returns, or the first of several."""
        first = first_of(output)
        for leaf in torch_compat.tree_leaves(output):
            if (spec_of(leaf) is None) == (leaf is first) and isinstance(leaf, Tensor):
                what = "whole" if leaf is first else "sharded along the sequence beside its activation"
                raise PropagationError(f"it returns a tensor that is {what}", sources=frozenset({SEQUENCE}))
        if not isinstance(first, Tensor):
            raise PropagationError("it returns no activation first", sources=frozenset({SEQUENCE}))

    def run_as(self, code: Code, call: Call) -> None:
        """Run with tensors of a rank's size; raises whatever the code raises then."""
        self._has_values = call.has_values
        call, dim = call.fresh(), self.roles.sequence_dim
        if dim is not None:
            call = _replaced(call, lambda x: x.narrow(dim, 0, x.shape[dim] // self.degree))
        mode = in_mode(self.block, training=self.training)
        with mode, sized(self.block, code.sizes), patched(self._answers(code)):
            on_meta(self.block, call, notes=[self._record_function])

    def _record_function(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        if self._propagation is None:  # else it records itself
            self.record.note(func, args, kwargs, result)

    def _propagated(self, fqn: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a module's forward in which sharded tensors are propagated, while they are not around it."""

        def answer(*args: Any, **kwargs: Any) -> Any:
            with torch_compat.without_torch_functions():
                call = Call(args=args, kwargs=kwargs)
                if activation_of(args, kwargs) is not None:
                    call = self._marked(call, is_share=True)
            self._propagation = Propagation(self.degree, fqn, record=self.record)
            try:
                with self._propagation:
                    output = forward(*call.args, **call.kwargs)
            finally:
                self._propagation = None
            with torch_compat.without_torch_functions():
                for leaf in torch_compat.tree_leaves([call.args, dict(call.kwargs)]):
                    unmark(leaf)
                for leaf in torch_compat.tree_leaves(output):
                    if (spec := spec_of(leaf)) is not None and not spec.is_sequence:
                        raise PropagationError("its result leaves the module", sources=spec.sources)
                    unmark(leaf)
            return output

        return answer

    def _marked(self, call: Call, *, is_share: bool = False) -> Call:
        dim = self.roles.sequence_dim
        if dim is None:
            return call

        def sharded(x: Tensor) -> Tensor:
            if not is_share and x.shape[dim] % self.degree:
                raise PropagationError(f"a sequence of {x.shape[dim]} does not divide by tp = {self.degree}")
            share = x if is_share else x.narrow(dim, 0, x.shape[dim] // self.degree)
            placed = Placed(dim=dim, parts=(share.shape[dim] * self.degree,))
            return mark(share, placed=placed, degree=self.degree, sources=frozenset({SEQUENCE}))

        return _replaced(call, sharded)

    def _answers(self, code: Code) -> dict[nn.Module, Callable[..., Any]]:
        answers: dict[nn.Module, Callable[..., Any]] = {}
        for fqn, module in self.block.named_modules():
            if kind_of(module) in ("linear", "transposed"):
                answer = self._linear(fqn, module)
            elif fqn in self.roles.attention and self.roles.sequence_dim is not None:
                answer = self._attention(fqn, module, code)
            elif fqn and not list(module.children()):
                answer = self._leaf(fqn, module)
            else:
                answer = self._seen(module) if fqn else module.forward
            if own := self.roles.weights_in(self.block, fqn):
                answer = tried(module, fqn, own, self.degree)
            if fqn in code.apart:
                answer = self._apart(answer)
            if fqn in code.gathered:
                answer = self._gathered(answer)
            if fqn in code.propagated:
                answer = self._propagated(fqn, answer)
            answers[module] = self.activations.around(fqn, answer, self.record)
        return answers

    def _apart(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def answer(*args: Any, **kwargs: Any) -> Any:
            with self.record.drawing_apart():
                return forward(*args, **kwargs)

        return answer

    def _seen(self, module: nn.Module) -> Callable[..., Any]:
        forward: Callable[..., Any] = module.forward
        return forward if self._has_values else unseen(forward)

    def _leaf(self, fqn: str, module: nn.Module) -> Callable[..., Any]:
        forward = self._seen(module)

        def answer(*args: Any, **kwargs: Any) -> Any:
            self._note(fqn, [list(args), kwargs])
            with self._working(fqn):
                return forward(*args, **kwargs)

        return answer

    @contextlib.contextmanager
    def _working(self, fqn: str) -> Iterator[None]:
        """Run the functions of a module without a rule, and note whether they gather or narrow something."""
        before = 0 if self._propagation is None else self._propagation.num_moves
        with torch.no_grad() if fqn in self.roles.local else contextlib.nullcontext():
            yield
        if self._propagation is not None and self._propagation.num_moves > before:
            self.moving.add(fqn)

    def _note(self, fqn: str, arguments: Any) -> None:
        specs = [spec_of(leaf) for leaf in torch_compat.tree_leaves(arguments)]
        if any(spec is not None and not spec.is_sequence for spec in specs):
            self.local.add(fqn)
        else:
            dims = {None if spec is None else spec.placed.dim for spec in specs}
            self.whole.setdefault(fqn, set()).update(dims - {None} or {None})

    def _linear(self, fqn: str, module: Any) -> Callable[..., Any]:
        forward, (rows, columns) = module.forward, module.weight.shape
        inputs, outputs = (columns, rows) if kind_of(module) == "linear" else (rows, columns)

        def answer(x: Tensor) -> Tensor:
            spec = spec_of(x)
            contracts = self._contracts(fqn, x, inputs)
            self._refuse_another(fqn, contracts, spec)
            if not contracts and fqn not in self.roles.expanding:
                self._note(fqn, [x])
                with self._working(fqn):
                    return forward(x)
            with torch_compat.without_torch_functions():
                sources = spec.sources if spec is not None else frozenset()
                if not contracts and sources - {SEQUENCE}:
                    raise PropagationError(
                        f'"{fqn}" is not given all of a dim that it does not sum over', sources=frozenset({fqn})
                    )
                if contracts and spec is not None:
                    self.contracting[fqn] = (sources, spec.placed.parts)
                result = self._contracted(fqn, x, outputs) if contracts else self._expanded(fqn, x, outputs)
                shares = (share for whole, share in self._wholes if whole is x)
                self.record.note(f"{fqn} {contracts}", [next(shares, x)], {}, result)
                return result

        return answer

    def _refuse_another(self, fqn: str, contracts: bool, spec: Any) -> None:
        """Refuse a layer that is called several times, as in a block that repeats, and has other features each time."""
        if self._propagation is None or self._called.setdefault(fqn, contracts) == contracts:
            return
        sources = spec.sources if contracts else self.contracting[fqn][0]
        raise PropagationError(f'"{fqn}" is given sharded features in one call, and all in another', sources=sources)

    def _contracts(self, fqn: str, x: Tensor, inputs: int) -> bool:
        spec = spec_of(x)
        if self._propagation is not None:
            is_features = spec is not None and spec.sources != {SEQUENCE}
            return is_features and spec is not None and spec.placed.dim == x.ndim - 1
        return x.shape[-1] * self.degree == inputs

    def _whole_shape(self, fqn: str, x: Tensor) -> list[int]:
        """Return the shape of an activation whose features are not sharded, its sequence gathered."""
        dim, spec, shape = self.roles.sequence_dim, spec_of(x), list(x.shape)
        propagated = self._propagation is not None
        if dim is None:
            return shape
        if propagated:
            (self.unsharded if spec is None else self.along).add(fqn)
        is_whole = spec is None if propagated else fqn in self.roles.unsharded
        if is_whole or any(whole is x for whole, _ in self._wholes):
            return shape
        if propagated and spec is not None and spec.placed.dim != dim:
            raise PropagationError("it works along the sequence", sources=frozenset({SEQUENCE}))
        shape[dim] *= self.degree
        return shape

    def _expanded(self, fqn: str, x: Tensor, outputs: int) -> Tensor:
        shape = [*self._whole_shape(fqn, x)[:-1], outputs // self.degree]
        result = _differentiable(shape, x)
        if self._propagation is None:
            return result
        placed = Placed(dim=result.ndim - 1, parts=self.roles.expanding[fqn])
        whole = self.roles.gathered.get(fqn, frozenset())
        return mark(result, placed=placed, degree=self.degree, sources=frozenset({fqn}), whole=whole)

    def _contracted(self, fqn: str, x: Tensor, outputs: int) -> Tensor:
        shape, dim, spec = [*x.shape[:-1], outputs], self.roles.sequence_dim, spec_of(x)
        if dim is None:
            return _differentiable(shape, x)
        # What comes of whole sequences alone has one of its own.
        is_whole = fqn in self.roles.unsharded
        if self._propagation is not None and spec is not None:
            is_whole = not spec.sources & self.along
            (self.unsharded if is_whole else self.along).add(fqn)
        if is_whole:
            return _differentiable(shape, x)
        if shape[dim] % self.degree:
            raise PropagationError(f'"{fqn}" gives a sequence of {shape[dim]}', sources=frozenset({SEQUENCE}))
        size = shape[dim]
        shape[dim] //= self.degree
        result = _differentiable(shape, x)
        placed = Placed(dim=dim, parts=(size,))
        if self._propagation is None:
            return result
        return mark(result, placed=placed, degree=self.degree, sources=frozenset({SEQUENCE}))

    def _gathered(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a module's forward that is given the full sequence."""
        dim = self.roles.sequence_dim
        assert dim is not None, "tried only then"

        def whole(share: Tensor) -> Tensor:
            shape = list(share.shape)
            shape[dim] *= self.degree
            self._wholes.append((_differentiable(shape, share), share))
            return self._wholes[-1][0]

        def answer(*args: Any, **kwargs: Any) -> Any:
            key = activation_of(args, kwargs)
            if key is not None:
                with torch_compat.without_torch_functions():
                    args, kwargs = replaced(args, kwargs, key, whole)
            return forward(*args, **kwargs)

        return answer

    def _attention(self, fqn: str, module: Any, code: Code) -> Callable[..., Any]:
        """Return the forward of torch's attention module when its heads are sharded."""
        forward, dim = module.forward, 1 if module.batch_first else 0

        def answer(*args: Any, **kwargs: Any) -> Any:
            names = ("query", "key", "value")
            with torch_compat.without_torch_functions():
                given = [args[at] if at < len(args) else kwargs[name] for at, name in enumerate(names)]
                sharded = self._sharded(fqn, given, dim, code)
                wholes = {
                    id(x): _empty(x, dim, self.degree if apart else 1) for x, apart in zip(given, sharded, strict=True)
                }
                rest = {name: value for name, value in kwargs.items() if name not in names}
                out, weights = forward(*[wholes[id(x)] for x in given], *args[3:], **rest)
                out = _differentiable(list(given[0].shape), given[0])
                if sharded[0] and self._propagation is not None:
                    placed = Placed(dim=dim, parts=(out.shape[dim] * self.degree,))
                    mark(out, placed=placed, degree=self.degree, sources=frozenset({SEQUENCE}))
                self.record.note(f"{fqn} heads", [*given, *args[3:]], rest, (out, weights))
            return out, weights

        return answer

    def _sharded(self, fqn: str, given: list[Tensor], dim: int, code: Code) -> tuple[bool, ...]:
        if self._propagation is None:
            return code.given.get(fqn, (False,) * 3)
        specs = [spec_of(x) for x in given]
        found = tuple(spec is not None for spec in specs)
        if any(spec is not None and (spec.placed.dim != dim or not spec.is_sequence) for spec in specs):
            raise PropagationError(
                f'"{fqn}" is given something else than a sharded sequence', sources=frozenset({SEQUENCE})
            )
        if self.given.setdefault(fqn, found) != found:
            raise PropagationError(f'"{fqn}" is given sharded sequences and whole ones', sources=frozenset({SEQUENCE}))
        return found


def _empty(x: Tensor, dim: int, times: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] *= times
    return torch.full(shape, SMALL, dtype=x.dtype, device=x.device)


def _differentiable(shape: list[int], like: Tensor) -> Tensor:
    """Return a result of a layer with weights that are trained; no leaf, so that it may be changed in place."""
    return torch.full(shape, SMALL, dtype=like.dtype, device=like.device, requires_grad=True).clone()


def _replaced(call: Call, change: Callable[[Tensor], Tensor]) -> Call:
    """Change the activation that a block takes."""
    key = activation_of(call.args, call.kwargs)
    if key is None:
        raise PropagationError("it takes no activation with a sequence", sources=frozenset({SEQUENCE}))
    args, kwargs = replaced(call.args, call.kwargs, key, change)
    return replace(call, args=args, kwargs=kwargs)
