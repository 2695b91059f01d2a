"""Jobs that are written for a cluster: read by the shell, and by the schemas of Kubernetes, as they are."""

import ast
import os
import re
import subprocess
from dataclasses import replace

import kubernetes_validate
import pytest
import yaml
from support.sockets import watched_listeners

import composer3d
from composer3d import Job
from composer3d.cli import main
from composer3d.errors import ComposerError
from composer3d.jobs.kubernetes_yaml import kubernetes_objects
from composer3d.jobs.ray_driver import ray_driver
from composer3d.jobs.request import JobRequest
from composer3d.jobs.slurm_script import slurm_script
from composer3d.jobs.ssh_script import ssh_script

KUBERNETES = "1.33"
MANIFEST = """\
composer3d = 1
extends = "quickstart"
run.output = "out put"
run.grace_s = 45
run.max_restarts = 3
run.device = "auto"
mesh.dp_shard = 4
train.microbatch = 4
"""
SIZE = {"nodes": 2, "gpus_per_node": 2}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a manifest for four GPUs, in which the test stands."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "My run.toml").write_text(MANIFEST)
    return tmp_path


def asked(**options):
    """Return a request as `launch` makes it of the manifest, without its check and plan."""
    run = {"uses_gpus": True, "output": "out put", "grace_s": 45.0, "max_restarts": 3, "name": "my-run"}
    return JobRequest(manifest="My run.toml", **SIZE, **run, **options)


def objects(kind, **options):
    """Return the Kubernetes objects of the manifest by kind."""
    text = kubernetes_objects(asked(**options), kind=kind)
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def is_shell(text):
    return subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def test_a_slurm_job_asks_for_what_the_run_needs_and_is_told_before_its_end(folder):
    with watched_listeners() as addresses:
        job = composer3d.launch("My run.toml", on="slurm", partition="gpu", time="1-00:00:00", **SIZE)
    assert job.ok and not addresses
    assert is_shell(job.text)
    lines = job.text.splitlines()
    assert lines[0] == "#!/bin/bash"
    assert lines[2].startswith("# plan: a rank needs ")
    assert [line for line in lines if line.startswith("#SBATCH")] == [
        "#SBATCH --job-name=my-run",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --gpus-per-node=2",
        "#SBATCH --partition=gpu",
        "#SBATCH --time=1-00:00:00",
        "#SBATCH --signal=B:USR1@105",  # grace_s and a minute
        "#SBATCH --output=my-run-%j.out",
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
    ]
    command = next(line for line in lines if "torch.distributed.run" in line)
    assert f"--max-restarts=3 -m composer3d run '{folder}/My run.toml'" in command
    assert "export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=75" in lines


def test_ranks_that_are_not_started_again_are_tasks_of_slurm(folder):
    lines = slurm_script(replace(asked(), max_restarts=0)).splitlines()
    assert "#SBATCH --ntasks-per-node=2" in lines
    assert not any("torch.distributed" in line for line in lines)
    assert f"  python3 -m composer3d run '{folder}/My run.toml' &" in lines


def test_a_job_of_another_number_of_ranks_says_that_it_would_not_start(folder, capfd):
    command = ["launch", "My run.toml", "--on", "slurm", "--nodes", "2", "--gpus-per-node", "8"]
    wrong = "[mesh] dp_shard=4, but the world has 16 ranks"
    assert main(command) == 0
    out, err = capfd.readouterr()
    assert is_shell(out)
    assert f"# check: My run.toml:7:1: {wrong}\n# this run would not start on 16 ranks" in out
    assert wrong in err
    assert "--submit refuses it" in err
    assert main([*command, "--submit"]) == 2
    assert wrong in capfd.readouterr().err
    assert sorted(os.listdir()) == ["My run.toml"]


