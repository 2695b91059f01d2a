"""Observation of torch's bucketed reducer, which works in C++."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

__all__ = ["watch_buckets"]


def watch_buckets(module: Any, span: Callable[..., Any]) -> None:
    """Open spans around the collectives of a module that `replicate_buckets` was given; leave any other as it is.

    The reducer offers one place for Python, its communication hook, which it calls once a bucket. The one that is put
    there issues what the reducer would have, on the same bits. A callback that autograd runs just before the reducer's
    own, in which C++ waits for all buckets, waits for them in its place. The rest is not called through Python: what
    ranks compare and send when the reducer is made, and when it forms its buckets again after the first backward, is
    inside of private functions of two classes (torch 2.11-2.15), around which a span is opened. The first backward of a
    static graph, which the reducer runs as a whole when it has ended, is waited for in there.

    Args:
        module: Before its first forward.
        span: Given a name and attributes, the mesh `axis` among them, opens one: `broadcast` for `weights` and for
            `buckets`; `all_reduce` with the `bytes` where a bucket is issued, `wait` where all are waited for;
            `all_reduce` of `unused` where the reducer brings together which parameters had no gradient.
    """
    name = "torch.distributed._composable.replicate"
    if name not in sys.modules or not isinstance(module, sys.modules[name].DDP):
        return
    state: Any = sys.modules[name].replicate.state(module)
    make = state.lazy_init
    spans = partial(span, axis=state._init_kwargs["device_mesh"].mesh_dim_names[0])

    def lazy_init() -> None:
        # A reducer takes one hook: somebody else's is called inside of the one here.
        given = state._comm_hook_args.pop() if state._comm_hook_args else None
        with spans("broadcast", group="weights"):
            make()
        _watch_reducer(state._ddp, spans, given)

    state.lazy_init = lazy_init


def _watch_reducer(ddp: Any, span: Callable[..., Any], given: Any) -> None:
    import torch

    reduce = _reducing(ddp) if given is None else given[0][1]
    issued: list[Any] = []
    form, num_reductions = ddp._pre_forward, 0
    finds_unused = ddp.find_unused_parameters and not ddp.static_graph
    learning = 2 if ddp.static_graph else 1  # reductions from which the reducer learns the order of gradients

    def wait() -> None:
        nonlocal num_reductions
        num_reductions += 1
        with span("wait", group="buckets", op="all_reduce"):
            for future in issued:
                future.wait()
        issued.clear()
        if finds_unused:  # the next callback is the reducer's, the one after it ends the span
            unused = span("all_reduce", group="unused")
            unused.__enter__()
            engine.queue_callback(lambda: unused.__exit__(None, None, None))

    def hook(given_state: Any, bucket: Any) -> Any:
        # What somebody else's hook sends of a bucket is in spans of its own.
        sent = {"bytes": bucket.buffer().nbytes} if given is None else {}
        with span("all_reduce", group="buckets", bucket=bucket.index(), **sent):
            future = reduce(given_state, bucket)
        issued.append(future)
        if bucket.is_last():
            engine.queue_callback(wait)
        return future

    def pre_forward(*args: Any, **kwargs: Any) -> Any:
        is_due = num_reductions >= learning and not ddp._has_rebuilt_buckets and not finds_unused
        if not (is_due and torch.is_grad_enabled()):
            return form(*args, **kwargs)
        with span("broadcast", group="buckets"):
            return form(*args, **kwargs)

    engine: Any = torch.autograd.Variable._execution_engine
    # The reducer calls a hook with arguments of these names; as strings, annotations would be refused.
    hook.__annotations__ = {}
    ddp.register_comm_hook(None if given is None else given[0][0], hook)
    ddp._pre_forward = pre_forward


def _reducing(ddp: Any) -> Callable[[Any, Any], Any]:
    import torch.distributed as dist

    size = ddp.process_group.size()

    def reduce(_: Any, bucket: Any) -> Any:
        tensor = bucket.buffer()
        tensor.mul_(1.0 / size)  # as the reducer does without a hook, on the way into a bucket
        work = dist.all_reduce(tensor, group=ddp.process_group, async_op=True)

        def reduced(future: Any) -> Any:
            future.value()  # an error is one of the backward
            return tensor

        return work.get_future().then(reduced)

    return reduce
