"""Whole scripts of one device, adapted in a few lines, train on two ranks as they do alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.models import write_manifest

import composer3d
from composer3d.testing import full, run_ranks

TIGHT = 1e-12
FOLDER = Path(__file__).parent
HEAD = "run = composer3d.compose(model, MANIFEST)\n    rank, ranks = run.context.reader, run.context.num_readers\n"
WEIGHTS = (
    "weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}",
    "weights = {name: full(parameter.detach()) for name, parameter in run.named_parameters()}\n    run.close()",
)

# Of each script the lines that change: (as it is, as it is composed).
NANOGPT = [
    ("    model = GPT()\n", f"    model = GPT()\n    {HEAD}    model = run.model\n"),
    (
        "    decay = [p for p in model.parameters() if p.dim() >= 2]\n"
        "    nodecay = [p for p in model.parameters() if p.dim() < 2]\n"
        '    optim_groups = [{"params": decay, "weight_decay": weight_decay}, '
        '{"params": nodecay, "weight_decay": 0.0}]\n'
        "    optimizer = torch.optim.AdamW(optim_groups, lr=learning_rate, betas=(0.9, 0.95))\n",
        '    optim_groups = [{"match": r"ln_|bias", "weight_decay": 0.0}]\n'
        "    optimizer = run.optimizer(\n"
        "        torch.optim.AdamW, optim_groups, lr=learning_rate, betas=(0.9, 0.95), weight_decay=weight_decay\n"
        "    )\n"
        "    progress = Progress()\n"
        '    run.attach("progress", progress)\n',
    ),
    (
        '    if os.path.exists(os.path.join(out_dir, "ckpt.pt")):\n'
        '        checkpoint = torch.load(os.path.join(out_dir, "ckpt.pt"))\n'
        '        model.load_state_dict(checkpoint["model"])\n'
        '        optimizer.load_state_dict(checkpoint["optimizer"])\n'
        '        iter_num, best_val_loss = checkpoint["iter_num"], checkpoint["best_val_loss"]\n',
        '    if os.path.exists(os.path.join(out_dir, "latest")):\n'
        '        run.load(sorted(str(path) for path in Path(out_dir).glob("step-*"))[-1])\n'
        "        checkpoint = progress.state\n"
        '        iter_num, best_val_loss = checkpoint["iter_num"], checkpoint["best_val_loss"]\n',
    ),
    (
        "            checkpoint = {\n"
        '                "model": model.state_dict(),\n'
        '                "optimizer": optimizer.state_dict(),\n',
        "            progress.state = {\n",
    ),
    (
        '            torch.save(checkpoint, os.path.join(out_dir, "ckpt.pt"))\n',
        '            run.save(os.path.join(out_dir, f"step-{iter_num}"))\n',
    ),
    (
        "            X, Y = get_batch(draw)\n",
        "            X, Y = (part.chunk(ranks)[rank] for part in get_batch(draw))\n",
    ),
    ("            loss.backward()\n", "            loss = run.backward(loss)\n"),
    ("torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)", "run.clip_grad_norm_(grad_clip)"),
    WEIGHTS,
]
NO_TRAINER = [
    (
        "    model = LlamaForCausalLM(config)\n",
        f"    model = LlamaForCausalLM(config)\n    {HEAD}    model = run.model\n",
    ),
    (
        "DataLoader(dataset(2, 20), batch_size=per_device_train_batch_size)",
        "run.loader(DataLoader(dataset(2, 20), batch_size=per_device_train_batch_size))",
    ),
    (
        '    decayed = [p for n, p in model.named_parameters() if "norm" not in n]\n'
        '    spared = [p for n, p in model.named_parameters() if "norm" in n]\n'
        '    groups = [{"params": decayed}, {"params": spared, "weight_decay": 0.0}]\n'
        "    optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)\n",
        '    groups = [{"match": "norm", "weight_decay": 0.0}]\n'
        "    optimizer = run.optimizer(torch.optim.AdamW, groups, lr=1e-2, weight_decay=0.1)\n",
    ),
    (
        "    completed_steps, curve = 0, []\n",
        '    completed_steps, curve = 0, []\n    run.attach("lr_scheduler", lr_scheduler)\n',
    ),
    # The block under accumulate.
    (
        "            is_last = (step + 1) % gradient_accumulation_steps == 0 or step == len(train_dataloader) - 1\n"
        "            size = gradient_accumulation_steps if step < 4 else 1  # the epoch's last group has one batch\n"
        "            outputs = model(**batch)\n"
        "            loss = outputs.loss\n"
        "            (loss / size).backward()\n"
        "            if is_last:\n"
        "                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n",
        "            with run.accumulate(gradient_accumulation_steps):\n"
        "                outputs = model(**batch)\n"
        "                loss = outputs.loss\n"
        "                run.backward(loss)\n"
        "                run.clip_grad_norm_(1.0)\n",
    ),
    (
        "            if is_last:\n                completed_steps",
        "            if run.sync_gradients:\n                completed_steps",
    ),
    WEIGHTS,
]
FABRIC = [
    ("    model = Classifier()\n", f"    model = Classifier()\n    {HEAD}    model = run.model\n"),
    ("torch.optim.SGD(model.parameters(), ", "run.optimizer(torch.optim.SGD, "),
    ("DataLoader(images(2, 28), batch_size=4)", "run.loader(DataLoader(images(2, 28), batch_size=4))"),
    ("            loss.backward()\n", "            run.backward(loss)\n"),
    ("torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)", "run.clip_grad_norm_(max_norm=0.5)"),
    (
        '        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}\n'
        '        torch.save(state, f"{out_dir}/{epoch}.pt")\n',
        '        run.save(f"{out_dir}/step-{epoch}")\n',
    ),
    WEIGHTS,
]


class Progress:
    """What a script keeps in its checkpoint beside the model and the optimizer."""

    def __init__(self):
        self.state = {}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def script(name, changes, **names):
    """Return a script's `train`, with lines replaced; every one of them stands in it."""
    text = (FOLDER / f"{name}.py").read_text()
    for before, after in changes:
        assert before in text, before
        text = text.replace(before, after)
    space = {"__name__": name, "composer3d": composer3d, "full": full, "Progress": Progress, "Path": Path, **names}
    exec(compile(text, f"{name}.py", "exec"), space)
    return space["train"]


