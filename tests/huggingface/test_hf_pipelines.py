"""Hugging Face models whose blocks are of several kinds, or compute with more than the hidden state, in pipelines."""

from __future__ import annotations

import pytest
from support.huggingface import assert_equal_to_one_device, make, results_of
from support.selected_cases import selected

from composer3d.huggingface.folder import import_transformers

STAGES = "[mesh]\npp = 2\n[scheduling.pipeline]\n"
FAMILIES = {
    "deepseek_v3": STAGES + 'schedule = "ZBVZeroBubble"\n',
    "qwen3_next": STAGES,
    "lfm2": STAGES + 'schedule = "Interleaved1F1B"\n',
    "bamba": STAGES,
    "minimax": STAGES,
}


@pytest.fixture(scope="module")
def results(tmp_path_factory, request):
    import_transformers()
    folder = tmp_path_factory.mktemp("models")
    wanted = selected(request, "family")
    folders = {family: make(family, folder / family) for family in wanted}
    return results_of(
        {family: (family, text, False) for family, text in FAMILIES.items() if family in wanted}, folders, 2
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_equal_one_device(family, results):
    assert_equal_to_one_device(results[family], 0.75)
