"""Optimizers of a DeepSpeed file: every default that differs is written out."""

from __future__ import annotations

from typing import Any

from composer3d.importing.automatic import argument, resolve
from composer3d.importing.translation import Translation

__all__ = ["optimizer"]

_TYPE, _PARAMS = "optimizer.type", "optimizer.params"
_ADAM = ("adam", "adamw", "fusedadam", "cpuadam", "deepspeedcpuadam")
_REFUSED = {
    "onebitadam": "1-bit Adam is another algorithm",
    "zerooneadam": "0/1 Adam is another algorithm",
    "onebitlamb": "1-bit LAMB is another algorithm",
    "muadam": "muP scales rates by widths",
    "muadamw": "muP scales rates by widths",
    "musgd": "muP scales rates by widths",
}
_MISSING = {"lamb": "LAMB", "lion": "Lion", "fusedlamb": "LAMB", "fusedlion": "Lion"}
_KEYS = {"sgd": ("momentum", "nesterov"), "muon": ("momentum", "nesterov", "eps")}  # of [optimizer], for that class
_TORCH = {"adagrad": "Adagrad", "rmsprop": "RMSprop", "adadelta": "Adadelta", "nadam": "NAdam", "radam": "RAdam"}


def optimizer(translation: Translation) -> None:
    """Carry the optimizer with all its hyperparameters."""
    t = translation
    if not t.has_block("optimizer"):
        return
    kind = t.text(_TYPE).lower().replace("_", "")
    if kind in _ADAM:
        _adam(t, kind)
    elif kind in _REFUSED:
        t.judge(_TYPE, "refused", _REFUSED[kind])
    elif kind in _MISSING:
        note = f'{_MISSING[kind]} by name; a class of yours: optimizer.use = "module:Class"'
        t.judge(_TYPE, "missing" if not t.is_run else "refused", note)
    elif kind == "sgd":
        _plain(t, "sgd", {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0, "nesterov": False})
    elif kind == "muon":
        _plain(t, "muon", {"lr": 1e-3, "momentum": 0.95, "weight_decay": 0.0})
        note = "which matrices it steps, and the scale of its updates, are chosen otherwise"
        t.judge(_TYPE, "changed", note, to="optimizer.use")
    elif kind in _TORCH:
        _plain(t, f"torch.optim:{_TORCH[kind]}", {"lr": 1e-2 if kind in ("adagrad", "rmsprop") else 1e-3})
    elif _TYPE in t:
        t.wrong(_TYPE, "is no optimizer of DeepSpeed or torch")
    _refused_parameters(t)
    t.judge_block(_PARAMS, "missing", "an argument that this optimizer is not given here")


def _refused_parameters(t: Translation) -> None:
    note = "DeepSpeed raises: write gradient_clipping at the top"
    t.judge(f"{_PARAMS}.max_grad_norm", "refused" if t.get(f"{_PARAMS}.max_grad_norm") else "equal", note)
    for name in ("torch_adam", "fused", "foreach", "capturable"):
        t.judge(f"{_PARAMS}.{name}", "meaningless", "speed")


def _adam(t: Translation, kind: str) -> None:
    as_l2 = kind == "adam" and f"{_PARAMS}.adam_w_mode" in t and not t.flag(f"{_PARAMS}.adam_w_mode")
    name = "torch.optim:Adam" if as_l2 else "adamw"
    t.put("optimizer.use", name, _TYPE)
    note = (
        "weight decay as an L2 penalty" if as_l2 else "DeepSpeed's Adam decays as AdamW does" if kind == "adam" else ""
    )
    t.judge(_TYPE, "carried", note, to="optimizer.use")
    t.judge(f"{_PARAMS}.adam_w_mode", "derived", "chooses between AdamW and L2", to="optimizer.use")
    if f"{_PARAMS}.bias_correction" in t and not t.flag(f"{_PARAMS}.bias_correction"):
        t.judge(f"{_PARAMS}.bias_correction", "refused", "torch has no Adam without bias correction")
    t.judge(f"{_PARAMS}.bias_correction", "equal")
    arguments: dict[str, Any] = {}
    if t.flag(f"{_PARAMS}.amsgrad"):
        arguments["amsgrad"] = True
        t.judge(f"{_PARAMS}.amsgrad", "carried", to="optimizer.args")
    t.judge(f"{_PARAMS}.amsgrad", "equal")
    _number(t, "lr", 1e-3, "learning_rate")
    betas = _betas(t)
    if betas is not None:
        reason = None if f"{_PARAMS}.betas" in t else "DeepSpeed's default"
        t.put("optimizer.betas", betas, f"{_PARAMS}.betas", reason=reason)
        t.judge(f"{_PARAMS}.betas", "carried", to="optimizer.args" if as_l2 else "optimizer.betas")
    _number(t, "eps", 1e-8, "adam_epsilon", to="optimizer.args" if as_l2 else "optimizer.eps")
    if as_l2:  # whose class has no keys of its own in the manifest
        moved = {key: t.settings.pop(f"optimizer.{key}", None) for key in ("betas", "eps")}
        arguments |= {key: setting.value for key, setting in moved.items() if setting is not None}
    if arguments:
        t.put("optimizer.args", arguments, f"{_PARAMS}.betas", f"{_PARAMS}.eps", reason="arguments of the class")
    _decay(t, of_torch=not as_l2 and t.flag(f"{_PARAMS}.torch_adam") and f"{_PARAMS}.weight_decay" not in t)


