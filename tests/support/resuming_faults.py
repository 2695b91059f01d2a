"""What is restored wrongly, or rests on what no checkpoint has."""

from __future__ import annotations

import contextlib

import torch

from composer3d import StepAction, StepPoint, hookimpl, plugin
from support.composition_faults import Mlp


class Restoring(torch.optim.AdamW):
    """Restores the requested state, except for a fault."""

    fault = ""

    @contextlib.contextmanager
    def plain_state(self, *, write):
        yield
        states = [state for state in self.state.values() if "exp_avg" in state]
        if write and self.fault == "another":
            alike = [state for state in states if state["exp_avg"].shape == states[2]["exp_avg"].shape]
            alike[0]["exp_avg"], alike[1]["exp_avg"] = alike[1]["exp_avg"], alike[0]["exp_avg"]
        elif write and self.fault == "dropped":
            for state in states[:1]:
                state["exp_avg_sq"].zero_()
        elif write and self.fault == "stale":
            for state in states[:1]:
                state["step"] -= 1
        elif write and self.fault == "scaled":
            for state in states[:1]:
                state["exp_avg"].mul_(2.0)


def restoring(fault):
    kind = type("Restoring", (Restoring,), {"fault": fault})
    return lambda run: run.optimizer(kind, lr=1e-3)


class Hidden(torch.optim.Optimizer):
    """Momentum in an attribute, which no checkpoint has."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})
        self.momentum = {}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    past = self.momentum.setdefault(parameter, torch.zeros_like(parameter))
                    past.mul_(0.9).add_(parameter.grad)
                    parameter.sub_(group["lr"] * past)


def hidden(run):
    return run.optimizer(Hidden)


class Forgetful:
    """Momentum of gradients that is saved, and not taken back."""

    def __init__(self):
        self.past = torch.zeros(1)

    def state_dict(self):
        return {"past": self.past}

    def load_state_dict(self, state):
        self.past = torch.zeros(1)


class Late:
    """Weights of the first step, which its first step makes."""

    def __init__(self):
        self.slow = {}

    def state_dict(self):
        return dict(self.slow)

    def load_state_dict(self, state):
        self.slow = dict(state)


@plugin(family="communication")
class Slow:
    """Keep the weights of the first step."""

    @hookimpl
    def composer3d_step_actions(self, context):
        def keep(state):
            slow = context.state[self].slow
            for part in context.parts:
                for fqn, parameter in part.module.named_parameters():
                    slow.setdefault(fqn, parameter.detach().clone())

        return StepAction(name="slow", point=StepPoint.GRADIENTS_REDUCED, run=keep)

    @hookimpl
    def composer3d_state(self, context):
        return {"slow": context.state.setdefault(self, Late())}


@plugin(family="communication")
class Momentum:
    """Count steps in a state that loads wrongly."""

    @hookimpl
    def composer3d_step_actions(self, context):
        def add(state):
            context.state[self].past.add_(1.0)

        return StepAction(name="momentum", point=StepPoint.GRADIENTS_REDUCED, run=add)

    @hookimpl
    def composer3d_state(self, context):
        return {"momentum": context.state.setdefault(self, Forgetful())}


class OwnDraws(Mlp):
    """Drops with a generator of its own, whose state is in no checkpoint."""

    def __init__(self, dim):
        super().__init__(dim)
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x):
        return super().forward(x) * (torch.rand(1, generator=self.generator).to(x) + 0.5)


class Remembering(Mlp):
    """Grows with what it has seen, in a buffer that is not saved."""

    def __init__(self, dim):
        super().__init__(dim)
        self.register_buffer("seen", torch.zeros(1), persistent=False)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.seen.add_(1.0)
        return super().forward(x) * (1.0 + 0.1 * self.seen)


class Rising:
    """A rate that counts its own calls, and forgets them."""

    def __init__(self, optimizer):
        self.optimizer, self.calls = optimizer, 0

    def apply(self, step):
        self.calls += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-3 * self.calls
        return 1e-3 * self.calls

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass
