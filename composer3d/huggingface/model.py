"""A factory of Hugging Face models, whose weights stay on disk until each rank reads its part."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from composer3d.errors import ComposerError, ModelError, did_you_mean
from composer3d.huggingface.files import WeightFiles
from composer3d.huggingface.folder import TOKENIZER, find_folder, import_transformers
from composer3d.huggingface.forward import expect_no_packing, multiply_in_double_precision, run_on_meta

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from composer3d.huggingface.weights import FolderWeights
    from composer3d.interfaces import Loss

__all__ = ["Dtype", "HuggingFaceModel", "Weights"]

Dtype = Literal["auto", "float32", "bfloat16", "float16", "float64"]
Weights = Literal["pretrained", "init"]
# What a configuration says of its own origin, and not of the model.
_ORIGIN = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache")
_SIZES = ("vocab_size", "hidden_size")
_MOST_LAYERS = 100_000  # each is built on meta: a damaged number would build until memory ends


class HuggingFaceModel:
    """A causal language model of transformers, for `compose` and for manifests.

    Args:
        name: A folder, or the name of a model in the Hugging Face cache of this machine; nothing is downloaded.
        beside: The folder from which a relative path counts; default the working folder.
        weights: `pretrained` reads the folder's safetensors; `init` draws new ones, as the configuration says.
        dtype: Of parameters; `auto` is the configuration's, else that of the weights.
        attn_implementation: As for `from_pretrained`: `sdpa`, `eager`, ...; default: transformers' choice.
        trust_remote_code: Run Python that lies in the folder.
        config: Overrides of the configuration.

    Raises:
        ModelError: transformers is missing, there is no such model, or its configuration cannot be used.
    """

    def __init__(
        self,
        name: str | Path,
        *,
        beside: Path | None = None,
        weights: Weights = "pretrained",
        dtype: Dtype = "float32",
        attn_implementation: str | None = None,
        trust_remote_code: bool = False,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        import_transformers()
        self.folder = find_folder(str(name), beside=beside or Path.cwd())
        self._weights, self._dtype_name = weights, dtype
        self._attention, self._trusts = attn_implementation, trust_remote_code
        self.config: Any = _read_config(self.folder, trust_remote_code, dict(config or {}))
        self._uses_cache = getattr(self.config, "use_cache", None)
        self.files: WeightFiles | None = WeightFiles(self.folder) if weights == "pretrained" else None

    @property
    def vocab_size(self) -> int | None:
        """The tokens that the model has rows for."""
        size = getattr(self._text_config, "vocab_size", None)
        return size if isinstance(size, int) else None

    @property
    def max_seq_len(self) -> int | None:
        """The longest sequence that the configuration is made for."""
        size = getattr(self._text_config, "max_position_embeddings", None)
        return size if isinstance(size, int) and size > 0 else None

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer beside the model; None without one."""
        path = self.folder / TOKENIZER
        return path if path.is_file() else None

    @property
    def _text_config(self) -> Any:
        return self.config.get_text_config(decoder=True)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of parameters."""
        import torch

        if self._dtype_name != "auto":
            return getattr(torch, self._dtype_name)
        stated = getattr(self.config, "dtype", None)
        stated = getattr(torch, stated) if isinstance(stated, str) else stated
        return stated or (self.files.dtype() if self.files is not None else None) or torch.float32

    def __call__(self) -> nn.Module:
        """Return the model with the weights that its configuration gives it; cheap on meta.

        Raises:
            ModelError: transformers has no causal language model of this configuration, or not with this attention.
        """
        import torch
        from transformers import AutoModelForCausalLM

        for config in (self.config, self._text_config):
            if getattr(config, "use_cache", None) is not None:
                config.use_cache = False  # training has no use for keys and values of the past
        options = {} if self._attention is None else {"attn_implementation": self._attention}
        try:
            model: nn.Module = AutoModelForCausalLM.from_config(
                self.config, dtype=_widened(self.dtype), trust_remote_code=self._trusts, **options
            )
        except ComposerError:
            raise
        except Exception as error:  # what a size that fits no other raises depends on the family
            said = (str(error).strip() or type(error).__name__).splitlines()[0]
            if not isinstance(error, ValueError | ImportError):
                said = f"{type(error).__name__}: {said}"
            if self._attention is not None and ("attn_implementation" in str(error) or self._attention in said):
                message = f'attn_implementation = "{self._attention}" cannot be used: {said}'
                raise ModelError(message, key="attn_implementation") from error
            raise ModelError(f"transformers cannot make a causal language model of {self.folder}: {said}") from error
        expect_no_packing(model)
        if _widened(self.dtype) is torch.float64:
            multiply_in_double_precision(model)
        run_on_meta(model)
        return model

    def open_weights(self, model: nn.Module) -> FolderWeights | None:
        """Return where the model's weights lie, None for `init`; reads no values.

        Raises:
            ModelError: They are not the model's.
        """
        from composer3d.huggingface.weights import FolderWeights

        return None if self.files is None else FolderWeights(self.files, model)

    def own_loss(self) -> Callable[[Any, Tensor], Loss]:
        """Return the loss of outputs that were made with `model_inputs`."""
        from functools import partial

        from composer3d.huggingface.own_loss import model_loss

        weight = getattr(self._text_config, "router_aux_loss_coef", None)
        is_on = getattr(self._text_config, "output_router_logits", False)
        return partial(model_loss, auxiliary_weight=float(weight) if weight and is_on else 0.0)

    def record(self) -> dict[str, Any]:
        """Return what makes the model what it is, as JSON values."""
        stated = {key: value for key, value in self.config.to_diff_dict().items() if key not in _ORIGIN}
        record: dict[str, Any] = json.loads(json.dumps(stated, default=str))
        return {"config": record, "dtype": str(self.dtype).removeprefix("torch.")}

    def save_description(self, to: Path) -> None:
        """Write what a folder of the model has besides weights: configuration, generation settings, tokenizer, code."""
        from composer3d.huggingface.export import save_description

        save_description(self.folder, self.config_to_save, to)

    @property
    def config_to_save(self) -> Any:
        """The configuration as it was, with the overrides and the dtype of this run."""
        import copy

        config = copy.deepcopy(self.config)
        if self._uses_cache is not None:
            config.use_cache = self._uses_cache
        config.dtype = self.dtype
        return config


def _read_config(folder: Path, trust_remote_code: bool, overrides: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    options = {"trust_remote_code": trust_remote_code, "local_files_only": True, "return_unused_kwargs": True}
    try:
        config, unused = AutoConfig.from_pretrained(folder, **options, **overrides)
    except (ValueError, OSError, TypeError, KeyError) as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"{folder} brings its own Python code, which is not run",
                key="trust_remote_code",
                hint="read it, and set trust_remote_code = true",
            ) from error
        raise ModelError(f"the configuration in {folder} cannot be used: {said}") from error
    except Exception as error:  # validators of configurations raise classes of their own
        raise ModelError(f"the configuration in {folder} cannot be used: {str(error).splitlines()[0]}") from error
    unknown = next((key for key in unused if key not in options), None)
    if unknown is not None:
        hint = did_you_mean(unknown, [key for key in config.to_dict() if not key.startswith("_")])
        raise ModelError(f'the configuration of {type(config).__name__} has no "{unknown}"', key="args", hint=hint)
    for key in _SIZES:
        size = getattr(config.get_text_config(decoder=True), key, None)
        if type(size) is int and size < 1:
            raise ModelError(f"the configuration in {folder} has {key} = {size}, and a model has at least 1")
    layers = {key: size for key, size in config.to_dict().items() if "layer" in key and type(size) is int}
    deep = next((key for key, size in layers.items() if size > _MOST_LAYERS), None)
    if deep is not None:
        raise ModelError(f"the configuration in {folder} has {deep} = {layers[deep]:,}, more than any model's")
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"the weights in {folder} are quantised, and what is trained has to be in floating point",
            hint="load them with transformers, dequantize, and save_pretrained",
        )
    return config


def _widened(dtype: torch.dtype) -> torch.dtype:
    """Return float64 where that is torch's default dtype, as in a proof, which widens every dtype that is named."""
    import torch

    return torch.float64 if torch.get_default_dtype() is torch.float64 else dtype
