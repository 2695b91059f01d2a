"""The `[data]` table of a manifest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field, model_validator

from composer3d.manifest import table

__all__ = ["DataTable"]

_MOST_TOKENS = 1 << 30  # of one sample
# Keys that apply to one kind of source only, with the value that means unset.
_OF_USER: tuple[tuple[str, Any], ...] = (
    ("args", {}),
    ("padding", "none"),
    ("pad_multiple", None),
    ("pad_id", 0),
    ("bucket", 0),
)
_OF_USER_WHY = 'is for use = "module:callable"'
_FIXED_WHY = "every sequence has seq_len tokens already"


@table
class BlendedTable:
    """One source of a blend.

    Args:
        use: As `data.use`.
        weight: Its share of the samples is its weight divided by the sum of all; default: the number of its samples,
            where no source states one.
        args: Arguments of `module:callable`.
    """

    use: str = Field(min_length=1)
    weight: float | None = Field(default=None, gt=0, le=1e9)
    args: dict[str, Any] = Field(default_factory=dict)


@table
class DataTable:
    """Training data of a run, and its order.

    Args:
        use: `python_docs` (reference text that ships inside Python), `synthetic`, a file or folder of text (UTF-8) or
            of tokens (.npy, .bin), or `module:callable`; the prefix of an indexed data set of Megatron-LM's, a .bin and
            an .idx file, which says the tokens' dtype.
        seq_len: Tokens per sequence, and the most that a sample of variable length may have.
        args: Arguments of `module:callable`.
        tokenizer: `bytes` has one token per byte; `bpe` is trained on the text itself; or a tokenizer.json, or a folder
            that holds one. The last two need the extra `bpe`. Default: that of the Hugging Face model, else `bytes`.
        vocab_size: Of `bpe` (default 4096), of `synthetic` (default 256), or of the tokens in token files.
        order: `shuffle` and `sequential` are functions of seed and step; `stream` is the order of an iterable.
        workers: Processes per rank that read ahead; 0 reads in the rank itself.
        prefetch: Batches that each worker reads ahead; default 2.
        pin_memory: Batches in page-locked memory, so that copies to an accelerator overlap.
        padding: To the longest sample of the global batch, to seq_len, or to a multiple of pad_multiple.
        pad_multiple: Of `padding = "multiple"`, in tokens.
        pad_id: The token that fills up; targets are filled with -100.
        bucket: Samples of windows of this many batches are batched by length; 0 is off.
        blend: Instead of `use`, several sources and their weights.
        evaluation_fraction: Part of the samples, at the end, that is held out for evaluation.
        dtype: Of the tokens in a .bin file (default uint16); a .npy file carries its own.
    """

    use: str = Field(default="python_docs", min_length=1)
    seq_len: int = Field(default=256, ge=1, le=_MOST_TOKENS)
    args: dict[str, Any] = Field(default_factory=dict)
    tokenizer: str | None = Field(default=None, min_length=1)
    vocab_size: int | None = Field(default=None, ge=1, le=1 << 32)
    order: Literal["shuffle", "sequential", "stream"] = "shuffle"
    workers: int = Field(default=0, ge=0, le=1 << 10)
    prefetch: int | None = Field(default=None, ge=1, le=1 << 10)
    pin_memory: bool = False
    padding: Literal["none", "longest", "seq_len", "multiple"] = "none"
    pad_multiple: int | None = Field(default=None, ge=1, le=_MOST_TOKENS)
    pad_id: int = Field(default=0, ge=0, lt=1 << 32)
    bucket: int = Field(default=0, ge=0, le=1 << 20)
    evaluation_fraction: float = Field(default=0.05, ge=0, lt=1)
    dtype: Literal["uint16", "uint32"] | None = None
    blend: tuple[BlendedTable, ...] = ()

    @property
    def sources(self) -> tuple[DataTable, ...]:
        """Return a table for each source of a blend; a table without one is its only source."""
        if not self.blend:
            return (self,)
        return tuple(replace(self, use=each.use, args=each.args, blend=()) for each in self.blend)

    @property
    def kind(self) -> Literal["python_docs", "synthetic", "user", "path"]:
        """Return what `use` names; of a blend `user`, if one of its sources is one."""
        if self.blend:
            return "user" if any(each.kind == "user" for each in self.sources) else "path"
        if self.use == "python_docs":
            return "python_docs"
        if self.use == "synthetic":
            return "synthetic"
        return "user" if ":" in self.use else "path"

    @property
    def has_file(self) -> bool:
        """Return whether the tokenizer is one from a file."""
        return self.tokenizer not in (None, "bytes", "bpe")

    @model_validator(mode="after")
    def _applies(self) -> DataTable:
        """Refuse keys that would be ignored, and pairs of keys that cannot be."""
        objections = self._of_blend() if self.blend else (*self._misplaced(), *self._impossible())
        for objection in objections:
            raise ValueError(objection)
        return self

    def _of_blend(self) -> Iterator[str]:
        if self.use != "python_docs":
            yield "use and blend both say what the data is; leave one of them out"
        if len({each.weight is None for each in self.blend}) > 1:
            yield "blend has sources with and without weight; state the weight of all, or of none"
        if self.args:
            yield "args are those of a source; write them in its entry of blend"
        if self.order == "stream":
            yield 'order = "stream" is one iterable\'s; a blend has numbered samples'
        _ = self.sources  # each is validated as a table of its own

    def _misplaced(self) -> Iterator[str]:
        if self.kind != "user":
            for key, neutral in _OF_USER:
                if getattr(self, key) != neutral:
                    why = _OF_USER_WHY if key == "args" else f"{_OF_USER_WHY}; {_FIXED_WHY}"
                    yield f"{key} {why}; remove it"
            if self.order == "stream":
                yield 'order = "stream" is for use = "module:callable"; take "shuffle" or "sequential"'
        if self.kind != "path" and self.dtype is not None:
            yield "dtype is for token files; remove it"
        if self.kind in ("synthetic", "user") and self.tokenizer not in (None, "bytes"):
            yield f'tokenizer = "{self.tokenizer}" is for text; remove it'

    def _impossible(self) -> Iterator[str]:
        if self.tokenizer == "bpe" and self.vocab_size is not None and self.vocab_size <= 256:
            yield f'tokenizer = "bpe" starts from 256 bytes; vocab_size = {self.vocab_size} leaves no room for merges'
        if self.kind == "python_docs" and self.tokenizer in (None, "bytes") and self.vocab_size not in (None, 256):
            yield 'tokenizer = "bytes" has 256 tokens; remove vocab_size, or set tokenizer = "bpe"'
        if self.has_file and self.vocab_size is not None:
            yield f'tokenizer = "{self.tokenizer}" has its own tokens; remove vocab_size'
        if self.padding == "multiple" and self.pad_multiple is None:
            yield 'padding = "multiple" needs pad_multiple, for example pad_multiple = 64'
        if self.padding != "multiple" and self.pad_multiple is not None:
            yield 'pad_multiple is for padding = "multiple"'
        if self.bucket and self.padding == "none":
            yield 'bucket batches samples of other lengths together; set padding = "longest"'
        if self.prefetch is not None and not self.workers:
            yield "prefetch is for workers, and workers = 0; set workers"
        if self.order == "stream" and self.workers:
            yield 'order = "stream" is read by one process, in order; remove workers'
        if self.order == "stream" and self.bucket:
            yield 'order = "stream" does not look ahead, so it has no windows to sort; remove bucket'
