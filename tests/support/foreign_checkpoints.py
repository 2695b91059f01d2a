"""Checkpoint folders of other systems, written as their formats are documented, of one training of AdamW."""

from __future__ import annotations

import collections
import math
from pathlib import Path

import torch
from torch import nn
from torch.distributed import checkpoint as dcp


class Scaler:
    """An object that a system pickles into its files."""

    def __init__(self):
        self.scale = 1.0


def trained(model, optimizer, batches, loss_fn):
    """Take a step for every batch; return the model's losses."""
    losses = []
    for tokens, targets in batches:
        loss = loss_fn(model(tokens), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _moments(model, optimizer):
    return {name: optimizer.state[p] for name, p in model.named_parameters()}


def write_fsdp(folder, model, optimizer, step):
    """FSDP as torch's tutorials save it: `app.model.*` and `app.optim.state.*`, hyperparameters as pickled entries."""
    groups = {name: {"lr": 0.1, "betas": (0.9, 0.95)} for name, _ in model.named_parameters()}
    optim = {"state": _moments(model, optimizer), "param_groups": groups}
    dcp.save({"app": {"model": model.state_dict(), "optim": optim}}, checkpoint_id=folder)


def write_torchtitan(folder, model, optimizer, step):
    state = {
        **model.state_dict(),
        **{f"optimizer.state.{fqn}.{k}": v for fqn, s in _moments(model, optimizer).items() for k, v in s.items()},
        **{f"optimizer.param_groups.{fqn}.lr": 0.1 for fqn, _ in model.named_parameters()},
        "train_state": {"step": torch.tensor(step)},
        "lr_scheduler": Scaler(),
    }
    dcp.save(state, checkpoint_id=folder)


def write_accelerate(folder, model, optimizer, step):
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "pytorch_model_fsdp_0")
    optim = {"state": _moments(model, optimizer), "param_groups": [{"lr": 0.1, "params": [0]}]}
    dcp.save({"optimizer": optim}, checkpoint_id=folder / "optimizer_0")


def write_universal(folder, model, optimizer, step):
    for name, parameter in model.named_parameters():
        inner = folder / "zero" / name
        inner.mkdir(parents=True)
        torch.save({"param": parameter.detach(), "cat_dim": 0}, inner / "fp32.pt")
        for kind in ("exp_avg", "exp_avg_sq"):
            torch.save({"param": optimizer.state[parameter][kind], "cat_dim": 0}, inner / f"{kind}.pt")
        torch.save(step, inner / "step.pt")


def _groups(model):
    named = list(model.named_parameters())
    return [[(n, p) for n, p in named if p.dim() > 1], [(n, p) for n, p in named if p.dim() < 2]]


def _model_file(model, step):
    shapes = [collections.OrderedDict((n, p.shape) for n, p in group) for group in _groups(model)]
    weights = ((f"module.{n}", p.detach().to(torch.bfloat16)) for n, p in model.named_parameters())
    return {
        "module": collections.OrderedDict(weights),
        "param_shapes": shapes, "buffer_names": [], "global_steps": step, "ds_version": "0.19.6",
        "shared_params": {}, "loss_scaler": Scaler(),
    }  # fmt: skip


def _padded(values, num_ranks):
    flat = torch.cat([value.detach().reshape(-1) for value in values])
    return nn.functional.pad(flat, (0, -len(flat) % (2 * num_ranks))).chunk(num_ranks)


def write_zero_2(folder, model, optimizer, step, num_ranks=2):
    folder.mkdir()
    torch.save(_model_file(model, step), folder / "mp_rank_00_model_states.pt")
    for rank in range(num_ranks):
        flat = {
            kind: [_padded([optimizer.state[p][kind] for _, p in group], num_ranks)[rank] for group in _groups(model)]
            for kind in ("exp_avg", "exp_avg_sq")
        }
        base = {"state": {i: {"step": step, **{kind: flat[kind][i] for kind in flat}} for i in range(2)}}
        partitions = [_padded([p for _, p in group], num_ranks)[rank].clone() for group in _groups(model)]
        state = {
            "zero_stage": 2, "partition_count": [num_ranks] * 2, "loss_scaler": Scaler(),
            "single_partition_of_fp32_groups": partitions, "base_optimizer_state": base,
        }  # fmt: skip
        torch.save({"optimizer_state_dict": state}, folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def write_zero_3(folder, model, optimizer, step, num_ranks=2):
    folder.mkdir()

    def part(value, rank):
        flat = value.detach().reshape(-1)
        size = math.ceil(len(flat) / num_ranks)
        return nn.functional.pad(flat, (0, size * num_ranks - len(flat))).chunk(num_ranks)[rank]

    for rank in range(num_ranks):
        torch.save(_model_file(model, step), folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        inner, flat = {}, []
        for index, group in enumerate(_groups(model)):
            flat.append(torch.cat([part(p, rank) for _, p in group]))
            moments = {
                k: torch.cat([part(optimizer.state[p][k], rank) for _, p in group]) for k in ("exp_avg", "exp_avg_sq")
            }
            inner[index] = {"step": torch.tensor(float(step)), **moments}
        state = {
            "zero_stage": 3, "partition_count": num_ranks, "fp32_flat_groups": flat,
            "optimizer_state_dict": {"state": inner, "param_groups": []}, "loss_scaler": Scaler(),
        }  # fmt: skip
        torch.save({"optimizer_state_dict": state}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def write_weights(folder, model, optimizer, step):
    from safetensors.torch import save_file

    folder.mkdir()
    save_file({name: p.detach() for name, p in model.named_parameters()}, folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    Path(folder, "trainer_state.json").write_text(f'{{"global_step": {step}}}')


WRITERS = {
    "dcp": write_fsdp, "torchtitan": write_torchtitan, "accelerate": write_accelerate,
    "universal": write_universal, "zero 2": write_zero_2, "zero 3": write_zero_3,
}  # fmt: skip
