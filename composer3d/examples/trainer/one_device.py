"""A program with transformers' Trainer: its arguments, evaluation and checkpoints."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

config = LlamaConfig(
    vocab_size=31,
    hidden_size=16,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=2,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=None,
)


def dataset(num):
    """Return sequences that count upwards, each from another number."""
    blocks = (torch.arange(8) + torch.arange(num)[:, None]) % 30 + 1
    return [{"input_ids": block, "labels": block.clone()} for block in blocks]


def main(output_dir="out", batch_size=4):
    torch.manual_seed(42)
    model = LlamaForCausalLM(config)
    args = TrainingArguments(
        output_dir,
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=batch_size,
        num_train_epochs=3,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_steps=2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model, args, train_dataset=dataset(24), eval_dataset=dataset(8))
    trainer.train()
    trainer.save_model(f"{output_dir}/last")
    return [row[key] for row in trainer.state.log_history for key in ("loss", "eval_loss", "grad_norm") if key in row]


if __name__ == "__main__":
    main()
