"""Buffers inside of experts of a list, as batch-norm's statistics: the model's are those of the rank that holds it."""

from __future__ import annotations

import pytest
import torch
from support.mixtures import (
    DIM,
    NUM_EXPERTS,
    Looped,
    MixtureNet,
    Stack,
    Stacked,
    mine,
    seeded,
    token_sum,
    tokens_and_targets,
)
from support.models import write_manifest
from torch import nn

import composer3d
from composer3d.testing import fake_world, full, run_ranks

TIGHT = 1e-12
TABLES = "[sharding.fsdp2]\n[sharding.expert_parallel]\n"
LAYOUTS = {
    "ep": (2, f"[mesh]\ndp_shard = 2\nep = 2\n{TABLES}"),
    "ep of 4": (4, f"[mesh]\ndp_shard = 4\nep = 4\n{TABLES}"),
    "replicas of experts": (4, f"[mesh]\ndp_replicate = 2\ndp_shard = 2\nep = 2\n{TABLES}"),
    "shards of experts": (4, f"[mesh]\ndp_shard = 4\nep = 2\n{TABLES}"),
    "one": (1, "[sharding.fsdp2]\n"),
}


class Statistics(Looped):
    """Experts with batch-norm, all with one table, and an entry that is none of them and has statistics too."""

    def __init__(self):
        super().__init__()
        held = {
            f"expert_{number}": nn.Sequential(
                nn.Linear(DIM, 12), nn.BatchNorm1d(12, dtype=torch.float64), nn.GELU(), nn.Linear(12, DIM)
            )
            for number in range(NUM_EXPERTS)
        }
        table = torch.ones(3)
        for expert in held.values():
            expert.register_buffer("table", table)
        self.experts = nn.ModuleDict({"after": nn.BatchNorm1d(DIM, affine=False)} | held)

    def forward(self, x_BSD):
        x_TD = x_BSD.flatten(0, 1)
        weights_TK, chosen_TK = self.gate(x_TD).softmax(-1).topk(2, -1)
        out_TD = torch.zeros_like(x_TD)
        for number in range(NUM_EXPERTS):
            token, slot = torch.where(chosen_TK == number)
            out = self.experts[f"expert_{number}"](x_TD[token])
            out_TD.index_add_(0, token, out * weights_TK[token, slot, None])
        return x_BSD + self.experts["after"](out_TD).view_as(x_BSD) / 100


def make_model():
    return seeded(lambda: MixtureNet(Statistics))


def is_of_expert(fqn):
    return ".expert_" in fqn and "running" in fqn


def train(compute, optimizer):
    for _ in range(3):
        compute()
        optimizer.step()
        optimizer.zero_grad()


def trained(text, averages):
    """Train a composed run; return its buffers before they are averaged, and its state."""
    torch.set_default_dtype(torch.float64)
    tokens, targets = tokens_and_targets()
    run = composer3d.compose(make_model(), write_manifest(text), loss_fn=token_sum)
    run.averages_buffers = averages
    ours = mine(run, tokens), mine(run, targets)
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    train(lambda: run.forward_backward(ours[0], target=ours[1]), optimizer)
    own = {fqn: buffer.clone() for fqn, buffer in run.named_buffers()}
    state = run.full_state_dict()
    shared = {fqn: buffer.clone() for fqn, buffer in run.named_buffers()}
    place = run.coordinates["ep"]
    run.close()
    return {"own": own, "state": state, "shared": shared, "ep": place}


@pytest.mark.parametrize(
    ("layout", "averages"),
    [
        ("ep", True),
        ("shards of experts", False),
        pytest.param("ep", False, marks=pytest.mark.slow),
        pytest.param("shards of experts", True, marks=pytest.mark.slow),
        pytest.param("replicas of experts", True, marks=pytest.mark.slow),
    ],
)
def test_statistics_of_experts_are_those_of_their_holders(layout, averages):
    num_ranks, text = LAYOUTS[layout]
    ranks = run_ranks(trained, num_ranks, text, averages)
    state = ranks[0]["state"]
    names = [fqn for fqn in state if is_of_expert(fqn)]
    assert len(names) == 2 * 2 * NUM_EXPERTS
    for fqn in names:
        holder = int(fqn.split("expert_")[1][0]) * 2 // NUM_EXPERTS
        held = [rank["own"][fqn] for rank in ranks if rank["ep"] == holder]
        assert all(not torch.equal(rank["own"][fqn], held[0]) for rank in ranks if rank["ep"] != holder)
        expected = torch.stack(held).mean(0) if averages else held[0]
        assert float((state[fqn] - expected).abs().max()) < TIGHT, fqn
        assert all(torch.equal(rank["shared"][fqn], state[fqn]) for rank in ranks[:2]), fqn
    of_block = "layers.0.experts.after.running_mean"
    everyone = torch.stack([rank["own"][of_block] for rank in ranks])
    assert not torch.equal(everyone[0], everyone[1])
    expected = everyone.mean(0) if averages else everyone[0]
    assert float((state[of_block] - expected).abs().max()) < TIGHT