def trained(name, changes, layout, folder, runs):
    """Run a script alone, and adapted on this rank; return how far curves and weights are apart, and the rest."""
    torch.set_default_dtype(torch.float64)
    rank = torch.distributed.get_rank()
    alone, together = folder / f"alone-{rank}", folder / "together"
    alone.mkdir()
    found = []
    for index, out_dir in (([], alone), (changes, together)):
        for arguments in runs:
            train = script(name, index, MANIFEST=write_manifest(layout))  # a new process, as far as the script goes
            result = train(str(out_dir), *arguments)
        found.append(result)
    (curve, more, weights), (own_curve, own_more, own_weights) = found
    assert weights.keys() == own_weights.keys()
    error = max(float((own_weights[key] - weights[key]).abs().max()) for key in weights)
    assert len(curve) == len(own_curve)
    return max(abs(a - b) for a, b in zip(curve, own_curve, strict=True)), error, more, own_more


FSDP, ACCUMULATED = "[sharding.fsdp2]\n", "[sharding.fsdp2]\nzero = 1\n"


@pytest.mark.parametrize("layout", [FSDP, ACCUMULATED])
def test_nanogpt_resumed(tmp_path, layout):
    for curve, error, best, own_best in run_ranks(trained, 2, "nanogpt_style", NANOGPT, layout, tmp_path, [(3,), (6,)]):
        assert curve < TIGHT and error < TIGHT and abs(best - own_best) < TIGHT


@pytest.mark.parametrize("layout", [FSDP, "[sharding.ddp]\n"])
def test_fabric(tmp_path, layout):
    for curve, error, rates, own_rates in run_ranks(trained, 2, "fabric_style", FABRIC, layout, tmp_path, [()]):
        assert curve < TIGHT and error < TIGHT and rates == own_rates


@pytest.mark.slow
@pytest.mark.parametrize("layout", [FSDP, ACCUMULATED])
def test_hugging_face_without_a_trainer(tmp_path, layout):
    pytest.importorskip("transformers")
    for curve, error, more, own in run_ranks(trained, 2, "no_trainer_style", NO_TRAINER, layout, tmp_path, [()]):
        assert curve < 31 * TIGHT and error < TIGHT and more == own
