"""QLoRA: `check` shows what is frozen and converted; the slow tier proves, trains and merges it."""

from __future__ import annotations

from composer3d.cli import main


def test_check_accepts_it(copied, capsys):
    copied("qlora")
    assert main(["check", "run.toml"]) == 0
    assert "CONVERT      qlora" in capsys.readouterr().out
