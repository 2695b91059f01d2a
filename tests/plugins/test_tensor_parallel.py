from __future__ import annotations

import tempfile

import pytest
import torch
from support.architectures import FAMILIES, batch_of, class_loss
from support.models import largest, mine, write_manifest
from support.tensor_parallel import built, errors, steps_of, table
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import composer3d
from composer3d import BatchError, ManifestError, torch_compat
from composer3d.testing import full, run_ranks

# Dynamo looks at the .grad of everything that it traces.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
TIGHT = 1e-12
LAYERS = 2
SP, LP = "sequence_parallel = true", "loss_parallel = true"
SETTINGS = ["", SP, LP, f"{SP}\n{LP}"]
FSDP = "[sharding.fsdp2]\n"


def tp(family, degree=2, settings="", more=""):
    return f"[mesh]\ntp = {degree}\n{more}\n" + table(family, settings)


def compare(world_size, cases):
    """Return the collectives of every case, after comparing loss, norm and gradients with one device."""
    for results in run_ranks(steps_of, world_size, cases):
        errors = [largest(result[:3]) for result in results]
        assert largest(errors) < TIGHT, dict(zip([case[:2] for case in cases], errors, strict=True))
    return [result[3] for result in results]


# ---- numerics --------------------------------------------------------------------------------------------------------


def test_gradients_equal_one_device():
    compare(2, [(family, tp(family)) for family in FAMILIES] + [("bert", tp("bert", 2, SP))])


def test_gradients_equal_one_device_in_every_setting():
    compare(2, [(family, tp(family, 2, settings)) for family in ("llama", "gpt2") for settings in SETTINGS])


def test_gradients_equal_one_device_on_four_ranks():
    compare(4, [("llama", tp("llama", 4)), ("gpt2", tp("gpt2", 4, f"{SP}\n{LP}"))])


def test_gradients_of_grouped_heads_ties_and_one_head_a_rank():
    llama, gpt2 = tp("llama", 2, SP), tp("gpt2", 2, "")
    compare(
        2,
        [
            ("llama", llama, {"num_kv_heads": 2}),
            ("llama", llama, {"tie_embeddings": True}),
            ("gpt2", gpt2, {"num_layers": 1, "num_heads": 2}),
        ],
    )


def with_data(data, family, settings="", axis="dp_shard"):
    return family, f"[mesh]\ntp = 2\n{axis} = 2\n[train]\nmicrobatch = 1\n{data}\n" + table(family, settings)


def test_gradients_with_data_parallelism():
    cases = [with_data(f"{FSDP}zero = {zero}", "llama", SP) for zero in (1, 2, 3)]
    cases += [
        with_data(FSDP, "gpt2", LP),
        with_data("[sharding.ddp]", "llama", LP, "dp_replicate"),
        with_data("[sharding.ddp]", "gpt2", SP, "dp_replicate"),
    ]
    compare(4, cases)


def test_gradients_with_hybrid_sharding():
    text = f"[mesh]\ntp = 2\ndp_shard = 2\ndp_replicate = 2\n{FSDP}\n" + table("gpt2", SP)
    compare(8, [("gpt2", text)])


def test_compiled_blocks():
    more = '[scheduling.compile]\nbackend = "aot_eager"'
    compare(2, [("llama", tp("llama", 2, SP, more))])


def test_mixed_precision():
    text = f"[mesh]\ntp = 2\n{FSDP}[precision.mixed]\n" + table("llama", SP)
    for results in run_ranks(steps_of, 4, [("llama", text)]):
        loss, norm, gradients, _ = results[0]
        assert 0 < loss < 0.05 and norm < 0.05 and 0 < gradients < 0.1


