"""Rows of several documents: positions that begin anew, numbers of documents, and ends without loss."""

from __future__ import annotations

import torch
from torch import Tensor

from composer3d.runner.data.data_source import IGNORED, Sample
from composer3d.runner.data.data_table import DocumentsTable
from composer3d.runner.data.inputs import Inputs

__all__ = ["divided_at_ends", "with_documents"]


def with_documents(tokens_S: Tensor, targets_S: Tensor, *, firsts_S: Tensor, table: DocumentsTable) -> Sample:
    """Return a row with what its model is given of the documents in it.

    Args:
        tokens_S: The row.
        targets_S: Of its tokens.
        firsts_S: Whether a document begins with a token; one begins with the first token, whatever it says.
        table: Names the arguments of the model's forward.
    """
    firsts_S = firsts_S.clone()
    firsts_S[0] = True
    numbers_S = firsts_S.cumsum(0) - 1
    named = {}
    if table.positions is not None:
        named[table.positions] = torch.arange(len(tokens_S)) - firsts_S.nonzero()[:, 0][numbers_S]
    if table.numbers is not None:
        named[table.numbers] = numbers_S
    return (Inputs(args=(tokens_S,), kwargs=named) if named else tokens_S), targets_S


def divided_at_ends(tokens_S: Tensor, targets_S: Tensor, table: DocumentsTable) -> Sample:
    """Return a row of tokens with the documents that a token in it ends.

    Source: Megatron-LM, `get_ltor_masks_and_position_ids`: the ending token belongs to its document, and where
    `loss_after_end` is false what follows it, the next document's first token, is not predicted.
    """
    ends_S = torch.eq(tokens_S, table.end if table.end is not None else -1)
    if not table.loss_after_end:
        targets_S = targets_S.masked_fill(ends_S, IGNORED)
    return with_documents(tokens_S, targets_S, firsts_S=ends_S.roll(1), table=table)
