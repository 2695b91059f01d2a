"""Methods of attention over a sharded sequence, and what a model must have for each."""

from __future__ import annotations

from enum import StrEnum

from composer3d import Role, RunContext

__all__ = ["Method", "head_repeats", "heads_over", "inner_degrees", "unfit"]


class Method(StrEnum):
    """Methods by which the queries of one rank attend to the keys of the others.

    `auto` chooses by bytes; `gather` all-gathers keys and values, and again in the backward, `gather_once` keeps them;
    `ring` passes them around while blocks are computed; `ulysses` exchanges positions for heads; `usp` does both, in
    groups; `universal` all-gathers and runs torch's function on the rank's rows, with biases that have gradients and
    dropout.
    """

    AUTO = "auto"
    GATHER = "gather"
    GATHER_ONCE = "gather_once"
    RING = "ring"
    ULYSSES = "ulysses"
    USP = "usp"
    UNIVERSAL = "universal"


def head_repeats(num_heads: int, num_kv_heads: int, degree: int) -> int:
    """Return how often each key head is repeated so that a degree divides them: the fewest times that do."""
    groups = num_heads // num_kv_heads
    return next((n for n in range(1, groups + 1) if groups % n == 0 and num_kv_heads * n % degree == 0), groups)


def inner_degrees(num_heads: int, degree: int) -> list[int]:
    """Return the inner degrees of usp that heads and ranks allow, the largest first."""
    return [n for n in range(degree - 1, 1, -1) if degree % n == 0 and num_heads % n == 0]


def unfit(
    method: Method, *, num_heads: int, degree: int, inner_degree: int | None = None, needs_autograd: str = ""
) -> str | None:
    """Return why a method cannot compute an attention, with what to write instead; None where it can.

    Args:
        method: As stated or chosen, not "auto".
        num_heads: Heads of queries on a rank, after tensor parallelism.
        degree: Ranks that share the sequence.
        inner_degree: Of usp, where it is given.
        needs_autograd: What has to be computed by torch's own function: `dropout`, `a bias with a gradient`.
    """
    if needs_autograd and method in (Method.GATHER, Method.GATHER_ONCE, Method.RING, Method.USP):
        return (
            f'method = "{method}" computes blocks with kernels that take no {needs_autograd.removeprefix("a ")}; '
            'write method = "universal", or "ulysses" where the degree divides the heads'
        )
    if method is Method.ULYSSES and num_heads % degree:
        inner = inner_degrees(num_heads, degree)
        instead = f'"usp" with inner_degree = {inner[0]}' if inner else '"gather" or "ring"'
        return (
            f'method = "ulysses" gives each of {degree} ranks the same number of heads, and there are {num_heads}; '
            f"write method = {instead}"
        )
    if method is Method.USP:
        possible = inner_degrees(num_heads, degree)
        if not possible:
            return (
                f'method = "usp" needs a divisor of cp = {degree}, other than 1 and {degree}, that divides the '
                f'{num_heads} heads, and there is none; write method = "gather" or "ring"'
            )
        if inner_degree is not None and inner_degree not in possible:
            names = ", ".join(map(str, possible))
            return f"inner_degree = {inner_degree} is not one of {names}, which divide cp and heads"
    return None


def heads_over(context: RunContext, num_heads: int) -> int:
    """Return over how many ranks tensor parallelism divides heads, if they divide.

    Args:
        context: Of the run.
        num_heads: Of the whole model.
    """
    degrees = [context.degrees[axis] for axis in context.layout.names(Role.TENSOR)]
    return next((degree for degree in degrees if degree > 1 and num_heads % degree == 0), 1)