def train(family, text, factory=True, steps=3):
    """Train; return the losses, every parameter in full, and those that are no DTensors."""
    torch.set_default_dtype(torch.float64)
    model = FAMILIES[family] if factory else built(family)
    run = composer3d.compose(model, write_manifest(text), loss_fn=class_loss)
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    inputs, targets = (mine(run, tensor) for tensor in batch_of(family))
    losses = []
    for number in range(steps):
        with run.step(number):
            losses.append(float(run.forward_backward(inputs, target=targets)))
            run.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    values = {name: run.context.in_model_order(name, full(p)) for name, p in run.named_parameters()}
    plain = {name: p.detach().clone() for name, p in run.named_parameters() if not hasattr(p, "placements")}
    run.close()
    return losses, values, plain


@pytest.mark.parametrize("factory", [False, True], ids=["module", "factory"])
def test_training_goes_as_on_one_device(factory):
    alone, values, _ = run_ranks(train, 1, "gpt2", "", factory)[0]
    for losses, cut, _ in run_ranks(train, 2, "gpt2", tp("gpt2", 2, SP), factory):
        assert losses == pytest.approx(alone, abs=TIGHT)
        assert max(float((cut[name] - values[name]).abs().max()) for name in values) < 1e-9


# ---- random streams --------------------------------------------------------------------------------------------------


def masks(settings):
    """Record what each dropout module of the first block did."""
    torch.set_default_dtype(torch.float64)
    text = write_manifest(tp("gpt2", 2, settings))
    run = composer3d.compose(built("gpt2", {"dropout": 0.5}), text, loss_fn=class_loss)
    seen = {}
    block = run.model.h[0]

    def keep(name):
        def hook(module, args, output):
            with torch_compat.without_torch_functions():
                seen.setdefault(name, (output == 0).flatten()[:64].clone())

        return hook

    run.model.drop.register_forward_hook(keep("drop"))
    block.attn.resid_dropout.register_forward_hook(keep("attention residual"))
    block.mlp.dropout.register_forward_hook(keep("feed-forward residual"))
    inputs, targets = batch_of("gpt2")
    with run.step(0):
        run.forward_backward(inputs, target=targets)
    run.close()
    return seen


@pytest.mark.parametrize(("settings", "alike"), [("", True), (SP, False)])
def test_dropout_draws_alike_where_activations_are_alike(settings, alike):
    one, other = run_ranks(masks, 2, settings)
    assert len(one) == 3
    for name in one:
        assert torch.equal(one[name], other[name]) == alike, name
    assert len({tuple(mask.tolist()) for mask in one.values()}) == 3


def gradients_with_dropout(texts):
    found = []
    for text in texts:
        run = composer3d.compose(built("gpt2", {"dropout": 0.5}), write_manifest(text), loss_fn=class_loss)
        inputs, targets = batch_of("gpt2")
        with run.step(0):
            run.forward_backward(inputs.clone(), target=targets)
            found.append({name: full(p.grad) for name, p in run.named_parameters()})
        run.close()
    return found


def test_recomputation_draws_the_same():
    texts = [tp("gpt2", 2, SP, more) for more in ("", "[scheduling.activation_checkpoint]")]
    plain, again = run_ranks(gradients_with_dropout, 2, texts)[0]
    assert all(torch.equal(plain[name], again[name]) for name in plain)


# ---- collectives -----------------------------------------------------------------------------------------------------


def counts(settings, layers=LAYERS):
    """Return the collectives of a step of one micro-batch: Megatron's two a layer and direction."""
    control = 2  # what a step agrees on, and the loss
    pairs = 2 * (2 * layers + 1)  # two a layer, one at embedding or head; forward and backward
    if SP in settings:
        expected = {("all_gather", "tp"): pairs, ("reduce_scatter", "tp"): pairs, ("all_reduce", "tp"): control}
    else:
        expected = {("all_gather", "tp"): 0, ("all_reduce", "tp"): pairs + control}
    expected["all_reduce", "tp"] += 2 if LP in settings else 0
    expected["all_gather", "tp"] += 0 if LP in settings else 1
    return {key: count for key, count in expected.items() if count}


@pytest.mark.parametrize("settings", SETTINGS, ids=["plain", "sp", "lp", "sp-lp"])
def test_collectives(settings):
    sizes = [("llama", 1), ("gpt2", 3), ("bert", 2)]
    cases = [(family, tp(family, 2, settings), {"num_layers": layers}) for family, layers in sizes]
    for (_, _, options), counted in zip(cases, compare(2, cases), strict=True):
        assert counted == counts(settings, options["num_layers"])


