"""The overlays of deploy/, rendered by `kubectl kustomize` and checked against Kubernetes' own schemas."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from manifests import DEPLOY, OVERLAYS, Manifest, containers, kustomize, manifests, pods, rendered

from python_backend.config import load_config

KINDS = {
    "single": {"Job"},
    "servers": {"StatefulSet", "Job", "Service", "PodDisruptionBudget"},
    "ranks": {"StatefulSet", "Job", "Service", "PodDisruptionBudget"},
}
EVERYWHERE = {"ConfigMap", "Secret", "PersistentVolumeClaim", "NetworkPolicy"}
layout = pytest.mark.parametrize("overlay", OVERLAYS)


def validate(path: Path) -> subprocess.CompletedProcess[str]:
    """`kubernetes-validate --strict`, which also refuses unknown fields."""
    command = [Path(sys.executable).with_name("kubernetes-validate"), "--strict", path]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@layout
def test_it_is_valid_and_a_typo_is_not(overlay: str, tmp_path: Path) -> None:
    text = rendered(overlay)
    (tmp_path / "good.yaml").write_text(text)
    good = validate(tmp_path / "good.yaml")
    assert (good.returncode, good.stdout.count("passed")) == (0, len(manifests(overlay))), good.stdout + good.stderr
    (tmp_path / "bad.yaml").write_text(text.replace("terminationGracePeriodSeconds", "terminationGracePeriodSecond", 1))
    bad = validate(tmp_path / "bad.yaml")
    assert bad.returncode != 0
    assert "terminationGracePeriodSecond" in bad.stdout + bad.stderr


@layout
def test_it_has_core_kinds_alone(overlay: str) -> None:
    found = {manifest["kind"] for manifest in manifests(overlay)}
    assert found == KINDS[overlay] | EVERYWHERE


@layout
def test_no_pod_has_privileges_or_writes_outside_its_volumes(overlay: str) -> None:
    for name, pod in pods(overlay).items():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"], name
        assert spec["securityContext"]["runAsUser"] == 1000
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not spec["automountServiceAccountToken"]
        shm = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}}
        assert shm in spec["volumes"]
        for container in containers(pod):
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"]
            assert not context["allowPrivilegeEscalation"]
            assert context["capabilities"] == {"drop": ["ALL"]}
        assert {"name": "shm", "mountPath": "/dev/shm"} in spec["containers"][0]["volumeMounts"]


@layout
def test_its_yaml_is_a_run_whose_paths_the_manifests_know(overlay: str, tmp_path: Path) -> None:
    texts = [manifest["data"]["run.yaml"] for manifest in manifests(overlay) if manifest["kind"] == "ConfigMap"]
    assert len(texts) == 1
    (tmp_path / "run.yaml").write_text(texts[0])
    config = load_config(tmp_path / "run.yaml")
    assert config.run.dir.is_relative_to("/data")
    assert config.server.training_key_env == "TRAINING_KEY"
    specs = {name: pod["spec"] for name, pod in pods(overlay).items()}
    if overlay == "single":
        return
    server = specs["rlhf-server"]["containers"][0]
    probe = server["startupProbe"]
    repository = probe["exec"]["command"][probe["exec"]["command"].index("--repository") + 1]
    assert Path(repository) == config.server_dir / "model_repository"
    assert config.server_dir.is_relative_to("/tmp")  # not on the volume that the servers share
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 2 * config.server.start_timeout_s
    assert [port["containerPort"] for port in server["ports"]] == [8000, 8001, 8002]
    (pre_stop_s,) = [word for word in server["lifecycle"]["preStop"]["exec"]["command"] if word.isdigit()]
    stopping_s = int(pre_stop_s) + config.server.drain_s + config.server.exit_timeout_s + 5
    assert specs["rlhf-server"]["terminationGracePeriodSeconds"] >= stopping_s
    trainer = specs["rlhf-trainer"]["containers"][0]
    assert str(config.run.journal_dir / "heartbeat.json") in trainer["readinessProbe"]["exec"]["command"][-1]
    assert specs["rlhf-actor"]["terminationGracePeriodSeconds"] > config.actor.stop_grace_s + 5
    assert config.actor.client.servers == ("dns:rlhf-server:8000",)
    assert config.trainer.servers == ["dns:rlhf-server:8001"]


@layout
def test_prometheus_reaches_what_is_annotated(overlay: str, tmp_path: Path) -> None:
    (text,) = [manifest["data"]["run.yaml"] for manifest in manifests(overlay) if manifest["kind"] == "ConfigMap"]
    (tmp_path / "run.yaml").write_text(text)
    config = load_config(tmp_path / "run.yaml")
    ports = {"rlhf-actor": config.monitoring.actor_port, "rlhf-trainer": config.monitoring.trainer_port}
    if overlay == "single":  # all of it is inside one pod, on loopback
        assert set(ports.values()) == {None}
        return
    assert config.monitoring.host == config.server.host == "0.0.0.0"
    allowed = {
        port["port"]
        for manifest in manifests(overlay)
        if manifest["kind"] == "NetworkPolicy"
        for rule in manifest["spec"].get("ingress", [])
        if any("namespaceSelector" in source for source in rule["from"])
        for port in rule["ports"]
    }
    for name, port in {**ports, "rlhf-server": config.server.metrics_port}.items():
        pod = pods(overlay)[name]
        assert pod["metadata"]["annotations"] == {"prometheus.io/scrape": "true", "prometheus.io/port": str(port)}
        assert port in [port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]]
        assert port in allowed


def secrets(pod: Manifest) -> list[dict[str, Any]]:
    """The secrets that become variables of its containers; one with a `key` is that key alone."""
    return [
        source.get("secretRef") or source["valueFrom"]["secretKeyRef"]
        for container in containers(pod)
        for source in [*container.get("envFrom", []), *container.get("env", [])]
        if "secretRef" in source or "secretKeyRef" in source.get("valueFrom", {})
    ]


@layout
def test_a_pod_gets_only_the_keys_that_it_needs(overlay: str) -> None:
    """Who serves gets all of them, because rewards may be judges."""
    found = {name: [secret.get("key") for secret in secrets(pod)] for name, pod in pods(overlay).items()}
    several = {"rlhf-server": [None], "rlhf-trainer": ["TRITON_CONTROL_KEY"], "rlhf-actor": ["TRAINING_KEY"]}
    assert found == ({"rlhf-run": [None]} if overlay == "single" else several)


@layout
def test_every_name_that_is_used_exists(overlay: str) -> None:
    found = manifests(overlay)
    names = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in found}
    for pod in pods(overlay).values():
        assert {("Secret", secret["name"]) for secret in secrets(pod)} <= names
        for volume in pod["spec"]["volumes"]:
            assert "configMap" not in volume or ("ConfigMap", volume["configMap"]["name"]) in names
            claim = volume.get("persistentVolumeClaim")
            assert claim is None or ("PersistentVolumeClaim", claim["claimName"]) in names
        for container in containers(pod):
            assert container["image"].startswith("registry.example.com/"), "an overlay sets every image"
    labels = [pod["metadata"]["labels"].items() for pod in pods(overlay).values()]
    for manifest in found:
        if manifest["kind"] in ("Service", "NetworkPolicy", "PodDisruptionBudget"):
            selector = manifest["spec"].get("podSelector") or manifest["spec"]["selector"]
            wanted = selector.get("matchLabels", selector).items()
            assert any(wanted <= pod for pod in labels), manifest["metadata"]


def test_without_a_key_nothing_is_rendered(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("keys.env")  # the developer's own
    done = kustomize(Path(shutil.copytree(DEPLOY, tmp_path / "deploy", ignore=ignored)), "servers", check=False)
    assert done.returncode != 0
    assert "keys.env" in done.stderr
