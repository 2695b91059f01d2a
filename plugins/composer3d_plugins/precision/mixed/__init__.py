"""Mixed precision: narrow compute, wide weights and reductions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from composer3d import (
    Dtypes,
    GradScaler,
    LayoutOffer,
    LayoutTraits,
    Metric,
    Phase,
    PluginError,
    Role,
    RunContext,
    Stateful,
    Transform,
    hookimpl,
    make_unit,
    map_tensors,
    plugin,
    select_fqns,
    torch_compat,
)
from composer3d_plugins.precision.mixed.norms import compute_in_float32, find_norms, find_statistics
from composer3d_plugins.precision.mixed.scaler import SMALLEST, LossScaler

if TYPE_CHECKING:
    import torch
    from torch import nn

Name = Literal["bfloat16", "float16", "float32"]
BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
INITIAL = 65536.0
DYNAMIC = (
    "initial_scale",
    "growth_factor",
    "backoff_factor",
    "growth_interval",
    "hysteresis",
    "hysteresis_restored",
    "min_scale",
)


def _table(wanted: LayoutTraits, degrees: Mapping[str, int]) -> Mapping[str, Any] | None:
    """Compute in bfloat16, which is the default of `param_dtype`."""
    return {} if wanted.compute_dtype == "bfloat16" else None


@plugin(family="precision", offer=LayoutOffer(table=_table, choices={"compute_dtype": ("bfloat16",)}))
class Mixed:
    """Compute in bfloat16 or float16 on weights that stay float32 in the optimizer, and reduce gradients in float32.

    The data-parallel plugin applies it to its units. Without one, the policy is applied here, over a mesh of one rank,
    so that it means the same thing in every layout. Parameters without dims stay float32: they widen no result. With
    float16 the loss is scaled, so that small gradients survive; a step in which a gradient of any rank is not finite is
    skipped on all ranks, and all of them lower the scale. The metrics then have `loss_scale` and `overflow_steps`, the
    number of steps skipped so far. Checkpoints are float32, so a run may resume in another precision.
    Memory: float32 shards, and the unit at work in param_dtype.
    Collectives: none of its own; all-gathers carry param_dtype, reductions reduce_dtype. float16: the one vote a step
        that every reason to skip shares. norms = "float32_units": those of one unit more for every norm.

    Source: Micikevicius et al., Mixed Precision Training, arXiv:1710.03740.

    Args:
        param_dtype: Of parameters and activations in forward and backward.
        reduce_dtype: Of gradients in reductions.
        output_dtype: Of the model's outputs; default: as they come, and float32 with float16, in which a summed loss
            would overflow.
        buffer_dtype: Of floating-point buffers; default: unchanged.
        norms: "as_others": on weights and inputs in param_dtype. "float32": the same weights and inputs, computed on in
            float32, as norms with running statistics of another dtype (BatchNorm) are in any case. "float32_units": on
            float32 weights, which are gathered and reduced as units of their own.
        norm_modules: Patterns of the norms; default: torch's norms, and modules whose class name ends in "Norm".
        initial_scale: Of the loss; default 65536. Only with float16, as all that follow.
        growth_factor: Factor of the scale after growth_interval steps without overflow; default 2.
        backoff_factor: Factor of the scale after an overflow; default 0.5.
        growth_interval: Steps without overflow before the scale grows; default 2000.
        hysteresis: Overflows before the scale falls, counted from its last growth; default: the first one lowers it, or
            the second with `hysteresis_restored`.
        hysteresis_restored: When these overflows are counted anew: "growth" of the scale, the default, or every "step"
            without overflow.
        min_scale: Where another overflow ends the run; default 2^-24, the least number of float16.
        static_scale: A scale that never changes, in place of all these; steps that overflow are skipped.
    """

    param_dtype: Name = "bfloat16"
    reduce_dtype: Name = "float32"
    output_dtype: Name | None = None
    buffer_dtype: Name | None = None
    norms: Literal["as_others", "float32", "float32_units"] = "as_others"
    norm_modules: tuple[str, ...] | None = None
    initial_scale: float | None = Field(default=None, gt=0)
    growth_factor: float | None = Field(default=None, gt=1)
    backoff_factor: float | None = Field(default=None, gt=0, lt=1)
    growth_interval: int | None = Field(default=None, ge=1)
    hysteresis: int | None = Field(default=None, ge=2)
    hysteresis_restored: Literal["growth", "step"] | None = None
    min_scale: float | None = Field(default=None, gt=0)
    static_scale: float | None = Field(default=None, gt=0)

    @hookimpl
    def composer3d_layout(self, degrees: Mapping[str, int]) -> LayoutTraits:
        """Describe the part in a layout."""
        return LayoutTraits(
            compute_dtype=self.param_dtype, reduce_dtype=self.reduce_dtype, gather_bytes=BYTES[self.param_dtype]
        )

    @hookimpl
    def composer3d_configure(self, context: RunContext) -> None:
        """Refuse options that would do nothing."""
        if self.param_dtype == "float16":
            context.claim("grad_scaler", by=self)
        self._refuse_scales()
        if self.norm_modules is not None and self.norms == "as_others":
            raise PluginError(
                'norm_modules has no effect with norms = "as_others"', hint='write norms = "float32" or "float32_units"'
            )

        if self.norms == "float32" and self.param_dtype == "float32":
            raise PluginError(
                'norms = "float32" has no effect with param_dtype = "float32", in which all modules compute',
                hint="remove norms",
            )

    def _refuse_scales(self) -> None:
        """Refuse options of a loss scale that there is not, or that another one decides."""
        dynamic = [name for name in DYNAMIC if getattr(self, name) is not None]
        stated = [*dynamic, *(["static_scale"] if self.static_scale is not None else [])]
        if stated and self.param_dtype != "float16":
            raise PluginError(
                f'{stated[0]} has no effect with param_dtype = "{self.param_dtype}": its exponents need no loss scale',
                hint='write param_dtype = "float16"',
            )
        if self.static_scale is not None and dynamic:
            raise PluginError(f"{dynamic[0]} has no effect with static_scale, which never changes; keep one of the two")
        first = self.initial_scale or INITIAL
        if self.min_scale is not None and first < self.min_scale:
            raise PluginError(f"min_scale = {self.min_scale:g} is above the initial scale, {first:g}")

    @hookimpl
    def composer3d_dtypes(self, context: RunContext, fqn: str) -> Dtypes:
        """Return a unit's dtypes: norms that are units of their own compute in float32; only the root casts outputs."""
        param, reduce = _dtype(self.param_dtype), _dtype(self.reduce_dtype)
        if any(f"{fqn}.".startswith(f"{unit}.") for unit in context.own_units):
            return Dtypes(param=_dtype("float32"), reduce=_dtype("float32"), output=param)
        output = self.output_dtype or ("float32" if self.param_dtype == "float16" else None)
        return Dtypes(param=param, reduce=reduce, output=_dtype(output) if output is not None and not fqn else None)

    @hookimpl
    def composer3d_convert(self, context: RunContext) -> list[Transform]:
        """Change norms and buffers; apply the policy over a mesh of one rank where no data-parallel plugin would."""
        transforms = []
        if self.norms != "as_others":
            transforms.append(
                Transform(
                    name="mixed.norms",
                    phase=Phase.CONVERT,
                    select=self._select_norms,
                    apply=self._apply_norms,
                    own_units=self.norms == "float32_units",
                )
            )
        transforms.append(
            Transform(
                name="mixed.statistics",
                phase=Phase.CONVERT,
                select=self._select_statistics,
                apply=_compute_in_float32,
                may_be_empty=True,
            )
        )
        if self.buffer_dtype is not None:
            transforms.append(
                Transform(name="mixed.buffers", phase=Phase.CONVERT, select=_select_buffers, apply=self._apply_buffers)
            )
        if not any(axis in context.owners for axis in context.layout.names(Role.BATCH)):
            transforms.append(
                Transform(
                    name="mixed", phase=Phase.DATA, select=lambda model, context: context.units(None), apply=self._apply
                )
            )
        return transforms

    @hookimpl
    def composer3d_grad_scaler(self, context: RunContext) -> GradScaler | None:
        """Scale the loss where exponents are short."""
        return self._scaler(context)

    @hookimpl
    def composer3d_state(self, context: RunContext) -> Mapping[str, Stateful] | None:
        """Save the scale."""
        scaler = self._scaler(context)
        return None if scaler is None else {"loss_scale": scaler}

    @hookimpl
    def composer3d_measure(self, context: RunContext, step: int) -> Sequence[Metric] | None:
        """Report the scale and the steps that overflowed."""
        scaler: LossScaler | None = context.state.get(self)
        if scaler is None:
            return None
        return [
            Metric(name="loss_scale", value=scaler.factor, reduction="rank0"),
            Metric(name="overflow_steps", value=float(scaler.num_overflows), reduction="rank0"),
        ]

    def _scaler(self, context: RunContext) -> LossScaler | None:
        if self.param_dtype != "float16":
            return None
        if self not in context.state:
            context.state[self] = LossScaler(
                scale=self.static_scale or self.initial_scale or INITIAL,
                growth=self.growth_factor or 2.0,
                backoff=self.backoff_factor or 0.5,
                interval=self.growth_interval or 2000,
                hysteresis=self.hysteresis or (1 if self.hysteresis_restored is None else 2),
                is_restored_by_steps=self.hysteresis_restored == "step",
                smallest=self.min_scale or SMALLEST,
                is_static=self.static_scale is not None,
            )
        scaler: LossScaler = context.state[self]
        return scaler

    def _select_norms(self, model: nn.Module, context: RunContext) -> list[str]:
        if self.norm_modules is not None:
            return [fqn for pattern in self.norm_modules for fqn in select_fqns(pattern, context.fqns)]
        found = find_norms(model)
        if not found:
            raise PluginError(
                f'norms = "{self.norms}", and the model has no norm that is known as one',
                hint="name them: norm_modules = [...]",
            )
        return found

    def _apply_norms(self, model: nn.Module, fqns: Sequence[str], context: RunContext) -> list[str]:
        return _compute_in_float32(model, fqns, context) if self.norms == "float32" else list(fqns)

    def _select_statistics(self, model: nn.Module, context: RunContext) -> list[str]:
        """Return norms whose running statistics would be of another dtype than their weights, and compute in that."""
        self._refuse_float32_throughout(model, context)
        buffer_dtype = None if self.buffer_dtype is None else _dtype(self.buffer_dtype)
        found = find_statistics(model, _dtype(self.param_dtype), buffer_dtype)
        others = self._select_norms(model, context) if found and self.norms == "float32" else []
        return [fqn for fqn in found if fqn not in others]

    def _refuse_float32_throughout(self, model: nn.Module, context: RunContext) -> None:
        """Refuse a table that casts nothing: weights, inputs and gradients are float32 without it.

        A model or inputs of another dtype are cast to float32, so the model has to be seen.
        """
        stated = (self.param_dtype, self.reduce_dtype, self.output_dtype, self.buffer_dtype, self.norms)
        if stated != ("float32", "float32", None, None, "as_others"):
            return
        given: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
        map_tensors(given.append, context.example)
        if all(tensor.dtype == _dtype("float32") for tensor in given if tensor.is_floating_point()):
            raise PluginError(
                'param_dtype = "float32" has no effect with reduce_dtype = "float32": the model is in float32, and so '
                "are its gradients",
                hint='write param_dtype = "bfloat16", or remove the table',
            )

    def _apply_buffers(self, model: nn.Module, fqns: Sequence[str], context: RunContext) -> list[str]:
        assert self.buffer_dtype is not None, "declared only with it"
        for fqn in fqns:
            for _, buffer in model.get_submodule(fqn).named_buffers(recurse=False):
                if buffer.is_floating_point():
                    buffer.data = buffer.data.to(_dtype(self.buffer_dtype))
        return list(fqns)

    def _apply(self, model: nn.Module, fqns: Sequence[str], context: RunContext) -> list[str]:
        from torch.distributed.fsdp import fully_shard

        for fqn in sorted(fqns, key=lambda name: -len(name.split(".")) if name else 1):
            make_unit(
                fully_shard,
                fqn,
                model,
                context,
                mesh=context.data_mesh(None),
                reshard_after_forward=False,
                ignored_params=torch_compat.whole_parameters(model),
            )
        return list(fqns)


def _compute_in_float32(model: nn.Module, fqns: Sequence[str], context: RunContext) -> list[str]:
    for fqn in fqns:
        compute_in_float32(model.get_submodule(fqn))
    return list(fqns)


def _select_buffers(model: nn.Module, context: RunContext) -> list[str]:
    found = [
        fqn
        for fqn, module in model.named_modules()
        if any(buffer.is_floating_point() for buffer in module.buffers(recurse=False))
    ]
    if not found:
        raise PluginError("buffer_dtype has no effect: the model has no floating-point buffer")
    return found


def _dtype(name: Name) -> torch.dtype:
    import torch

    return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[name]