# Full recomputation repeats the forward's collectives, but for the last of a block: nothing needs its result again.
RECOMPUTED = [
    pytest.param('mode = "full"', {"all_reduce": 1}, {"all_gather": 2, "reduce_scatter": 1}, id="full"),
    pytest.param('mode = "selective"', {}, {}, id="selective"),
]


@pytest.mark.parametrize(("mode", "plain", "sequence"), RECOMPUTED)
def test_collectives_of_recomputation(mode, plain, sequence):
    more = f"[scheduling.activation_checkpoint]\n{mode}"
    counted = compare(2, [("gpt2", tp("gpt2", 2, settings, more)) for settings in ("", SP)])
    for settings, extra, found in zip(("", SP), (plain, sequence), counted, strict=True):
        expected = counts(settings)
        for op, number in extra.items():
            expected[op, "tp"] += number * LAYERS
        assert found == expected


# ---- state -----------------------------------------------------------------------------------------------------------


def layout(text):
    run = composer3d.compose(FAMILIES["gpt2"], write_manifest(text), loss_fn=class_loss)
    model = run.model
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    placements = {
        name: (tuple(p.placements), tuple(p.to_local().shape))
        for name, p in run.named_parameters()
        if hasattr(p, "placements")
    }
    tied = model.lm_head.weight is model.wte.weight
    run.close()
    return names, placements, tied


def test_state():
    names = [name for name, _ in FAMILIES["gpt2"]().named_parameters(remove_duplicate=False)]
    of_layer = {
        "attn.c_attn.weight": ((Shard(0),), (24, 16)),
        "attn.c_attn.bias": ((Shard(0),), (24,)),
        "attn.c_proj.weight": ((Shard(1),), (16, 8)),
        "attn.c_proj.bias": ((Replicate(),), (16,)),
        "mlp.c_fc.weight": ((Shard(0),), (32, 16)),
        "mlp.c_fc.bias": ((Shard(0),), (32,)),
        "mlp.c_proj.weight": ((Shard(1),), (16, 32)),
        "mlp.c_proj.bias": ((Replicate(),), (16,)),
    }
    expected = {f"h.{layer}.{name}": value for layer in range(LAYERS) for name, value in of_layer.items()}
    for found, placements, tied in run_ranks(layout, 2, tp("gpt2")):
        assert found == names
        assert tied
        assert placements == {"wte.weight": ((Shard(0),), (6, 16)), **expected}


def test_replicated_parameters_stay_equal_to_the_last_bit():
    for settings in ("", SP):
        (_, one, plain), (_, other, also_plain) = run_ranks(train, 2, "gpt2", tp("gpt2", 2, settings), True, 5)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
        # Without sequence_parallel norms are plain parameters; with it every parameter is a DTensor.
        assert bool(plain) == (settings == "")
        assert all(torch.equal(plain[name], also_plain[name]) for name in plain)


TWO_BY_TWO = f"[mesh]\ntp = 2\ndp_shard = 2\n{FSDP}" + table("gpt2", SP)


def resumed(text, path, first, last):
    """Train from step `first`, loading what was saved there, to `last`, and save; return weights and moments."""
    torch.set_default_dtype(torch.float64)
    run = composer3d.compose(built("gpt2"), write_manifest(text), loss_fn=class_loss)
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    average = Average(run)
    run.attach("average", average)
    inputs, targets = (mine(run, tensor) for tensor in batch_of("gpt2"))
    if first:
        run.load(path)
    for number in range(first, last):
        with run.step(number):
            run.forward_backward(inputs, target=targets)
            optimizer.step()
            optimizer.zero_grad()
            average.update()
    if not first and path:
        run.save(path)
    held = list(run.named_parameters())
    held += [(f"{name} exp_avg", optimizer.state[p]["exp_avg"]) for name, p in run.named_parameters()]
    held += [(f"{name} average", value) for name, value in average.values.items()]
    values = {name: run.context.in_model_order(name.partition(" ")[0], full(tensor)) for name, tensor in held}
    run.close()
    return values


