"""A loop in the form of PyTorch's FSDP2 and tensor parallelism examples."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

vocab_size, dim, num_layers, tp_size, num_iterations = 64, 32, 3, 2, 8


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.w1, self.w2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        return x + self.w2(torch.relu(self.w1(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(FeedForward() for _ in range(num_layers))
        self.output = nn.Linear(dim, vocab_size)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(x) / dim**0.5


def main(output_dir="out"):
    torch.manual_seed(0)
    model = Model()
    device_mesh = init_device_mesh("cpu", (dist.get_world_size() // tp_size, tp_size), mesh_dim_names=("dp", "tp"))
    tp_mesh, dp_mesh = device_mesh["tp"], device_mesh["dp"]
    for layer in model.layers:
        parallelize_module(layer, tp_mesh, {"w1": ColwiseParallel(), "w2": RowwiseParallel()})
        fully_shard(layer, mesh=dp_mesh)
    fully_shard(model, mesh=dp_mesh)
    dp_rank = dp_mesh.get_local_rank()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)

    losses = []
    for i in range(num_iterations):
        generator = torch.Generator().manual_seed(100 * i + dp_rank)
        tokens = torch.randint(vocab_size, (4, 16), generator=generator)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten().sub(1) % vocab_size)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss, op=dist.ReduceOp.SUM)
        losses.append(loss.item() / dist.get_world_size())
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(main())
    dist.destroy_process_group()
