"""nanoGPT's training loop: its own schedule, accumulation, evaluation, and resuming."""

import math
from pathlib import Path

import torch
from model import GPT, block_size

import composer3d

batch_size, gradient_accumulation_steps, eval_interval, eval_iters = 4, 2, 5, 2
learning_rate, min_lr, warmup_iters, weight_decay, grad_clip = 1e-2, 1e-3, 2, 0.1, 0.3


def main(out_dir="out", max_iters=10, lr_decay_iters=10):
    torch.manual_seed(1337)
    data = torch.tensor([min(byte, 127) for byte in Path(__file__).with_name("model.py").read_bytes()])
    generator = torch.Generator().manual_seed(6)

    def get_batch(split):
        own = generator if split == "train" else torch.Generator().manual_seed(7)
        ix = torch.randint(len(data) - block_size, (batch_size,), generator=own)
        x = torch.stack([data[i : i + block_size] for i in ix])
        y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
        return x, y

    def get_lr(it):
        if it < warmup_iters:
            return learning_rate * (it + 1) / (warmup_iters + 1)
        ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
        return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)

    model = GPT()
    run = composer3d.compose(model, Path(__file__).with_name("run.toml"))
    optimizer = run.prepare(model.configure_optimizers(weight_decay, learning_rate, (0.9, 0.95)))
    iter_num, best_val_loss, losses = 0, 1e9, []
    path = Path(out_dir) / "ckpt"
    run.attach("loop", checkpoint := {})
    if path.exists():
        run.load(path)
        iter_num, best_val_loss = checkpoint["iter_num"], checkpoint["best_val_loss"]
        generator.set_state(checkpoint["generator"])

    @torch.no_grad()
    def estimate_loss():
        model.eval()
        val_loss = torch.tensor([model(*get_batch("val"))[1] for _ in range(eval_iters)]).mean().item()
        model.train()
        return val_loss

    while True:
        for param_group in optimizer.param_groups:
            param_group["lr"] = get_lr(iter_num)
        if iter_num % eval_interval == 0:
            val_loss = estimate_loss()
            print(f"step {iter_num}: val loss {val_loss:.4f}")
            losses.append(val_loss)
            if val_loss < best_val_loss:
                best_val_loss = val_loss
                checkpoint |= {
                    "iter_num": iter_num,
                    "best_val_loss": best_val_loss,
                    "generator": generator.get_state(),
                }
                run.save(path)
        if iter_num >= max_iters:
            break
        for _ in range(gradient_accumulation_steps):
            X, Y = (whole.chunk(run.context.num_readers)[run.context.reader] for whole in get_batch("train"))
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
            run.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        iter_num += 1
    run.close()
    return losses


if __name__ == "__main__":
    Path("out").mkdir(exist_ok=True)
    main()
