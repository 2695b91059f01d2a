"""Rules by which a propagated sequence is gathered, indexed and attended to: the attention engine behind them."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from composer3d import BatchError, PluginError, torch_compat
from composer3d.propagation import AttentionCall, PropagationError, Reach, attend_drawing
from composer3d_plugins.sharding.context_parallel.attention_methods import Method, unfit
from composer3d_plugins.sharding.context_parallel.attention_pattern import Pattern
from composer3d_plugins.sharding.context_parallel.attention_traffic import AttentionShape, Layout
from composer3d_plugins.sharding.context_parallel.flexible_attention import attend_flexibly
from composer3d_plugins.sharding.context_parallel.method_choice import Link, choose
from composer3d_plugins.sharding.context_parallel.sequence_attention import (
    Attention,
    SequencePlan,
    attend,
    local_attention,
)
from composer3d_plugins.sharding.context_parallel.sequence_groups import SequenceGroup
from composer3d_plugins.sharding.context_parallel.sequence_operators import gather_sequence, gather_windows
from composer3d_plugins.sharding.context_parallel.sequence_positions import Positions, Run, contiguous, zigzag

__all__ = ["DryRules", "EngineRules", "shape_of"]

# Among which `auto` chooses.
MOST_PLANS = 256
METHODS = (Method.GATHER, Method.RING, Method.ULYSSES, Method.UNIVERSAL)
# Notes of what takes a dim for one of positions.
MIXED = frozenset({"attention", "products", "neighbours"})


@dataclass(kw_only=True)
class EngineRules:
    """Exchanges between the ranks of cp.

    Args:
        group: The ranks.
        method: Of attention.
        balanced: Whether a rank holds one chunk from both ends of the sequence.
        tokens: Returns the number of tokens of a sequence of a length, without padding.
        link: Returns figures of the links between the ranks, for attention in a dtype; None where there are none.
        decided: Called with a sentence for each method that `auto` chooses.
        assigned: Returns the positions of sequences of a length in the batch at work, where they are others than
            `balanced` says.
    """

    group: SequenceGroup
    method: Method
    balanced: bool
    tokens: Callable[[int], int] = int
    link: Callable[[str], Link | None] = lambda dtype: None
    decided: Callable[[str], None] = lambda sentence: None
    assigned: Callable[[int], Positions | None] = lambda length: None
    _indices: dict[tuple[int, str, int], tuple[Positions, Tensor]] = field(default_factory=dict)
    _plans: dict[Any, SequencePlan] = field(default_factory=dict)
    _causal: weakref.WeakSet[Tensor] = field(default_factory=weakref.WeakSet)

    def positions(self, length: int) -> Positions:
        """Return the positions of every rank of a sequence of a length."""
        standard = positions_of(length, self.group.degree, is_balanced=self.balanced)
        return self.assigned(length) or standard

    def local_length(self, length: int) -> int:
        """Return the number of this rank's positions."""
        return self.positions(length).local_lengths[self.group.rank]

    def divides(self, *, coarse: int, fine: int) -> bool:
        """Return whether positions of a length are those of a shorter one, each so many in a row."""
        # Assigned positions are others in every batch, and decisions by shapes hold for all of them.
        is_standard = self.assigned(coarse) is None and self.assigned(fine) is None
        return is_standard and divides(self.positions(coarse), self.positions(fine))

    def index(self, length: int, device: torch.device) -> Tensor:
        """Return this rank's positions."""
        if torch_compat.capture_is_on():
            return self.positions(length).index(self.group.rank).to(device)  # of the graph that is captured
        mode = torch_compat.active_fake_mode()
        # Kept by what makes tensors too, so that a plan counts it as a run does.
        key = (length, str(device), 0 if mode is None else id(mode))
        positions = self.positions(length)
        if self._indices.get(key, (None, None))[0] is not positions:
            self._indices[key] = positions, positions.index(self.group.rank).to(device)
        return self._indices[key][1]

    def gather(self, x: Tensor, *, dim: int, length: int) -> Tensor:
        """Return all positions in order; 1 all-gather, backward 1 reduce-scatter."""
        if x.is_complex():
            return torch.view_as_complex(self.gather(torch.view_as_real(x), dim=dim % x.ndim, length=length))
        if not x.is_floating_point():
            x = x.detach()
        return gather_sequence(x, dim=dim, positions=self.positions(length), group=self.group.name)

    def windows(self, x: Tensor, *, dim: int, reach: Reach) -> Tensor:
        """Return what this rank's positions of a result read; 1 all-to-all, backward 1 more."""
        held, windows = self._windows(reach)
        return gather_windows(x, dim=dim, positions=held, windows=windows, group=self.group.name)

    def window_sizes(self, reach: Reach) -> list[int] | None:
        """Return the sizes of this rank's windows; None where a rank has none."""
        windows = self._windows(reach)[1]
        return [end - start for start, end in windows[self.group.rank]] if all(windows) else None

    def _windows(self, reach: Reach) -> tuple[Positions, tuple[tuple[Run, ...], ...]]:
        read, written = (tuple(map(self.positions, parts)) for parts in (reach.read, reach.written))
        return windows_of(read, written, reach.before, reach.after)

    def attend(self, call: AttentionCall) -> Tensor:
        """Return the output of this rank's queries."""
        q, k, v, mask = call.q_BHSE, call.k_BKTE, call.v_BKTF, call.mask
        if q.is_meta:
            return q.new_empty([*q.shape[:-1], v.shape[-1]])
        if call.block_mask is not None or call.score_mod is not None:
            return self._attend_flexibly(call)
        if call.q_length is None:
            gqa = q.ndim > 2 and q.shape[-3] != k.shape[-3]
            return attend_drawing(q, k, v, mask, call.dropout_p, call.is_causal, scale=call.scale, enable_gqa=gqa)
        self._refuse_padding(call)
        if q.ndim > 4:
            return self._attend_many(call)
        flat = q.ndim == 3
        if flat:
            q, k, v = (x.unsqueeze(1) for x in (q, k, v))
            mask = None if mask is None else mask.unsqueeze(1) if mask.ndim == 3 else mask
        attention = Attention(
            pattern=Pattern.causal() if call.is_causal else Pattern(),
            mask=mask,
            scale=call.scale,
            dropout=call.dropout_p,
            of_heads=call.of_heads,
        )
        rows = self.positions(call.q_length)
        if call.k_length is None:
            whole = Positions.whole(k.shape[2])
            out = local_attention(q, k, v, attention, rows=rows, columns=whole, rank=self.group.rank)
        else:
            out = attend(q, k, v, attention, self._plan(q, k, v, attention, call.q_length, call.k_length))
        return out.squeeze(1) if flat else out

    def _attend_many(self, call: AttentionCall) -> Tensor:
        """Return attention of queries with several batch dims."""
        lead, mask = call.q_BHSE.shape[:-3], call.mask
        if mask is not None and mask.ndim > 3:
            mask = mask.expand(*lead, *mask.shape[-3:]).flatten(0, -4)
        q, k, v = (x.flatten(0, -4) for x in (call.q_BHSE, call.k_BKTE, call.v_BKTF))
        return self.attend(replace(call, q_BHSE=q, k_BKTE=k, v_BKTF=v, mask=mask)).unflatten(0, lead)

    def _refuse_padding(self, call: AttentionCall) -> None:
        """Raise an error where a mask lets tokens see the padding that follows them."""
        mask, length = call.mask, call.k_length
        if mask is None or length is None or (tokens := self.tokens(length)) == length or call.is_causal:
            return
        if mask in self._causal:
            return
        if torch_compat.capture_is_on():
            raise torch_compat.CaptureError("a mask of padded positions is looked at")
        if torch_compat.active_fake_mode() is not None:
            return
        rows = mask
        if mask.shape[-2] > 1 and call.q_length is not None:
            at = self.index(call.q_length, mask.device) if call.has_own_rows else torch.arange(call.q_length)
            rows = mask[..., (at < self.tokens(call.q_length)).nonzero()[:, 0].to(mask.device), :]
        seen = rows[..., tokens:]
        if bool((seen if seen.dtype is torch.bool else seen > torch.finfo(seen.dtype).min / 2).any()):
            raise BatchError(
                f"a sequence of {tokens} tokens was padded to {length}, since ranks of cp share it equally, and a mask "
                f"lets tokens see the padding; pad it yourself, with a mask that hides it, or use "
                f"{self._nearest(length)} tokens"
            )
        self._causal.add(mask)

    def weigh(self, weights: Tensor, *, row: int, column: int, rows: int, columns: int) -> None:
        """Raise an error where tokens read padding in attention that is written out: its weights have to be 0 there."""
        tokens = self.tokens(columns)
        if tokens == columns or weights.is_meta or torch_compat.active_fake_mode() is not None:
            return
        if torch_compat.capture_is_on():
            raise torch_compat.CaptureError("weights of padded positions are looked at")
        num_rows = self.positions(rows).num_below(self.group.rank, self.tokens(rows))
        of_tokens = weights.detach().narrow(row, 0, num_rows)
        if bool((of_tokens.narrow(column, tokens, columns - tokens) != 0).any()):
            raise BatchError(
                f"a sequence of {tokens} tokens was padded to {columns}, since ranks of cp share it equally, and "
                f"attention that is written out weighs the padding; use {self._nearest(columns)} tokens"
            )

    def _nearest(self, padded: int) -> str:
        """Return the nearest lengths that ranks share equally."""
        lower = padded - self.group.degree * (2 if self.balanced else 1)
        return f"{lower} or {padded}" if lower else f"{padded}"

    def _attend_flexibly(self, call: AttentionCall) -> Tensor:
        assert call.q_length is not None and call.k_length is not None, "sharded, as the propagation asks"
        if (tokens := self.tokens(call.k_length)) != call.k_length:
            raise BatchError(
                f"a sequence of {tokens} tokens was padded to {call.k_length}, since ranks of cp share it equally, "
                "and functions of flex_attention may see the padding; "
                f"use {self._nearest(call.k_length)} tokens"
            )
        attention = Attention(scale=call.scale)
        plan = self._plan(call.q_BHSE, call.k_BKTE, call.v_BKTF, attention, call.q_length, call.k_length)
        return attend_flexibly(
            call.q_BHSE, call.k_BKTE, call.v_BKTF, plan,
            score_mod=call.score_mod, block_mask=call.block_mask, scale=call.scale,
        )  # fmt: skip

    def _plan(
        self, q: Tensor, k: Tensor, v: Tensor, attention: Attention, q_length: int, k_length: int
    ) -> SequencePlan:
        """Return the plan of one attention, the same on all ranks.

        Raises:
            PluginError: The method cannot compute it.
        """
        needs = "" if not attention.needs_autograd else "dropout" if attention.dropout else "a bias with a gradient"
        rows, columns = self.positions(q_length), self.positions(k_length)
        key = (tuple(q.shape), tuple(k.shape), v.shape[-1], q.itemsize, rows, columns, attention.pattern, needs)
        if key not in self._plans:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            layout = Layout(rows=rows, columns=columns, pattern=attention.pattern)
            method = self._method(shape_of(q, k, v), layout, needs, str(q.dtype).removeprefix("torch."))
            self._plans[key] = SequencePlan.of(method, self.group, rows, columns)
        return self._plans[key]

    def _method(self, shape: AttentionShape, layout: Layout, needs_autograd: str, dtype: str) -> Method:
        degree = self.group.degree
        if self.method is not Method.AUTO:
            # Dropout and trained biases are computed by universal whatever is asked for.
            inner_degree = self.group.inner_degree if self.method is Method.USP else None
            why = unfit(self.method, num_heads=shape.num_heads, degree=degree, inner_degree=inner_degree)
            if why is not None:
                raise PluginError(why)
            return self.method
        found = choose(shape, layout, link=self.link(dtype), needs_autograd=needs_autograd, methods=METHODS)
        self.decided(
            f'context_parallel: method = "auto" is "{found.method}" for {shape.num_heads} heads, {shape.num_kv_heads} '
            f"of keys, and {layout.columns.length} positions: {found.reason}"
        )
        return found.method

    def note(self, what: str, name: str) -> None:
        """Take no note in a run: the dry run has."""


