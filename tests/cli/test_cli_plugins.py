from __future__ import annotations

import json
import re

import pytest

BUILT_IN = {"activation_checkpoint", "compile", "ddp", "fsdp2", "mixed"}


def test_every_plugin_is_listed(command):
    code, out, err = command("plugins")
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert re.split(r"\s{2,}", lines[0]) == [
        *("plugin", "family", "owns", "phases", "step points", "other hooks", "devices", "from")
    ]
    assert {line.split()[0] for line in lines[1:]} >= BUILT_IN
    row = next(line for line in lines if line.startswith("fsdp2"))
    assert re.split(r"\s{2,}", row)[1:3] == ["sharding", "dp_shard, dp_replicate"]
    assert "composer3d_plugins.sharding.fsdp2:FSDP2 (composer3d " in row


def test_what_plugins_without_phases_act_on(command):
    _, out, _ = command("plugins")
    rows = {cells[0]: cells[3:6] for cells in (re.split(r"\s{2,}", line) for line in out.splitlines()[1:])}
    assert rows["wandb"] == ["-", "-", "metrics"]
    assert rows["low_bit_optimizer"] == ["-", "-", "optimizer"]
    assert rows["memory_snapshot"] == ["-", "BEGIN, END", "-"]
    assert not [name for name, cells in rows.items() if cells == ["-", "-", "-"]]


def test_plugins_for_programs(command):
    code, out, _ = command("plugins", "--json")
    told = json.loads(out)
    assert (code, told["composer3d"]) == (0, 1)
    found = {plugin["name"]: plugin for plugin in told["plugins"]}
    assert found.keys() >= BUILT_IN
    assert {name: found[name]["phases"] for name in BUILT_IN} == {
        "activation_checkpoint": ["RECOMPUTE"],
        "compile": ["COMPILE"],
        "ddp": ["DATA"],
        "fsdp2": ["DATA"],
        "mixed": ["CONVERT", "DATA"],
    }
    assert all(plugin["error"] is None for plugin in found.values())
    # Those that only look on, or make the optimizer, stand in no phase.
    acting = {name: plugin["phases"] or plugin["points"] or plugin["hooks"] for name, plugin in found.items()}
    assert all(acting.values())
    assert found["throughput"]["points"] == ["BEGIN", "BEFORE_OPTIMIZER"]
    assert found["float8"]["points"] == ["PARAMETERS_FINAL"]
    fsdp2 = found["fsdp2"]
    assert (fsdp2["family"], fsdp2["owns"], fsdp2["devices"]) == ("sharding", ["dp_shard", "dp_replicate"], None)
    assert "composer3d_shard" in fsdp2["hooks"]
    options = {option["key"]: option for option in fsdp2["options"]}
    assert options["zero"] == {
        "key": "zero",
        "type": "1, 2 or 3",
        "required": False,
        "default": 3,
        "description": "The ZeRO stage.",
    }
    assert (options["units"]["type"], options["units"]["default"]) == ("a list of strings", None)


def test_one_plugin_is_shown_in_full(command):
    code, out, err = command("plugins", "mixed")
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0].startswith("[precision.mixed]  from composer3d_plugins.precision.mixed:Mixed")
    assert lines[1:6] == [
        "owns: -",
        "phases: CONVERT, DATA",
        "step points: -",
        "other hooks: dtypes, grad_scaler, measure, state",
        "devices: any",
    ]
    assert lines[6].startswith("source: ") and lines[6].endswith("/precision/mixed/__init__.py")
    assert "Memory: float32 shards" in out
    options, _, rest = out.partition("\nOptions\n")[2].partition("\n\nHooks\n")
    assert '  param_dtype: "bfloat16", "float16" or "float32", default "bfloat16"\n      ' in options
    hooks, _, refusals = rest.partition('\n\nRefuses, as its source states it ("..." is known in a run)\n')
    assert re.search(r"^  composer3d_grad_scaler: \w", hooks, re.MULTILINE)
    assert re.search(r"^  \.\.\. has no effect with ", refusals, re.MULTILINE)


def test_one_plugin_in_full_for_programs(command):
    _, out, _ = command("plugins", "float8", "--json")
    (plugin,) = json.loads(out)["plugins"]
    assert plugin["hook_docs"].keys() == set(plugin["hooks"]) and all(plugin["hook_docs"].values())
    messages = [refusal["message"] for refusal in plugin["refusals"]]
    assert any(message.startswith('needs "fsdp2": ') for message in messages)


def test_an_unknown_plugin(command):
    assert command("plugins", "fspd2") == (2, "", 'no plugin "fspd2" is installed; did you mean "fsdp2"?\n')


def test_a_suite_is_run_and_what_it_finds_is_an_exit_code(command, monkeypatch):
    from composer3d.testing import conformance
    from composer3d.testing.conformance import suite

    # One heading: the others are tested in testing/test_plugin_conformance.py.
    monkeypatch.setattr(suite, "HEADINGS", ("purpose",))
    monkeypatch.setattr(conformance, "run_conformance", lambda case: suite.run_conformance(case, headings=("purpose",)))
    code, out, err = command("plugins", "activation_checkpoint", "--conformance", "--options", "every = 2", "--json")
    found = json.loads(out)
    assert (code, err, found["ok"], found["plugin"]) == (0, "", True, "activation_checkpoint")
    assert [(finding["heading"], finding["options"]) for finding in found["findings"]] == [("purpose", "{ every = 2 }")]
    code, out, err = command("plugins", "activation_checkpoint", "--conformance", "--options", "every = 0")
    assert code == 1
    assert out == (
        "purpose      refused options { every = 0 }\n"
        "    [scheduling.activation_checkpoint] scheduling.activation_checkpoint.every must be at least 1, not 0\n"
        "    state options that are accepted, and beside them tables that it needs\n"
    )
    assert err == "1 of 1 checks do not hold\n"


def test_a_suite_takes_options_that_check_accepts(command, monkeypatch):
    from composer3d.testing import conformance
    from composer3d.testing.conformance import suite

    monkeypatch.setattr(conformance, "run_conformance", lambda case: suite.run_conformance(case, headings=("purpose",)))
    code, out, err = command("plugins", "compression", "--conformance")
    assert (code, err) == (0, "")
    assert out == (
        'with { gradients = "int8" }, since its defaults are refused: [communication.compression] neither gradients '
        'nor weights are to be compressed; write gradients = "int8", for example\n'
        'purpose      holds        { gradients = "int8" }\n'
        "    no file or socket is opened to check, plan or verify\n"
        "conforms: 1 checks hold\n"
    )


def test_a_suite_of_a_plugin_that_needs_others_ends_at_once(command):
    code, out, _ = command("plugins", "async_tensor_parallel", "--conformance")
    assert code == 1 and out.count("refused options") == 1 and "add a table of the family sharding that owns tp" in out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--conformance"], "--conformance needs the NAME of a plugin; one of: "),
        (["mixed", "--minutes", "2"], "--minutes has no effect without --conformance"),
        (["mixed", "--conformance", "--options", "a b"], '--options "a b" is no TOML: '),
        (["mixed", "--conformance", "--beside", "no.toml"], "--beside no.toml cannot be read: no such file"),
    ],
)
def test_a_suite_that_cannot_be_is_refused(command, arguments, told):
    code, _, err = command("plugins", *arguments)
    assert code == 2 and err.startswith(told)
