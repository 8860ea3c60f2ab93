"""Renders the overlays of deploy/ and finds their pods and torchrun lines."""

import functools
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
OVERLAYS = sorted(path.name for path in (DEPLOY / "overlays").iterdir())


@functools.cache
def manifests(overlay):
    """Return the manifests of the overlay, by `kubectl kustomize` of a copy that has a key: the repository has none."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(DEPLOY, Path(folder) / "deploy"))
        (copy / "base" / "keys.env").write_text("TRAINING_KEY=test\n")
        command = [Path(sys.executable).with_name("kubectl"), "kustomize", copy / "overlays" / overlay]
        return list(yaml.safe_load_all(subprocess.run(command, capture_output=True, text=True, check=True).stdout))


def pods(overlay):
    """Return the pod template of each StatefulSet and Job, by name."""
    return {m["metadata"]["name"]: m["spec"]["template"] for m in manifests(overlay) if "template" in m.get("spec", {})}


def containers(pod):
    """Return all containers of a pod template."""
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]
