"""Instruction data of fine-tuning programs: files of chats, templates, masks of prompts, packing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from composer3d.importing.translation import Translation

__all__ = ["HUB_NOTE", "carry_file", "carry_packing", "carry_template", "fine_tuned", "messages_of", "named_data"]

HUB_NOTE = "no file of JSON lines: save it as one, and name that with --data"
_SUFFIXES = (".jsonl", ".json")
_NAMED = ("chatml",)
# Keys of TRL's SFTConfig and of LLaMA-Factory that say that a file is about instruction data.
_OF_TRL = (
    "assistant_only_loss", "completion_only_loss", "max_length", "max_seq_length", "packing_strategy",
    "chat_template_path", "dataset_text_field", "padding_free",
)  # fmt: skip
_OF_FACTORY = ("cutoff_len", "template", "train_on_prompt", "mask_history", "neat_packing")

_NAMING = (
    *("dataset", "dataset_name", "dataset_config_name", "template", "cutoff_len", "val_size", "train_file"),
    *("validation_file", "packing", *_OF_TRL, *_OF_FACTORY),
)


def carry_file(t: Translation, key: str, paths: Sequence[str], *, verdict: str = "carried", note: str = "") -> bool:
    """Name files of JSON lines as the data; return whether they are such files, or the user named one.

    Args:
        t: Of the file.
        key: Of the source, for its verdict.
        paths: As the source has them, of data sets that are read one after the other.
        verdict: Of files that are carried.
        note: What differs.
    """
    if t.options.data is not None:
        t.judge(key, "derived", "--data names the data" + (f"; {note}" if note else ""), to="data.use")
        return t.options.data.endswith(_SUFFIXES)
    files = [path for path in paths if path.endswith(_SUFFIXES) and "://" not in path]
    if not files or len(files) != len(paths):
        other = next((path for path in paths if path not in files), "it")
        t.judge(key, "missing", f"{other} is {HUB_NOTE}")
        return False
    if len(files) == 1:
        t.put("data.use", files[0], key)
        t.judge(key, verdict, note, to="data.use")
    else:
        t.put("data.blend", [{"use": path} for path in files], key)
        t.judge(key, verdict, note, to="data.blend")
    return True


def carry_template(t: Translation, key: str, *, default: Sequence[str] = ()) -> None:
    """Carry a chat template that is shipped here, or a file; others are the tokenizer's own, or missing.

    Args:
        t: Of the file.
        key: Of the source.
        default: Names that stand for the tokenizer's template.
    """
    name = t.get(key)
    if name is None or name in default:
        t.judge(key, "equal" if name else "meaningless", "the tokenizer's own template")
    elif isinstance(name, str) and (name in _NAMED or name.endswith((".jinja", ".jinja2"))):
        t.carry(key, "data.chat.template", name)
    else:
        t.judge(key, "missing", "the tokenizer's own template is read: write this one to a file, as data.chat.template")


def carry_packing(
    t: Translation, key: str, *, others: Sequence[str] = (), note: str = "", changed: bool = False
) -> None:
    """Carry whether rows hold several chats; without packing they are padded to the longest of a batch.

    Args:
        t: Of the file.
        key: The switch.
        others: Further switches, one of which is enough.
        note: What differs where rows are packed.
        changed: Whether that is in numbers.
    """
    on = [name for name in (key, *others) if t.flag(name)]
    if on:
        t.put("data.chat.packing", True, *on)
        if (t.options.model or "").startswith("composer3d.models:"):
            t.put(
                "data.documents", {"positions": "positions", "numbers": "documents"}, reason="as this model names them"
            )
    else:
        t.put("data.padding", "longest", key, reason="a row is a chat")
    for name in (key, *others):
        verdict = "carried" if not on else "changed" if changed else "carried"
        t.judge(name, verdict, note if on else "", to="data.chat.packing" if on else "data.padding")


def fine_tuned(translation: Translation) -> None:
    """Carry what TRL's SFTTrainer and LLaMA-Factory say of chats, in files of the Trainer's arguments."""
    t = translation
    is_factory = any(key in t for key in _OF_FACTORY)
    if not t.is_run or not (is_factory or any(key in t for key in _OF_TRL) or t.flag("packing")):
        return
    stated = [t.get(key) for key in ("train_file", "dataset_name", "dataset") if isinstance(t.get(key), str)]
    key = next((key for key in ("train_file", "dataset_name", "dataset") if isinstance(t.get(key), str)), "train_file")
    if not carry_file(t, key, stated[:1]):
        t.put("data.use", "FILL_IN:data", reason="the source names no file of chats")
    if is_factory:
        _of_factory(t)
    else:
        _of_trl(t)


def named_data(translation: Translation) -> None:
    """Judge what is left of keys that name instruction data."""
    for key in _NAMING:
        verdict = "missing" if translation.get(key) not in (None, False, 0, "") else "meaningless"
        translation.judge(key, verdict, "instruction data; name data with --data")


def _of_factory(t: Translation) -> None:
    t.state("cutoff_len", "data.seq_len", t.integer("cutoff_len", 2048, least=1) or 2048)
    t.put("data.chat.too_long", "truncate", reason="LLaMA-Factory truncates to cutoff_len")
    carry_template(t, "template", default=("default", "empty"))
    note = "chats of a row do not see each other here; there they do without neat_packing"
    carry_packing(t, "packing", others=("neat_packing",), note=note, changed=not t.flag("neat_packing"))
    last, all_ = t.flag("mask_history"), t.flag("train_on_prompt")
    t.put("data.chat.trained", "all" if all_ else "last" if last else "assistant", "train_on_prompt", "mask_history")
    t.judge("train_on_prompt", "carried", to="data.chat.trained")
    t.judge("mask_history", "carried", to="data.chat.trained")
    share = t.number("val_size", 0.0) or 0.0
    if 0 <= share < 1:
        t.state("val_size", "data.evaluation_fraction", float(share))


def _of_trl(t: Translation) -> None:
    key = next((key for key in ("max_length", "max_seq_length") if key in t), "max_length")
    t.state(key, "data.seq_len", t.integer(key, 1024, least=1) or 1024)
    t.put("data.chat.too_long", "truncate", reason="TRL truncates to max_length")
    carry_template(t, "chat_template_path")
    strategy = t.text("packing_strategy", "bfd")
    wrapped = "TRL cuts chats at the ends of rows there, and lets them see each other"
    carry_packing(t, "packing", note=wrapped if strategy == "wrapped" else "", changed=strategy == "wrapped")
    t.judge("packing_strategy", "changed" if strategy == "wrapped" else "equal", wrapped)
    t.judge("padding_free", "equal", "memory: the same numbers without padding")
    only = t.flag("assistant_only_loss")
    t.put(
        "data.chat.trained",
        "assistant" if only else "all",
        "assistant_only_loss",
        reason=None if only else "TRL's default",
    )
    t.judge("assistant_only_loss", "carried", to="data.chat.trained")
    completions = t.get("completion_only_loss")
    if completions is None or only:
        t.judge("completion_only_loss", "equal", 'records with "prompt" and "completion" are told by data.chat.trained')
    elif t.flag("completion_only_loss"):
        t.put("data.chat.trained", "assistant", "completion_only_loss")
        t.judge("completion_only_loss", "carried", to="data.chat.trained")
    t.judge("completion_only_loss", "equal", to="data.chat.trained")
    if t.text("dataset_text_field", "text") != "text":
        t.judge("dataset_text_field", "missing", 'rename the field to "text"')
    t.judge("dataset_text_field", "equal", 'the field "text" is read')
    t.put("data.evaluation_fraction", 0.0, reason="TRL evaluates on a set of its own")


def messages_of(properties: Any) -> Mapping[str, str]:
    """Return the fields of a message by what they hold: role and content."""
    found = properties if isinstance(properties, Mapping) else {}
    return {name: str(found[name]) for name in ("role", "content") if found.get(name)}
