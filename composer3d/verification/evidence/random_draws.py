"""Random draws of a model: their call sites and generator states, checked against the rules of each mesh axis.

A draw is identified by the generator's state before it: two draws of one size from one state are one mask. Ranks along
a batch or sequence axis hold other samples or positions, and must draw other masks; ranks along tp hold the same
activations between their sharded regions, and must draw the same ones there, but other ones where each of them holds
other features; and a recomputation in the backward must repeat the forward's draws.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from composer3d.mesh import Layout, Role
from composer3d.torch_compat import backward_inside, in_backward

if TYPE_CHECKING:
    from torch import Tensor

    from composer3d import Composition

__all__ = ["Drawn", "Draws", "StreamFault", "compare_streams", "recording"]

_DROPPING = ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
_DRAWING = frozenset(
    [f"{name}{suffix}" for name in _DROPPING for suffix in ("", "_")]
    + "dropout1d dropout2d dropout3d rand rand_like randn randn_like randint randint_like randperm normal".split()
    + "normal_ uniform_ exponential_ geometric_ cauchy_ log_normal_ random_ bernoulli bernoulli_ multinomial".split()
    + ["poisson", "gumbel_softmax"]
)
_WHILE_TRAINING = frozenset({"rrelu", "rrelu_"})
_WITH_PROBABILITY = frozenset({"scaled_dot_product_attention"})


@dataclass(kw_only=True)
class Draws:
    """Draws of one call site in one step on one rank.

    Args:
        shape: Local shape of the drawn tensor.
        forward: Digest of the generator's state before each draw of a forward.
        again: The same of each draw inside a backward: a recomputation.
        before: The same of each draw of a forward of the step before.
        probabilities: Every dropout probability with which it is called.
        is_idle: Whether all dropped values were zero already.
        is_common: Whether all samples of the step have one number, so that micro-batches and ranks draw alike.
        is_shared: Whether all ranks of a sequence draw alike, as for a tensor that each of them has whole.
    """

    shape: tuple[int, ...]
    forward: list[str] = field(default_factory=list)
    again: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    probabilities: set[float] = field(default_factory=set)
    is_idle: bool = True
    is_common: bool = False
    is_shared: bool = False

    @property
    def is_seeded(self) -> bool:
        """Return whether the draws repeat in every step."""
        return bool(set(self.forward) & set(self.before))


@dataclass(kw_only=True)
class Drawn:
    """Draws of one rank in one step.

    Args:
        sites: By call site: module, function, and index among such calls in one call of the module.
        calls: Number of calls of each module, by FQN, outside of backwards.
    """

    sites: dict[str, Draws] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)

    def beside(self, before: Drawn) -> Drawn:
        """Return these draws with those of the step before noted at each site."""
        for site in self.sites.keys() & before.sites.keys():
            self.sites[site].before = before.sites[site].forward
        return self

    def often(self, site: str) -> float:
        """Return the number of draws at a site per call of its module; infinity where the module is not called."""
        calls = self.calls.get(module_at(site), 0)
        return len(self.sites[site].forward if site in self.sites else ()) / calls if calls else math.inf


def module_at(site: str) -> str:
    """Return the FQN of a call site's module; empty for the root."""
    return site.rpartition(":")[0].removesuffix("(root)")


@dataclass(frozen=True, kw_only=True)
class StreamFault:
    """A violated rule of random draws.

    Args:
        site: The call site.
        kind: equal_over: ranks along `axis` draw the same and must not. differs_over: they must and do not. recompute:
            the recomputation draws other numbers. repeated: micro-batches draw the same. steps: so do steps. more:
            drawn more often than on one device, or where that draws nothing. fewer: less often in one call of the
            module. none: one device draws, and no rank does. otherwise: they drop with another probability.
        axis: Mesh axis along which ranks are compared.
        ranks: Ranks that are compared, or that violate the rule.
    """

    site: str
    kind: str
    axis: str = ""
    ranks: tuple[int, ...] = ()


