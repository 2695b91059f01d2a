"""Islands of local SGD that train with plain SGD in float64, and manifests of theirs."""

from __future__ import annotations

import torch

from composer3d import pieces_of
from composer3d.composition.loop.sampling import local_slice
from support.models import composed, full, sum_loss, unpadded

STEPS, LR, ISLANDS = 6, 0.5, 2
PLAIN = "[mesh]\nisland = 2\n"
ALONE = "[mesh]\nisland = 1\n"


def table(method, **options):
    values = "".join(f"{key} = {value}\n" for key, value in options.items())
    return f'[communication.local_sgd]\nmethod = "{method}"\n{values}'


def batches(step, islands=ISLANDS, make=unpadded, samples=None):
    """Return (tokens, targets) of each island, in equal parts or by `samples`."""
    tokens, targets = make(num_sequences=8, seed=step)
    samples = samples or (1,) * islands
    sizes = [len(tokens) * each // sum(samples) for each in samples]
    return list(zip(tokens.split(sizes), targets.split(sizes), strict=True))


def mine(run, step, make=unpadded):
    tokens, targets = make(num_sequences=8, seed=step)
    return (local_slice(tensor, **pieces_of(run.context).slice) for tensor in (tokens, targets))


def trained(text, steps=STEPS, *, make=unpadded, save=None, load=None, first=0, model=None, loss_fn=sum_loss):
    """Return this rank's parameters, in full, after every step."""
    torch.set_default_dtype(torch.float64)
    run = composed(text, model, loss_fn=loss_fn)
    optimizer = run.optimizer(torch.optim.SGD, lr=LR)
    if load is not None:
        run.load(load)
    found = []
    for step in range(first, steps):
        tokens, targets = mine(run, step, make)
        with run.step(step):
            run.forward_backward(tokens, target=targets)
            optimizer.step()
            optimizer.zero_grad()
        found.append({fqn: full(p.detach()).clone() for fqn, p in run.named_parameters()})
        if save is not None and step == save[1]:
            run.save(save[0])
    run.close()
    return found


def equal(one, other):
    return all(torch.equal(tensor, other[fqn]) for fqn, tensor in one.items())


def distance(one, other):
    return max(float((tensor - other[fqn]).abs().max()) for fqn, tensor in one.items())
