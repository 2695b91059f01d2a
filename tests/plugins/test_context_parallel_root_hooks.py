"""Context parallelism: forward hooks of the whole model are given whole sequences, as on one device."""

from __future__ import annotations

import pytest
import torch
from support.models import write_manifest
from support.root_hooks import HOOKS, Model, errors, loss_of

import composer3d
from composer3d.errors import BatchError
from composer3d.testing import run_ranks

TIGHT = 1e-12
FSDP = "mesh.cp = 2\n[sharding.context_parallel]\n[sharding.fsdp2]\n"
PADDED = (
    "a sequence of 7 tokens does not divide into 4 equal chunks, as context_parallel needs, and is not padded, since "
    "the model's own code (__getitem__) sees padding as it sees tokens; use 4 or 8"
)
SEVERAL = ["several", "gradient", "body"]
# The other one keeps what the loss of a loop reads.
ENGINE = [name for name in HOOKS if name != "kept"]


def found(names: list[str], text: str, late: bool, loop: bool) -> dict[str, float]:
    return errors(names, text, late=late, loop=loop)


def assert_one_devices(world_size: int, names: list[str], text: str, *, late: bool = False, loop: bool = False) -> None:
    for each in run_ranks(found, world_size, names, text, late, loop):
        assert not {name: error for name, error in each.items() if not error < TIGHT}


def test_they_relate_positions_as_on_one_device():
    assert_one_devices(2, ENGINE, FSDP)


def test_they_do_in_a_loop_and_where_they_are_registered_on_the_composed_model():
    assert_one_devices(2, list(HOOKS), FSDP, late=True, loop=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "tables"),
    [
        pytest.param(4, f"mesh.tp = 2\n{FSDP}[sharding.tensor_parallel]\nsequence_parallel = true\n", id="tp"),
        pytest.param(4, f"mesh.pp = 2\ntrain.microbatch = 1\n{FSDP}[scheduling.pipeline]\n", id="stages"),
        pytest.param(4, f"mesh.dp_shard = 2\n{FSDP}", id="samples"),
        pytest.param(2, f"train.microbatch = 1\n{FSDP}[scheduling.activation_checkpoint]\n", id="recomputed"),
        pytest.param(2, f"{FSDP}[scheduling.compile]\nbackend = 'aot_eager'\n", id="compiled"),
        pytest.param(2, FSDP.replace("[sharding.fsdp2]", "[sharding.ddp]"), id="ddp"),
    ],
)
def test_they_do_beside_other_plugins(world_size: int, tables: str):
    assert_one_devices(world_size, SEVERAL, tables)


def uneven() -> tuple[list[str], int]:
    """Return what is said of lengths that are not padded, in a loop, and the modes that stay behind it."""
    x, said = torch.zeros(2, 8, dtype=torch.int64), []
    for name in ("output", "input"):
        model = Model()
        HOOKS[name](model)
        run = composer3d.compose(model, write_manifest(FSDP), loss_fn=loss_of, example=((x,), {}))
        try:
            with run.step(0):
                run.model(x[:, :7])
        except BatchError as error:
            said.append(str(error))
        finally:
            run.close()
    return said, len(torch.overrides._get_current_function_mode_stack())


def test_lengths_are_not_padded_where_they_see_padding_and_no_mode_stays_behind():
    for said, num_modes in run_ranks(uneven, 2):
        assert said == [PADDED, PADDED]
        assert num_modes == 0