@dataclass(kw_only=True)
class DryRules:
    """Notes of a dry run: what was done, by module and function.

    Args:
        degree: Ranks along cp.
        balanced: As of `EngineRules`.
        others: Whether what mixes positions and is no attention is gathered, or refused.
        takes_all: Whether masks that are gathered leave nothing out, whatever the values of an example.

    Attributes:
        notes: Numbers of (what, module, function).
        at_work: FQNs of the modules at work, the innermost last.
        calls: Attentions, with the modules at work.
        failed: FQN of the module in which the run ended with an error.
        has_features: Whether a layer has summed over the sharded dim before anything took it for one of positions.
    """

    degree: int
    balanced: bool
    others: str
    takes_all: bool = False
    notes: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    at_work: list[str] = field(default_factory=list)
    failed: str = ""
    calls: list[tuple[str, AttentionCall]] = field(default_factory=list)
    has_features: bool = False

    def positions(self, length: int) -> Positions:
        """Return the positions of every rank; those of a dry run are the first one's."""
        return positions_of(length, self.degree, is_balanced=self.balanced)

    def index(self, length: int, device: torch.device) -> Tensor:
        """Return positions of the right number."""
        return torch.arange(self.local_length(length), device=device)

    def local_length(self, length: int) -> int:
        """Return the number of positions of the first rank."""
        return self.positions(length).local_lengths[0]

    def divides(self, *, coarse: int, fine: int) -> bool:
        """Return what ranks find in a run."""
        return divides(self.positions(coarse), self.positions(fine))

    def gather(self, x: Tensor, *, dim: int, length: int) -> Tensor:
        """Return a tensor of the global length."""
        if self.takes_all and x.dtype is torch.bool:
            return x.new_ones([*x.shape[:dim], length, *x.shape[dim:][1:]])
        return torch.cat([x] * (self.degree + 1), dim).narrow(dim, 0, length)

    def windows(self, x: Tensor, *, dim: int, reach: Reach) -> Tensor:
        """Return a tensor of the size of the first rank's windows."""
        size = sum(self.window_sizes(reach) or [])
        return x.index_select(dim, torch.zeros(size, dtype=torch.int64, device=x.device))

    def window_sizes(self, reach: Reach) -> list[int] | None:
        """Return the sizes of the first rank's windows; None where a rank has none."""
        read, written = (tuple(map(self.positions, parts)) for parts in (reach.read, reach.written))
        windows = windows_of(read, written, reach.before, reach.after)[1]
        return [end - start for start, end in windows[0]] if all(windows) else None

    def attend(self, call: AttentionCall) -> Tensor:
        """Record the call, and return a tensor of the output's form."""
        self.calls.append((self.at_work[-1] if self.at_work else "", call))
        return call.q_BHSE.new_zeros([*call.q_BHSE.shape[:-1], call.v_BKTF.shape[-1]], requires_grad=True).clone()

    def weigh(self, weights: Tensor, *, row: int, column: int, rows: int, columns: int) -> None:
        """Do nothing: weights have no values on meta."""

    def note(self, what: str, name: str) -> None:
        """Count, and refuse what is to be refused."""
        if what == "channels" or (what == "gathered" and name == "linear"):
            self.has_features |= not any(used in MIXED for used, _, _ in self.notes)
        if what == "channels":
            return
        module = self.at_work[-1] if self.at_work else ""
        self.notes[what, module, name] += 1
        if what == "gathered" and self.others == "refuse":
            raise PropagationError(f'"{module}": {name} mixes positions, and others = "refuse" gathers nothing')


