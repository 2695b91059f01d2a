from __future__ import annotations

from typing import Literal

from pydantic import Field

from composer3d import plugin
from composer3d.registry import Catalogue
from composer3d.testing import Refused, combine, installed_options, owners_of
from composer3d.testing.combining import explain, uncovered
from composer3d.testing.plugin_options import tables_of


@plugin(family="communication", owns=("cp",))
class Stranger:
    """A plugin of somebody else's."""

    mode: Literal["a", "b"] = "a"
    fast: bool = False
    depth: int = Field(default=2, ge=1, le=4)
    name: str = Field(default="x", examples=["y"])
    secret: bool = Field(default=False, examples=[])
    where: str | None = None


def test_options_of_a_third_party_plugin_are_read_from_its_fields():
    options = installed_options(Catalogue(()), used={"stranger": Stranger})
    assert options == {
        "mesh.cp": ("1", "2", "4"),
        "communication.stranger": ("off", "on"),
        "communication.stranger.mode": ("off", "default", '"b"'),
        "communication.stranger.fast": ("off", "default", "true"),
        "communication.stranger.depth": ("off", "default", "1", "4"),
        "communication.stranger.name": ("off", "default", '"y"'),
    }


def test_every_installed_plugin_and_owned_axis_is_there():
    options, catalogue = installed_options(), Catalogue.installed()
    assert {key.split(".")[1] for key in options if not key.startswith("mesh.")} == set(catalogue.names())
    assert owners_of(options)["mesh.dp_replicate"] == ("sharding.ddp", "sharding.fsdp2")


def test_a_row_is_a_manifest():
    row = {"mesh.tp": "2", "sharding.a": "on", "sharding.a.x": "3", "sharding.a.y": "default", "sharding.b": "off"}
    assert tables_of(row) == "mesh.tp = 2\nsharding.a = { x = 3 }"


OPTIONS = {
    "mesh.tp": ("1", "2", "4"),
    "mesh.pp": ("1", "2", "4"),
    "sharding.tensor": ("off", "on"),
    "sharding.tensor.sequence": ("off", "default", "true"),
    "scheduling.stages": ("off", "on"),
    "scheduling.stages.schedule": ("off", "default", '"zb"', '"v"'),
    "scheduling.compile": ("off", "on"),
    "train.accumulation": ("1", "2", "8"),
}
OWNERS = {"mesh.tp": ("sharding.tensor",), "mesh.pp": ("scheduling.stages",)}


def check(row):
    reasons = []
    if row["scheduling.stages.schedule"] == '"zb"' and row["scheduling.compile"] == "on":
        reasons.append("halves")
    # Whatever the schedule, so that only all of its values together show what is refused.
    if row["scheduling.stages"] == "on" and int(row["train.accumulation"]) < int(row["mesh.pp"]):
        reasons.append(f"few {row['scheduling.stages.schedule']}")
    if row["sharding.tensor.sequence"] == "true" and row["mesh.tp"] == "1":
        reasons.append("nothing to cut")
    return reasons


def test_refusals_are_found_with_what_is_to_blame_and_hide_no_other_pair():
    made = combine(OPTIONS, check=check, owners=OWNERS)
    assert not any(check(row) for row in made.rows)
    assert all(int(row["mesh.tp"]) * int(row["mesh.pp"]) <= 8 for row in made.rows)
    by_reason = {}
    for refusal in made.refused:
        by_reason.setdefault(refusal.reason, []).append(dict(refusal.choices))
    assert by_reason["halves"] == [
        {"scheduling.stages.schedule": '"zb"', "scheduling.compile": "on"},
    ]
    assert by_reason["nothing to cut"] == [{"sharding.tensor.sequence": "true", "mesh.tp": "1"}]
    left = {frozenset(pair) for pair in uncovered(OPTIONS, made.rows)}
    wanted = {
        frozenset([("mesh.tp", "4"), ("mesh.pp", "4")]),
        frozenset([("scheduling.stages.schedule", '"zb"'), ("scheduling.compile", "on")]),
        frozenset([("sharding.tensor.sequence", "true"), ("mesh.tp", "1")]),
        *(frozenset([("mesh.pp", pp), ("train.accumulation", "1")]) for pp in ("2", "4")),
        frozenset([("mesh.pp", "4"), ("train.accumulation", "2")]),
    }
    assert wanted <= left
    # What is left besides cannot be for what a plugin is or owns.
    plugins = {"sharding.tensor", "scheduling.stages"}
    for pair in left - wanted:
        (one, first), (other, second) = sorted(pair)
        keys = {one, other, one.rpartition(".")[0], other.rpartition(".")[0]}
        assert keys & (plugins | {"mesh.tp", "mesh.pp"}) and ("off" in (first, second))