@contextlib.contextmanager
def recording(run: Composition) -> Iterator[Drawn]:
    """Record every draw of the model inside, by call site: module, function, and index among such calls.

    Blocks that are compiled run eagerly inside, since draws of a compiled graph are not intercepted.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    drawn = Drawn()
    found = drawn.sites
    open_modules: list[tuple[str, dict[str, int]]] = [("", {})]

    class Recording(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            # Inside this method the mode is off, so what a drawing function calls is not counted again.
            name = getattr(func, "__name__", "")
            if name == "backward":
                return backward_inside(self, args, kwargs or {})
            look(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))

    def look(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        drawing, given, named = _inside_of(getattr(func, "__name__", ""), args, kwargs)
        if not _draws(drawing, given, named) or hasattr(func, "composer3d_written"):
            return
        fqn, calls = open_modules[-1]
        number = calls.get(drawing, 0)
        calls[drawing] = number + 1
        site = f"{fqn or '(root)'}:{drawing}" + (f"#{number}" if number else "")
        _note(found, site, given)
        found[site].is_common |= streams.is_common
        found[site].is_shared |= streams.is_shared
        found[site].probabilities |= _probability(drawing, given, named)

    def enter(fqn: str) -> Any:
        def note(*_: Any) -> None:
            open_modules.append((fqn, {}))
            drawn.calls[fqn] = drawn.calls.get(fqn, 0) + (not in_backward())

        return note

    def leave(*_: Any) -> None:
        open_modules.pop()

    hooks = []
    for part in run.parts:
        for fqn, module in part.module.named_modules():
            name = part.firsts.get(fqn, fqn)
            hooks.append(module.register_forward_pre_hook(enter(name), prepend=True))
            hooks.append(module.register_forward_hook(leave, always_call=True))
    streams = run.context.streams
    # What the streams draw by sample, no other mode sees.
    streams.watch = look
    try:
        with torch.compiler.set_stance("force_eager"), Recording():
            yield drawn
    finally:
        streams.watch = None
        for hook in hooks:
            hook.remove()


def _inside_of(
    name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[str, tuple[Any, ...], Mapping[str, Any]]:
    """Return the inner random function of one whose inner call no mode intercepts; any other as it is."""
    if name != "multi_head_attention_forward":
        return name, args, kwargs
    # dropout_p is the eleventh argument.
    probability = kwargs.get("dropout_p", args[10] if len(args) > 10 else 0.0) if kwargs.get("training", True) else 0.0
    if kwargs.get("need_weights", True):
        return "dropout", (args[0], probability, True), {}
    return "scaled_dot_product_attention", args[:1], {"dropout_p": probability}


def _draws(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if kwargs.get("generator") is not None or _is_on_meta(args, kwargs):
        return False
    if name in _WITH_PROBABILITY:
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    if name in _WHILE_TRAINING:
        return bool(kwargs.get("training", args[3] if len(args) > 3 else False))
    if name not in _DRAWING:
        return False
    if "dropout" not in name:
        return True
    # (input, p, training, inplace); a dropout that is off, or drops nothing, draws nothing.
    probability = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    return bool(training) and probability > 0.0


def _is_on_meta(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether arguments are on meta: a pipeline runs its stages there to infer shapes, without draws."""
    device = kwargs.get("device") or getattr(args[0] if args else None, "device", None)
    return str(device).partition(":")[0] == "meta"


def _probability(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> set[float]:
    if name in _WITH_PROBABILITY:
        return {float(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))}
    return {float(kwargs.get("p", args[1] if len(args) > 1 else 0.5))} if "dropout" in name else set()


def _note(found: dict[str, Draws], site: str, args: tuple[Any, ...]) -> None:
    import torch

    from composer3d.step import local

    tensor = args[0] if args and isinstance(args[0], torch.Tensor) else None
    device = torch.device("cpu") if tensor is None else tensor.device
    if device.type == "cpu":
        state = torch.get_rng_state()
    else:
        state = torch.get_device_module(device).get_rng_state(device)
    shape = tuple(local(tensor).shape) if tensor is not None else ()
    digest = hashlib.blake2b(state.numpy().tobytes(), digest_size=12).hexdigest()
    draws = found.setdefault(site, Draws(shape=shape))
    (draws.again if in_backward() else draws.forward).append(digest)
    if draws.is_idle and ("dropout" not in site or tensor is None or _has_values(local(tensor.detach()))):
        draws.is_idle = False


def _has_values(tensor: Tensor) -> bool:
    """Return whether anything would be dropped; what stands for another stage's is zeros."""
    return not getattr(tensor, "composer3d_absent", False) and bool(tensor.any())


