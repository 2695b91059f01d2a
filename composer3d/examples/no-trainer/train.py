"""A training script in the form of Hugging Face's `run_clm_no_trainer.py`: DataLoaders, groups, scheduler, generate."""

import math
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_scheduler

import composer3d

gradient_accumulation_steps, num_train_epochs, batch_size = 2, 3, 4
config = LlamaConfig(
    vocab_size=31,
    hidden_size=16,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=32,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=None,
)


def dataset(num):
    """Return sequences that count upwards, each from another number."""
    blocks = (torch.arange(8) + torch.arange(num)[:, None]) % 30 + 1
    return [{"input_ids": block, "labels": block.clone()} for block in blocks]


def main(output_dir="out"):
    torch.manual_seed(42)
    model = LlamaForCausalLM(config)
    order = torch.Generator().manual_seed(42)
    train_dataloader = DataLoader(dataset(24), shuffle=True, generator=order, batch_size=batch_size)
    eval_dataloader = DataLoader(dataset(8), batch_size=batch_size)
    no_decay = ["bias", "norm.weight"]
    optimizer_grouped_parameters = [
        {
            "params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)],
            "weight_decay": 0.1,
        },
        {
            "params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)],
            "weight_decay": 0.0,
        },
    ]
    optimizer = torch.optim.AdamW(optimizer_grouped_parameters, lr=1e-2)
    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / gradient_accumulation_steps)
    max_train_steps = num_train_epochs * num_update_steps_per_epoch
    lr_scheduler = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=1, num_training_steps=max_train_steps)

    run = composer3d.compose(model, Path(__file__).with_name("run.toml"))
    train_dataloader, optimizer, lr_scheduler = run.prepare(train_dataloader, optimizer, lr_scheduler)

    losses = []
    for epoch in range(num_train_epochs):
        model.train()
        for step, batch in enumerate(train_dataloader):
            outputs = model(**batch)
            loss = outputs.loss
            loss = loss / gradient_accumulation_steps
            run.backward(loss)
            if (step + 1) % gradient_accumulation_steps == 0 or step == len(train_dataloader) - 1:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
        model.eval()
        eval_losses = []
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            eval_losses.append(outputs.loss)
        losses.append(torch.stack(eval_losses).mean().item())
        print(f"epoch {epoch}: perplexity {math.exp(losses[-1]):.4f}")
    tokens = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=6, do_sample=False)
    print("5 6 7 goes on as", *tokens[0, 3:].tolist())
    state_dict = run.full_state_dict()
    if run.context.rank == 0:
        model.save_pretrained(output_dir, state_dict=state_dict)
    run.close()
    return [*losses, *tokens[0].tolist()]


if __name__ == "__main__":
    main()
