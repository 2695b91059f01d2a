"""A recipe in torchtune's form: a class with `setup` and `train`; gradients summed over tokens scaled at the end."""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import composer3d

vocab_size, dim, gradient_accumulation_steps, max_norm = 64, 32, 2, 1.0
IGNORED = -100


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.gate, self.up = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm, self.output = nn.RMSNorm(dim), nn.Linear(dim, vocab_size, bias=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def dataset(num):
    """Return prompts and answers: labels of prompts, of different lengths, are ignored."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(vocab_size, (num, 17), generator=generator)
    tokens[:, 1::2] = tokens[:, :-1:2]  # every second token repeats the one before
    lengths = torch.randint(1, 9, (num, 1), generator=generator)
    labels = torch.where(torch.arange(16) < lengths, IGNORED, tokens[:, 1:])
    return [{"tokens": row[:-1], "labels": label} for row, label in zip(tokens, labels, strict=True)]


def scale_grads(model, scaler):
    for p in model.parameters():
        if p.grad is not None:
            p.grad *= scaler


class Recipe:
    def setup(self):
        torch.manual_seed(11)
        self._model = Decoder()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-2)
        self._lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self._optimizer, lambda step: min(1.0, (step + 1) / 3))
        self._dataloader = DataLoader(dataset(32), batch_size=4, drop_last=True)
        self._run = composer3d.compose(self._model, Path(__file__).with_name("run.toml"))
        self._run.prepare(self._optimizer, self._lr_scheduler)
        self._dataloader = self._run.prepare(self._dataloader)

    def _loss_step(self, batch):
        logits = self._model(batch["tokens"])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)

    def train(self, epochs):
        losses, running_loss, num_tokens = [], 0, 0
        for _ in range(epochs):
            for idx, batch in enumerate(self._dataloader):
                current_num_tokens = (batch["labels"] != IGNORED).sum()
                num_tokens += current_num_tokens
                current_loss = self._loss_step(batch) * current_num_tokens
                running_loss += self._run.backward(current_loss)
                if (idx + 1) % gradient_accumulation_steps == 0:
                    torch.distributed.all_reduce(num_tokens)
                    scale_grads(self._model, 1 / num_tokens)
                    nn.utils.clip_grad_norm_(self._model.parameters(), max_norm)
                    self._optimizer.step()
                    self._optimizer.zero_grad(set_to_none=True)
                    self._lr_scheduler.step()
                    losses.append((running_loss / num_tokens).item())
                    print(f"step {len(losses)}: loss {losses[-1]:.4f}")
                    running_loss, num_tokens = 0, 0
        return losses


def main(output_dir="out"):
    recipe = Recipe()
    recipe.setup()
    return recipe.train(epochs=2)


if __name__ == "__main__":
    main()
