"""A notebook as its kernel executes it: two ranks, errors of cells, a manifest's run with its progress."""

from __future__ import annotations

import re

import pytest
from support.documents import files, read

WHY = "notebooks are executed where nbclient and ipykernel are installed"
nbclient = pytest.importorskip("nbclient", reason=WHY)
pytest.importorskip("ipykernel", reason=WHY)
FAILS = """def fails():
    if torch.distributed.get_rank() == 1:
        raise ValueError("of rank 1")
    torch.distributed.barrier()


run_ranks(fails, 2)"""
MANIFEST = """composer3d = 1
model = { use = "composer3d.models:llama", args = { dim = 32, num_layers = 1, num_heads = 2 } }
data = { use = "synthetic", seq_len = 16, vocab_size = 64 }
train.steps = 3
mesh.dp_shard = 2
sharding.fsdp2 = {}
run.device = "cpu"
"""


def text_of(cell, kind):
    """Return what a cell shows: the streams or results of a kind, or the traceback of its error."""
    found = [each for each in cell.outputs if kind in (each.get("name"), each.output_type)]
    return "".join(
        each.get("text") or "\n".join(each.get("traceback", [])) or each.data["text/plain"] for each in found
    )


@pytest.mark.slow
def test_cells_run_again_fail_with_their_own_line_and_show_progress(tmp_path):
    import nbformat

    sources = [
        files(read("composer3d/examples/README.md"))["notebook.py"],
        "run_ranks(train, 2, 3) == losses",
        FAILS,
        "run_ranks(train, 2, 3) == losses",
        f"open('run.toml', 'w').write({MANIFEST!r})\ncomposer3d.run('run.toml').status",
        "print(composer3d.plan('run.toml', world_size=2))",
    ]
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    client = nbclient.NotebookClient(
        nbformat.v4.new_notebook(cells=cells),
        timeout=1200,
        allow_errors=True,
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    first, again, failed, after, trained, planned = cells
    assert first.outputs == []
    assert text_of(again, "execute_result") == text_of(after, "execute_result") == "True"
    said = text_of(failed, "error")
    assert "rank 1 of 2 failed: ValueError: of rank 1" in said and "line 3, in fails" in said
    assert text_of(trained, "execute_result") == "'finished'"
    assert re.search(r"step 3/3 +loss", text_of(trained, "stderr")) and "from fork" not in text_of(trained, "stderr")
    assert "fsdp2" in text_of(planned, "stdout")
