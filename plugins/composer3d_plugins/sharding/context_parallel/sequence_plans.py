"""Plans of a model's attentions: the method of each, chosen at its first call, and the positions of its lengths."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from composer3d_plugins.sharding.context_parallel.attention_methods import Method
from composer3d_plugins.sharding.context_parallel.attention_pattern import Pattern
from composer3d_plugins.sharding.context_parallel.attention_traffic import AttentionShape, Layout
from composer3d_plugins.sharding.context_parallel.method_choice import Choice, Link, choose
from composer3d_plugins.sharding.context_parallel.sequence_attention import Attention, SequencePlan
from composer3d_plugins.sharding.context_parallel.sequence_groups import SequenceGroup
from composer3d_plugins.sharding.context_parallel.sequence_positions import Positions, contiguous, zigzag

__all__ = ["SequencePlans", "shape_of"]

_POSSIBLE = (Method.GATHER, Method.RING, Method.ULYSSES, Method.UNIVERSAL)


@dataclass(frozen=True, kw_only=True)
class SequencePlans:
    """Positions by length, and plans by what decides a method; all ranks make the same ones.

    Args:
        group: The ranks.
        method: That is asked for; `auto` chooses for each attention by its sizes.
        is_balanced: Whether a rank has one chunk from both ends of a sequence.
        link: Figures of the links, where there are any.
    """

    group: SequenceGroup
    method: Method
    is_balanced: bool
    link: Link | None = None
    _positions: dict[int, Positions] = field(default_factory=dict, repr=False, compare=False)
    _plans: dict[tuple[Method, int, int], SequencePlan] = field(default_factory=dict, repr=False, compare=False)
    _choices: dict[tuple[AttentionShape, int, int, Pattern, str], Choice] = field(
        default_factory=dict, repr=False, compare=False
    )

    def positions(self, length: int) -> Positions:
        """Return the positions of every rank of a sequence of a length."""
        if length not in self._positions:
            self._positions[length] = (zigzag if self.is_balanced else contiguous)(length, self.group.degree)
        return self._positions[length]

    def plan(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attention: Attention,
        *,
        num_rows: int,
        num_columns: int,
    ) -> SequencePlan:
        """Return the plan of an attention.

        Args:
            q: Queries of this rank [B, H, L, E].
            k: Keys of this rank [B, K, M, E].
            v: Values of this rank [B, K, M, F].
            attention: What is computed.
            num_rows: Queries of the whole sequence.
            num_columns: Keys of the whole sequence.
        """
        method = self.method
        if method is Method.AUTO:
            method = self.choice(shape_of(q, k, v), attention, num_rows=num_rows, num_columns=num_columns).method
        key = (method, num_rows, num_columns)
        if key not in self._plans:
            rows, columns = self.positions(num_rows), self.positions(num_columns)
            self._plans[key] = SequencePlan.of(method, self.group, rows, columns)
        return self._plans[key]

    def choice(self, shape: AttentionShape, attention: Attention, *, num_rows: int, num_columns: int) -> Choice:
        """Return the choice of a method for an attention, with its figures.

        Args:
            shape: Sizes.
            attention: What is computed.
            num_rows: Queries of the whole sequence.
            num_columns: Keys of the whole sequence.
        """
        needs = "dropout" if attention.dropout else "a bias with a gradient" if attention.needs_autograd else ""
        key = (shape, num_rows, num_columns, attention.pattern, needs)
        if key not in self._choices:
            layout = Layout(
                rows=self.positions(num_rows), columns=self.positions(num_columns), pattern=attention.pattern
            )
            self._choices[key] = choose(shape, layout, link=self.link, needs_autograd=needs, methods=_POSSIBLE)
        return self._choices[key]


def shape_of(q_BHLE: torch.Tensor, k_BKME: torch.Tensor, v_BKMF: torch.Tensor) -> AttentionShape:
    """Return the sizes of an attention on one rank."""
    return AttentionShape(
        batch=q_BHLE.shape[0],
        num_heads=q_BHLE.shape[1],
        num_kv_heads=k_BKME.shape[1],
        head_dim=q_BHLE.shape[3],
        value_dim=v_BKMF.shape[3],
        element_bytes=q_BHLE.element_size(),
    )
