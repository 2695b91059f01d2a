"""Borders of documents inside of sequences, as Megatron-LM and GPT-NeoX name them."""

from __future__ import annotations

from composer3d.importing.translation import Translation

__all__ = ["documents_inside"]

_POSITIONS, _ATTENTION, _LOSS = "reset_position_ids", "reset_attention_mask", "eod_mask_loss"
_GPT2_END = 50256
# As `composer3d.models:llama` and `moe` name them.
_ARGUMENTS = {_POSITIONS: ("positions", "positions"), _ATTENTION: ("numbers", "documents")}


def documents_inside(translation: Translation) -> None:
    """Carry positions that begin anew, attention inside of documents, and ends without loss, where the end is known.

    Source: Megatron-LM, `get_ltor_masks_and_position_ids`.
    """
    t = translation
    on = [key for key in (_POSITIONS, _ATTENTION, _LOSS) if t.flag(key)]
    end = _end(t)
    is_hf = t.options.model is not None and ":" not in t.options.model
    if on and t.settings.get("data.use") is not None and t.settings["data.use"].value == "synthetic":
        for key in on:
            t.judge(key, "meaningless", "made-up tokens have no documents")
    elif on and end is not None and not (is_hf and (_POSITIONS in on) != (_ATTENTION in on)):
        t.put("data.documents.end", end, reason=f"the token that ends documents, of {t.text('tokenizer_type')}")
        for key in on:
            if key == _LOSS:
                t.carry(key, "data.documents.loss_after_end", False)
            elif is_hf:
                t.put("data.documents.positions", "position_ids", *on, reason="of which the model makes its masks")
                t.judge(key, "carried", to="data.documents.positions")
            else:
                name, argument = _ARGUMENTS[key]
                note = "an argument of the model's forward, as composer3d.models:llama has it"
                t.carry(key, f"data.documents.{name}", argument, note)
    both = "the model's masks follow its positions: write data.documents, with both or neither"
    unknown = "which token ends a document is not known here: write data.documents with end"
    for key in (_POSITIONS, _ATTENTION, _LOSS):
        t.judge(key, "missing" if key in on else "equal", both if end is not None else unknown)


def _end(t: Translation) -> int | None:
    """Return the token that ends documents, of tokenizers that are known by their name."""
    kind = t.text("tokenizer_type")
    if kind == "GPT2BPETokenizer":
        return _GPT2_END
    if kind == "NullTokenizer":
        stated = t.integer("null_tokenizer_eod_id") if t.get("null_tokenizer_eod_id") is not None else None
        size = t.integer("vocab_size") if t.get("vocab_size") is not None else None
        return stated if stated is not None else size
    return None
