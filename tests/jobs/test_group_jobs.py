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

# Machine 0 ends once machine 1 has been there twice, or as it is asked to.
REMOTE = {
    "ssh": '#!/bin/bash\necho "$*" >>argv\nexec bash -c "${!#}"\n',
    "sleep": "#!/bin/bash\n",
    "python3": """\
#!/bin/bash
echo "$*" >>argv
case "$*" in *'--node-rank 1 '*)
  echo "$COMPOSER3D_QUORUM_TOKEN" >>secrets
  [ "$(wc -l <secrets)" = 1 ] && kill -9 $$
  echo >twice
  exit 0;;
esac
stat --format=%a 'out put/logs/'.secret-* >mode
echo "$COMPOSER3D_QUORUM_TOKEN" >first
[ -e lost ] || { touch lost; [ "$HOW" = lost ] && kill -9 $$; }
[ "$HOW" = failed ] && exit 3
read -r <twice
""",
}


@pytest.mark.parametrize(
    ("how", "code", "again"),
    [("calm", 0, ["machine 1"]), ("lost", 0, ["machine 0"]), ("failed", 3, [])],
    ids=["another", "first", "failed"],
)
def test_an_ssh_job_starts_again_what_is_lost_and_nothing_that_has_failed(folder, how, code, again, monkeypatch):
    (folder / "bin").mkdir()
    for name, text in REMOTE.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    os.mkfifo(folder / "twice")
    reader = os.open(folder / "twice", os.O_RDWR)  # what machine 1 writes waits for machine 0
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("HOW", how)
    (folder / "secrets").touch()
    script = group_ssh_script(asked(hosts=("alice@node1", "node2")))
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    os.close(reader)
    assert done.returncode == code
    told = [line.partition(" (")[0].removesuffix(" is lost") for line in done.stderr.splitlines() if "is lost" in line]
    assert set(again) <= set(told) <= {*again, "machine 1"}
    secrets = (folder / "secrets").read_text().split()
    secret = (folder / "first").read_text().strip()
    assert len(secret) == 32 and set(secrets) <= {secret}
    assert secret not in (folder / "argv").read_text()
    assert (folder / "mode").read_text() == "600\n"
    assert not [path.name for path in (folder / "out put" / "logs").iterdir() if path.name.startswith(".")]


# ---- Kubernetes ------------------------------------------------------------------------------------------------------


def jobs(**options):
    """Return the objects by kind, and the specifications of the set's jobs by name, validated."""
    found = {document["kind"]: document for document in yaml.safe_load_all(group_kubernetes_objects(asked(**options)))}
    for kind in ("ConfigMap", "Secret", "Service"):
        kubernetes_validate.validate(found[kind], KUBERNETES, strict=True)
    specs = {}
    for replicated in found["JobSet"]["spec"]["replicatedJobs"]:
        spec = replicated["template"]["spec"]
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": spec}
        kubernetes_validate.validate(job, KUBERNETES, strict=True)
        specs[replicated["name"]] = spec
    return found, specs


def test_a_lost_pod_comes_back_under_its_number(folder):
    found, specs = jobs(nodes=3)
    assert sorted(found) == ["ConfigMap", "JobSet", "Secret", "Service"]
    spec = found["JobSet"]["spec"]
    assert set(spec) == {"network", "successPolicy", "failurePolicy", "replicatedJobs"}
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["first"]}
    assert (specs["first"]["completions"], specs["other"]["completions"]) == (1, 2)
    for each in specs.values():
        pod = each["template"]["spec"]
        # Values without an enumeration in the schema.
        assert (each["completionMode"], pod["restartPolicy"]) == ("Indexed", "Never")
        ignored = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
        assert each["podFailurePolicy"]["rules"][0] == ignored
        assert pod["terminationGracePeriodSeconds"] == 105
    final = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2, 3]}}
    assert specs["first"]["podFailurePolicy"]["rules"][1:] == [final]
    assert specs["other"]["backoffLimit"] == 10_000


@pytest.mark.parametrize(
    ("job", "environment", "place"),
    [
        ("first", {"ADDRESS": "10.1.2.3"}, "--node-rank 0 --endpoint 10.1.2.3:29400"),
        ("first", {"ADDRESS": "fd00::5"}, "--node-rank 0 --endpoint [fd00::5]:29400"),
        (
            "other",
            {"ADDRESS": "10.1.2.4", "JOB_COMPLETION_INDEX": "1"},
            "--node-rank 2 --endpoint my-run-first-0-0.my-run:29400",
        ),
    ],
)
def test_a_pod_is_started_as_its_machine(folder, job, environment, place):
    _, specs = jobs(nodes=3)
    (container,) = specs[job]["template"]["spec"]["containers"]
    (folder / "python3").write_text('#!/bin/bash\necho "$*"\n')
    (folder / "python3").chmod(0o755)
    environment |= {"PATH": f"{folder}:{os.environ['PATH']}"}
    said = subprocess.run(container["command"], env=environment, capture_output=True, text=True, check=True).stdout
    sizes = "-m composer3d run /etc/composer3d/run.toml --nproc-per-node 2 --nodes 3"
    assert said == f"{sizes} --set run.output=/output/my-run {place}\n"


def test_a_secret_of_pods_is_no_word_of_a_command_and_new_each_time(folder):
    found, specs = jobs()
    token = found["Secret"]["stringData"]["token"]
    assert len(token) == 32 and token != jobs()[0]["Secret"]["stringData"]["token"]
    for spec in specs.values():
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
    assert "NODES, GPUS, MAX_RESTARTS = 2, 2, 1\n" in text
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
