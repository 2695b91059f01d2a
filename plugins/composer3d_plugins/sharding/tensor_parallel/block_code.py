"""Execution of a model's own code under a plan, determined block by block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from composer3d import PluginError, RunContext
from composer3d.propagation import SEQUENCE, Call, KeptShardError, PropagationError, Traced, outside, trace
from composer3d_plugins.sharding.tensor_parallel.fitting import fit, fits
from composer3d_plugins.sharding.tensor_parallel.module_roles import Code, Roles, roles_of, sized
from composer3d_plugins.sharding.tensor_parallel.plan_resolution import CONTRACTING, EXPANDING, Rule, Rules, region_of

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Codes"]

WHOLE = 'write plan = "auto", which leaves the sequence of such a block whole, or sequence_parallel = false'


@dataclass(frozen=True, kw_only=True)
class Codes:
    """Determines how the code of each block runs.

    Args:
        model: The whole model.
        rules: The plan.
        blocks: The repeated blocks, where they are known.
        sequence_dim: The dim of activations that sequence_parallel shards; None without it.
        unsharded: Blocks whose activations it does not shard.
        traced: Of the model with these blocks; None runs it.
    """

    model: nn.Module
    rules: Rules
    context: RunContext
    blocks: tuple[str, ...]
    sequence_dim: int | None
    unsharded: frozenset[str] = frozenset()
    traced: Traced | None = None

    def find(self) -> Code:
        """Return how the code of every module is run, by the model's FQNs.

        Raises:
            PluginError: Heads do not divide by tp, or code needs what other ranks hold.
        """
        try:
            traced = self.traced or trace(self.model, self.context, blocks=self.blocks)
        except PluginError:
            return self._all_propagated()
        self._refuse_read(traced)
        if hooked := [block for block in self._sharded_blocks() if block in traced.hooked]:
            text = "registers hooks, which would be given the positions of a rank"
            raise PluginError(f'the forward of "{hooked[0]}", or the model\'s around it, {text}', hint=WHOLE)
        found: list[tuple[str, Code | None]] = []
        # Every form is looked at: what cannot be propagated is refused now, not in the first step.
        for first, group in traced.forms.items():
            known: dict[tuple[bool, frozenset[tuple[str, Rule]]], Code | None] = {}
            for fqn in group:
                rules = (fqn in self.unsharded, frozenset(self._inside(fqn).items()))
                if rules not in known:
                    known[rules] = self._code_of(fqn, traced.calls[first])
                found.append((fqn, known[rules]))
        codes = {fqn: code for fqn, code in found if code is not None}
        if len(codes) < len(found) or not self._holds(codes, traced):
            return self._all_propagated()
        return _joined(codes)

    def _refuse_read(self, traced: Traced) -> None:
        """Refuse to shard what code outside of its module reads, with replicated tensors."""
        read = set(traced.read)
        for first, group in traced.forms.items():
            inside = [name.removeprefix(first) for name in traced.read if first and f"{name}.".startswith(f"{first}.")]
            read |= {f"{fqn}{name}" for fqn in group for name in inside}
        for fqn, rule in self.rules.items():
            if fqn in read and rule.style in (
                *EXPANDING,
                *CONTRACTING,
                "vocab",
                "head",
                "local",
                "sequence",
                "weights",
            ):
                raise PluginError(
                    f'"{fqn}" is "{rule.style}", and code outside of it reads its parameters, which are whole there',
                    hint='write "replicate"',
                )

    def _holds(self, codes: Mapping[str, Code], traced: Traced) -> bool:
        """Return whether code that is correct on one example is so on a larger one, and leaves the rest unchanged."""
        sizes = _joined(codes).sizes
        if sizes and list(traced.forms) != [""] and not self._leave_rest(sizes, traced):
            return False
        if not all(self._fits(fqn, codes[fqn], traced.calls[fqn], training=False) for fqn in traced.forms):
            return False
        if self.context.example is not None:
            return True
        try:
            larger = trace(self.model, self.context, blocks=self.blocks, scale=2)
        except PluginError:
            # Such a batch cannot come: positions end before it, say.
            return True
        return all(self._fits(fqn, codes[fqn], larger.calls[fqn]) for fqn in traced.forms if fqn in larger.calls)

    def _leave_rest(self, sizes: Mapping[tuple[str, str], int], traced: Traced) -> bool:
        """Return whether the code around blocks does the same with a rank's sizes; it may use modules of theirs too."""
        before = outside(self.model, traced)
        try:
            with sized(self.model, sizes):
                return outside(self.model, traced).entries == before.entries
        except Exception:  # a model's own code may raise anything
            return False

    def _fits(self, fqn: str, code: Code, call: Call, *, training: bool = True) -> bool:
        block, degree = self.model.get_submodule(fqn), self.context.degrees["tp"]
        return fits(block, code=code, roles=self._roles(fqn), degree=degree, call=call, training=training)

    def _roles(self, fqn: str) -> Roles:
        sequence_dim = None if fqn in self.unsharded else self.sequence_dim
        return roles_of(self.model.get_submodule(fqn), self._inside(fqn), sequence_dim=sequence_dim)

    def _inside(self, fqn: str) -> dict[str, Rule]:
        """Return the rules of the modules in a block, by their FQNs in it; its own one if it multiplies parameters."""
        prefix = f"{fqn}." if fqn else ""
        inside = {name.removeprefix(prefix): rule for name, rule in self.rules.items() if name.startswith(prefix)}
        own = self.rules.get(fqn)
        return {**inside, "": own} if own is not None and own.style == "weights" else inside

    def _code_of(self, fqn: str, call: Call) -> Code | None:
        block, rules = self.model.get_submodule(fqn), self._inside(fqn)
        roles = self._roles(fqn)
        if roles.weights:
            return Code(propagated=frozenset({""}))
        regions = {name: region for name in roles.expanding if (region := region_of(name, rules)) is not None}
        apart = {
            name
            for name, rule in rules.items()
            if rule.style == "sequence" and roles.sequence_dim is not None and _is_bare(block.get_submodule(name))
        }
        try:
            code = fit(
                block,
                roles=roles,
                degree=self.context.degrees["tp"],
                call=call,
                regions=regions,
                apart=frozenset(apart),
            )
        except PropagationError as error:
            if not error.divides:
                raise PluginError(f"heads do not divide: {error}") from error
            if error.sources - {SEQUENCE} or isinstance(error, KeptShardError):
                is_kept = isinstance(error, KeptShardError) and not error.sources - {SEQUENCE}
                raise PluginError(
                    f"the plan does not fit the model's code: {error}", hint=WHOLE if is_kept else None
                ) from error
            return None
        # A norm that is stated to work on a full sequence, though activations are sharded, has no dry run.
        is_sharded = all(rule.is_sharded for rule in rules.values() if rule.style == "sequence")
        return code if is_sharded or roles.sequence_dim is None else None

    def _all_propagated(self) -> Code:
        """Propagate blocks that are sharded along the sequence, also those without sharded layers; else regions."""
        sharded = self._sharded_blocks()
        regions = {
            region
            for fqn, rule in self.rules.items()
            if rule.style in EXPANDING and (region := region_of(fqn, self.rules)) is not None
        }
        multiplying = {self._block_around(fqn) or "" for fqn, rule in self.rules.items() if rule.style == "weights"}
        sharded = [*sharded, *multiplying]
        return Code(
            propagated=frozenset(sharded) | {region for region in regions if self._block_around(region) not in sharded}
        )

    def _sharded_blocks(self) -> list[str]:
        if self.sequence_dim is None:
            return []
        bounded = any(rule.style in ("split", "split_gather") for rule in self.rules.values())
        inside = {
            self._block_around(fqn)
            for fqn, rule in self.rules.items()
            if (rule.style in EXPANDING and rule.is_sharded) or rule.style == "sequence"
        }
        return [block for block in self.blocks if (bounded or block in inside) and block not in self.unsharded]

    def _block_around(self, fqn: str) -> str | None:
        return next((block for block in self.blocks if fqn == block or fqn.startswith(f"{block}.")), None)


def _joined(codes: Mapping[str, Code]) -> Code:
    """Return the code of all blocks, by the model's FQNs."""

    def full(fqn: str, name: str) -> str:
        return ".".join(filter(None, (fqn, name)))

    return Code(
        sizes={(full(fqn, name), key): v for fqn, code in codes.items() for (name, key), v in code.sizes.items()},
        propagated=frozenset(full(fqn, name) for fqn, code in codes.items() for name in code.propagated),
        gathered=frozenset(full(fqn, name) for fqn, code in codes.items() for name in code.gathered),
        given={full(fqn, name): sharded for fqn, code in codes.items() for name, sharded in code.given.items()},
        apart={full(fqn, name): placed for fqn, code in codes.items() for name, placed in code.apart.items()},
        activations={full(fqn, name): seen for fqn, code in codes.items() for name, seen in code.activations.items()},
    )


def _is_bare(module: nn.Module) -> bool:
    return next(module.parameters(), None) is None
