"""Objects for kubectl: a JobSet whose pods find each other by name, or a TrainJob with a runtime of its own.

Both mount the manifest from a ConfigMap, so that the file is all that a cluster needs beside an image. Strings are
written as JSON, which YAML contains.
"""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path

from composer3d.errors import ComposerError
from composer3d.jobs.request import JobRequest

__all__ = ["CONFIG", "FOLDER", "OUTPUT", "PORT", "SERVICE", "kubernetes_objects", "manifest_text", "pod"]

PORT = 29400
FOLDER, OUTPUT = "/etc/composer3d", "/output"

CONFIG = """\
apiVersion: v1
kind: ConfigMap
metadata:
  name: {name}
data:
  run.toml: {manifest}
"""

# A headless service gives each pod a name before it is ready: rank 0 is met while its container starts.
SERVICE = """\
apiVersion: v1
kind: Service
metadata:
  name: {name}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    jobset.sigs.k8s.io/jobset-name: {name}
"""

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
    maxRestarts: {max_restarts}
  replicatedJobs:
    - name: node
      replicas: 1
      template:
        spec:
          parallelism: {nodes}
          completions: {nodes}
          completionMode: Indexed
          backoffLimit: 0
          template:
{pod}"""

_RUNTIME = """\
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainingRuntime
metadata:
  name: {name}
spec:
  mlPolicy:
    numNodes: {nodes}
    torch:
      numProcPerNode: {gpus_per_node}
  template:
    spec:
      replicatedJobs:
        - name: node
          template:
            metadata:
              labels:
                trainer.kubeflow.org/trainjob-ancestor-step: trainer
            spec:
              template:
{pod}"""

_TRAINJOB = """\
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: {name}
spec:
  runtimeRef:
    apiGroup: trainer.kubeflow.org
    kind: TrainingRuntime
    name: {name}
  trainer:
    numNodes: {nodes}
    numProcPerNode: {gpus_per_node}
"""

# The kubelet kills what has not ended after terminationGracePeriodSeconds; ranks save within run.grace_s before.
_POD = """\
spec:
  restartPolicy: Never
  terminationGracePeriodSeconds: {stop_s}
  containers:
    - name: node
      image: {image}
      command: {command}
      env:
{environment}{ports}{resources}      volumeMounts:
        - name: manifest
          mountPath: {folder}
        - name: output
          mountPath: {output}
        - name: shared-memory
          mountPath: /dev/shm
  volumes:
    - name: manifest
      configMap:
        name: {name}
    - name: output
      persistentVolumeClaim:
        claimName: {volume}
    - name: shared-memory
      emptyDir:
        medium: Memory
"""


def kubernetes_objects(request: JobRequest, *, kind: str = "jobset") -> str:
    """Return the objects that `kubectl apply -f` takes, in one file.

    torchrun runs in every pod. In a JobSet it is told where the first pod is; in a TrainJob the operator tells it, by
    PET_ variables, which torchrun reads, and whose own ones would be refused (trainer.kubeflow.org, torch runtime).
    SIGTERM, which a pod that is evicted gets first, makes ranks save.

    Checkpoints and logs go to a volume that all pods mount, a claim that exists and that several nodes may write
    (ReadWriteMany): a pod's own files end with it.

    Args:
        request: What is to be started; without an image it is the one that `dockerfile` describes.
        kind: `jobset`, or `trainjob`.

    Raises:
        ComposerError: The manifest is larger than a ConfigMap, or builds on another file, which that would lack; or a
            TrainJob of a range of nodes.
    """
    if kind == "trainjob" and request.is_elastic:
        raise ComposerError("--kind trainjob: its operator gives torchrun one number of nodes; write --kind jobset")
    shared = {"name": request.name, "nodes": request.nodes, "gpus_per_node": request.gpus_per_node}
    objects = [CONFIG.format(name=request.name, manifest=json.dumps(manifest_text(request)))]
    manifest, keep = f"{FOLDER}/run.toml", ["--set", f"run.output={OUTPUT}/{request.name}"]
    if kind == "trainjob":
        command = ["torchrun", f"--max-restarts={request.max_restarts}", *request.run_arguments(manifest), *keep]
        objects.append(_RUNTIME.format(pod=pod(request, command, indent=16), **shared))
        objects.append(_TRAINJOB.format(**shared))
    else:
        host = f"{request.name}-node-0-0.{request.name}"
        rendezvous = ("--rdzv-backend=c10d", f"--rdzv-id={request.name}", f"--rdzv-endpoint={host}:{PORT}")
        command = ["torchrun", *request.torchrun(*rendezvous, manifest=manifest), *keep]
        objects.append(SERVICE.format(name=request.name))
        node = pod(request, command, indent=12, port=PORT)
        objects.append(_JOBSET.format(pod=node, max_restarts=request.max_restarts, **shared))
    return request.comment() + "---\n".join(objects)


def pod(request: JobRequest, command: list[str], *, indent: int, port: int | None = None, variables: str = "") -> str:
    """Return a pod's specification, indented for its place.

    Args:
        request: What is to be started.
        command: Of its container.
        indent: Spaces before each line.
        port: That it listens on.
        variables: Of its environment, besides those of the request: entries of a list, indented by eight spaces.
    """
    ports = "" if port is None else f"      ports:\n        - containerPort: {port}\n"
    variable = '        - name: {}\n          value: "{}"\n'
    gpus = f"      resources:\n        limits:\n          nvidia.com/gpu: {request.gpus_per_node}\n"
    text = _POD.format(
        name=request.name,
        image=json.dumps(request.image or f"composer3d:{version('composer3d')}"),
        output=OUTPUT,
        volume=request.volume,
        command=json.dumps(command),
        stop_s=request.stop_s,
        environment="".join(variable.format(*each) for each in request.environment.items()) + variables,
        ports=ports,
        resources=gpus if request.uses_gpus else "",
        folder=FOLDER,
    )
    return "".join(" " * indent + line for line in text.splitlines(keepends=True))


def manifest_text(request: JobRequest) -> str:
    """Return what the ConfigMap holds.

    Raises:
        ComposerError: It builds on another file, or is larger than an object may be.
    """
    path = Path(request.manifest)
    if not path.exists():
        return f'composer3d = 1\nextends = "{request.manifest}"\n'
    text = path.read_text(encoding="utf-8")
    base = re.search(r"(?m)^\s*extends\s*=\s*[\"']([^\"']+)", text)
    if base is not None and (path.parent / base[1]).exists():
        raise ComposerError(f"{request.manifest}: it builds on {base[1]}, which the pods lack; give one file")
    if len(text.encode()) > 1_000_000:
        raise ComposerError(f"{request.manifest}: a ConfigMap holds 1 MiB; put the manifest into the image")
    return text
