"""A training script in the style of nanoGPT, for one device: own schedule, accumulation, evaluation, checkpoints."""

import math
import os

import torch
from torch import nn
from torch.nn import functional as F

n_layer, n_head, n_embd, block_size, vocab_size = 3, 2, 12, 9, 23
batch_size, accumulation, max_iters, eval_interval, eval_iters = 4, 3, 6, 3, 2
learning_rate, min_lr, warmup_iters, weight_decay, grad_clip = 1e-2, 1e-3, 2, 0.1, 0.3


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=False)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (part.view(B, T, n_head, C // n_head).transpose(1, 2) for part in self.c_attn(x).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(n_embd), Attention()
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(vocab_size, n_embd),
                wpe=nn.Embedding(block_size, n_embd),
                h=nn.ModuleList([Block() for _ in range(n_layer)]),
                ln_f=nn.LayerNorm(n_embd),
            )
        )
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * n_layer))

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, idx, targets=None):
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, vocab_size), targets.view(-1), ignore_index=-1)


data = torch.randint(vocab_size, (500,), generator=torch.Generator().manual_seed(5))
draw = torch.Generator().manual_seed(6)


def get_batch(generator):
    ix = torch.randint(len(data) - block_size, (batch_size,), generator=generator)
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


def train(out_dir, iters):
    torch.manual_seed(1)
    model = GPT()
    decay = [p for p in model.parameters() if p.dim() >= 2]
    nodecay = [p for p in model.parameters() if p.dim() < 2]
    optim_groups = [{"params": decay, "weight_decay": weight_decay}, {"params": nodecay, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(optim_groups, lr=learning_rate, betas=(0.9, 0.95))

    iter_num, best_val_loss, curve = 0, 1e9, []
    if os.path.exists(os.path.join(out_dir, "ckpt.pt")):
        checkpoint = torch.load(os.path.join(out_dir, "ckpt.pt"))
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        iter_num, best_val_loss = checkpoint["iter_num"], checkpoint["best_val_loss"]
        draw.set_state(checkpoint["draw"])

    @torch.no_grad()
    def estimate_loss():
        generator = torch.Generator().manual_seed(7)
        model.eval()
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y = get_batch(generator)
            logits, loss = model(X, Y)
            losses[k] = loss.item()
        model.train()
        return losses.mean().item()

    while True:
        for param_group in optimizer.param_groups:
            param_group["lr"] = get_lr(iter_num)
        if iter_num % eval_interval == 0:
            val_loss = estimate_loss()
            curve.append(val_loss)
            best_val_loss = min(best_val_loss, val_loss)
            checkpoint = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "iter_num": iter_num,
                "best_val_loss": best_val_loss,
                "draw": draw.get_state(),
            }
            torch.save(checkpoint, os.path.join(out_dir, "ckpt.pt"))
        if iter_num >= iters:
            break
        for _ in range(accumulation):
            X, Y = get_batch(draw)
            logits, loss = model(X, Y)
            loss = loss / accumulation
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        curve += [loss.item() * accumulation, norm.item()]
        iter_num += 1
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return curve, best_val_loss, weights
