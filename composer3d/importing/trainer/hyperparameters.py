"""Batch and optimizer of the Trainer; every default of its is written out."""

from __future__ import annotations

from composer3d.importing.deepspeed.batch_sizes import data_degree
from composer3d.importing.translation import Translation

__all__ = ["batch", "optimizer", "smoothing"]

_TORCH = {"sgd": "sgd", "adagrad": "torch.optim:Adagrad", "rmsprop": "torch.optim:RMSprop"}
_SMALL = {
    "adamw_torch_8bit": "8bit",
    "adamw_bnb_8bit": "8bit",
    "adamw_8bit": "8bit",
    "paged_adamw_8bit": "8bit",
    "adamw_torch_4bit": "4bit",
}
_PAGED = ("paged_adamw_32bit", "paged_adamw")


def batch(translation: Translation) -> None:
    """Carry batch sizes, steps and clipping."""
    t, micro_key, steps_key = translation, "per_device_train_batch_size", "gradient_accumulation_steps"
    least = int(t.table.defaults[micro_key])
    micro, steps = t.integer(micro_key, least, least=1) or least, t.integer(steps_key, 1, least=1) or 1
    t.state(micro_key, "train.microbatch", micro)
    world = data_degree(t)
    if steps > 1 and world is not None:
        formula = f"{micro} x {steps} x {world} ranks"
        t.put("train.global_batch", micro * steps * world, steps_key, reason=formula)
        t.judge(steps_key, "derived", f"global_batch = {formula}", to="train.global_batch")
    elif steps > 1 and t.is_run:
        t.carry(steps_key, "train.accumulate", steps)
    elif steps > 1:
        t.loop.append(f"with run.accumulate({steps}):  # {steps_key}, around forward, backward and optimizer.step()")
        t.judge(steps_key, "derived", f"the loop's own: run.accumulate({steps})")
    t.judge(steps_key, "equal", "global_batch is microbatch x data-parallel degree by default")
    total = t.integer("max_steps", -1) or -1
    if total > 0:
        t.carry("max_steps", "train.steps", total)
        t.judge("num_train_epochs", "ignored-there", "max_steps decides")
    t.judge("max_steps", "meaningless", "num_train_epochs decides")
    t.judge("num_train_epochs", "missing", "epochs: write train.steps = epochs x samples / global batch")
    norm = t.number("max_grad_norm", 1.0) or 0.0
    t.state("max_grad_norm", "train.grad_clip", float(norm) if norm > 0 else float("inf"))


def optimizer(translation: Translation) -> None:
    """Carry the optimizer; like composer3d, the Trainer decays neither biases nor norms."""
    t, name = translation, translation.text("optim", "adamw_torch").lower()
    if name in _SMALL:
        t.put("@small_state.format", _SMALL[name], "optim")
        t.judge("optim", "changed", "other block sizes and maps of the moments", to="@small_state.format")
    elif name in _PAGED:
        t.carry("optim", "optimizer.use", "adamw", "its state is paged to the host there, with the same numbers")
    elif name not in _TORCH and name.split("_")[0] != "adamw":
        t.judge("optim", "refused", f'{name} by name; a class of yours: optimizer.use = "module:Class"')
    use = _TORCH.get(name, "adamw")
    t.state("optim", "optimizer.use", use)
    t.state("learning_rate", "optimizer.lr", float(t.number("learning_rate", 5e-5) or 0.0))
    t.state("weight_decay", "optimizer.weight_decay", float(t.number("weight_decay", 0.0) or 0.0))
    if use == "adamw":
        betas = [float(t.number(key, default) or 0.0) for key, default in (("adam_beta1", 0.9), ("adam_beta2", 0.999))]
        stated = [key for key in ("adam_beta1", "adam_beta2") if key in t]
        t.put("optimizer.betas", betas, *stated, reason=None if stated else "the Trainer's default")
        for key in stated:
            t.judge(key, "carried", to="optimizer.betas")
        t.state("adam_epsilon", "optimizer.eps", float(t.number("adam_epsilon", 1e-8) or 0.0))
    elif use == "sgd":
        t.put("optimizer.momentum", 0.0, reason="the Trainer's SGD has none")
    for key in ("adam_beta1", "adam_beta2", "adam_epsilon"):
        t.judge(key, "ignored-there", "of Adam alone")
    t.judge("optim_args", "missing" if t.get("optim_args") else "meaningless", "arguments of the optimizer's class")


def smoothing(translation: Translation) -> None:
    """Carry the share of a target's probability that is spread over all classes: the mean over them is torch's too."""
    t, key = translation, "label_smoothing_factor"
    share = t.number(key, 0.0) or 0.0
    if not 0 <= share < 1:
        t.wrong(key, "must be at least 0 and below 1")
    elif share and t.is_run:
        t.carry(key, "train.loss", {"use": "cross_entropy", "label_smoothing": float(share)})
    elif share:
        t.loop.append(f"# The loss of the loop: cross_entropy(logits, targets, label_smoothing={share:g})")
        t.judge(key, "carried", "the loop's own loss")
    t.judge(key, "equal", "no label is smoothed")