def test_jobsets_are_what_the_api_takes(folder):
    found = objects("jobset")
    assert sorted(found) == ["ConfigMap", "JobSet", "Service"]
    for kind in ("ConfigMap", "Service"):
        kubernetes_validate.validate(found[kind], KUBERNETES, strict=True)
    jobset = found["JobSet"]
    assert jobset["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    assert set(jobset["spec"]) == {"network", "failurePolicy", "replicatedJobs"}
    (replicated,) = jobset["spec"]["replicatedJobs"]
    pod = as_job(replicated)["template"]["spec"]
    # Values without an enumeration in the schema.
    assert (replicated["template"]["spec"]["completionMode"], pod["restartPolicy"]) == ("Indexed", "Never")
    assert pod["terminationGracePeriodSeconds"] == 105
    (container,) = pod["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 2}}
    assert "--rdzv-endpoint=my-run-node-0-0.my-run:29400" in container["command"]
    assert container["command"][-2:] == ["--set", "run.output=/output/my-run"]
    assert found["ConfigMap"]["data"] == {"run.toml": MANIFEST}


def as_job(replicated):
    """Return the specification of a replicated job, which a Job's schema takes."""
    spec = replicated["template"]["spec"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": spec}
    kubernetes_validate.validate(job, KUBERNETES, strict=True)
    return spec


def test_a_trainjob_leaves_the_meeting_point_to_the_operator(folder):
    found = objects("trainjob", image="registry/x:1")
    assert sorted(found) == ["ConfigMap", "TrainJob", "TrainingRuntime"]
    (replicated,) = found["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    (container,) = as_job(replicated)["template"]["spec"]["containers"]
    assert container["image"] == "registry/x:1"
    assert container["command"][:2] == ["torchrun", "--max-restarts=3"]  # PET_ variables say the rest
    assert not any(variable["name"].startswith("PET_") for variable in container["env"])
    assert found["TrainJob"]["spec"]["runtimeRef"]["name"] == found["TrainingRuntime"]["metadata"]["name"]
    assert found["TrainJob"]["spec"]["trainer"] == {"numNodes": 2, "numProcPerNode": 2}


def test_a_ray_driver_is_python_and_runs_torchrun_on_every_node(folder):
    text = ray_driver(asked())
    values = {
        target.id: ast.literal_eval(node.value)
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Name) and target.id == "TORCHRUN"
    }
    assert values["TORCHRUN"][0] == "--nproc-per-node=2"
    assert values["TORCHRUN"][-1] == f"{folder}/My run.toml"
    assert "LEAST, MOST, GPUS = 2, 2, 2" in text


# ---- nodes that may leave and come ----------------------------------------------------------------------------------


RANGE = MANIFEST.replace("mesh.dp_shard = 4", "mesh.dp_shard = -1\nmesh.gpus_per_node = 2\nrun.nodes = '1:2'")


def test_a_range_of_nodes_is_the_manifests_and_checked_and_planned_at_every_size(folder):
    (folder / "My run.toml").write_text(RANGE)
    job = composer3d.launch("My run.toml", on="slurm", gpus_per_node=2)
    assert job.ok
    assert is_shell(job.text)
    assert "#SBATCH --nodes=1-2\n" in job.text
    assert '--nnodes="$SLURM_JOB_NUM_NODES" ' in job.text
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1\n" in job.text
    title, *plans = [line for line in job.text.splitlines() if line.startswith("# ")]
    assert title == "# composer3d launch My run.toml: 1 to 2 nodes of 2 ranks"
    assert [line.partition(" needs")[0] for line in plans[:2]] == ["# plan: each of 2 ranks", "# plan: each of 4 ranks"]


def test_a_size_of_the_range_that_does_not_fit_is_named(folder):
    job = composer3d.launch("My run.toml", on="ray", nodes="1:2", gpus_per_node=2)
    assert [problem.message for problem in job.problems] == ["dp_shard=4, but the world has 2 ranks"]
    assert "# this run would not start on 2 ranks\n" in job.text


def test_every_system_is_given_the_range(folder):
    elastic = {"least_nodes": 1}
    found = objects("jobset", **elastic)
    (replicated,) = found["JobSet"]["spec"]["replicatedJobs"]
    (container,) = as_job(replicated)["template"]["spec"]["containers"]
    assert "--nnodes=1:2" in container["command"]
    assert {"name": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "value": "1"} in container["env"]
    driver = ray_driver(asked(**elastic))
    ast.parse(driver)
    assert "LEAST, MOST, GPUS = 1, 2, 2" in driver
    script = ssh_script(asked(hosts=("node1", "node2"), **elastic))
    assert is_shell(script)
    assert "--rdzv-backend=c10d --rdzv-endpoint=${hosts[0]#*@}:$port" in script
    assert "--nnodes=1:2" in script and "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in script


SSH = """\
#!/bin/bash
while [ "${1#-}" != "$1" ]; do [ "$1" = -o ] && shift; shift; done
[ "$1" = node2 ] && exit LOST
exit 0
"""


@pytest.mark.parametrize(("lost", "least", "code"), [(1, 1, 0), (1, 2, 1), (0, 1, 0), (255, 1, 0), (255, 2, 255)])
def test_an_ssh_job_of_a_range_ends_well_where_enough_machines_do(folder, lost, least, code, monkeypatch):
    (folder / "bin").mkdir()
    (folder / "bin" / "ssh").write_text(SSH.replace("LOST", str(lost)))
    (folder / "bin" / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    text = ssh_script(asked(hosts=("node1", "node2"), least_nodes=least))
    assert subprocess.run(["bash"], input=text, text=True, capture_output=True).returncode == code


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (None, '--nodes is missing, and the manifest has no run.nodes; write --nodes 4, or "2:4"'),
        ("2:x", '--nodes: nodes = "2:x" is no range; write "2:4" for 2, 3 or 4 nodes, or [2, 4] for 2 or 4'),
        ("0", "--nodes: nodes are counted from 1 to 65536"),
        (
            (1, 4),
            "run.nodes = [1, 4] leaves out numbers between them, of which torchrun starts each that is there; write "
            "--nodes 4, or a range",
        ),
    ],
)
def test_nodes_that_cannot_be_are_refused(folder, nodes, message):
    with pytest.raises(ComposerError) as caught:
        composer3d.launch("My run.toml", on="ray", nodes=nodes, gpus_per_node=2)
    assert str(caught.value) == message


def test_the_operator_of_a_trainjob_knows_no_range(folder):
    with pytest.raises(ComposerError) as caught:
        objects("trainjob", least_nodes=1)
    assert str(caught.value) == (
        "--kind trainjob: its operator gives torchrun one number of nodes; write --kind jobset"
    )


def test_ssh_starts_one_torchrun_a_host(folder):
    text = ssh_script(asked(hosts=("alice@node1", "node2")))
    assert is_shell(text)
    assert "hosts=(alice@node1 node2)" in text


def test_a_host_file_may_be_one_of_mpirun(folder, capfd):
    (folder / "hosts").write_text("# two\nalice@node1 slots=2\n\n-x\n")
    command = ["launch", "My run.toml", "--on", "ssh", "--nodes", "2", "--gpus-per-node", "2"]
    assert main([*command, "--hosts", "hosts"]) == 2
    assert capfd.readouterr().err == '--hosts: "-x" is no address of a machine\n'


def test_a_host_file_that_names_a_machine_twice_is_refused_with_its_line(folder, capfd):
    (folder / "hosts").write_text("node1\n# two\nalice@node1\n")
    command = ["launch", "My run.toml", "--on", "ssh", "--nodes", "2", "--gpus-per-node", "2"]
    assert main([*command, "--hosts", "hosts"]) == 2
    assert capfd.readouterr().err == '--hosts hosts:3: "alice@node1" is the machine of line 1; name each once\n'


# The second machine fails once the first one runs.
REMOTE = {
    "ssh": '#!/bin/bash\nexec bash -c "${!#}"\n',
    "python3": """\
#!/bin/bash
case "$*" in *--node-rank=1*) read -r <ready; exit 7;; esac
trap 'kill $!; echo "$*" >stopped; exit 0' TERM
tail -f /dev/null &
echo >ready
wait
""",
}


def test_an_ssh_job_that_fails_stops_its_own_start_and_no_run_of_a_like_name(folder, monkeypatch):
    (folder / "bin").mkdir()
    for name, text in REMOTE.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    os.mkfifo(folder / "ready")
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    ids = ("my-run", "my-run-2")
    like = [["bash", "-c", "read", "-m", f"--rdzv-id={each}", "-m", "composer3d", "run"] for each in ids]
    others = [subprocess.Popen(command, stdin=subprocess.PIPE) for command in like]
    try:
        script = ssh_script(asked(hosts=("node1", "node2")))
        assert subprocess.run(["bash", "-c", script], capture_output=True, timeout=60).returncode == 7
        assert [other.poll() for other in others] == [None, None]
    finally:
        for other in others:
            other.communicate()
    stopped = (folder / "stopped").read_text()
    assert re.search(r" --rdzv-id=my-run-\d+-\d+-\d+ --nnodes=2 ", stopped)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on": "ssh"}, "--on ssh: 2 nodes, and --hosts names 0; name one a line"),
        ({"on": "ssh", "hosts": ["a", "-oProxyCommand=x"]}, '--hosts: "-oProxyCommand=x" is no address of a machine'),
        ({"on": "ssh", "hosts": ["a", "bob@A"]}, "--hosts: a and bob@A are one machine; name each once"),
        ({"on": "ray", "partition": "gpu"}, "--partition is slurm's; ray does not take it"),
        ({"on": "kubernetes", "time": "1:00"}, "--time is slurm's; kubernetes does not take it"),
        ({"on": "slurm", "time": "3-99:99:99"}, '--time "3-99:99:99" is none of Slurm\'s'),
        (
            {"on": "kubernetes", "image": "a/b", "volume": "data\n- name: evil"},
            '--volume "data\n- name: evil": the name of a claim is at most 63 of the letters a to z, digits, - and ., '
            "and begins and ends with a letter or a digit",
        ),
        ({"on": "slurm", "time": "1\n#SBATCH --uid=0"}, '--time "1\n#SBATCH --uid=0" is none of Slurm\'s'),
        ({"on": "slurm", "name": "a b"}, '--name "a b": a job\'s name is at most 47 of the letters a to z, digits'),
    ],
)
def test_what_no_system_takes_is_refused(folder, options, message):
    with pytest.raises(composer3d.ComposerError) as refused:
        composer3d.launch("My run.toml", **SIZE, **options)
    assert str(refused.value).startswith(message)