def _betas(t: Translation) -> list[float] | None:
    key = f"{_PARAMS}.betas"
    arguments = t.options.arguments or {}
    filled = [float(argument(arguments, "adam_beta1")), float(argument(arguments, "adam_beta2"))]
    betas: Any = resolve(t, key, value=filled)
    if key not in t:
        return [0.9, 0.999]
    if betas is None:
        return None
    if not isinstance(betas, list) or len(betas) != 2 or not all(isinstance(beta, int | float) for beta in betas):
        t.wrong(key, "must be two numbers")
        return None
    return [float(beta) for beta in betas]


def _number(
    t: Translation,
    name: str,
    default: float,
    argument_name: str,
    *,
    to: str | None = None,
    whose: str = "DeepSpeed's default",
) -> None:
    key = f"{_PARAMS}.{name}"
    if t.get(key) == "auto":
        value = resolve(t, key, argument_name)
        if value is None:
            return
    else:
        value = t.number(key, default)
    t.put(f"optimizer.{name}", float(value), key, reason=None if key in t else whose)
    t.judge(key, "carried", to=to or f"optimizer.{name}")


def _decay(t: Translation, *, of_torch: bool) -> None:
    """Write weight decay for every parameter: DeepSpeed exempts none, composer3d those of less than two dims.

    Args:
        of_torch: The file chooses torch's AdamW, which decays where it is not told to.
    """
    key = f"{_PARAMS}.weight_decay"
    if t.get(key) == "auto" and t.options.arguments is None:
        resolve(t, key, "weight_decay")
        return
    if of_torch:
        t.judge(f"{_PARAMS}.torch_adam", "derived", "torch's AdamW, whose default is 0.01", to="optimizer.weight_decay")
        _number(t, "weight_decay", 0.01, "weight_decay", whose="torch's default, whose AdamW torch_adam chooses")
    else:
        _number(t, "weight_decay", 0.0, "weight_decay")
    decay = t.settings["optimizer.weight_decay"].value
    if decay:
        group = [{"match": ".", "weight_decay": decay}]
        t.put("optimizer.groups", group, key, reason="DeepSpeed decays norms and biases too")


def _plain(t: Translation, name: str, defaults: dict[str, Any]) -> None:
    """Carry an optimizer of torch by its arguments."""
    t.put("optimizer.use", name, _TYPE)
    if name != "muon":
        t.judge(_TYPE, "carried", to="optimizer.use")
    own = {"lr", "weight_decay", *_KEYS.get(name, ())}
    given = [leaf.path[-1] for leaf in t.tree.below(_PARAMS) if len(leaf.path) == 3]
    extra: dict[str, Any] = {}
    for key in dict.fromkeys([*defaults, *given]):
        source = f"{_PARAMS}.{key}"
        value = resolve(t, source, {"lr": "learning_rate"}.get(key, key)) if source in t else defaults.get(key)
        if value is None or key in ("max_grad_norm", "torch_adam", "fused", "foreach", "capturable"):
            continue
        if key in own:
            number = value if isinstance(value, bool) else t.number(source, value if source not in t else None)
            if number is None:
                continue
            reason = None if source in t else "the class's default"
            t.put(f"optimizer.{key}", number, source, reason=reason)
            t.judge(source, "carried", to=f"optimizer.{key}")
        else:
            extra[key] = value
            t.judge(source, "carried", to="optimizer.args")
    if extra:
        t.put("optimizer.args", extra, reason="arguments of the class")