def compare_streams(ranks: Sequence[Drawn], reference: Drawn, layout: Layout) -> list[StreamFault]:
    """Return every violated rule.

    A site is in a sharded region if its local shape is a part of the reference's, rather than equal to it.

    Args:
        ranks: Draws of every rank in one step.
        reference: Draws of one device in one step, in the same micro-batches.
        layout: Axes and degrees of the run.
    """
    unseen = reference.sites.keys() - {site for drawn in ranks for site in drawn.sites}
    # A plugin's draws in a sharded region, below torch's functions, are not recorded here.
    whole = layout.degree(Role.TENSOR) == 1
    faults = [StreamFault(site=site, kind="none") for site in sorted(unseen) if whole]
    # Recomputed code may be called by its function alone, and is then recorded at the site of a caller.
    known = {rank: {one for draws in drawn.sites.values() for one in draws.forward} for rank, drawn in enumerate(ranks)}
    for site in sorted({site for drawn in ranks for site in drawn.sites}):
        members = {rank: drawn.sites[site] for rank, drawn in enumerate(ranks) if site in drawn.sites}
        if site not in reference.sites and all(draws.is_idle for draws in members.values()):
            continue  # a stage may run what another one holds, on zeros that stand for it
        usual = reference.sites.get(site, Draws(shape=()))
        faults += _amounts(site, ranks, reference)
        if usual.is_seeded:
            continue  # the model seeds what it draws there itself, and has the same numbers everywhere
        faults += _inside(site, members, known)
        for axis in layout.dense_axes:
            if axis.role not in (Role.BATCH, Role.SEQUENCE, Role.TENSOR):
                continue
            apart = not usual.is_common
            if axis.role is Role.SEQUENCE:
                apart &= not any(draws.is_shared for draws in members.values())
            if axis.role is Role.TENSOR:
                apart = site in reference.sites and next(iter(members.values())).shape != usual.shape
            faults += _between(site, axis.name, apart, _neighbours([*members], axis.name, layout), members)
    return faults


def _amounts(site: str, ranks: Sequence[Drawn], reference: Drawn) -> Iterator[StreamFault]:
    """Yield faults of ranks that draw more or less often than one device, or drop with another probability."""
    usual = reference.sites.get(site, Draws(shape=()))
    members = {rank: drawn.sites[site] for rank, drawn in enumerate(ranks) if site in drawn.sites}
    more = tuple(rank for rank, draws in members.items() if len(draws.forward) > len(usual.forward))
    if more:
        yield StreamFault(site=site, kind="more", ranks=more)
    # Randomly dropped layers are not called; called ones draw as often as on one device.
    fewer = tuple(rank for rank, drawn in enumerate(ranks) if drawn.often(site) < reference.often(site) < math.inf)
    if fewer and reference.often(site).is_integer():
        yield StreamFault(site=site, kind="fewer", ranks=fewer)
    otherwise = tuple(rank for rank, draws in members.items() if draws.probabilities != usual.probabilities)
    if otherwise and usual.forward:
        yield StreamFault(site=site, kind="otherwise", ranks=otherwise)


def _inside(site: str, drawn: Mapping[int, Draws], known: Mapping[int, set[str]]) -> Iterator[StreamFault]:
    for rank, draws in drawn.items():
        if not set(draws.again) <= known[rank]:
            yield StreamFault(site=site, kind="recompute", ranks=(rank,))
            return
    for rank, draws in drawn.items():
        if len(set(draws.forward)) < len(draws.forward) and not draws.is_common:
            yield StreamFault(site=site, kind="repeated", ranks=(rank,))
            return
        if draws.is_seeded:
            yield StreamFault(site=site, kind="steps", ranks=(rank,))
            return


def _between(
    site: str, axis: str, apart: bool, pairs: Sequence[tuple[int, int]], drawn: Mapping[int, Draws]
) -> Iterator[StreamFault]:
    for one, other in pairs:
        first, second = set(drawn[one].forward), set(drawn[other].forward)
        if apart and first & second:
            yield StreamFault(site=site, kind="equal_over", axis=axis, ranks=(one, other))
            return
        if not apart and first != second:
            yield StreamFault(site=site, kind="differs_over", axis=axis, ranks=(one, other))
            return


def _neighbours(members: Sequence[int], axis: str, layout: Layout) -> list[tuple[int, int]]:
    """Return pairs of ranks whose coordinates differ along one axis only."""
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for rank in members:
        coordinates = layout.coordinates(rank)
        groups[tuple((name, index) for name, index in coordinates.items() if name not in (axis, "ep"))].append(rank)
    return [(group[0], other) for group in groups.values() for other in group[1:]]
