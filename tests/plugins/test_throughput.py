from __future__ import annotations

from functools import partial

import pytest
import torch
from composer3d_plugins.profiling.throughput import _percentile, _Transfers
from support.models import Even, Net, assert_unchanged, composed, padded, seeded
from support.profiled_steps import train

from composer3d import ManifestError
from composer3d.testing import run_ranks

PIPELINE = "[mesh]\npp = 2\n[scheduling.pipeline]\n"
TENSOR = '[mesh]\ntp = 2\n[sharding.tensor_parallel.plan]\n"layers.*.up" = "colwise"\n"layers.*.down" = "rowwise"\n'
FSDP, TABLE = "[sharding.fsdp2]\n", "[profiling.throughput]\npeak_tflops = 0.5\n"
TOKENS = 12 * 5


def multiplying(**options):
    net = Net(**options)
    return sum(p.numel() for p in net.parameters()) - (0 if options.get("tied") else net.tok.weight.numel())


def test_gradients_equal_one_device_and_collectives_stay():
    assert_unchanged(2, FSDP, TABLE + "count_step = 1\n")


@pytest.mark.parametrize(
    ("text", "world_size", "tied"),
    # Copies of a tied weight are counted by both stages that multiply with it.
    [("", 1, False), ("", 1, True), (FSDP, 2, False), (FSDP, 2, True), (PIPELINE, 2, False)],
)
def test_rates_are_of_the_whole_run(text, world_size, tied):
    for rows, _ in run_ranks(partial(train, options={"tied": tied}), world_size, text + TABLE + "window = 1\n"):
        row = rows[-1]
        per_token = row["model_6n_tflops_per_s"] * 1e12 / row["throughput_tokens_per_s"]
        # Ranks end a step at slightly different times.
        assert per_token == pytest.approx(6 * multiplying(tied=tied), rel=0.3 if world_size > 1 else 1e-9)
        assert row["mfu_6n"] == pytest.approx(row["model_6n_tflops_per_s"] / 0.5 / world_size, rel=1e-6)
        # Every rank has its own time of the step; the percentile is the longest.
        slowest = TOKENS / row["step_time_p50_s"]
        assert row["throughput_tokens_per_s"] >= slowest * (1 - 1e-9)
        assert world_size > 1 or row["throughput_tokens_per_s"] == pytest.approx(slowest)


def counted(text):
    rows, _ = train(text, steps=3)
    return [row.get("hardware_counted_tflops_per_s", 0) * 1e12 / row["throughput_tokens_per_s"] for row in rows]


def test_operations_are_counted_in_one_step_with_recomputation():
    """Without attention, what multiplies is counted as 6 a weight; gradients of the first layer's input are not needed.

    Recomputation does the forward of the blocks again: 2 a weight of theirs.
    """
    matrices = sum(p.numel() for name, p in Net().named_parameters() if p.ndim == 2 and name != "tok.weight")
    (before, exact, after) = run_ranks(counted, 1, TABLE)[0]
    assert before == 0 and exact == pytest.approx(after) == pytest.approx(6 * matrices)
    blocks = sum(p.numel() for name, p in Net().named_parameters() if p.ndim == 2 and name.startswith("layers"))
    (_, again, _) = run_ranks(counted, 1, TABLE + "[scheduling.activation_checkpoint]\n")[0]
    assert again > exact and again <= 6 * matrices + 2 * blocks + 1e-6


class Attending(Net):
    """With attention over the positions, of one head, before the blocks."""

    def forward(self, tokens):
        heads = self.tok(tokens)[:, None]
        x = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)[:, 0]
        for layer in self.layers:
            x = layer(x)
        return self.out(self.norm(x)) + 0.0


def bits(more):
    run = composed(more, seeded(Attending, dim=8))
    optimizer = run.optimizer(torch.optim.SGD, lr=0.5)
    tokens, targets = padded()
    for number in range(3):
        with run.step(number):
            run.forward_backward(tokens, target=targets)
            optimizer.step()
            optimizer.zero_grad()
        figures = run.report(number, {"step_time_s": 1.0})
    weights = [parameter.detach().clone() for _, parameter in run.named_parameters()]
    run.close()
    return weights, figures


def test_counting_changes_no_bit_and_knows_attention():
    """Attention over L positions of dim d takes 4 L d operations a token forward, and 2.5 times that backward, for the
    kernel computes its scores again.
    """
    ((expected, _), (weights, figures)) = run_ranks(lambda: (bits(""), bits(TABLE)), 1)[0]
    assert all(torch.equal(one, other) for one, other in zip(weights, expected, strict=True))
    matrices = sum(p.numel() for name, p in Net(dim=8).named_parameters() if p.ndim == 2 and name != "tok.weight")
    per_token = figures["hardware_counted_tflops_per_s"] * 1e12 / figures["throughput_tokens_per_s"]
    assert per_token == pytest.approx(6 * matrices + 3.5 * 4 * 5 * 8)


