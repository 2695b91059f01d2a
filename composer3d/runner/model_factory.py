"""The model of a run: the factory that `[model]` names, its arguments, frozen parameters, and the loss."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from composer3d.errors import (
    ComposerError,
    LossError,
    ManifestError,
    ModelError,
    PatternError,
    ReferenceFailure,
    describe_error,
    is_interrupt,
)
from composer3d.initialisation import unreadable
from composer3d.manifest import Manifest, hide, resolve_reference
from composer3d.processes import running
from composer3d.runner.objective.loss_functions import make_loss

if TYPE_CHECKING:
    from torch import nn

    from composer3d.huggingface import HuggingFaceModel
    from composer3d.initialisation import TensorSource

__all__ = ["ModelFactory"]

# What models that compute their loss call the targets.
_HOST_LIMIT_S = 600.0
_TARGET_NAMES = ("targets", "labels", "target", "label")


class ModelFactory:
    """Makes the model of a manifest; called once by `compose`.

    Arguments that the data decide are filled in where the factory has them and the manifest does not state them:
    `vocab_size`, and `max_seq_len`.

    Args:
        manifest: With the runner's tables.
        vocab_size: Of the data's tokens; None where unknown.

    Raises:
        ManifestError: The factory cannot be imported.
    """

    def __init__(self, manifest: Manifest, *, vocab_size: int | None) -> None:
        self._manifest = manifest
        table, document = manifest.tables["model"], manifest.document
        self.hf = None if table.hf is None else _hugging_face(manifest)
        self._function: Callable[..., nn.Module]
        self.args: dict[str, Any] = table.args
        if self.hf is not None:
            self._function = self.hf
        else:
            try:
                self._function = resolve_reference(table.reference, document.folder)
            except ComposerError as error:
                raise ManifestError([document.problem(("model", "use"), str(error))]) from error
            derived = {"vocab_size": vocab_size, "max_seq_len": manifest.tables["data"].seq_len}
            accepted = _named_arguments(self._function)
            self.args = {k: v for k, v in derived.items() if v is not None and k in accepted} | table.args
            _check_arguments(self._function, self.args, manifest)
        loss = manifest.tables["train"].loss_table
        self.uses_own_loss = loss.use == "model"
        try:
            self.loss = make_loss(loss, document.folder)
        except ReferenceFailure as error:
            raise ManifestError([document.problem(("train", "loss"), error.message, hint=error.hint)]) from error
        if self.hf is not None and self.uses_own_loss and loss.reduction is not None:
            message = "the loss of a Hugging Face model is a sum over its labels already; remove reduction"
            raise ManifestError([document.problem(("train", "loss", "reduction"), message)])
        self._target_name: str | None = None
        self.flops_per_token = 0
        self._unmatched: list[PatternError] = []

    @property
    def loss_fn(self) -> Callable[[Any, Any], Any]:
        """The loss of the run."""
        return self.hf.own_loss() if self.hf is not None and self.uses_own_loss else self.loss.function

    def inputs(self, targets: Any) -> dict[str, Any]:
        """Return what the model takes besides its inputs: the targets, where it computes the loss itself.

        Raises:
            LossError: Its forward has no argument for them.
        """
        from composer3d.huggingface import model_inputs

        if not self.uses_own_loss or targets is None:
            return {}
        if self.hf is not None:
            return model_inputs(targets)
        if self._target_name is None:
            raise LossError(
                'with [train] loss = "model" the model is given the targets, and its forward has no argument '
                f"{', '.join(_TARGET_NAMES)}; add one, or give data without targets"
            )
        return {self._target_name: targets}

    def record(self) -> dict[str, Any]:
        """Return the values that must be equal when a run resumes."""
        if self.hf is not None:
            return {"hf": self.hf.record()}
        return {"use": self._manifest.tables["model"].reference, "args": hide(self.args)}

    @property
    def vocab_size(self) -> int | None:
        """The tokens that the model has rows for, as far as its arguments or its configuration say."""
        if self.hf is not None:
            return self.hf.vocab_size
        size = self.args.get("vocab_size")
        return size if isinstance(size, int) else None

    def __call__(self) -> nn.Module:
        """Return the model, its frozen parameters marked; see `refuse_unmatched`."""
        import torch

        from composer3d.models import num_flops_per_token

        table = self._manifest.tables["model"]
        # A model that is built with its values, and may read data, takes its time.
        limit: dict[str, float] = {"limit_s": _HOST_LIMIT_S} if table.build == "host" else {}
        if isinstance(self._function, torch.nn.Module):
            raise ModelError(
                f"{table.reference} is a {type(self._function).__name__} that exists, not a callable that returns one; "
                "name its class, or a function that builds it",
                key="use",
            )
        with self._located(), running("called", table.hf or table.reference, **limit):
            model = self._function() if self.hf is not None else self._function(**self.args)
        if not isinstance(model, torch.nn.Module):
            raise ModelError(f"the factory returned {type(model).__name__}, not a torch.nn.Module", key="use")
        _refuse_unreadable(model)
        self.learn(model)
        self.flops_per_token = num_flops_per_token(model, self._manifest.tables["data"].seq_len)
        names = [fqn for fqn, _ in model.named_parameters(remove_duplicate=False)]
        frozen: set[str] = set()
        for pattern in self._manifest.tables["train"].frozen:
            try:
                frozen |= _inside(pattern, names)
            except PatternError as error:
                self._unmatched.append(error)
        for fqn, parameter in model.named_parameters(remove_duplicate=False):
            if fqn in frozen:
                parameter.requires_grad_(False)
        return model

    def learn(self, model: nn.Module) -> None:
        """Take in what the model calls its targets, of a model that another factory of the manifest has made."""
        accepted = _named_arguments(model.forward)
        self._target_name = next((name for name in _TARGET_NAMES if name in accepted), None)

    def open_weights(self, model: nn.Module) -> TensorSource | None:
        """Return where the weights of a Hugging Face model lie; None where the factory makes them."""
        with self._located():
            return None if self.hf is None else self.hf.open_weights(model)

    @contextlib.contextmanager
    def _located(self) -> Iterator[None]:
        try:
            yield
        except ModelError as error:
            raise _at_key(error, self._manifest) from error

    def build(self) -> nn.Module | Callable[[], nn.Module]:
        """Return what `compose` is given: the factory, or with `build = "host"` the model.

        Raises:
            ManifestError: The factory fails.
        """
        import torch

        if self._manifest.tables["model"].build == "deferred":
            return self
        # The same on all ranks: compose refuses ranks that start from different weights.
        torch.manual_seed(self._manifest.train.seed)
        try:
            model = self()
        except BaseException as error:
            if isinstance(error, ManifestError) or is_interrupt(error):
                raise
            message = f"the factory raised {describe_error(error)}"
            raise ManifestError([self._manifest.document.problem(("model", "use"), message)]) from error
        return model

    def refuse_unmatched(self) -> None:
        """Refuse patterns of `frozen` that matched nothing, and a loss of a model that is given no targets.

        Asked after the factory was called.

        Raises:
            ManifestError: At the line of `frozen`, or of `loss`.
        """
        document = self._manifest.document
        problems = [document.problem(("train", "frozen"), str(error)) for error in self._unmatched]
        always_given = self._manifest.tables["data"].kind != "user"
        if self.uses_own_loss and self.hf is None and self._target_name is None and always_given:
            message = 'loss = "model" is computed by the model, whose forward has no argument '
            problems.append(document.problem(("train", "loss"), message + ", ".join(_TARGET_NAMES)))
        if problems:
            raise ManifestError(problems)


def _refuse_unreadable(model: nn.Module) -> None:
    """Refuse a model whose names or shapes have no end, or are not known yet.

    Raises:
        ModelError: With the FQN at fault.
    """
    if (what := unreadable(model)) is not None:
        raise ModelError(what, key="use")


def _hugging_face(manifest: Manifest) -> HuggingFaceModel:
    from composer3d.huggingface import HuggingFaceModel

    table = manifest.tables["model"]
    try:
        return HuggingFaceModel(
            table.hf,
            beside=manifest.document.folder,
            weights=table.weights or "pretrained",
            dtype=table.dtype or "float32",
            attn_implementation=table.attn_implementation,
            trust_remote_code=table.trust_remote_code,
            config=table.args,
        )
    except ModelError as error:
        raise _at_key(error, manifest) from error


def _at_key(error: ModelError, manifest: Manifest) -> ManifestError:
    """Place an error at the key of `[model]` that it is about, if that is stated."""
    document = manifest.document
    stated = document.get(("model", error.key)) is not None or error.key == "use"
    path = ("model", error.key if stated else "hf")
    return ManifestError([document.problem(path, error.message, hint=error.hint)])


def _inside(pattern: str, names: Sequence[str]) -> set[str]:
    """Return the parameters that match a pattern, or lie inside a module that does."""
    from composer3d import select_fqns

    prefixes = {".".join(name.split(".")[:length]) for name in names for length in range(1, name.count(".") + 2)}
    found = set(select_fqns(pattern, sorted(prefixes)))
    return {name for name in names if any(name == fqn or name.startswith(f"{fqn}.") for fqn in found)}


def _named_arguments(function: Callable[..., Any]) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return set()


def _check_arguments(function: Callable[..., Any], args: dict[str, Any], manifest: Manifest) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(**args)
    except TypeError as error:
        use = manifest.tables["model"].reference
        hint = f"it takes {', '.join(signature.parameters) or 'none'}"
        problem = manifest.document.problem(("model", "args"), f"{use} cannot take these arguments: {error}", hint=hint)
        raise ManifestError([problem]) from error
