"""Tensor parallelism of `nn.MultiheadAttention`, whose projections are parameters passed to one function.

That function takes the sizes of the whole model only. The module's forward is therefore replaced by one that computes
this rank's heads, with the same arguments and results.

Shapes: B batch, S queries, L keys, D model dim, E head dim, T degree of tp, H heads of this rank, which are the model's
divided by T: q_BHSE, k_BHLE, v_BHLE.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from composer3d import RunContext, torch_compat
from composer3d.propagation import Marks, Placed, exchanged, site_of, spec_of, strip

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["HeadsOf", "why_whole"]


def why_whole(module: nn.MultiheadAttention, degree: int) -> str | None:
    """Return why a module's heads are not sharded; None if they are."""
    if "weight" not in module.out_proj._parameters or hasattr(module, "parametrizations"):
        return "its weights are computed from other parameters"
    if module.num_heads % degree:
        return f"its {module.num_heads} heads do not divide by tp = {degree}"
    if module.bias_k is not None or module.add_zero_attn:
        return "it adds a key and a value of its own, which belong to all heads"
    return None


@dataclass(frozen=True, kw_only=True)
class HeadsOf:
    """The forward of `nn.MultiheadAttention` on this rank's heads.

    Collectives: 1 all-reduce forward, 1 backward for each distinct input; with `need_weights`, 1 all-gather of
    weights_BHSL over heads. Where the sequence is sharded, 1 all-gather of each distinct input and 1 reduce-scatter
    forward, and backward as many the other way round.

    Args:
        module: With parameters that are sharded.
        mesh: Of one dim, tp.
        given: Which of query, key and value are sharded along the sequence.
        marks: Where code is propagated: tensors carry the metadata of their sharding, and so does the result.
    """

    module: nn.MultiheadAttention
    fqn: str
    mesh: DeviceMesh
    context: RunContext
    given: tuple[bool, ...] = (False, False, False)
    marks: Marks | None = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; arguments and results as of torch, [B, S, D] or [S, B, D] by `batch_first`."""
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        is_batched = query.dim() == 3
        sharded = self.given if self.marks is None else tuple(spec_of(x) is not None for x in (query, key, value))
        shared: dict[int, Tensor] = {}
        for x, is_sharded in zip((query, key, value), sharded, strict=True):
            if id(x) not in shared:
                shared[id(x)] = self._shared(x, is_sharded)
        given = [self._batched(shared[id(x)], is_batched) for x in (query, key, value)]
        q_BHSE, k_BHLE, v_BHLE = (
            F.linear(x, weight, bias).unflatten(-1, (-1, self.module.head_dim)).transpose(1, 2)
            for x, weight, bias in zip(given, self._weights(), self._biases(), strict=True)
        )
        mask_BHSL = self._mask(q_BHSE, k_BHLE, attn_mask, key_padding_mask)
        out_BHSE, weights_BHSL = self._attend(q_BHSE, k_BHLE, v_BHLE, mask_BHSL, need_weights)
        y_BSD = self._summed(
            F.linear(out_BHSE.transpose(1, 2).flatten(2), torch_compat.local_of(self.module.out_proj.weight)),
            sharded[0],
        )
        weights = None
        if weights_BHSL is not None:
            weights = self._gathered(weights_BHSL)
            weights = weights.mean(1) if average_attn_weights else weights
        if not is_batched:
            return y_BSD.squeeze(0), None if weights is None else weights.squeeze(0)
        result = y_BSD if self.module.batch_first else y_BSD.transpose(0, 1)
        if sharded[0] and self.marks is not None:
            self.marks.mark(result, Placed(dim=self._dim, parts=(result.shape[self._dim] * self.mesh.size(),)))
        return result, weights

    @property
    def _dim(self) -> int:
        """The sequence dim of the arguments: 1 with `batch_first`, else 0."""
        return 1 if self.module.batch_first else 0

    def _batched(self, x: Tensor, is_batched: bool) -> Tensor:
        if not is_batched:
            return x.unsqueeze(0)
        return x if self.module.batch_first else x.transpose(0, 1)

    def _weights(self) -> tuple[Tensor, ...]:
        packed: Any = self.module.in_proj_weight
        if packed is not None:
            return torch_compat.local_of(packed).chunk(3)
        return tuple(torch_compat.local_of(getattr(self.module, f"{name}_proj_weight")) for name in "qkv")

    def _biases(self) -> tuple[Tensor | None, ...]:
        bias = self.module.in_proj_bias
        return (None, None, None) if bias is None else torch_compat.local_of(bias).chunk(3)

    def _mask(self, q_BHSE: Tensor, k_BHLE: Tensor, attn_mask: Tensor | None, padding: Tensor | None) -> Tensor | None:
        """Return the mask that is added to scores_BHSL, of shape [B or 1, H or 1, S or 1, L]."""
        masks = []
        if attn_mask is not None:
            if attn_mask.dim() == 3:
                whole = attn_mask.view(q_BHSE.shape[0], self.module.num_heads, *attn_mask.shape[-2:])
                attn_mask = whole.narrow(1, self.mesh.get_local_rank() * q_BHSE.shape[1], q_BHSE.shape[1])
            masks.append(_added(attn_mask, q_BHSE.dtype))
        if padding is not None:
            masks.append(_added(padding, q_BHSE.dtype).view(-1, 1, 1, k_BHLE.shape[2]))
        return sum(masks[1:], masks[0]) if masks else None

    def _attend(
        self, q_BHSE: Tensor, k_BHLE: Tensor, v_BHLE: Tensor, mask_BHSL: Tensor | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        probability = self.module.dropout if self.module.training else 0.0
        drawing: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if probability:
            drawing = self.context.streams.sharded(site_of(self.fqn), dim=1, parts=(self.module.num_heads,))
        with drawing:
            if not need_weights:
                return F.scaled_dot_product_attention(q_BHSE, k_BHLE, v_BHLE, mask_BHSL, probability), None
            scores_BHSL = (q_BHSE / math.sqrt(q_BHSE.shape[-1])) @ k_BHLE.transpose(-2, -1)
            weights_BHSL = (scores_BHSL if mask_BHSL is None else scores_BHSL + mask_BHSL).softmax(-1)
            weights_BHSL = F.dropout(weights_BHSL, probability) if probability else weights_BHSL
        return weights_BHSL @ v_BHLE, weights_BHSL

    # ---- between ranks -----------------------------------------------------------------------------------------------

    def _shared(self, x: Tensor, is_sharded: bool) -> Tensor:
        """Return x_BSD with a Partial gradient over tp, all-gathered from x_B(S/T)D if it is sharded."""
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        def exchange(x: Tensor) -> Tensor:
            placement = Shard(self._dim) if is_sharded else Replicate()
            wrapped: Any = DTensor.from_local(strip(x), self.mesh, [placement], run_check=False)
            if is_sharded:
                wrapped = wrapped.redistribute(placements=[Replicate()])
            result: Tensor = torch_compat.unviewed(wrapped.to_local(grad_placements=[Partial()]))
            return result

        return exchanged(x, exchange)

    def _summed(self, share: Tensor, is_sharded: bool) -> Tensor:
        """All-reduce partial sums y_BSD over tp, or reduce-scatter them to y_B(S/T)D, and add the replicated bias_D."""
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        def exchange(share: Tensor) -> Tensor:
            wrapped: Any = DTensor.from_local(share, self.mesh, [Partial()], run_check=False)
            placement = Shard(1) if is_sharded else Replicate()
            wrapped = wrapped.redistribute(placements=[placement])
            if self.module.out_proj.bias is not None:
                wrapped = wrapped + self.module.out_proj.bias
            result: Tensor = torch_compat.unviewed(wrapped.to_local())
            return result

        return exchanged(share, exchange)

    def _gathered(self, share: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        def exchange(share: Tensor) -> Tensor:
            wrapped: Any = DTensor.from_local(share, self.mesh, [Shard(1)], run_check=False)
            result: Tensor = torch_compat.unviewed(wrapped.redistribute(placements=[Replicate()]).to_local())
            return result

        return exchanged(share, exchange)


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an additive mask: True in torch's boolean masks means masked out."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, float("-inf"))
