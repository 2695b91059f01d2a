"""The file of FSDP's options that transformers' Trainer takes."""

from __future__ import annotations

from composer3d.importing.fully_sharded import fully_sharded
from composer3d.importing.translation import Translation

__all__ = ["RULES"]


def sharded(translation: Translation) -> None:
    """Carry the options, whose names may begin with fsdp_."""
    t = translation

    def key_of(name: str) -> str:
        return f"fsdp_{name}" if f"fsdp_{name}" in t else name

    fully_sharded(t, key_of, machines=1, world=t.options.world_size)
    for key in t.tree.leaves:
        if not key.startswith("xla"):
            t.judge(key, "ignored-there", "the same name with the prefix fsdp_ decides")


def xla(translation: Translation) -> None:
    """Refuse XLA where it is switched on."""
    t = translation
    for name in ("xla", "xla_fsdp_v2"):
        if t.flag(name):
            t.judge(name, "refused", "there is no XLA here")
    for name in ("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "xla_fsdp_settings"):
        t.judge_block(name, "meaningless", "of XLA")


RULES = {"sharded": sharded, "xla": xla}
