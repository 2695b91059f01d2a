"""Hugging Face's causal language models: from a folder into any layout, and back into a folder.

Needs the extra `hf`. transformers is imported where it is used: it takes seconds. Nothing here goes to the network.
"""

from __future__ import annotations

from composer3d.huggingface.model import HuggingFaceModel
from composer3d.huggingface.own_loss import model_inputs, model_loss
from composer3d.huggingface.weights import FolderWeights

__all__ = ["FolderWeights", "HuggingFaceModel", "model_inputs", "model_loss"]
