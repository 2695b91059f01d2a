"""`composer3d check` of optimizers: steps in the backward, matrices of muon, plugins that make the optimizer."""

from __future__ import annotations

import pytest
from support.cli_reports import report


def test_two_plugins_that_would_make_the_optimizer_are_found(edited, command):
    table = "[sharding.fsdp2]\n[precision.low_bit_optimizer]\n[sharding.cpu_offload]\n"
    edited("[sharding.fsdp2]", table + 'mode = "all"')  # which leaves the optimizer alone
    assert report(command, "run.toml")[1]["ok"]
    edited("[sharding.fsdp2]", table)
    (problem,) = report(command, "run.toml")[1]["problems"]
    assert "[sharding.cpu_offload]" in problem["message"] and "[precision.low_bit_optimizer]" in problem["message"]
    assert "both make the optimizer, and a run has one; remove one of them" in problem["message"]


STEPPED = """\
composer3d = 1
[model]
use = "composer3d.models:llama"
args = { dim = 32, num_heads = 2, num_layers = 2 }
[data]
use = "synthetic"
seq_len = 16
[train]
steps = 1
[optimizer]
in_backward = true
"""


def test_what_an_optimizer_in_the_backward_excludes_is_found(folder, command):
    (folder / "run.toml").write_text(STEPPED)
    sets = (
        "train.global_batch=4",
        "stability.on_nonfinite=skip",
        "mesh.pp=2",
        "scheduling.pipeline={}",
        'precision.mixed={ param_dtype = "float16" }',
        'sharding.cpu_offload={ mode = "gradients" }',
    )
    code, told = report(command, "run.toml", *(f"--set={each}" for each in sets))
    assert code == 2
    messages = [problem["message"] for problem in told["problems"]]
    begins = [
        "in_backward cannot be: grad_clip = 1 needs the norm of all gradients, and in_backward waits",
        "in_backward cannot be: a gradient is complete after all 4 micro-batches of a step, not after the first",
        "in_backward cannot be: a pipeline's micro-batches add to a gradient, and tied weights meet, after",
        "in_backward cannot be: [precision.mixed] (--set precision.mixed=",
        "in_backward cannot be: [sharding.cpu_offload] (--set sharding.cpu_offload=",
        'on_nonfinite = "skip" would have to take back what optimizer.in_backward has stepped',
    ]
    assert len(messages) == len(begins)
    assert all(any(message.startswith(begin) for message in messages) for begin in begins), messages
    more = ("train.grad_clip=inf", "sharding.nvme_offload={}")
    code, told = report(command, "run.toml", *(f"--set={each}" for each in more))
    assert (code, len(told["problems"])) == (2, 1)
    assert "steps pieces of many parameters" in told["problems"][0]["message"]
    assert (
        command("check", "run.toml", "--set", "train.grad_clip=inf", "--set", "precision.low_bit_optimizer={}")[0] == 0
    )


@pytest.mark.parametrize(
    ("sets", "place", "message"),
    [
        (
            ("optimizer.use=sgd",),
            "optimizer",
            "low_bit_optimizer keeps the moments of Adam and AdamW, and the optimizer",
        ),
        (
            ("precision.low_bit_optimizer.min_numel=10000000",),
            "precision.low_bit_optimizer",
            "min_numel = 10000000 leaves all moments in float32: the largest parameter has ",
        ),
    ],
)
def test_an_optimizer_that_a_plugin_does_not_replace_is_found(folder, command, sets, place, message):
    (folder / "run.toml").write_text(STEPPED.replace("in_backward = true\n", "") + "[precision.low_bit_optimizer]\n")
    code, told = report(command, "run.toml", *(f"--set={each}" for each in sets))
    assert code == 2
    (problem,) = told["problems"]
    assert problem["message"].startswith(message)
    assert problem["table"].startswith(place)


@pytest.mark.parametrize(
    ("matrices", "message"),
    [
        ("layerz", 'matrices = "layerz" finds no parameter; it is a regular expression; the model has tok_embeddings'),
        ("_norm", 'matrices = "_norm" finds 4 parameters, and none of them is a matrix; it is a regular expression'),
    ],
)
def test_matrices_that_are_none_are_found(folder, command, matrices, message):
    (folder / "run.toml").write_text(STEPPED.replace("in_backward = true", f'use = "muon"\nmatrices = "{matrices}"'))
    code, told = report(command, "run.toml")
    assert code == 2
    (problem,) = told["problems"]
    assert problem["message"].startswith(message.partition("; it")[0])
    assert (problem["table"], problem["key"]) == ("optimizer", "matrices")


@pytest.mark.parametrize("other", ["precision.low_bit_optimizer={}", "sharding.nvme_offload={}"])
def test_two_plugins_that_make_the_optimizer_are_found(folder, command, other):
    (folder / "run.toml").write_text(STEPPED.replace("in_backward = true\n", ""))
    offload = 'sharding.cpu_offload={ mode = "%s" }'
    code, told = report(command, "run.toml", "--set", offload % "optimizer", "--set", other)
    assert code == 2
    (problem,) = told["problems"]
    assert "both make the optimizer, and a run has one; remove one of them" in problem["message"]
    assert all(name in problem["message"] for name in ("sharding.cpu_offload", other.partition("=")[0]))
    assert command("check", "run.toml", "--set", offload % "gradients", "--set", other)[0] == 0


def test_an_optimizer_that_is_not_known_to_step_units_alone_is_found(folder, command):
    (folder / "run.toml").write_text(STEPPED.replace("in_backward = true", 'use = "torch.optim:Adafactor"'))
    code, told = report(command, "run.toml", "--set", "sharding.fsdp2={ overlap_optimizer = 1 }")
    assert code == 2
    (problem,) = told["problems"]
    assert problem["message"].startswith("Adafactor is not known to step every parameter by itself")
    assert (problem["table"], problem["key"]) == ("optimizer", "use")
