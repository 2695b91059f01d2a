"""A training script in the shape of Lightning Fabric's, for one device: BatchNorm, momentum, a scheduler, a resume."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

accumulate, epochs = 3, 2


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 5, 3, bias=False)
        self.norm = nn.GroupNorm(1, 5)
        self.blocks = nn.ModuleList(nn.Linear(5 * 16, 5 * 16) for _ in range(2))
        self.head = nn.Linear(5 * 16, 7)

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x))).flatten(1)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


def images(seed, num):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(num, 1, 6, 6, generator=generator), torch.randint(7, (num,), generator=generator))


def train(out_dir):
    torch.manual_seed(1)
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    train_loader = DataLoader(images(2, 28), batch_size=4)
    test_loader = DataLoader(images(3, 8), batch_size=8)
    curve = []
    for epoch in range(epochs):
        model.train()
        for batch_idx, (data, target) in enumerate(train_loader):
            is_accumulating = (batch_idx + 1) % accumulate != 0
            loss = F.cross_entropy(model(data), target, label_smoothing=0.1)
            loss.backward()
            if not is_accumulating:
                for parameter in model.parameters():
                    parameter.grad /= accumulate  # what Fabric's examples leave out
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
        optimizer.zero_grad()  # what is left of an epoch is not used
        scheduler.step()
        model.eval()
        with torch.no_grad():
            for data, target in test_loader:
                output = model(data)
                test_loss = F.cross_entropy(output, target)
                correct = (output.argmax(1) == target).sum()
        curve += [test_loss.item(), correct.item()]
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, f"{out_dir}/{epoch}.pt")
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return curve, scheduler.get_last_lr(), weights
