"""Recipe of a recorded model: every parameter and buffer can be made alone and in full."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from composer3d.errors import ComposerError, InitialisationError, did_you_mean
from composer3d.initialisation.disk_weights import Slab, TensorSource
from composer3d.initialisation.identity import seed_of
from composer3d.initialisation.operation_log import Log, Replay, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Recipe", "TensorSpec"]


class Recipe:
    """The log of a factory, read tensor by tensor.

    Every random operator has a key that does not depend on who asks: the first FQN whose storage it writes, and its
    position among the random operators of that FQN's history. Where it writes no parameter or buffer, as in
    `nn.Parameter(torch.randn(d, d) * 0.02)`, the key is of the first FQN whose history it belongs to. So a parameter
    that is computed from another sees the values that the other one gets, and adding a layer to a model leaves the
    weights of all others as they were.

    Attributes:
        ties: Groups of FQNs that are one tensor.
        attributes: FQNs of tensors that are plain attributes, neither parameters nor buffers.
        loose: Tensors that containers, closures and hooks hold, by how they are reached; they stay these objects.
        source: Weights on disk, which are read instead of initialised.
    """

    def __init__(
        self,
        log: Log,
        specs: Mapping[str, TensorSpec],
        *,
        ties: Sequence[tuple[str, ...]],
        attributes: Sequence[str],
        loose: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._log = log
        self._specs = dict(specs)
        self._keys = _random_keys(log, self._specs)
        self.ties = tuple(ties)
        self.attributes = frozenset(attributes)
        self.loose = dict(loose or {})
        self.source: TensorSource | None = None

    @property
    def fqns(self) -> tuple[str, ...]:
        """All names, tied ones too: parameters, then buffers, attributes, and what containers and closures hold."""
        return tuple(self._specs)

    def __contains__(self, fqn: str) -> bool:
        return fqn in self._specs

    def spec(self, fqn: str) -> TensorSpec:
        """Return the tensor's value when the factory returned.

        Raises:
            InitialisationError: There is no such parameter, buffer or attribute.
        """
        if fqn not in self._specs:
            hint = did_you_mean(fqn, self.fqns)
            raise InitialisationError(f'the factory makes no "{fqn}"' + (f"; {hint}" if hint else ""))
        return self._specs[fqn]

    def value(self, fqn: str, *, seed: int) -> Tensor | Slab:
        """Return one tensor in full: still to be read, where the source has it, else made; see `full`."""
        return Slab(self.source, fqn) if self.source is not None and fqn in self.source else self.full(fqn, seed=seed)

    def full(self, fqn: str, *, seed: int) -> Tensor:
        """Make one tensor on the CPU, in full, by running its history alone.

        The values depend on `fqn`, `seed` and the history, not on what was made before. torch's random state and
        default dtype are left as they were. Memory: the tensor and what its history holds, freed on return.
        Collectives: none.

        Args:
            fqn: Of a parameter, buffer or attribute.
            seed: Of the run.

        Raises:
            InitialisationError: There is no such tensor, or a recorded operator cannot run on the CPU.
        """
        import torch

        spec = self.spec(fqn)
        replay = Replay(self._log)
        with _state_kept(), torch.no_grad():
            for number in self._log.history(spec.storage):
                entry = self._log.entries[number]
                if entry.is_random:
                    torch.default_generator.manual_seed(seed_of(seed, *self._keys[number]))
                if entry.dtype != torch.get_default_dtype():
                    torch.set_default_dtype(entry.dtype)
                try:
                    replay.run(entry)
                except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
                    if isinstance(error, ComposerError):
                        raise
                    raise InitialisationError(
                        f'{entry.place}{entry.name} of "{fqn}" cannot run on the CPU: {error}'
                    ) from error
            result = replay.tensor(spec).resolve_conj().resolve_neg()
            # A view would keep the whole storage alive.
            return result if self._log.covers(spec) else result.clone()

    def fingerprint(self) -> int:
        """Return a 64-bit digest of everything recorded and of the source, by which ranks compare their factories."""
        import torch

        digest = hashlib.blake2b(digest_size=8)
        for entry in self._log.entries:
            digest.update(repr((entry.name, entry.args, sorted(entry.kwargs.items()), entry.dtype)).encode())
        for number, constant in self._log.constants.items():
            digest.update(str(number).encode() + constant.reshape(-1).view(torch.uint8).numpy().tobytes())
        source = None if self.source is None else self.source.fingerprint()
        digest.update(repr((self._specs, self.ties, source)).encode())
        return int.from_bytes(digest.digest(), "big")


@contextlib.contextmanager
def _state_kept() -> Iterator[None]:
    """Give back torch's CPU random state and default dtype; `torch.manual_seed` would also reseed accelerators."""
    import torch

    state, dtype = torch.get_rng_state(), torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_rng_state(state)
        torch.set_default_dtype(dtype)


def _random_keys(log: Log, specs: Mapping[str, TensorSpec]) -> dict[int, tuple[str, int]]:
    """Give every random entry that some tensor depends on its owner's FQN and a position."""
    owners: dict[int, str] = {}
    for fqn, spec in specs.items():
        owners.setdefault(spec.storage, fqn)
    keys: dict[int, tuple[str, int]] = {}
    for storage, fqn in owners.items():
        position = 0
        for number in log.history(storage, whole=True):
            entry = log.entries[number]
            if not entry.is_random or number in keys:
                continue
            written = [owners[other] for other in sorted(entry.writes) if other in owners]
            if not written or written[0] == fqn:
                keys[number] = (fqn, position)
                position += 1
    return keys
