"""Jobs of groups of ranks that come and go: a machine that is lost does not end the others, and is started again."""

from __future__ import annotations

import ast
import os
import subprocess

import kubernetes_validate
import pytest
import yaml

import composer3d
from composer3d.errors import ComposerError
from composer3d.jobs.group_kubernetes import group_kubernetes_objects
from composer3d.jobs.group_ray import group_ray_driver
from composer3d.jobs.group_slurm import group_slurm_script
from composer3d.jobs.group_ssh import group_ssh_script
from composer3d.jobs.request import JobRequest

KUBERNETES = "1.33"
MANIFEST = """\
composer3d = 1
extends = "quickstart"
run.output = "out put"
mesh.replica = {}
mesh.dp_shard = 1
[communication.replicas]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "My run.toml").write_text(MANIFEST.format(2))
    return tmp_path


def asked(**options):
    """Return a request as `launch` makes it of the manifest, without its check and plan."""
    stated = {"nodes": 2, "gpus_per_node": 2, "uses_gpus": True, "output": "out put", "grace_s": 45.0}
    stated |= {"max_restarts": 1, "name": "my-run", "has_groups": True}
    return JobRequest(manifest="My run.toml", **(stated | options))


def test_a_node_of_slurm_may_be_lost(folder):
    text = group_slurm_script(asked())
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    lines = text.splitlines()
    assert [line for line in lines if line.startswith("#SBATCH")] == [
        "#SBATCH --job-name=my-run",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --gpus-per-node=2",
        "#SBATCH --signal=B:USR1@105",  # grace_s and a minute
        "#SBATCH --output=my-run-%j.out",
        "#SBATCH --open-mode=append",
        "#SBATCH --no-kill",
        "#SBATCH --requeue",
    ]
    assert "--no-kill --kill-on-bad-exit=0" in text
    command = next(line for line in lines if "composer3d run" in line)
    assert f"-m composer3d run '{folder}/My run.toml' --nproc-per-node 2 --nodes 2 --node-rank \"$1\"" in command


# ---- ssh -------------------------------------------------------------------------------------------------------------

# Each start of a machine does what the file `how-K` says next: is killed, ends with a code, waits until another one has
# come `again`, is there until it is told to end, since it came too `late` for the run, or is killed `together` with the
# other one; then none is started again before the loss of all is noted.
REMOTE = {
    "ssh": '#!/bin/bash\necho "$*" >>argv\nexec env --default-signal=TERM bash -c "${!#}"\n',
    "sleep": """\
#!/bin/bash
until [ "$(cat 'out put/logs/'.losses-* 2>/dev/null | wc -l)" -ge $(($(wc -l <met) / 2)) ]; do
  read -rt 0.1 <>again
done
""",
    "python3": """\
#!/bin/bash
echo "$*" >>argv
line="$*"
node="${line##*--node-rank }" && node=${node%% *}
echo "$COMPOSER3D_QUORUM_TOKEN" >>secrets
stat --format=%a 'out put/logs/'.secret-* >mode
how=$(head -n 1 "how-$node") && sed -i 1d "how-$node"
case $how in
  killed) kill -9 $$ ;;
  together)
    echo >>met
    while [ $(($(wc -l <met) % 2)) = 1 ]; do read -rt 0.1 <>again; done
    kill -9 $$ ;;
  wait) read -r <again && exit 0 ;;
  again) echo >again && exit 0 ;;
  late)
    trap 'exit 75' TERM
    while :; do read -rt 0.1 <>again; done ;;
  *) exit "$how" ;;
