"""Instruction data: templates as transformers renders them, masks of prompts, packing."""

from __future__ import annotations

import json

import numpy as np
import pytest

from composer3d.errors import DataError
from composer3d.runner.data import DataTable, Loader, open_source
from composer3d.runner.data.chats.chat_packing import packed
from composer3d.runner.data.data_table import ChatTable, DocumentsTable

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "Zwei f\u00fcr mich?"},
    {"role": "assistant", "content": "2 \u2713"},
]
MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
)
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "") + (
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# As Qwen3's: what the assistant thought is left out once others have spoken.
FORGETTING = (
    "{% for m in messages %}<{{ m.role }}>{% if loop.last and m.role == 'assistant' %}(thought){% endif %}"
    "{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def written(folder, *records, name="chats.jsonl"):
    (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return name


def opened(folder, *records, table=None, **chat):
    keys = {"padding": "none" if chat.get("packing") else "longest", "seq_len": 200, **(table or {})}
    chat = {"template": "chatml", **chat}
    data = DataTable(
        use=written(folder, *records),
        evaluation_fraction=keys.pop("evaluation_fraction", 0.0),
        chat=ChatTable(**chat),
        **keys,
    )
    return open_source(data, seed=0, folder=folder, cache=folder / "cache"), data


def said(tokens):
    return bytes(token for token in tokens if token >= 0).decode(errors="replace")


def trained(source, index=0):
    return said(source[index][1].tolist())


def test_the_assistants_turns_are_trained_and_the_rest_is_not(tmp_path):
    source, _ = opened(tmp_path, {"messages": TURNS})
    tokens, targets = source[0]
    assert trained(source) == "1<|im_end|>2 \u2713<|im_end|>"
    assert len(tokens) == len(targets) == source.lengths[0]
    assert said(tokens.tolist()).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne?")
    assert trained(opened(tmp_path, {"messages": TURNS}, trained="last")[0]) == "2 \u2713<|im_end|>"
    source, _ = opened(tmp_path, {"messages": TURNS}, trained="all")
    assert (source[0][1] >= 0).all()


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, "b<|im_end|>"),
        ({"instruction": "a", "input": "x", "output": "b"}, "b<|im_end|>"),
        ({"prompt": TURNS[:3], "completion": TURNS[3:]}, "2 \u2713<|im_end|>"),
        ({"prompt": "2 + 2 =", "completion": " 4"}, " 4"),
        ({"text": "all of it"}, "ll of it"),
    ],
    ids=["sharegpt", "alpaca", "given turns", "completion", "text"],
)
def test_forms_of_records(tmp_path, record, expected):
    assert trained(opened(tmp_path, record)[0]) == expected


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marked", "by prefixes"])
def test_tokens_and_masks_are_those_of_transformers(tmp_path, template):
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        special_tokens=["</s>", "<assistant>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    found.train_from_iterator(["one two three user assistant " * 5], trainer)
    kept = transformers.PreTrainedTokenizerFast(tokenizer_object=found, eos_token="</s>", chat_template=template)
    kept.save_pretrained(tmp_path / "model")
    (tmp_path / "own.jinja").write_text(template)
    table = {"tokenizer": str(tmp_path / "model" / "tokenizer.json")}
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_object=found, eos_token="</s>", chat_template=MARKED
    ).apply_chat_template(TURNS, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = np.array(reference["input_ids"]), np.array(reference["assistant_masks"])
    for stated in (None, "own.jinja"):
        source, _ = opened(tmp_path, {"messages": TURNS}, template=stated, table=table)
        tokens, targets = source[0]
        assert [*tokens.tolist(), ids[-1]] == ids.tolist()
        # A character of three bytes has three tokens: all of what the assistant wrote is trained.
        assert targets.tolist()[:-1] == np.where(mask == 1, ids, -100)[1:-1].tolist()
    assert source.vocab_size == max(found.get_vocab().values()) + 1


def test_a_turn_that_changes_when_others_follow_is_refused_and_its_last_one_is_trained(tmp_path):
    (tmp_path / "own.jinja").write_text(FORGETTING)
    with pytest.raises(DataError) as caught:
        opened(tmp_path, {"messages": TURNS[:2]}, {"messages": TURNS}, template="own.jinja")
    assert str(caught.value) == (
        '[data] use = "chats.jsonl": chats.jsonl:2 message 2 is rendered otherwise when more messages follow, so its '
        "tokens cannot be found; mark what it writes with {% generation %} in the template, or set chat.trained = "
        '"last" or "all"'
    )
    source, _ = opened(tmp_path, {"messages": TURNS}, template="own.jinja", trained="last")
    assert trained(source) == "(thought)2 \u2713"


def chats_of(lengths):
    """Records of one completion each, of so many tokens after the first."""
    return [
        {"prompt": chr(97 + number), "completion": chr(97 + number) * length} for number, length in enumerate(lengths)
    ]


def test_packed_rows_hold_every_chat_once_with_positions_and_numbers_of_their_own(tmp_path):
    source, _ = opened(
        tmp_path,
        *chats_of([5, 3, 4, 2, 6]),
        packing=True,
        table={"seq_len": 8, "pad_id": 9, "documents": DocumentsTable(positions="at", numbers="of")},
    )
    rows = [source[number] for number in range(len(source))]
    assert len(rows) == 3 and source.lengths.tolist() == [8, 8, 8]
    assert sorted("".join(trained(source, number) for number in range(3))) == sorted("aaaaabbbccccddeeeeee")
    inputs, targets = rows[1]
    assert said(inputs.args[0].tolist()) == "aaaaabbb"
    assert inputs.kwargs["at"].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert inputs.kwargs["of"].tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    inputs, targets = rows[2]
    assert inputs.args[0].tolist()[4:] == [9] * 4 and targets.tolist()[4:] == [-100] * 4
    assert inputs.kwargs["of"].tolist() == [0] * 4 + [1] * 4


def test_packing_is_best_fit_and_leaves_no_chat_out():
    lengths = np.random.default_rng(0).integers(1, 33, 500)
    rows = packed(np.arange(500), lengths, width=64)
    assert sorted(rows.chats.tolist()) == list(range(500))
    sums = [int(lengths[rows.of(number)].sum()) for number in range(len(rows))]
    assert max(sums) <= 64 and len(rows) <= 1.02 * lengths.sum() / 64 + 1


def test_the_last_chats_are_held_out_before_rows_are_packed(tmp_path):
    source, _ = opened(
        tmp_path, *chats_of([3, 3, 3, 3]), packing=True, table={"seq_len": 6, "evaluation_fraction": 0.5}
    )
    assert (trained(source), trained(source.evaluation)) == ("aaabbb", "cccddd")
    assert source.record() | {"sha256": "", "tokenizer": ""} == {
        "kind": "chats",
        "use": "chats.jsonl",
        "sha256": "",
        "trained": "assistant",
        "template_sha256": source.record()["template_sha256"],
        "tokenizer": "",
        "num_tokens": 16,
        "num_chats": 4,
        "num_trained": 12,
        "seq_len": 6,
        "is_packed": True,
        "num_left_out": 0,
        "num_samples": 1,
        "num_evaluation_samples": 1,
        "vocab_size": 256,
    }


def test_long_chats_are_refused_left_out_or_truncated(tmp_path):
    records, table = chats_of([12, 3]), {"seq_len": 8}
    with pytest.raises(DataError) as caught:
        opened(tmp_path, *records, table=table)
    assert str(caught.value) == (
        '[data] use = "chats.jsonl": 1 of 2 chats are longer than seq_len = 8 (the longest has 12); raise it, or set '
        'chat.too_long = "drop" or "truncate"'
    )
    source, _ = opened(tmp_path, *records, table=table, too_long="drop")
    assert (len(source), trained(source), source.record()["num_left_out"]) == (1, "bbb", 1)
    source, _ = opened(tmp_path, *records, table=table, too_long="truncate")
    assert (len(source), trained(source), source.lengths.tolist()) == (2, "a" * 8, [8, 3])


def test_rows_of_one_chat_are_padded_to_the_longest_of_the_global_batch(tmp_path):
    source, table = opened(tmp_path, *chats_of([5, 3, 4, 2]), table={"order": "sequential", "pad_id": 9})
    loaders = [
        Loader(
            source, table, seed=0, rank=rank, degree=2, batch_size_of=lambda step: 4, position_of=lambda step: step * 4
        )
        for rank in range(2)
    ]
    batches = [loader.batch(0) for loader in loaders]
    assert [batch.tokens.shape for batch in batches] == [(2, 5), (2, 5)]
    assert batches[1].targets[1].tolist() == [100, 100, -100, -100, -100]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "chats.jsonl:1 is no JSON: Expecting property name enclosed in double quotes: line 2 column 1 (char 2)"),
        ("[1]", "chats.jsonl:1 is of type list, and a record is an object with FORMS"),
        ('{"a": 1}', "chats.jsonl:1 has a; a record has FORMS, or name its field as chat.messages"),
        ('{"messages": []}', 'chats.jsonl:1 has no list of messages as "messages"'),
        (
            '{"messages": [{"who": "me"}]}',
            'chats.jsonl:1 has messages[0] without texts "role" and "content"; name its fields as chat.role and '
            "chat.content",
        ),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no chat has a turn of the assistant"),
        ('{"prompt": "a", "completion": ""}', 'chats.jsonl:1 has an empty "completion"'),
        ("\udcff", "chats.jsonl:1 is no JSON: 'utf-8' codec can't decode byte 0xff in position 0"),
        ('{"messages": [], "tools": "[x"}', 'chats.jsonl:1 has tools that begin with "[" and are no JSON: Expecting'),
    ],
)
def test_records_that_cannot_be_used_are_named(tmp_path, line, expected):
    (tmp_path / "chats.jsonl").write_bytes(f"{line}\n".encode(errors="surrogateescape"))
    table = DataTable(use="chats.jsonl", padding="longest", chat=ChatTable(template="chatml"))
    with pytest.raises(DataError) as caught:
        open_source(table, seed=0, folder=tmp_path, cache=tmp_path / "cache")
    forms = '"messages" (or "conversations"), "prompt" with "completion", "instruction" with "output", or "text"'
    assert expected.replace("FORMS", forms) in str(caught.value)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% if %}", '[data] chat.template = "own.jinja": line 1: '),
        ("{{ raise_exception('no systems') }}", "chats.jsonl:1 cannot be rendered by own.jinja: no systems"),
        ("{{ messages.__class__.__mro__ }}", "is unsafe"),
    ],
)
def test_templates_run_in_a_sandbox_and_their_faults_are_named(tmp_path, template, expected):
    (tmp_path / "own.jinja").write_text(template)
    with pytest.raises(DataError) as caught:
        opened(tmp_path, {"messages": TURNS}, template="own.jinja")
    assert expected in str(caught.value)
