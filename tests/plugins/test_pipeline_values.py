"""Values on meta that a forward reads: those of the order in which it ran, computed once something is read."""

import torch
from composer3d_plugins.scheduling.pipeline.values import Values

from composer3d import torch_compat


def run(function, values):
    """Run a function on meta, with the values of what it makes."""

    def operator(func, types, args, kwargs):
        return values.run(func, args, kwargs)

    with torch.no_grad(), torch_compat.dispatch_mode(operator, compiles=False):
        return function()


def test_what_is_read_has_the_value_that_it_has_then():
    seen, weights = [], torch.empty(3, dtype=torch.int64, device="meta")

    def forward():
        counts = torch.arange(4)
        seen.append(int(counts.sum()))
        view = counts[1:]
        before = counts * 2
        view.add_(10)  # what came before keeps its values
        seen.append([int(each) for each in counts])
        seen.append(int(before.sum()))
        view.copy_(weights)
        seen.append(int(counts[2]))

    unknown = []
    run(forward, Values(unknown.append))
    assert seen == [6, [0, 11, 12, 13], 12, 1]  # of what was overwritten by no one knows what: one
    assert len(unknown) == 1


def test_values_that_nothing_reads_are_not_computed():
    computed = []

    class Counts(Values):
        def _run_beside(self, func, *rest):
            computed.append(func)
            super()._run_beside(func, *rest)

    def forward(reads):
        table = torch.arange(1024).float().cos()
        return bool((table <= 1).all()) if reads else table

    values = Counts()
    assert run(lambda: forward(False), values).is_meta and not computed
    assert run(lambda: forward(True), values) and len(computed) >= 6
