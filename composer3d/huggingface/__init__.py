"""Hugging Face's causal language models: from a folder into any layout, and back into a folder.

Needs the extra `hf`. transformers is imported where it is used: it takes seconds. Nothing here goes to the network.
"""

from __future__ import annotations

from composer3d.huggingface.export import Exporter
from composer3d.huggingface.folder import CONFIG, TOKENIZER, find_folder, import_transformers
from composer3d.huggingface.model import Dtype, HuggingFaceModel, Weights
from composer3d.huggingface.own_loss import model_inputs, model_loss
from composer3d.huggingface.weights import FolderWeights

__all__ = [
    "CONFIG",
    "Dtype",
    "Exporter",
    "FolderWeights",
    "HuggingFaceModel",
    "TOKENIZER",
    "Weights",
    "find_folder",
    "import_transformers",
    "model_inputs",
    "model_loss",
]
