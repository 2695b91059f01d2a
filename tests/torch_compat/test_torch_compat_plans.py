import json
from pathlib import Path

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter

from composer3d import torch_compat


def test_plans_and_results_of_a_save_are_carried_by_json(tmp_path):
    tensors = {"a": torch.randn(3, 2), "b": torch.ones((), dtype=torch.bfloat16, requires_grad=True)}
    planner, writer = DefaultSavePlanner(flatten_state_dict=False), FileSystemWriter(tmp_path)
    planner.set_up_planner(tensors, writer.storage_meta(), True)
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    items = json.loads(json.dumps(torch_compat.checkpoint_plans.plan_items(plan)))
    again = torch_compat.checkpoint_plans.plan_of_items(items)
    assert again.items == plan.items and again.items[0].tensor_data.properties.dtype is torch.float32
    (twice, other), _ = planner.create_global_plan([again, torch_compat.checkpoint_plans.plan_of_items(items)])
    kept = [torch_compat.checkpoint_plans.planned_items(each, items) for each in (twice, other)]
    # What two ranks hold alike is written by one of them.
    assert sorted(number for each in kept for number, _ in each) == [0, 1]
    mine = writer.prepare_global_plan([torch_compat.checkpoint_plans.with_items(plan, kept[0])])[0]
    assert mine.items == twice.items and [each.index.index for each in mine.items] == [hint for _, hint in kept[0]]
    results = writer.write_data(mine, planner).wait()
    found = torch_compat.checkpoint_plans.results_of_items(
        json.loads(json.dumps(torch_compat.checkpoint_plans.write_items(results)))
    )
    assert found == results and {Path(each.storage_data.relative_path).suffix for each in found} == {".distcp"}
