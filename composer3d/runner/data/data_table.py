"""The `[data]` table of a manifest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field, model_validator

from composer3d.manifest import table

__all__ = ["ChatTable", "DataTable", "DocumentsTable"]

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
class DocumentsTable:
    """Arguments that tell a model of the documents in a row.

    Models of transformers find documents in positions that begin anew, and mask attention between them.

    Args:
        positions: Argument of the model's forward that is given positions, 0 where a document begins.
        numbers: Argument that is given the number of each token's document, from 0 in every row.
        end: The token that ends a document, in text and token files.
        loss_after_end: Whether the first token of the next document is predicted from it.
    """

    positions: str | None = Field(default=None, min_length=1)
    numbers: str | None = Field(default=None, min_length=1)
    end: int | None = Field(default=None, ge=0, lt=1 << 32)
    loss_after_end: bool = True


@table
class ChatTable:
    """Instruction data: chats rendered by a template, with loss where the assistant speaks.

    Args:
        template: `chatml`, or a file of jinja; default: that of the tokenizer's folder.
        trained: Every turn of the assistant, its last one, or all tokens.
        packing: Several chats in a row of seq_len tokens, which do not attend to each other.
        too_long: What becomes of chats of more than seq_len tokens.
        messages: Field of a record that holds the messages; default: `messages` or `conversations`.
        role: Field of a message that says who speaks; default: `role` or `from`.
        content: Field of a message that holds the text; default: `content` or `value`.
    """

    template: str | None = Field(default=None, min_length=1)
    trained: Literal["assistant", "last", "all"] = "assistant"
    packing: bool = False
    too_long: Literal["refuse", "drop", "truncate"] = "refuse"
    messages: str | None = Field(default=None, min_length=1)
    role: str | None = Field(default=None, min_length=1)
    content: str | None = Field(default=None, min_length=1)


# What models of transformers are given of packed chats.
_HF_POSITIONS = DocumentsTable(positions="position_ids")


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
        chat: The files are instruction data, JSON lines of chats.
        documents: What the model is told of documents that share a row; default of packed chats: `position_ids`.
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
    chat: ChatTable | None = None
    documents: DocumentsTable | None = None

    @property
    def packs(self) -> bool:
        """Return whether a row holds several chats."""
        return self.chat is not None and self.chat.packing

    @property
    def told(self) -> DocumentsTable | None:
        """Return what the model is told of documents in a row."""
        return self.documents or (_HF_POSITIONS if self.packs else None)

    @property
    def sources(self) -> tuple[DataTable, ...]:
        """Return a table for each source of a blend; a table without one is its only source."""
        if not self.blend:
            return (self,)
        return tuple(replace(self, use=each.use, args=each.args, blend=()) for each in self.blend)

    @property
    def kind(self) -> Literal["python_docs", "synthetic", "user", "path", "chat"]:
        """Return what `use` names; of a blend `user`, if one of its sources is one."""
        if self.chat is not None:
            return "chat"
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
        if self.kind == "chat":
            yield from self._of_chat()
        elif self.kind != "user":
            for key, neutral in _OF_USER:
                if getattr(self, key) != neutral:
                    why = _OF_USER_WHY if key == "args" else f"{_OF_USER_WHY}; {_FIXED_WHY}"
                    yield f"{key} {why}; remove it"
            if self.order == "stream":
                yield 'order = "stream" is for use = "module:callable"; take "shuffle" or "sequential"'
        if self.kind != "path" and self.dtype is not None:
            yield "dtype is for token files; remove it"
        if self.documents is not None and self.kind != "chat":
            yield from self._of_documents(self.documents)
        if self.kind in ("synthetic", "user") and self.tokenizer not in (None, "bytes"):
            yield f'tokenizer = "{self.tokenizer}" is for text; remove it'

    def _of_chat(self) -> Iterator[str]:
        told = self.told
        if self.use in ("python_docs", "synthetic") or ":" in self.use:
            yield f'chat is for files of JSON lines, and use = "{self.use}" is none; remove chat, or name a file'
        if self.args or self.order == "stream":
            key = "args" if self.args else 'order = "stream"'
            yield f'{key} is for use = "module:callable"; remove it'
        if self.vocab_size is not None:
            yield "vocab_size is the tokenizer's, of chats; remove it"
        if self.tokenizer == "bpe":
            yield 'tokenizer = "bpe" is trained on text; chats need a model\'s, or "bytes"'
        if self.packs and (self.padding != "none" or self.bucket):
            yield "chat.packing fills every row up to seq_len; remove padding and bucket"
        if not self.packs and self.padding == "none":
            yield 'chats have many lengths; set padding = "longest", or chat.packing = true'
        if self.packs and told is not None and told.positions is None and told.numbers is None:
            yield "packed chats would attend to each other; name an argument of the model as documents.positions"
        if not self.packs and self.documents is not None:
            yield "documents is for rows of several documents; set chat.packing = true, or remove it"
        if told is not None and (told.end is not None or not told.loss_after_end):
            yield "documents.end and loss_after_end are for text and token files; packed chats are known; remove them"

    def _of_documents(self, told: DocumentsTable) -> Iterator[str]:
        if self.kind in ("synthetic", "user"):
            yield f'documents is for text, token files and packed chats, and use = "{self.use}" is none; remove it'
        elif told.end is None:
            yield "documents needs end, the token that ends a document"
        elif told.positions is None and told.numbers is None and told.loss_after_end:
            yield "documents changes nothing; name positions or numbers, or set loss_after_end = false"

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
