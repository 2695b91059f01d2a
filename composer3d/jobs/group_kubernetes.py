"""Objects for kubectl that start groups of ranks: a JobSet whose pods come back one by one, each to its own number."""

from __future__ import annotations

import json
import secrets

from composer3d.errors import ComposerError
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

_DISRUPTED = """\
              - action: Ignore
                onPodConditions:
                  - type: DisruptionTarget
                    status: "True"
"""

# The set ends with the first machine's pod, which knows who takes part. A pod that ends is made again under its number;
# one whose node is drained, or lost, is not counted. Exit codes 2 and 3 are of a manifest that is wrong, and of a run
# that has failed: of the first machine they end the set.
_JOBSET = """\
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {name}
spec:
  network:
    enableDNSHostnames: true
    subdomain: {name}
  successPolicy:
    operator: All
    targetReplicatedJobs: [first]
  failurePolicy:
    maxRestarts: 0
  replicatedJobs:
    - name: first
      replicas: 1
      template:
        spec:
          parallelism: 1
          completions: 1
          completionMode: Indexed
          backoffLimit: {max_restarts}
          podFailurePolicy:
            rules:
{disrupted}              - action: FailJob
                onExitCodes:
                  operator: In
                  values: [2, 3]
          template:
{first}{others}"""

_OTHERS = """\
    - name: other
      replicas: 1
      template:
        spec:
          parallelism: {count}
          completions: {count}
          completionMode: Indexed
          backoffLimit: {tries}
          podFailurePolicy:
            rules:
{disrupted}          template:
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
    count, others = request.nodes - 1, ""
    if count:
        name = f"{request.name}-first-0-0.{request.name}"
        others = _OTHERS.format(
            count=count,
            tries=_TRIES,
            disrupted=_DISRUPTED,
            pod=_pod(request, "$((JOB_COMPLETION_INDEX + 1))", endpoint=f"{name}:{PORT}"),
        )
    jobset = _JOBSET.format(
        name=request.name,
        max_restarts=max(request.max_restarts, 6),  # Kubernetes' own, for a pod whose processes are killed
        disrupted=_DISRUPTED,
        first=_pod(request, "0", endpoint=f"$ADDRESS:{PORT}", port=PORT),
        others=others,
    )
    objects = [
        CONFIG.format(name=request.name, manifest=json.dumps(manifest_text(request))),
        _SECRET.format(name=request.name, token=json.dumps(secrets.token_hex(16))),
        SERVICE.format(name=request.name),
        jobset,
    ]
    return request.comment() + "# Who has this file's secret may take part in the run.\n" + "---\n".join(objects)


def _pod(request: JobRequest, rank: str, *, endpoint: str, port: int | None = None) -> str:
    """Return the pod of a machine; the shell reads its number and the endpoint, and no other word.

    The first one listens on its own address, since its name may not be known yet; an IPv6 one stands in brackets.
    """
    script = f'case $ADDRESS in *:*) ADDRESS="[$ADDRESS]" ;; esac; exec python3 "$@" --node-rank {rank}'
    command = ["bash", "-c", f"{script} --endpoint {endpoint}", "machine", *request.machine(f"{FOLDER}/run.toml")]
    command += ["--set", f"run.output={OUTPUT}/{request.name}"]
    return pod(request, command, indent=12, port=port, variables=_VARIABLES.format(name=request.name))
