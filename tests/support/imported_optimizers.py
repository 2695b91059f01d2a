"""Configurations of every source system that name an optimizer."""

from __future__ import annotations

import json


def deepspeed(kind: str, **params: object) -> tuple[str, str]:
    text = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": kind, "params": {"lr": 1e-3, **params}}}
    return "ds.json", json.dumps(text)


def megatron(name: str, *more: str) -> tuple[str, str]:
    flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 1 --lr 1e-3 --train-iters 9"
    return "train.sh", f"python pretrain_gpt.py {flags} --optimizer {name} {' '.join(more)}\n"


def trainer(name: str) -> tuple[str, str]:
    return "args.json", json.dumps({"per_device_train_batch_size": 1, "max_steps": 9, "optim": name, "adam_beta2": 0.9})


def automodel(target: str, more: str = "") -> tuple[str, str]:
    text = "step_scheduler: {global_batch_size: 8, local_batch_size: 1, max_steps: 9}\ndistributed: {strategy: fsdp2}\n"
    return "recipe.yaml", f"{text}optimizer: {{_target_: {target}, lr: 1.0e-3, weight_decay: 0.1{more}}}\n"


SOURCES = {
    **{
        f"deepspeed-{kind}-{more}": deepspeed(kind, **more)
        for kind in ("Adam", "AdamW", "FusedAdam", "CPUAdam")
        for more in ({}, {"betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}, {"amsgrad": True})
    },
    "deepspeed-l2": deepspeed("Adam", adam_w_mode=False, betas=[0.9, 0.95], eps=1e-6, weight_decay=0.1),
    "deepspeed-l2-default": deepspeed("Adam", adam_w_mode=False, amsgrad=True),
    "deepspeed-sgd": deepspeed("SGD", momentum=0.9, nesterov=True, weight_decay=0.1),
    "deepspeed-muon": deepspeed("Muon", momentum=0.9, weight_decay=0.1, eps=1e-6),
    "deepspeed-adagrad": deepspeed("Adagrad", eps=1e-6, weight_decay=0.1),
    "deepspeed-rmsprop": deepspeed("RMSprop", eps=1e-6, alpha=0.9, momentum=0.5, weight_decay=0.1),
    "deepspeed-adadelta": deepspeed("Adadelta", eps=1e-6, rho=0.8),
    "deepspeed-nadam": deepspeed("NAdam", eps=1e-6, betas=[0.9, 0.95]),
    "deepspeed-radam": deepspeed("RAdam", eps=1e-6, betas=[0.9, 0.95]),
    **{f"megatron-{name}": megatron(name) for name in ("adam", "sgd", "muon")},
    "megatron-numbers": megatron("adam", "--adam-beta1", "0.8", "--adam-eps", "1e-6", "--weight-decay", "0.1"),
    **{f"trainer-{name}": trainer(name) for name in ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")},
    **{
        f"torchtitan-{name}": (
            "job.toml",
            f'[optimizer]\nname = "{name}"\neps = 1e-6\nbeta2 = 0.9\n[training]\nsteps = 9\n',
        )
        for name in ("Adam", "AdamW")
    },
    **{
        f"automodel-{name}": automodel(f"torch.optim.{name}", more)
        for name, more in (("AdamW", ""), ("Adam", ", eps: 1.0e-6, betas: [0.9, 0.95]"), ("SGD", ", momentum: 0.9"))
    },
    **{
        f"neox-{kind}": ("neox.yml", f'"optimizer": {{"type": "{kind}", "params": {{"lr": 0.001}}}}\n"num_layers": 2\n')
        for kind in ("Adam", "sgd")
    },
}