def saved_and_loaded(text, path, is_loading):
    """Save after three steps, or load; return the state, and the loss of an evaluation."""
    torch.set_default_dtype(torch.float64)
    tokens, targets = tokens_and_targets()
    run = composer3d.compose(make_model(), write_manifest(text), loss_fn=token_sum)
    ours = mine(run, tokens), mine(run, targets)
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    if is_loading:
        run.load(path)
    else:
        train(lambda: run.forward_backward(ours[0], target=ours[1]), optimizer)
        run.save(path)
    loss = float(run.evaluate(ours[0], target=ours[1]).loss)
    state = run.full_state_dict()
    run.close()
    return state, loss


@pytest.mark.parametrize("other", ["ep of 4", pytest.param("one", marks=pytest.mark.slow)])
def test_statistics_of_experts_are_saved_and_loaded_at_another_degree(other, tmp_path):
    path = tmp_path / "saved"
    state, loss = run_ranks(saved_and_loaded, 2, LAYOUTS["ep"][1], path, False)[0]
    num_ranks, text = LAYOUTS[other]
    found, other_loss = run_ranks(saved_and_loaded, num_ranks, text, path, True)[0]
    assert found.keys() == state.keys()
    for fqn, value in state.items():
        assert torch.equal(found[fqn], value), fqn
    assert abs(loss - other_loss) < TIGHT


class OfExpertsAlone(Statistics):
    """The same without statistics of what all ranks run."""

    def __init__(self):
        super().__init__()
        self.experts["after"] = nn.Identity()


def evaluated(text):
    torch.set_default_dtype(torch.float64)
    tokens, targets = tokens_and_targets()
    single = seeded(lambda: MixtureNet(OfExpertsAlone))

    def compute():
        loss = token_sum(single(tokens), targets)
        (loss.sum / loss.count).backward()

    train(compute, torch.optim.SGD(single.parameters(), lr=0.1))
    single.eval()
    with torch.no_grad():
        loss = token_sum(single(tokens), targets)
    run = composer3d.compose(seeded(lambda: MixtureNet(OfExpertsAlone)), write_manifest(text), loss_fn=token_sum)
    ours = mine(run, tokens), mine(run, targets)
    train(lambda: run.forward_backward(ours[0], target=ours[1]), run.optimizer(torch.optim.SGD, lr=0.1))
    found = float(run.evaluate(ours[0], target=ours[1]).loss)
    state, expected = run.full_state_dict(), single.state_dict()
    run.close()
    errors = {fqn: float((state[fqn] - expected[fqn]).abs().max()) for fqn in state if "num_batches" not in fqn}
    return errors, abs(found - float(loss.sum / loss.count))


def test_statistics_of_experts_and_an_evaluation_equal_one_device():
    ranks = run_ranks(evaluated, 2, LAYOUTS["ep"][1])
    assert len(ranks[0][0]) == 2 * (2 + 8 * NUM_EXPERTS + NUM_EXPERTS) + 3
    for errors, of_loss in ranks:
        assert of_loss < TIGHT
        assert max(errors.values(), default=0.0) < TIGHT, errors


def loaded_from_one_device(text):
    """Load another model's state into a run, whole and one block's; return how far the run is from it."""
    torch.set_default_dtype(torch.float64)
    run = composer3d.compose(make_model(), write_manifest(text), loss_fn=token_sum)
    torch.manual_seed(7)
    other = MixtureNet(Statistics)
    said = [str(run.model.load_state_dict(other.state_dict()))]
    errors = [distance(run, other)]
    with torch.no_grad():
        for parameter in other.layers[1].parameters():
            parameter.mul_(2.0)
    said += [str(run.model.layers[1].load_state_dict(other.layers[1].state_dict()))]
    errors += [distance(run, other)]
    wrong = {**other.state_dict(), "layers.0.experts.expert_0.weight": torch.ones(1)}
    try:
        run.model.load_state_dict(wrong)
    except RuntimeError as error:
        said.append(str(error).partition(":")[2].strip())
    tokens, targets = tokens_and_targets()
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    run.forward_backward(mine(run, tokens), target=mine(run, targets))
    optimizer.step()
    run.close()
    return said, errors, run.coordinates["ep"]


def distance(run, other):
    buffers = {fqn: buffer for fqn, buffer in run.named_buffers() if "num_batches" not in fqn}
    named = {fqn: full(parameter.detach()) for fqn, parameter in run.named_parameters()} | buffers
    expected = other.state_dict()
    return max(float((value - expected[fqn]).abs().max()) for fqn, value in named.items())