def test_a_cut_product_is_counted_by_its_parts():
    """Each of two ranks multiplies half of what is cut, and the whole of what is not."""
    cut, whole = 6 * 4 * 2 * 7 * 16, 6 * 7 * 11
    for rows, _ in run_ranks(partial(train, options={"factory": Even}), 2, TENSOR + TABLE):
        per_token = rows[-1]["hardware_counted_tflops_per_s"] * 1e12 / rows[-1]["throughput_tokens_per_s"]
        # Ranks end a step at slightly different times; the whole of all on both ranks would be twice as much.
        assert per_token == pytest.approx(cut + 2 * whole, rel=0.3)


def test_bandwidth_of_every_axis():
    text = "[mesh]\ndp_replicate = 2\n" + FSDP + TABLE
    for rows, _ in run_ranks(train, 4, text):
        names = {name for name in rows[-1] if name.startswith("collective")}
        assert names == {"collective_gib_per_s_dp_replicate", "collective_gib_per_s_dp_shard"}
        assert rows[-1]["collective_gib_per_s_dp_shard"] > 0


def test_bandwidth_inside_operators_and_none_of_messages():
    (rows, _), _ = run_ranks(partial(train, options={"factory": Even}), 2, TENSOR + TABLE)
    assert {name for name in rows[-1] if name.startswith("collective")} == {"collective_gib_per_s_tp"}
    assert 0 < rows[-1]["collective_gib_per_s_tp"] < 100
    (rows, _), _ = run_ranks(partial(train, options={"num_layers": 4}), 2, PIPELINE + TABLE)
    assert not [name for name in rows[-1] if name.startswith("collective")]


class Mark:
    """A mark in the stream of a device that is behind the host: it has come to marks when it is told."""

    now_ms, reached = 0.0, 0.0

    def record(self):
        self.at = Mark.now_ms

    def query(self):
        return self.at <= Mark.reached

    def elapsed_time(self, later):
        assert self.query() and later.query(), "torch would wait, or refuse"
        return later.at - self.at


def test_bandwidth_on_a_device_is_of_what_it_has_done():
    transfers = _Transfers(Mark)
    for axis, num_bytes, milliseconds in (("tp", 2**20, 1.0), ("dp_shard", 2**30, 500.0), ("tp", 2**20, 3.0)):
        begin = transfers.mark()
        Mark.now_ms += milliseconds
        transfers.add(axis, num_bytes, begin)
    assert transfers.gib_per_s() == {}
    Mark.reached = 501.0
    assert transfers.gib_per_s() == pytest.approx({"tp": 1 / 1.024, "dp_shard": 2.0})
    assert transfers.gib_per_s() == pytest.approx({"tp": 1 / 1.024, "dp_shard": 2.0})  # nothing new is known
    Mark.reached = 504.0
    assert transfers.gib_per_s() == pytest.approx({"tp": 1 / 3.072, "dp_shard": 2.0})


def copied():
    transfers = _Transfers(lambda: torch.cuda.Event(enable_timing=True))
    source = torch.ones(2**28, dtype=torch.uint8, device="cuda")
    source.clone()
    begin = transfers.mark()
    source.clone()
    transfers.add("tp", source.nbytes, begin)
    torch.cuda.synchronize()
    return transfers.gib_per_s()["tp"]


@pytest.mark.gpu
def test_a_gpus_marks_are_read():
    """A quarter of a GiB is read and written; no memory does that within 10 microseconds, none takes a second."""
    assert 0.25 < run_ranks(copied, 1)[0] < 25_000


def test_percentiles():
    values = [float(n) for n in range(1, 101)]
    assert [_percentile(values, percent) for percent in (50, 95, 99)] == [50.0, 95.0, 99.0]
    assert _percentile([3.0], 99) == 3.0
    rows, _ = run_ranks(partial(train, steps=5), 1, "[profiling.throughput]\nwindow = 2\ncount_step = 0\n")[0]
    assert rows[-1]["step_time_p50_s"] <= rows[-1]["step_time_p95_s"] and "mfu_6n" not in rows[-1]


def test_refuses_a_peak_that_nothing_reaches():
    with pytest.raises(ManifestError) as caught:
        composed("[profiling.throughput]\npeak_tflops = 0.0\n")
    said = "profiling.throughput.peak_tflops must be greater than 0.0, not 0.0"
    assert str(caught.value).partition("run.toml")[2] == f":3:1: [profiling.throughput] {said}"


def counted_while_compiled():
    run = composed('[profiling.throughput]\ncount_step = 2\n[scheduling.compile]\nbackend = "eager"\n')
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    tokens, targets = padded()
    for number in range(3):
        with run.step(number):
            run.forward_backward(tokens, target=targets)
            optimizer.step()
        figures = run.report(number, {"step_time_s": 1.0})
    run.close()
    return figures


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_operations_are_counted_where_blocks_are_compiled():
    (figures,) = run_ranks(counted_while_compiled, 1)
    assert figures["hardware_counted_tflops_per_s"] > 0