def test_what_is_known_is_not_looked_for_again():
    asked = []

    def counted(row):
        asked.append(row)
        return check(row)

    made = combine(OPTIONS, check=check, owners=OWNERS)
    again = combine(OPTIONS, check=counted, owners=OWNERS, known=made.refused)
    assert again == made and len(asked) == len(made.rows)
    assert isinstance(made.refused[0], Refused)


def test_rows_that_were_made_before_stay_as_long_as_they_can():
    made = combine(OPTIONS, check=check, owners=OWNERS)
    more = {**OPTIONS, "train.clip": ("no", "yes")}
    before = [{**row, "train.clip": "no"} for row in made.rows]
    spoilt = [{**before[0], "scheduling.stages.schedule": '"zb"', "scheduling.compile": "on"}, {"mesh.tp": "1"}]
    again = combine(more, check=check, owners=OWNERS, known=made.refused, begin=[*spoilt, *before])
    assert all(row in again.rows for row in before) and len(again.rows) > len(before)
    assert not any(check(row) for row in again.rows)
    # What the rows that stay do not cover is covered by the others.
    alone = combine(more, check=check, owners=OWNERS, known=made.refused)
    assert uncovered(more, again.rows) == uncovered(more, alone.rows)


def test_of_a_row_that_is_refused_now_all_stays_but_an_option():
    known = combine(OPTIONS, check=check, owners=OWNERS).refused
    refused = {key: values[0] for key, values in OPTIONS.items()}
    refused |= {"scheduling.stages": "on", "scheduling.stages.schedule": '"zb"', "scheduling.compile": "on"}
    refused |= {"mesh.pp": "2", "train.accumulation": "2"}
    assert check(refused)
    rows = combine(OPTIONS, check=check, owners=OWNERS, known=known, begin=[refused]).rows
    assert rows[0] == {**refused, "scheduling.stages.schedule": "default"}


def test_a_reason_that_another_one_hides_blames_nothing_for_it():
    def one_at_a_time(row):
        # Compiled stages are refused before anybody looks at the accumulation.
        if row["scheduling.compile"] == "on" and row["scheduling.stages"] == "on":
            return ["compiled"]
        return ["many"] if row["scheduling.stages"] == "on" and row["train.accumulation"] == "8" else []

    row = {key: values[0] for key, values in OPTIONS.items()}
    row |= {"scheduling.stages": "on", "scheduling.stages.schedule": '"v"', "train.accumulation": "8"}
    found = explain(row, "many", OPTIONS, one_at_a_time, OWNERS)
    assert dict(found.choices) == {"scheduling.stages": "on", "train.accumulation": "8"}


def test_an_axis_that_its_owner_needs_is_not_to_blame():
    def one_at_a_time(row):
        if row["sharding.tensor"] == "on" and row["mesh.tp"] == "1":
            return ["nobody to share with"]
        return ["many"] if row["train.accumulation"] == "8" else []

    # Half of the keys never hold the axis and its owner, without what is to blame.
    options = {"sharding.tensor": ("off", "on"), "train.accumulation": ("1", "8"), "mesh.tp": ("1", "2")}
    row = {"sharding.tensor": "on", "train.accumulation": "8", "mesh.tp": "2"}
    found = explain(row, "many", options, one_at_a_time, {"mesh.tp": ("sharding.tensor",)})
    assert dict(found.choices) == {"train.accumulation": "8"}
