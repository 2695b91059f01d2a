"""One thread a process, torch's lazy modules imported once, and a reason where a GPU test is skipped.

Every worker has a temporary folder of its own, and a test that leaves something in it fails.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

# OpenMP reads it when torch is loaded; ranks are forked from this process, which must not start threads.
os.environ["OMP_NUM_THREADS"] = "1"
# Whether there is a GPU is asked without CUDA's driver: ranks forked from a process that used it could not.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
# Plans are traced: what an earlier version of the code traced is no test of this one.
os.environ["COMPOSER3D_TRACES"] = "off"
# Where nothing may write bytecode, every process that a test starts would compile composer3d anew, 0.9 s each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

import pytest  # noqa: E402
import torch  # noqa: E402
from support.daily_part import header, is_of_day  # noqa: E402
from support.huge_pages import move_into_huge_pages  # noqa: E402
from support.temporary_folders import leaving_nothing, own_temporary_folder  # noqa: E402
from support.tiers import COLLECTED, Collected, is_chosen, read_choice  # noqa: E402
from support.warm_process import compose_once  # noqa: E402

from composer3d.processes.forking import prewarm  # noqa: E402

# What ranks would import anew, each of them; torchao and the like are not among what these import.
PLUGINS = (
    "scheduling.activation_checkpoint.budget",
    "scheduling.pipeline.runtime",
    "scheduling.pipeline.shared_parameters",
    "scheduling.pipeline.split_choice",
    "scheduling.pipeline.stage",
    "sharding.context_parallel.eligibility",
    "sharding.context_parallel.sequence_outputs",
    "sharding.ddp",
    "sharding.expert_parallel.listed_experts",
    "sharding.expert_parallel.stacked_experts",
    "sharding.fsdp2",
    "sharding.tensor_parallel.boundary_calls",
    "sharding.tensor_parallel.plan_sources",
    "sharding.tensor_parallel.styles",
)
# The children of check and verify, and the ranks of a run, would import these.
COMMANDS = (
    "composer3d.checking.called",
    "composer3d.checking.first_forward",
    "composer3d.checking.layout_problems",
    "composer3d.checking.rules",
    "composer3d.checking.sizes",
    "composer3d.composition.compose",
    "composer3d.huggingface.export",
    "composer3d.models",
    "composer3d.planning.hardware.cluster",
    "composer3d.runner.objective.optimizer_arguments",
    "composer3d.runner.objective.optimizer_groups",
    "composer3d.runner.trainer",
    "composer3d.verification.session",
    "rich.progress",
    "torch.distributed.tensor.debug",
)

# Rules over all sources, which one process parses once.
RULES = ("tests/test_architecture.py", "tests/test_docstrings.py")


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from tests that are not about them: a backward in this process would end its forks, and ranks share."""
    if "gpu" not in config.getoption("markexpr").replace("not gpu", ""):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    stack = ExitStack()
    stack.enter_context(own_temporary_folder())
    config.add_cleanup(stack.close)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collect without the garbage collector: the modules of all tests stay, and it would scan them over and over."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _prewarmed() -> Iterator[None]:
    torch.set_num_threads(1)
    prewarm()
    prewarm((*COMMANDS, *(f"composer3d_plugins.{name}" for name in PLUGINS)))
    if not torch.cuda.is_available():  # a backward beside GPUs would end this process' forks
        compose_once()
    gc.collect()
    gc.freeze()  # half a million objects that stay are scanned by no later collection
    move_into_huge_pages()
    with leaving_nothing():
        yield


@pytest.fixture(autouse=True)
def _leaving_nothing() -> Iterator[None]:
    dtype, stance = torch.get_default_dtype(), compiler_stance()
    with leaving_nothing():
        yield
    left_dtype, left_stance = torch.get_default_dtype(), compiler_stance()
    torch.set_default_dtype(dtype)
    if left_stance != stance:
        torch.compiler.set_stance(stance)
    assert left_dtype is dtype, f"the test leaves {left_dtype} as the default dtype, in which later tests would compute"
    assert left_stance == stance, f"the test leaves the compiler in the stance {left_stance!r}, also in later tests"


def compiler_stance() -> str:
    """Return what `torch.compiler.set_stance` set last, which torch reports by no public name."""
    module: Any = sys.modules.get("torch._dynamo.eval_frame")
    return module._stance.stance if module else "default"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device and -m gpu, and torch.cuda.is_available() is False here")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--daily", action="store_true", help="of the slow tests those of the day; see -m slow")


def pytest_report_header(config: pytest.Config) -> str | None:
    return header() if config.getoption("daily") else None


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    choice = read_choice()
    for item in items:
        if is_chosen(choice, item.nodeid):
            item.add_marker(pytest.mark.slow)
    config.stash[COLLECTED] = Collected(items)
    if config.getoption("daily"):
        days = {item for item in items if is_of_day(scope_of(config, item.nodeid))}
        kept = [item for item in items if item in days or not item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept


def scope_of(config: pytest.Config, nodeid: str) -> str:
    """Return what stays together: a file if its tests share a fixture, all that parse every source, else the test."""
    file = nodeid.partition("::")[0]
    if file in RULES:
        return RULES[0]
    return file if file in sharing_files(config.rootpath) else nodeid


@cache
def sharing_files(root: Path) -> frozenset[str]:
    """Return the files whose tests share a fixture."""
    files = (root / "tests").rglob("test_*.py")
    return frozenset(str(path.relative_to(root)) for path in files if 'scope="module"' in path.read_text())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep a file on one worker if its tests share a fixture: two workers would start what it starts twice."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        """Files with fixtures of their own first, as a whole; after them test by test, so that no worker waits."""

        def _split_scope(self, nodeid: str) -> str:
            return scope_of(config, nodeid)

    return Scheduling(config, log)
