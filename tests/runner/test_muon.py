"""Muon for matrices in blocks, AdamW for the rest, beside torch's own two optimizers on one device."""

from __future__ import annotations

import pytest
import torch
from support.models import composed, full, mine, padded, seeded, sum_loss
from support.shared_worlds import in_one_world
from support.training import MANIFEST, losses, start, write

from composer3d import ManifestError
from composer3d.manifest import load_manifest
from composer3d.runner import TABLES
from composer3d.runner.objective.muon import Muon, group_matrices, matrices_of
from composer3d.testing import count_collectives, run_ranks

TP = (
    "[mesh]\ntp = 2\ndp_shard = 2\n[sharding.fsdp2]\n[sharding.tensor_parallel.plan]\n"
    '"layers.*.up" = "colwise"\n"layers.*.down" = "rowwise"\n'
)
RATE, DECAY, STEPS = 1e-2, 0.1, 3


class Even(torch.nn.Module):
    """As `support.models.Net`, with sizes that divide by tp."""

    def __init__(self):
        super().__init__()
        from support.models import VOCAB, Block

        class Block2(Block):
            def __init__(self):
                super().__init__(8)
                self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

        self.tok = torch.nn.Embedding(VOCAB, 8)
        self.layers = torch.nn.ModuleList(Block2() for _ in range(2))
        self.out = torch.nn.Linear(8, VOCAB)

    def forward(self, tokens):
        x = self.tok(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.out(x) + 0.0


def reference(factory, chunks, fused):
    model = seeded(factory)
    named = dict(model.named_parameters())
    hidden = [p for name, p in named.items() if name.startswith("layers.") and p.ndim == 2]
    others = [p for p in named.values() if not any(p is other for other in hidden)]
    optimizers = [
        torch.optim.Muon(hidden, lr=RATE, weight_decay=DECAY, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=RATE, weight_decay=DECAY, betas=(0.9, 0.95), fused=fused),
    ]
    tokens, targets = padded()
    count = (targets != -100).sum()
    for _ in range(STEPS):
        for part, wanted in zip(tokens.chunk(chunks), targets.chunk(chunks), strict=True):
            (sum_loss(model(part), wanted)[0] * (1 / count)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {name: p.detach() for name, p in named.items()}


def trained(text, factory, chunks, fused=True):
    """Return the largest error of weights, losses, and the collectives of the last optimizer step."""
    wanted = reference(factory, chunks, fused)
    run = composed(text, seeded(factory))
    optimizer = run.optimizer(
        Muon, groups=group_matrices([], matrices_of(run, None)), lr=RATE, weight_decay=DECAY, fused=fused
    )
    tokens, targets = (mine(run, tensor) for tensor in padded())
    found = []
    for number in range(STEPS):
        with run.step(number):
            found.append(float(run.forward_backward(tokens, target=targets)))
            run.clip_grad_norm_(float("inf"))
            with count_collectives(run.mesh) as collectives:
                optimizer.step()
            optimizer.zero_grad()
    error = max(
        float((full(p) - wanted[name]).abs().max() / wanted[name].abs().max()) for name, p in run.named_parameters()
    )
    run.close()
    return error, found, collectives.summary()


@pytest.mark.parametrize(("world_size", "texts"), [(1, [""]), (2, ["[sharding.fsdp2]\n", "[sharding.ddp]\n"])])
def test_data_parallel_equals_one_device_bit_for_bit(world_size, texts):
    from support.models import Net

    cases = [(text, Net, world_size, fused) for text in texts for fused in (False, True)]
    for (text, *_, fused), ranks in zip(cases, in_one_world(trained, world_size, *cases), strict=True):
        for error, found, _ in ranks:
            # torch's fused AdamW rounds what fills no vector at a tensor's end otherwise than what does, so where
            # a cut lies matters to it: in the last bit, and how much of a tensor that is, the processor decides.
            assert error <= (2**-23 if fused and "fsdp2" in text else 0.0)
            assert found[-1] < found[0]


def test_tensor_parallel_and_pipelines_equal_one_device():
    # Gradients differ in float32's last bits, and matrices are orthogonalised in bfloat16: three steps of one rounding.
    bound = STEPS * RATE * 0.2 * 4 * 2**-7
    pipeline = "[mesh]\npp = 2\n[scheduling.pipeline]\n[train]\nmicrobatch = 6\n"
    for world_size, text in ((4, TP), (2, pipeline)):
        for error, found, _ in run_ranks(trained, world_size, text, Even, 2):
            assert error < bound
            assert found[-1] < found[0]


def test_collectives_are_one_gather_a_matrix():
    texts = ("[sharding.fsdp2]\n", "[sharding.ddp]\n")
    sharded, replicated = (ranks[0][2] for ranks in in_one_world(trained, 2, *((text, Even, 2) for text in texts)))
    assert sharded == {("all_gather", "dp_shard"): (4, 4 * 4 * 8 * 16)}
    assert replicated == {}


# Experts whole on their ranks (ep, or fsdp2 along them), or each of them sharded: over efsdp along another dim.
STACKED = {
    (1, "[sharding.fsdp2]\n"): 0,
    (2, "[sharding.fsdp2]\n[mesh]\ndp_shard = 2\nep = 2\n[sharding.expert_parallel]\n"): 0,
    (2, "[sharding.ddp]\n"): 0,
    (4, "[sharding.fsdp2]\n[mesh]\ndp_shard = 4\nep = 2\n[sharding.expert_parallel]\n"): 2 * 2,  # layers and weights
}


def stepped(text):
    """Step stacked weights of experts by gradients of matrices; return the largest error beside torch's Muon."""
    from support.mixtures import DIM, MIXTURES, token_sum, tokens_and_targets

    alone = seeded(MIXTURES["stacked"])
    run = composed(text, seeded(MIXTURES["stacked"]), loss_fn=token_sum)
    assert {fqn for fqn in matrices_of(run, None) if "experts" in fqn} == {
        f"layers.{layer}.experts.{name}" for layer in range(2) for name in ("up_NFD", "down_NDF")
    }
    optimizer = run.optimizer(Muon, groups=group_matrices([], matrices_of(run, None)), lr=RATE, weight_decay=DECAY)
    tokens, targets = (mine(run, tensor) for tensor in tokens_and_targets())
    with run.step(0):
        run.forward_backward(tokens, target=targets)
        run.clip_grad_norm_(float("inf"))
        gradients = {fqn: full(p.grad) for fqn, p in run.named_parameters()}
        with count_collectives(run.mesh) as collectives:
            optimizer.step()
    found = {fqn: full(p) for fqn, p in run.named_parameters() if fqn.endswith(("up_NFD", "down_NDF"))}
    run.close()
    errors = []
    for fqn, stack in found.items():
        for weight, gradient, stepped_weight in zip(alone.get_parameter(fqn), gradients[fqn], stack, strict=True):
            matrix = torch.nn.Parameter(weight.detach().clone())
            matrix.grad = gradient.clone()
            torch.optim.Muon([matrix], lr=RATE, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw").step()
            errors.append(float((matrix.detach() - stepped_weight).abs().max()))
    assert len(errors) == 16 and DIM < 12
    return max(errors), sum(count for (op, axis), (count, _) in collectives.summary().items() if axis == "efsdp")


def test_a_stacked_weight_of_experts_is_a_matrix_for_each():
    for (world_size, text), gathers in STACKED.items():
        for error, gathered in run_ranks(stepped, world_size, text):
            assert error == 0.0
            assert gathered == gathers


@pytest.mark.slow
def test_a_run_trains_and_resumes_bit_for_bit_at_another_world(tmp_path):
    text = MANIFEST.replace("optimizer.lr = 1e-2", 'optimizer = { use = "muon", lr = 1e-2 }').replace(
        "steps = 12", "steps = 6"
    )
    path = write(tmp_path, text)
    resume = str(tmp_path / "out" / "checkpoints" / "step-3")
    start(path, 2, "checkpoint.every=3")
    start(path, 2, output=tmp_path / "again", resume=resume)
    whole = losses(tmp_path / "out")
    assert losses(tmp_path / "again") == whole[3:]
    start(path, 4, output=tmp_path / "four", resume=resume)
    assert losses(tmp_path / "four") == pytest.approx(whole[3:], rel=2e-3)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('use = "adamw", matrices = "x"', 'matrices is for use = "muon"'),
        ('use = "muon", matrices = "("', 'matrices = "(" is not a regular expression'),
        ('use = "muon", matrices = "nothing"', "matrices is a regular expression, searched in FQNs"),
        ('use = "muon", args = { capturable = true }', 'Muon takes no argument "capturable"'),
    ],
)
def test_refusals(tmp_path, table, message):
    path = write(tmp_path, MANIFEST.replace("optimizer.lr = 1e-2", f"optimizer = {{ {table} }}"))

    def rank():
        from composer3d.runner import train

        with pytest.raises(ManifestError) as caught:
            train(load_manifest(path, tables=TABLES, overrides=[f'run.output="{tmp_path}/out"']), silent=True)
        return str(caught.value)

    assert message in run_ranks(rank, 1)[0]


def test_groups_keep_their_order_and_matrices_are_apart():
    groups = [{"match": "up", "lr": 1.0}, {"match": "layers", "weight_decay": 0.0}]
    assert group_matrices(groups, ["layers.0.up.weight", "layers.0.down.weight", "z.weight"]) == [
        {"match": r"^(?:layers\.0\.up\.weight)$", "lr": 1.0, "matrices": True},
        groups[0],
        {"match": r"^(?:layers\.0\.down\.weight)$", "weight_decay": 0.0, "matrices": True},
        groups[1],
        {"match": r"^(?:z\.weight)$", "matrices": True},
    ]