esac
""",
}


@pytest.mark.parametrize(
    ("starts", "code", "again"),
    [
        ((["wait"], ["killed", "again"]), 0, ["machine 1"]),
        ((["killed", "again"], ["wait"]), 0, ["machine 0"]),
        ((["75", "again"], ["wait"]), 0, ["machine 0"]),
        ((["3"], ["3"]), 3, []),
        ((["0"], ["late"]), 0, []),
        ((["together", "0"], ["together", "0"]), 0, ["machine 0", "machine 1"]),
        ((["together"] * 9, ["together"] * 9), 137, ["machine 0", "machine 1"]),
    ],
    ids=["another", "first", "left", "failed", "late", "all", "all, twice"],
)
def test_an_ssh_job_starts_again_what_is_lost_and_nothing_that_has_failed(folder, starts, code, again, monkeypatch):
    (folder / "bin").mkdir()
    for name, text in REMOTE.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    for node, each in enumerate(starts):
        (folder / f"how-{node}").write_text("\n".join(each) + "\n")
    os.mkfifo(folder / "again")
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    (folder / "met").touch()
    script = group_ssh_script(asked(hosts=("alice@node1", "fd00::5")))
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    told = {line.partition(" (")[0] for line in done.stderr.splitlines() if "is lost" in line}
    assert told == set(again)
    (secret,) = set((folder / "secrets").read_text().split())
    argv = (folder / "argv").read_text()
    assert len(secret) == 32 and secret not in argv
    started = [line for line in argv.splitlines() if line.startswith("-m composer3d run")]
    assert all(line.endswith("--endpoint node1:29400,[fd00::5]:29400") for line in started)
    assert (folder / "mode").read_text() == "600\n"
    assert not [path.name for path in (folder / "out put" / "logs").iterdir() if path.name.startswith(".")]


# ---- Kubernetes ------------------------------------------------------------------------------------------------------


GETENT = "echo $2 >>asked; head -n 1 answers | sed 's/$/ STREAM/'; sed -i 1d answers"


def pods(**options):
    """Return the objects by kind, and the specification of the set's job, validated."""
    found = {document["kind"]: document for document in yaml.safe_load_all(group_kubernetes_objects(asked(**options)))}
    for kind in ("ConfigMap", "Secret", "Service"):
        kubernetes_validate.validate(found[kind], KUBERNETES, strict=True)
    (replicated,) = found["JobSet"]["spec"]["replicatedJobs"]
    assert replicated["name"] == "machine"
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": replicated["template"]["spec"]}
    kubernetes_validate.validate(job, KUBERNETES, strict=True)
    return found, job["spec"]


def test_a_lost_pod_comes_back_under_its_number_and_none_is_special(folder):
    found, spec = pods(nodes=3)
    assert sorted(found) == ["ConfigMap", "JobSet", "Secret", "Service"]
    assert set(found["JobSet"]["spec"]) == {"network", "failurePolicy", "replicatedJobs"}
    assert (spec["parallelism"], spec["completions"], spec["backoffLimit"]) == (3, 3, 10_000)
    assert spec["successPolicy"] == {"rules": [{"succeededCount": 1}]}  # no machine ends with 0 before the run
    ignored = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    final = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2, 3]}}
    assert spec["podFailurePolicy"]["rules"] == [ignored, final]
    pod = spec["template"]["spec"]
    # Values without an enumeration in the schema.
    assert (spec["completionMode"], pod["restartPolicy"]) == ("Indexed", "Never")
    assert pod["terminationGracePeriodSeconds"] == 105


@pytest.mark.parametrize(
    ("index", "address", "resolved"),
    [(0, "10.1.2.3", "10.1.9.9 10.1.2.3"), (1, "fd00::5", "fd00::5"), (3, "10.1.2.6", "")],
    ids=["of an earlier pod", "IPv6", "not listed"],
)
def test_a_pod_is_started_as_its_machine_once_its_name_stands_for_it(folder, index, address, resolved):
    _, spec = pods(nodes=4)
    (container,) = spec["template"]["spec"]["containers"]
    (folder / "answers").write_text("\n".join(resolved.split()) + "\n")
    programs = {"python3": 'echo "$*"', "sleep": "", "getent": GETENT}
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    environment = {"ADDRESS": address, "JOB_COMPLETION_INDEX": str(index), "PATH": f"{folder}:{os.environ['PATH']}"}
    said = subprocess.run(container["command"], env=environment, capture_output=True, text=True, check=True).stdout
    asked = folder / "asked"
    names = [f"my-run-machine-0-{each}.my-run" for each in range(3)]
    assert (asked.read_text().split() if asked.exists() else []) == names[index : index + 1] * len(resolved.split())
    sizes = "-m composer3d run /etc/composer3d/run.toml --nproc-per-node 2 --nodes 4"
    endpoints = ",".join(f"{name}:29400" for name in names)
    place = f"--set run.output=/output/my-run --endpoint {endpoints} --node-rank {index}"
    assert said == f"{sizes} {place}\n"