class Average:
    """Something that is kept beside every parameter, and saved under its name."""

    def __init__(self, run):
        self.run = run
        self.values = {name: p.detach().clone() for name, p in run.named_parameters()}

    def update(self):
        for name, p in self.run.named_parameters():
            self.values[name] = (self.values[name] + p.detach()) / 2

    def state_dict(self):
        return dict(self.values)

    def load_state_dict(self, state):
        self.values = dict(state)


LAYOUTS = {"1": (1, ""), "tp2": (2, tp("gpt2")), "dp4": (4, FSDP), "dp2 x tp2": (4, TWO_BY_TWO)}


def test_checkpoints_load_in_any_layout():
    alone = run_ranks(resumed, 1, "", None, 0, 3)[0]
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/step-2"
        wrote = run_ranks(resumed, 4, TWO_BY_TWO, path, 0, 2)[0]
        for world_size, text in LAYOUTS.values():
            for read in run_ranks(resumed, world_size, text, path, 2, 2):
                assert all(torch.equal(wrote[name], read[name]) for name in wrote)
        went_on = run_ranks(resumed, 2, LAYOUTS["tp2"][1], path, 2, 3)[0]
    assert max(float((went_on[name] - alone[name]).abs().max()) for name in alone) < 1e-9


# ---- refusals --------------------------------------------------------------------------------------------------------


def refusals(cases):
    found = []
    for family, text, *options in cases:
        with pytest.raises(ManifestError) as caught:
            composer3d.compose(built(family, *options), write_manifest(text), loss_fn=class_loss)
        found.append(str(caught.value).partition("run.toml:")[2])
    return found


def entries(degree, **plan):
    lines = "\n".join(f'"{pattern}" = {value}' for pattern, value in plan.items())
    return f"[mesh]\ntp = {degree}\n[sharding.tensor_parallel.plan]\n{lines}\n"


WQ, WO = "layers.*.attention.w[qkv]", "layers.*.attention.wo"
PAIR = {WQ: '"colwise"', WO: '"rowwise"'}
REFUSALS = [
    (
        ("llama", entries(3, **PAIR), {}),
        '"layers.0.attention.wq": its 16 output features do not divide by tp = 3',
    ),
    (
        ("llama", entries(4, **PAIR), {"num_kv_heads": 2}),
        '"layers.0.attention.wk": its 2 key-value heads do not divide by tp = 4',
    ),
    (
        ("llama", entries(2, **PAIR, **{"layers.*.attention.wx": '"colwise"'})),
        'the pattern "layers.*.attention.wx" matches nothing in the model; did you mean "layers.*.attention.wv"?',
    ),
    (
        ("llama", entries(2, **PAIR, **{"layers.0.attention.wk": '"rowwise"'})),
        'plan says of "layers.0.attention.wk" "colwise" by "layers.*.attention.w[qkv]", and "rowwise" by '
        '"layers.0.attention.wk"',
    ),
    (
        ("llama", entries(2, **{"output": '"colwise"'})),
        '"output" is "colwise", and no module around it holds a "rowwise" one that puts its cut result together again; '
        'plan that one, or write "head" for a projection whose result is the output',
    ),
    (
        ("llama", entries(2, **{WO: '"rowwise"'})),
        '"layers.0.attention.wo" is "rowwise", and no "colwise" module beside it gives it a cut input; plan the '
        "projections that feed it too",
    ),
    (
        ("llama", entries(2, **PAIR, norm='"colwise"')),
        '"norm" is a RMSNorm, and "colwise" cuts a linear layer with a weight of two dims',
    ),
    (
        ("llama", entries(5, tok_embeddings='"vocab"')),
        '"tok_embeddings": its 12 rows do not divide by tp = 5',
    ),
    (
        ("gpt2", entries(2, wte='"vocab"')),
        '"wte.weight" and "lm_head.weight" are one tensor, but "wte" is "vocab" and "lm_head" is "replicate"; cut both '
        '("vocab" and "head") or neither',
    ),
    (
        (
            "gpt2",
            entries(
                2,
                **{"h.*.attn.c_attn": '{ style = "packed_colwise", parts = [16, 16] }', "h.*.attn.c_proj": '"rowwise"'},
            ),
        ),
        '"h.0.attn.c_attn": its parts [16, 16] are 32 features, and it has 48 output features',
    ),
    (
        (
            "gpt2",
            entries(
                4,
                **{
                    "h.*.attn.c_attn": '{ style = "packed_colwise", parts = [40, 6, 2] }',
                    "h.*.attn.c_proj": '"rowwise"',
                },
            ),
        ),
        '"h.0.attn.c_attn": its part of 6 features (of [40, 6, 2]) does not divide by tp = 4',
    ),
    (
        (
            "llama",
            "[mesh]\ntp = 2\n[sharding.tensor_parallel]\nsequence_parallel = true\n"
            + entries(2, **PAIR).partition("tp = 2")[2],
        ),
        'sequence_parallel: plan does not say whether "tok_embeddings", which has parameters, works on '
        "activations that "
        'are cut along the sequence; write "sequence" if it does, else "replicate"',
    ),
    (
        (
            "llama",
            "[mesh]\ntp = 2\n[sharding.tensor_parallel]\nloss_parallel = true\n"
            + entries(2, **PAIR).partition("tp = 2")[2],
        ),
        'loss_parallel has no effect: no module of the plan is a "head"',
    ),
]


