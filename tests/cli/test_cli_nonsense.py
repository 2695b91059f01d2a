"""Manifests that are no manifests: every one ends as a problem with its line, at once, and never as a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

HEAD = "composer3d = 1\ntrain.steps = 10\n"
ALONE = {
    "data.vocab_size = 512": '3:1: [data] tokenizer = "bytes" has 256 tokens; remove vocab_size, or set tokenizer = '
    '"bpe"',
    "data = 3": "3:1: data must be a table, not the integer 3",
    'mesh = "x"': 'mesh must be a table, not the string "x"',
    "train.seed = 1_180_591_620_717_411_303_424": "3:7: [train] train.seed is an integer beyond 64 bits",
    f"train.seed = {'9' * 5000}": "3:14: an integer beyond 64 bits",
    f"train.seed = 0x{'f' * 5000}": "3:7: [train] train.seed is an integer beyond 64 bits",
    f"a{'.k' * 2000} = 1": "3:1: nested too deeply: a key of more than 64 parts",
    'data.use = "a\\u0000b"': "3:6: [data] data.use holds the character NUL",
    'data.use = "a\\nb"': '3:6: [data] use = "a\\nb": there is no "a\\nb" beside the manifest; give ',
    'data.use = "/proc/self/mem"': '3:6: [data] use = "/proc/self/mem" cannot be read: input/output error',
    'data.use = "/dev/zero"': '3:6: [data] use = "/dev/zero" is a device; give "python_docs", "synthetic", a file or '
    'folder, or "module:callable"',
    'data.use = "pipe"': '3:6: [data] use = "pipe" is a FIFO; give "python_docs", "synthetic", a file or folder, or '
    '"module:callable"',
    f'data.use = "{"a" * 300}"': f'3:6: [data] use = "{"a" * 300}" cannot be read: file name too long',
    'data.use = "/"': '3:6: [data] use = "/" is the root of the file system; give ',
    f'data.use = "{"b" * 300}"\nmodel = "composer3d.models:llama"': f'3:6: [data] use = "{"b" * 300}" cannot be read: '
    "file name too long",
    'data.tokenizer = "~nobody/x"': '3:6: [data] there is no "~nobody/x"; one of: bpe, bytes',
    'model.hf = "~nobody/x"': '3:7: [model] there is no folder "~nobody/x" beside the manifest, and no model of that '
    "name in the Hugging Face cache; nothing is downloaded; hf download ~nobody/x does that",
    'model = "sys:exit"': '3:1: [model] "sys:exit" is built into Python; name a class or a function',
    'model = "os:abort"': '3:1: [model] "os:abort" is built into Python; name a class or a function',
    'data = "os:abort"': '3:1: [data] "os:abort" is built into Python; name a class or a function',
    'model = "bad_exit:x"': '3:1: [model] the module "bad_exit" fails when imported, at bad_exit.py:1: SystemExit: 0',
    'model = "bad_interrupt:x"': '3:1: [model] the module "bad_interrupt" fails when imported, at bad_interrupt.py:1: '
    "KeyboardInterrupt",
    'model = "bad_base:x"': '3:1: [model] the module "bad_base" fails when imported, at bad_base.py:2: Own: no',
    'model = "bad_calls:exits"': "{folder}/bad_calls.py:4: the factory raised SystemExit: 0",
    'model = "bad_calls:interrupts"': "{folder}/bad_calls.py:5: the factory raised KeyboardInterrupt",
    'model = "bad_calls:nothing"': "3:1: [model] the factory returned NoneType, not a torch.nn.Module",
    f"extends = 0x{'f' * 5000}": "3:1: extends is an integer beyond 64 bits",
    f"mesh = 0x{'f' * 5000}": "3:1: mesh is an integer beyond 64 bits",
    "optimizer.betas = { a = 1 }": "3:11: [optimizer] optimizer.betas must be a list of 2 numbers, not a table",
    "optimizer.betas.embedding.lr = 1": "3:11: [optimizer] optimizer.betas must be a list of 2 numbers, not a table",
    "optimizer.betas = [0.9]": "3:11: [optimizer] optimizer.betas must be a list of 2 numbers, not of 1",
    "optimizer.groups = [{ lr = 1 }]": '3:21: [optimizer.groups[0]] needs the key "match"; ',
    "optimizer.args = { lr = 1.0 }": "3:20: [optimizer.args] lr is a key of [optimizer]; write it without args",
    'optimizer.use = "torch.optim:LBFGS"': "3:11: [optimizer] LBFGS calls a closure again, and a composed step runs "
    "once; use an optimizer that does not",
    'optimizer.use = "torch.optim:SparseAdam"': "SparseAdam takes sparse gradients alone, and gradients that ranks "
    "reduce are dense; use adamw",
    'optimizer.use = "torch.optim:Rprop"\nsharding.fsdp2 = {}': "3:11: warning: [optimizer] Rprop writes by ",
    'model = ""': "3:1: [model] model.use must have at least 1 character, not 0",
    '"\\u001b[31mred" = 1': '3:1: ["\\u001b[31mred"] unknown table "\\u001b[31mred"; one of: ',
    '"\\u202e" = 1': '3:1: ["\\u202e"] unknown table "\\u202e"; one of: ',
    'mesh.pp = 2\nscheduling.pipeline = { schedule = "own.txt" }': '"DualPipeV" or the path of a .csv file, not',
    "sharding.fsdp2.zero = true": "3:16: [sharding.fsdp2] zero = true is not one of 1, 2, 3",
    "sharding.fsdp2.zero = 3.0": "3:16: [sharding.fsdp2] zero = 3.0 is not one of 1, 2, 3",
    'train.frozen = ["**"]': "3:7: [train] frozen leaves no parameter to train",
    'model = "bad_calls:Empty"': "3:1: [model] the model has no parameter, so there is nothing to train",
    'model = "bad_calls:Frozen"': "3:1: [model] none of the model's 1 parameters has requires_grad, so there is ",
    'profiling.memory_snapshot.folder = "run.toml"': '[profiling.memory_snapshot] folder = "run.toml" is not a folder',
    'profiling.opentelemetry.folder = "run.toml/x"': 'folder = "run.toml/x" lies below run.toml, which is not a folder',
    'run.output = "dangling"': '3:5: [run] output = "dangling" is a link to nothing; name a folder',
    'run.output = "dangling/x"': 'output = "dangling/x" lies below dangling, which is a link to nothing',
    "model.args.num_layers = 9_000_000_000": "3:12: [model.args] num_layers = 9000000000 is above 65536",
    "optimizer.lr = inf": "3:11: [optimizer] optimizer.lr must be a finite number, not inf",
    "run.timeout_s = inf": "3:5: [run] run.timeout_s must be a finite number, not inf",
    "run.timeout_s = 1e300": "3:5: [run] run.timeout_s must be at most 10000000.0, not 1e+300",
    'run.output = "run.toml"': '3:5: [run] output = "run.toml" is not a folder; name a folder',
    'run.output = "run.toml/x"': '3:5: [run] output = "run.toml/x" lies below run.toml, which is not a folder; name a '
    "folder",
    "lr_schedule.warmup = 20": "3:13: [lr_schedule] warmup = 20 steps is longer than the run, which has steps = 10; "
    "write a fraction of the run, for example warmup = 0.1, or raise train.steps",
    'extends = "pipe"': '3:1: extends = "pipe", which cannot be read: it is a FIFO',
    'extends = "/dev/zero"': '3:1: extends = "/dev/zero", which cannot be read: it is a device',
    'extends = "chain-0.toml"': "chain-30.toml:2:1: extends is a chain of more than 32 manifests; join some of them",
    'extends = "large.toml"': '3:1: extends = "large.toml", which cannot be read: it is larger than 1 MiB',
    "mesh.dp_shard = 1000000000\nsharding.ddp = {}": "the degrees multiply to 1000000000 ranks, and 1048576 are",
    "mesh.tp = 1000000000\nsharding.tensor_parallel = {}": "the degrees multiply to 1000000000 ranks",
    "train.global_batch = 268_435_456\nmesh.pp = 2\nscheduling.pipeline = {}": None,
    "train.global_batch = 268_435_456\ntrain.batch_ramp = { start = 1, step = 1, every = 1 }": None,
    "train.global_batch = 4_000_000_000_000": "3:7: [train] train.global_batch must be at most 268435456, not 4",
    "train.global_batch = 10_000_000": "3:7: warning: [train] global_batch = 10000000 is 10,000,000 micro-batches on "
    "every rank, one after the other, in a step",
    "train.microbatch = 1_000_000_000": "3:7: [train] train.microbatch must be at most 268435456, not 1000000000",
    "data.workers = 1_000_000": "3:6: [data] data.workers must be at most 1024, not 1000000",
    "checkpoint.keep = 10_000_000_000_000": "[checkpoint] checkpoint.keep must be at most 1000000000000, not ",
    "optimizer.lr = 1e9": "3:11: [optimizer] optimizer.lr must be at most 1000000.0, not ",
    'run.output = ""': "3:5: [run] run.output must have at least 1 character, not 0",
    'optimizer.matrices = ""': "[optimizer] optimizer.matrices must have at least 1 character, not 0",
    'profiling.wandb.name = ""': "[profiling.wandb] profiling.wandb.name must have at least 1 character, not 0",
    'model = { use = "bad_calls:Sized", args = { size = 0 } }': "3:45: warning: [model.args] size = 0: parameters "
    'without elements, "head.weight", which nothing can train',
    'optimizer.groups = [{ match = "(a+)+$" }]': 'match = "(a+)+$" finds no parameter of the model; it is a regular',
    'optimizer.no_decay = "(.*)*x"': None,
    'optimizer.groups = [{ match = "(" }]': 'match = "(" is not a regular expression: missing )',
    r"optimizer.no_decay = '((\w+)+)\1'": "and a reference to a group, an atomic group or a possessive repetition",
    "train.frozen = ['" + "**." * 30 + "nothing']": 'nothing" matches nothing in the model',
    "train.grad_clip = inf": None,
    "profiling.own.use = 'bad_plugin:Raises'": "composer3d_configure of own raised ZeroDivisionError: by a "
    "plugin, at {folder}/bad_plugin.py:6",
    "sharding.own.use = 'bad_plugin:Exits'": "composer3d_shard of own raised SystemExit, at {folder}/bad_plugin.py:10",
    "precision.own.use = 'bad_plugin:Answers'": "composer3d_convert of own returned 'text', not a Transform, ",
    "precision.own.use = 'bad_plugin:Writes'": "cannot assign to field 'n', at {folder}/bad_plugin.py:19; instances of "
    "plugins are frozen: what one remembers between steps is kept in context.state[self]",
    "profiling.own.use = 'bad_plugin:Idle'": ":11: [profiling.own] Idle has no hook, so it does nothing; mark methods ",
    "profiling.own.use = 'bad_plugin:Misspelt'": ":11: [profiling.own] there is no hook composer3d_measures; did you "
    'mean "composer3d_measure"?',
}
FILES = {
    "bad_exit.py": "raise SystemExit(0)\n",
    "bad_interrupt.py": "raise KeyboardInterrupt\n",
    "bad_base.py": "class Own(BaseException): pass\nraise Own('no')\n",
    "bad_calls.py": "from torch import nn\n\n\ndef exits(): raise SystemExit(0)\n"
    "def interrupts(): raise KeyboardInterrupt\n"
    "def nothing(): return None\n"
    "class Empty(nn.Module):\n"
    "    def forward(self, x): return x\n"
    "class Frozen(nn.Module):\n"
    "    def __init__(self):\n"
    "        super().__init__()\n"
    "        self.head = nn.Embedding(256, 256).requires_grad_(False)\n"
    "    def forward(self, x): return self.head(x)\n"
    "class Sized(nn.Module):\n"
    "    def __init__(self, size):\n"
    "        super().__init__()\n"
    "        self.head, self.out = nn.Embedding(256, size), nn.Parameter(__import__('torch').zeros(256))\n"
    "    def forward(self, x): return self.head(x).sum(-1, keepdim=True) + self.out\n",
    "bad_plugin.py": """\