@functools.lru_cache(maxsize=256)
def positions_of(length: int, degree: int, *, is_balanced: bool) -> Positions:
    """Return the positions of every rank of a sequence of a length."""
    return (zigzag if is_balanced else contiguous)(length, degree)


@functools.lru_cache(maxsize=256)
def windows_of(
    read: tuple[Positions, ...], written: tuple[Positions, ...], before: int, after: int
) -> tuple[Positions, tuple[tuple[Run, ...], ...]]:
    """Return every rank's positions of what is read, and by rank the windows that positions of a result read."""
    windows = tuple(
        tuple((start - before, end + after) for start, end in runs) for runs in Positions.joined(written).runs
    )
    return Positions.joined(read), windows


@functools.lru_cache(maxsize=256)
def divides(coarse: Positions, fine: Positions) -> bool:
    """Return whether the positions of every rank are those of a shorter sequence, each so many in a row."""
    times = fine.length // coarse.length
    scaled = tuple(tuple((start * times, end * times) for start, end in rank) for rank in coarse.runs)
    return fine.length == coarse.length * times and scaled == fine.runs


def shape_of(q_BHSE: Tensor, k_BKTE: Tensor, v_BKTF: Tensor) -> AttentionShape:
    """Return the sizes of an attention."""
    return AttentionShape(
        batch=q_BHSE.shape[0],
        num_heads=q_BHSE.shape[1],
        num_kv_heads=k_BKTE.shape[1],
        head_dim=q_BHSE.shape[-1],
        value_dim=v_BKTF.shape[-1],
        element_bytes=q_BHSE.element_size(),
    )