def test_a_secret_of_pods_is_no_word_of_a_command_and_new_each_time(folder):
    found, spec = pods()
    token = found["Secret"]["stringData"]["token"]
    assert len(token) == 32 and token != pods()[0]["Secret"]["stringData"]["token"]
    (container,) = spec["template"]["spec"]["containers"]
    assert token not in str(container)
    reference = {"secretKeyRef": {"name": "my-run", "key": "token"}}
    assert {"name": "COMPOSER3D_QUORUM_TOKEN", "valueFrom": reference} in container["env"]


def test_a_file_with_a_secret_is_its_owners_and_submitted_again_as_it_is(folder, monkeypatch):
    (folder / "kubectl").write_text('#!/bin/bash\ncat "$3"\n')
    (folder / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    texts = [group_kubernetes_objects(asked()) for _ in range(2)]
    submitted = [
        composer3d.Job(system="kubernetes", name="my-run", text=text, problems=(), output="out").submit()
        for text in texts
    ]
    assert texts[0] != texts[1] and submitted == [texts[0].strip()] * 2
    assert (folder / "my-run.yaml").stat().st_mode & 0o777 == 0o600


# ---- Ray, and refusals -----------------------------------------------------------------------------------------------


def test_a_ray_driver_of_groups_is_python_and_runs_no_torchrun(folder):
    text = group_ray_driver(asked())
    ast.parse(text)
    assert "NODES, SERVERS, GPUS, MAX_RESTARTS = 2, 2, 2, 1\n" in text
    assert "torch.distributed" not in text


def test_what_groups_cannot_be_started_by_is_refused(folder):
    with pytest.raises(ComposerError) as caught:
        group_kubernetes_objects(asked(), kind="trainjob")
    assert str(caught.value) == (
        "--kind trainjob: its operator starts torchrun, whose world ends as a whole; of groups of ranks that come and "
        "go write --kind jobset"
    )
    with pytest.raises(ComposerError) as caught:
        composer3d.launch("My run.toml", on="ssh", hosts=["a", "b"], nodes="1:2", gpus_per_node=1)
    assert str(caught.value) == (
        "--nodes 1:2: groups of ranks divide over one number of machines, each of which may be lost and come again; "
        "write --nodes 2, and in the manifest how many groups a step needs"
    )


@pytest.mark.parametrize(
    ("groups", "ranks", "problems"),
    [
        (4, 1, []),
        (
            3,
            2,
            [
                "replica = 3: 3 groups do not divide over 2 machines, and the ranks of a group meet on one, in a "
                "folder and on loopback"
            ],
        ),
    ],
)
def test_groups_are_checked_for_their_machines(folder, groups, ranks, problems):
    (folder / "My run.toml").write_text(MANIFEST.format(groups).replace("dp_shard = 1", f"dp_shard = {ranks}"))
    size = {"nodes": 2, "gpus_per_node": groups * ranks // 2}
    job = composer3d.launch("My run.toml", on="slurm", overrides=["run.device=cpu", "train.global_batch=96"], **size)
    assert [problem.message for problem in job.problems if problem.severity == "error"] == problems
    assert job.ok is (not problems)
    assert "#SBATCH --no-kill\n" in job.text
