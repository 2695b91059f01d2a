"""Borders of documents inside of sequences, as Megatron-LM and GPT-NeoX name them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from composer3d.importing.end_tokens import (
    added_end_in_sentencepiece,
    end_in_sentencepiece,
    end_of_tokenizer,
    number_of_token,
)
from composer3d.importing.translation import Translation

__all__ = ["asks_for_end", "documents_inside", "is_before"]

_POSITIONS, _ATTENTION, _LOSS = "reset_position_ids", "reset_attention_mask", "eod_mask_loss"
_TOKENIZER = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")
_GPT2_END = 50256
# GPT-NeoX names tiktoken's encodings as the vocabulary.
_TIKTOKEN_ENDS = {
    "gpt2": _GPT2_END,
    "r50k_base": _GPT2_END,
    "p50k_base": _GPT2_END,
    "cl100k_base": 100257,
    "o200k_base": 199999,
}
# The first one has a token of its own that ends documents in Megatron-LM before core 0.15, and with --legacy-tokenizer.
_SENTENCEPIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
_TIKTOKEN_OWN = ["<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>"]  # Megatron-LM's, its tokens 0 to 6
# As `composer3d.models:llama` and `moe` name them.
_ARGUMENTS = {_POSITIONS: ("positions", "positions"), _ATTENTION: ("numbers", "documents")}


def asks_for_end(translation: Translation) -> bool:
    """Return whether something depends on where documents end."""
    return any(translation.flag(key) for key in (_POSITIONS, _ATTENTION, _LOSS))


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
        for key in _TOKENIZER:
            t.judge(key, "derived", "which token ends a document", to="data.documents.end")
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
    unknown = _unknown(t)
    for key in (_POSITIONS, _ATTENTION, _LOSS):
        t.judge(key, "missing" if key in on else "equal", both if end is not None else unknown)
    for key in _TOKENIZER:
        if on:
            t.judge(key, "missing" if t.get(key) else "meaningless", "write data.tokenizer where the data is text")
        t.judge(key, "meaningless", "the data is tokens")


def _unknown(t: Translation) -> str:
    place = t.text("tokenizer_model") or t.text("vocab_file")
    where = f"there are no files of {place} here that say it" if place else "no file of its tokenizer is named"
    return f"which token ends a document is not known, {where}: write data.documents with end"


def _end(t: Translation) -> int | None:
    """Return the token that ends documents, of tokenizers that are known by their names or have files here.

    Sources: `megatron/core/tokenizers` of Megatron-LM 0.20, `megatron/tokenizer/tokenizer.py` of GPT-NeoX.
    """
    kind = t.text("tokenizer_type")
    if kind in ("GPT2BPETokenizer", "HFGPT2Tokenizer"):
        return _GPT2_END
    if kind == "NullTokenizer":
        return _end_of_numbers(t)
    if kind == "TikTokenizer":
        own = t.get("special_tokens")
        listed = own if isinstance(own, list) else own.split() if isinstance(own, str) else _TIKTOKEN_OWN
        return listed.index("</s>") if "</s>" in listed else None
    if kind == "TiktokenTokenizer":
        return _TIKTOKEN_ENDS.get(t.text("vocab_file"))
    if kind in _SENTENCEPIECE and not t.flag("tokenizer_sentencepiece_legacy"):
        adds = kind == _SENTENCEPIECE[0] and (t.flag("legacy_tokenizer") or is_before(t, 15))
        read = added_end_in_sentencepiece if adds else end_in_sentencepiece
        return next((end for file in _places(t, "tokenizer_model") if (end := read(file)) is not None), None)
    if kind == "HuggingFaceTokenizer":
        return next(
            (end for place in _places(t, "tokenizer_model") if (end := end_of_tokenizer(place)) is not None), None
        )
    if kind == "HFTokenizer":
        ends = (number_of_token(file, "<|endoftext|>") for file in _places(t, "vocab_file"))
        return next((end for end in ends if end is not None), None)
    return None


def _end_of_numbers(t: Translation) -> int | None:
    """Return the end of a tokenizer that reads numbers: its last token; before core 0.18 the one after it."""
    if t.get("null_tokenizer_eod_id") is not None:
        return t.integer("null_tokenizer_eod_id")
    size = t.integer("vocab_size") if t.get("vocab_size") is not None else None
    if size is None:
        return None
    return size if is_before(t, 18) else size - 1


def is_before(t: Translation, minor: int) -> bool:
    """Return whether the source's version is stated, and below Megatron-LM's core 0.`minor`."""
    parts = (t.options.version or t.table.version).removeprefix("core_v").split(".")
    numbers = tuple(int(part) for part in parts[:2] if part.isdecimal())
    return len(numbers) == 2 and numbers < (0, minor)


def _places(t: Translation, key: str) -> Iterator[Path]:
    """Yield where a file or folder may lie that a key names: as it stands, and beside the source."""
    named = t.text(key)
    if named:
        yield from dict.fromkeys((Path(named), Path(t.tree.file).parent / named))