from composer3d import hookimpl, plugin
@plugin(family="profiling")
class Raises:
    @hookimpl
    def composer3d_configure(self, context):
        raise ZeroDivisionError("by a plugin")
@plugin(family="sharding")
class Exits:
    @hookimpl
    def composer3d_shard(self, context): raise SystemExit
@plugin(family="precision")
class Answers:
    @hookimpl
    def composer3d_convert(self, context): return "text"
@plugin(family="precision")
class Writes:
    n: int = 0
    @hookimpl
    def composer3d_configure(self, context): self.n += 1
@plugin(family="profiling")
class Idle:
    pass
@plugin(family="profiling")
class Misspelt:
    @hookimpl
    def composer3d_measures(self, context): return None
""",
}


@pytest.fixture
def bad_folder(folder):
    for name, text in FILES.items():
        (folder / name).write_text(text)
    os.mkfifo(folder / "pipe")
    (folder / "dangling").symlink_to("/nowhere/at/all")
    (folder / "large.toml").write_text("composer3d = 1\n" + "# filler\n" * 200_000)
    for index in range(2000):
        (folder / f"chain-{index}.toml").write_text(f'composer3d = 1\nextends = "chain-{index + 1}.toml"\n')
    (folder / "chain-2000.toml").write_text("composer3d = 1\n")
    return folder


@pytest.mark.parametrize("line", ALONE, ids=lambda line: line[:40])
def test_nonsense_is_a_problem_with_its_line_at_once(bad_folder, command, line):
    top, rest = (f"{line}\n", "") if line.startswith("extends") else ("", f"{line}\n")
    (bad_folder / "run.toml").write_text(f"composer3d = 1\ntrain.steps = 10\n{top}{rest}")
    begun = time.process_time()
    code, out, err = command("check", "run.toml", "--json")
    spent = time.process_time() - begun
    assert "Traceback" not in err
    problems = [problem for problem in json.loads(out)["problems"] if problem["severity"] == "error"]
    assert spent < 30.0  # seconds of imports on a slow machine, nothing that grows
    assert code == (2 if problems else 0)
    if ALONE[line] is None:
        return
    assert all(problem["line"] or problem["file"].startswith("--") for problem in problems)
    _, _, text = command("check", "run.toml")
    assert ALONE[line].format(folder=bad_folder) in text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("mesh=false", "mesh = false removes an inherited table, and there is none; remove this line"),
        ("mesh=3", "mesh must be a table, not the integer 3"),
        ("data=[]", "data must be a table, not a list"),
        ("train.seed=" + "9" * 5000, "train.seed must be an integer, not the string"),
        ("train.seed=0x" + "f" * 40, "train.seed is an integer beyond 64 bits"),
        ("k." * 2000 + "k=1", "nested too deeply: a key of more than 64 parts"),
    ],
)
def test_overrides_that_are_nonsense(folder, command, override, message):
    (folder / "run.toml").write_text(HEAD)
    code, out, err = command("check", "run.toml", "--set", override)
    assert (code, out) == (2, "")
    assert err.startswith("--set ") and message in err


def test_what_nothing_can_read_hides_no_other_problem(folder, command):
    (folder / "run.toml").write_text('composer3d = 1\nrun.output = "a\\u0000b"\ntrain.steps = 1\ntrain.sed = 3\n')
    assert command("check", "run.toml") == (
        2,
        "",
        "run.toml:2:5: [run] run.output holds the character NUL\n"
        'run.toml:4:7: [train] unknown key "sed"; did you mean "seed"?\n'
        "2 problems\n",
    )


def test_a_shipped_mixture_has_rows_for_the_tokens_of_the_data(folder, command):
    tables = 'model.use = "composer3d.models:moe"\nmodel.args = { dim = 16, num_layers = 1, num_heads = 2, %s }\n'
    data = 'data = { use = "synthetic", vocab_size = 512, seq_len = 8 }\ntrain.steps = 1\n'
    (folder / "run.toml").write_text("composer3d = 1\n" + tables % "num_experts = 2" + data)
    assert command("check", "run.toml")[0] == 0  # its first forward has the largest token
    (folder / "run.toml").write_text("composer3d = 1\n" + tables % "vocab_size = 256" + data)
    code, _, err = command("check", "run.toml")
    assert code == 2 and "[model.args] vocab_size = 256 is below that of the data, 512" in err


def test_stages_need_micro_batches_though_nobody_states_any(folder, command):
    text = "composer3d = 1\nmodel.args = { dim = 16, num_layers = 4, num_heads = 2 }\ntrain.steps = 1\nmesh.pp = 2\n"
    (folder / "run.toml").write_text(text + "[scheduling.pipeline]\n")
    assert command("check", "run.toml") == (
        2,
        "",
        "run.toml:5:13: [scheduling.pipeline] there are 1 micro-batches, and 1F1B needs at least as many micro-batches "
        "as stages, 2; set train.global_batch; the default is microbatch x data-parallel degree, 1\n1 problem\n",
    )
    (folder / "run.toml").write_text(text + "train.global_batch = 2\n[scheduling.pipeline]\n")
    assert command("check", "run.toml")[0] == 0


@pytest.mark.parametrize(
    "start", [("-m", "composer3d"), ("-P", "-c", "import sys; from composer3d.cli import main; sys.exit(main())")]
)
def test_files_beside_the_manifest_stand_in_for_no_installed_module(folder, start):
    """A folder in which everything is shadowed that a check imports, and that the user's own modules import.

    Installed, the program is a script in another folder, which is what -P amounts to.
    """
    for name in ("json", "torch", "numpy", "composer3d", "typing_extensions", "dataclasses", "random", "pydantic"):
        (folder / f"{name}.py").write_text(f"raise RuntimeError('the {name}.py of the folder')\n")
    if start[0] == "-m":  # `python -m composer3d` would take this one for the program itself, before any line of ours
        (folder / "composer3d.py").unlink()
    (folder / "neighbour.py").write_text("import json, torch, numpy, random\nfrom cli_models import build\n")
    text = (folder / "run.toml").read_text().replace("cli_models:build", "neighbour:build")
    (folder / "run.toml").write_text(text)
    check = [sys.executable, *start, "check", "run.toml"]
    done = subprocess.run(check, capture_output=True, text=True, cwd=folder, timeout=1200, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    (folder / "run.toml").write_text(text.replace("neighbour:build", "random:build"))
    done = subprocess.run(check, capture_output=True, text=True, cwd=folder, timeout=1200, check=False)
    assert done.returncode == 2
    assert "not from the folder of the manifest; rename random.py" in done.stderr


def test_a_degree_with_too_many_zeros_starts_no_process_for_each(edited, command):
    edited("dp_shard = 2", "dp_shard = 100_000")
    edited_text = "run.toml:4:2: [mesh] 100000 ranks are more than the "
    code, out, err = command("run", "run.toml", "--set", "train.global_batch=100000")
    assert (code, out) == (2, "") and edited_text in err