@pytest.mark.parametrize("layout", ["ep", pytest.param("shards of experts", marks=pytest.mark.slow)])
def test_a_state_of_one_device_is_loaded_into_the_experts_that_a_rank_holds(layout):
    num_ranks, text = LAYOUTS[layout]
    for said, errors, place in run_ranks(loaded_from_one_device, num_ranks, text):
        assert said[:2] == ["<All keys matched successfully>"] * 2
        assert max(errors) == 0.0
        odd = 'Unexpected key(s) in state_dict: "layers.0.experts.expert_0.weight".'
        assert said[2:] == ([odd] if place == 0 else [])


class RowsOfEach(Stack):
    """Stacked experts with scales and counts of each in buffers, a tensor and numbers beside them, and others."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.arange(1.0, 5.0))
        self.register_buffer("counts", torch.zeros(NUM_EXPERTS, dtype=torch.int64))
        self.register_buffer("share", torch.zeros(NUM_EXPERTS, 1))
        self.register_buffer("norm", torch.full((DIM,), 0.5))
        self.powers, self.gains = torch.tensor([[1.0], [0.5], [2.0], [0.25]]), [0.9, 1.0, 1.1, 1.2]

    def forward(self, hidden_states, top_k_index, top_k_weights=None):
        if self.training:
            rows = torch.stack([(top_k_index == number).sum() for number in range(self.num_experts)])
            self.counts += rows
            self.share = self.share / 2 + rows[:, None]
        gains = torch.tensor(self.gains)[top_k_index] * self.scale[top_k_index] * self.powers[top_k_index, 0]
        return super().forward(hidden_states * self.norm, top_k_index, top_k_weights * gains)


class Ambiguous(Stack):
    """As many experts as features between matrices, and as many numbers."""

    def __init__(self):
        super().__init__()
        self.up_NFD, self.up_NF = (nn.Parameter(torch.randn(NUM_EXPERTS, 4, *rest)) for rest in ((DIM,), ()))
        self.down_NDF = nn.Parameter(torch.randn(NUM_EXPERTS, DIM, 4))
        self.register_buffer("scale", torch.ones(4))


def with_rows(text):
    torch.set_default_dtype(torch.float64)
    tokens, targets = tokens_and_targets()
    single = seeded(lambda: MixtureNet(Stacked, stack=RowsOfEach))

    def compute():
        loss = token_sum(single(tokens), targets)
        (loss.sum / loss.count).backward()

    train(compute, torch.optim.SGD(single.parameters(), lr=0.1))
    run = composer3d.compose(
        seeded(lambda: MixtureNet(Stacked, stack=RowsOfEach)), write_manifest(text), loss_fn=token_sum
    )
    ours = mine(run, tokens), mine(run, targets)
    train(lambda: run.forward_backward(ours[0], target=ours[1]), run.optimizer(torch.optim.SGD, lr=0.1))
    errors = {
        fqn: float((full(p.detach()) - single.get_parameter(fqn).detach()).abs().max())
        for fqn, p in run.named_parameters()
    }
    state, expected = run.full_state_dict(), single.state_dict()
    experts = run.model.layers[0].experts
    kept = {name: buffer.clone() for name, buffer in experts.named_buffers()}, experts.gains, experts.powers.shape
    run.close()
    return (
        errors,
        {fqn: (state[fqn], expected[fqn]) for fqn in state if fqn.endswith(("counts", "share", "scale"))},
        kept,
    )


@pytest.mark.parametrize("layout", ["ep", pytest.param("replicas of experts", marks=pytest.mark.slow)])
def test_rows_that_stacked_experts_have_beside_weights_are_theirs(layout):
    num_ranks, text = LAYOUTS[layout]
    ranks = run_ranks(with_rows, num_ranks, text)
    for errors, _, (buffers, gains, shape) in ranks:
        assert max(errors.values()) < TIGHT, errors
        assert {name: len(buffer) for name, buffer in buffers.items()} == dict.fromkeys(
            ("scale", "counts", "share"), NUM_EXPERTS
        ) | {"norm": DIM}
        assert gains == [0.9, 1.0, 1.1, 1.2]
        assert shape == (NUM_EXPERTS, 1)
    state = ranks[0][1]
    assert len(state) == 2 * 3
    for fqn, (found, expected) in state.items():
        # A replica counts its half of the tokens; of whole numbers, which have no mean, the first one's are kept.
        if layout == "ep":
            assert torch.equal(found, expected), fqn
        elif fqn.endswith("share"):
            assert torch.allclose(found, expected / 2, rtol=0, atol=TIGHT), fqn


def test_rows_of_as_many_experts_as_features_are_refused():
    with fake_world(2), pytest.raises(composer3d.ManifestError) as caught:
        composer3d.compose(
            seeded(lambda: MixtureNet(Stacked, stack=Ambiguous)), write_manifest(LAYOUTS["ep"][1]), loss_fn=token_sum
        )
    assert (
        'expert_parallel: "layers.0.experts.scale" has 4 elements, and there are as many experts as features: nothing '
        "says which it has one for, and ranks hold rows of experts alone; name it with `expert`, or give it a second "
        "dim"
    ) in str(caught.value)
