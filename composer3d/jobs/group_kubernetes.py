"""Objects for kubectl that start groups of ranks: a JobSet whose pods come back one by one, each to its own number."""

from __future__ import annotations

import json
import secrets

from composer3d.errors import ComposerError
from composer3d.jobs.group_shell import NUM_SERVERS
from composer3d.jobs.kubernetes_yaml import CONFIG, FOLDER, OUTPUT, PORT, SERVICE, manifest_text, pod
from composer3d.jobs.request import JobRequest

__all__ = ["group_kubernetes_objects"]

_SECRET = """\
apiVersion: v1
kind: Secret
metadata:
  name: {name}
type: Opaque
stringData:
  token: {token}
"""

# The job, and with it the set, ends as a pod does with 0, since no machine ends so before the run. A pod that is lost,
# or has left, is made again under its number; one whose node is drained, or lost, is not counted. Exit codes 2 and 3
# are of a manifest that is wrong, and of a run that has failed.
_JOBSET = """\
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {name}
spec:
  network:
    enableDNSHostnames: true
    subdomain: {name}
  failurePolicy:
    maxRestarts: 0
  replicatedJobs:
    - name: machine
      replicas: 1
      template:
        spec:
          parallelism: {count}
          completions: {count}
          completionMode: Indexed
          backoffLimit: {tries}
          successPolicy:
            rules:
              - succeededCount: 1
          podFailurePolicy:
            rules:
              - action: Ignore
                onPodConditions:
                  - type: DisruptionTarget
                    status: "True"
              - action: FailJob
                onExitCodes:
                  operator: In
                  values: [2, 3]
          template:
{pod}"""

_VARIABLES = """\
        - name: ADDRESS
          valueFrom:
            fieldRef:
              fieldPath: status.podIP
        - name: COMPOSER3D_QUORUM_TOKEN
          valueFrom:
            secretKeyRef:
              name: {name}
              key: token
"""
_TRIES = 10_000  # of pods together; the pauses between those of one grow to six minutes


def group_kubernetes_objects(request: JobRequest, *, kind: str = "jobset") -> str:
    """Return the objects that `kubectl apply -f` takes, in one file; its secret is new each time.

    Args:
        request: What is to be started; see `kubernetes_objects`.
        kind: `jobset`.

    Raises:
        ComposerError: As `kubernetes_objects`; or a TrainJob.
    """
    if kind == "trainjob":
        raise ComposerError(
            "--kind trainjob: its operator starts torchrun, whose world ends as a whole; of groups of ranks that come "
            "and go write --kind jobset"
        )
    jobset = _JOBSET.format(name=request.name, count=request.nodes, tries=_TRIES, pod=_pod(request))
    objects = [
        CONFIG.format(name=request.name, manifest=json.dumps(manifest_text(request))),
        _SECRET.format(name=request.name, token=json.dumps(secrets.token_hex(16))),
        SERVICE.format(name=request.name),
        jobset,
    ]
    return request.comment() + "# Who has this file's secret may take part in the run.\n" + "---\n".join(objects)


def _pod(request: JobRequest) -> str:
    """Return the pod of a machine; the shell reads its number and its address, and no other word.

    A pod that is made again has another address, of which its name stands for the last one for a while. One that may
    serve listens on what the name stands for, and waits until that is its own.
    """
    names = [f"{request.name}-machine-0-{index}.{request.name}" for index in range(min(NUM_SERVERS, request.nodes))]
    own = f"{request.name}-machine-0-$JOB_COMPLETION_INDEX.{request.name}"
    script = (
        f"trap 'exit 75' TERM; while [ $JOB_COMPLETION_INDEX -lt {len(names)} ] && "
        f'! getent ahosts {own} | grep -q "^$ADDRESS "; do sleep 1; done; trap - TERM; '
        'exec python3 "$@" --node-rank $JOB_COMPLETION_INDEX'
    )
    command = ["bash", "-c", script, "machine", *request.machine(f"{FOLDER}/run.toml")]
    command += ["--set", f"run.output={OUTPUT}/{request.name}"]
    command += ["--endpoint", ",".join(f"{name}:{PORT}" for name in names)]
    return pod(request, command, indent=12, port=PORT, variables=_VARIABLES.format(name=request.name))
