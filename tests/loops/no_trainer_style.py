"""A training script in the shape of Hugging Face's examples without a Trainer, for one device."""

import math

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_scheduler

gradient_accumulation_steps, num_train_epochs, per_device_train_batch_size = 2, 2, 4
config = LlamaConfig(
    vocab_size=31, hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2,
    max_position_embeddings=32, attn_implementation="sdpa", use_cache=True, pad_token_id=0, eos_token_id=None,
    bos_token_id=None,
)  # fmt: skip


def dataset(seed, num):
    blocks = torch.randint(1, 31, (num, 8), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": block, "labels": block.clone()} for block in blocks]


def train(out_dir):
    torch.manual_seed(1)
    model = LlamaForCausalLM(config)
    train_dataloader = DataLoader(dataset(2, 20), batch_size=per_device_train_batch_size)
    eval_dataloader = DataLoader(dataset(3, 8), batch_size=per_device_train_batch_size)
    decayed = [p for n, p in model.named_parameters() if "norm" not in n]
    spared = [p for n, p in model.named_parameters() if "norm" in n]
    groups = [{"params": decayed}, {"params": spared, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / gradient_accumulation_steps)
    max_train_steps = num_train_epochs * num_update_steps_per_epoch
    lr_scheduler = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=1, num_training_steps=max_train_steps)
    completed_steps, curve = 0, []
    for _ in range(num_train_epochs):
        model.train()
        for step, batch in enumerate(train_dataloader):
            is_last = (step + 1) % gradient_accumulation_steps == 0 or step == len(train_dataloader) - 1
            size = gradient_accumulation_steps if step < 4 else 1  # the epoch's last group has one batch
            outputs = model(**batch)
            loss = outputs.loss
            (loss / size).backward()
            if is_last:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if is_last:
                completed_steps += 1
        model.eval()
        losses = []
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            losses.append(outputs.loss)
        curve += [math.exp(torch.stack(losses).mean()), optimizer.param_groups[0]["lr"]]
    text = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=6, do_sample=False)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return curve, [completed_steps, *text[0].tolist()], weights