def test_a_configmap_holds_the_whole_manifest(folder):
    (folder / "on-top.toml").write_text('composer3d = 1\nextends = "My run.toml"\n')
    with pytest.raises(composer3d.ComposerError, match="it builds on My run.toml, which the pods lack"):
        composer3d.launch("on-top.toml", on="kubernetes", **SIZE)


def test_a_cluster_that_is_not_here_is_named(folder, monkeypatch):
    monkeypatch.setenv("PATH", str(folder))
    job = Job(system="slurm", name="my-run", text="", problems=(), output="out")
    with pytest.raises(composer3d.ComposerError, match="--submit: there is no sbatch on this machine"):
        job.submit()
    assert not (folder / "my-run.sh").exists()


def test_a_script_of_the_jobs_name_is_not_overwritten(folder, monkeypatch):
    (folder / "sbatch").write_text("#!/bin/sh\n")
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    job = Job(system="slurm", name="my-run", text="new", problems=(), output="out")
    (folder / "my-run.sh").write_text("mine")
    with pytest.raises(composer3d.ComposerError, match="exists, differs and is not overwritten; remove it, or give"):
        job.submit(folder)
    assert (folder / "my-run.sh").read_text() == "mine"


def test_the_dockerfile_keeps_its_images_torch(capfd):
    assert main(["launch", "--dockerfile"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert any(line.startswith("FROM pytorch/pytorch:") for line in lines)
    assert any("--constraint /tmp/torch.txt" in line for line in lines)