def test_refusals():
    for degree in (2, 3, 4, 5):
        chosen = [(case, message) for case, message in REFUSALS if f"tp = {degree}\n" in case[1]]
        found = run_ranks(refusals, degree, [case for case, _ in chosen])[0]
        for (_, message), said in zip(chosen, found, strict=True):
            assert said.partition("] ")[2] == message


def uneven():
    run = composer3d.compose(built("llama"), write_manifest(tp("llama", 2, SP)), loss_fn=class_loss)
    inputs, targets = batch_of("llama")
    with pytest.raises(BatchError) as caught, run.step(0):
        run.forward_backward(inputs[:, :7], target=targets[:, :7])
    run.close()
    return str(caught.value)


def test_a_sequence_that_does_not_divide():
    assert run_ranks(uneven, 2)[0] == "a sequence of 7 does not divide by tp = 2, as sequence_parallel needs"


class Normed(nn.Module):
    """A norm between the projections, of which the plan says nothing."""

    def __init__(self, size):
        super().__init__()
        self.size, self.up, self.norm, self.down = size, nn.Linear(4, 8), nn.LayerNorm(size), nn.Linear(8, 4)

    def forward(self, x):
        x = self.up(x)
        return self.down(self.norm(x.view(*x.shape[:-1], -1, self.size)).flatten(-2))


def unplanned():
    text = write_manifest(entries(2, up='"colwise"', down='"rowwise"'))
    with pytest.raises(ManifestError) as caught:
        composer3d.compose(lambda: Normed(8), text, loss_fn=lambda output, target: output.sum())
    torch.set_default_dtype(torch.float64)
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    run = composer3d.compose(lambda: Normed(2), text, loss_fn=lambda output, target: output.square().sum())
    alone = Normed(2)
    alone.load_state_dict({name: full(p) for name, p in run.named_parameters()})
    (alone(x).square().sum() / 2).backward()
    with run.step(0):
        run.forward_backward(x, target=torch.zeros(2))
        assert errors(run, {name: p.grad for name, p in alone.named_parameters()}) < TIGHT
    run.close()
    return str(caught.value).partition("] ")[2]


def test_a_module_that_the_plan_does_not_mention():
    """Over all features a norm cannot work on a share of them; over a group of them it can, its gradient added up."""
    assert run_ranks(unplanned, 2)[0].startswith(
        'the plan does not fit the model\'s code: "Normed": layer_norm does not work on cut features (Given '
    )
