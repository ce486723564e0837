"""The manifests of docs/kubernetes: read as kustomize puts them together."""

import os
import subprocess
from pathlib import Path

import yaml

FOLDER = Path(__file__).parents[1] / "docs" / "kubernetes"
ON_DEMAND = FOLDER / "on-demand"
KUSTOMIZATIONS = (FOLDER, ON_DEMAND)


def kustomization(folder):
    return yaml.safe_load((folder / "kustomization.yaml").read_text())


def resources(folder):
    """The objects that a kustomization lists, in the pool's namespace."""
    texts = [(folder / name).read_text() for name in kustomization(folder)["resources"]]
    for found in (each for text in texts for each in yaml.safe_load_all(text)):
        if found["kind"] != "Namespace":
            found["metadata"]["namespace"] = kustomization(FOLDER)["namespace"]
        yield found


def pods():
    """By name, the pod that each workload makes."""
    found = [each for folder in KUSTOMIZATIONS for each in resources(folder) if "template" in each.get("spec", {})]
    return {each["metadata"]["name"]: each["spec"]["template"] for each in found}


def containers():
    """By (pod, container), every container; those that run before a pod's own come first."""
    return {
        (name, container["name"]): container
        for name, pod in pods().items()
        for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]
    }


def with_nodes_on_demand(name):
    """What the component of nodes on demand changes in a container of the controller."""
    spec = yaml.safe_load((ON_DEMAND / "controller.patch").read_text())["spec"]["template"]["spec"]
    return next(each for each in [*spec["initContainers"], *spec["containers"]] if each["name"] == name)


def settings():
    """What the map `ringmaster-pool` has."""
    lines = (FOLDER / "pool.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def environment(container, secrets):
    """The environment of a container. secrets: the secrets of the cluster, each a mapping, by name."""
    sources = {"configMapRef": {"ringmaster-pool": settings()}, "secretRef": secrets}
    found = {}
    for source in container.get("envFrom", []):
        ((kind, of),) = source.items()
        if of["name"] in sources[kind] or not of.get("optional"):
            found |= sources[kind][of["name"]]
    for variable in container.get("env", []):
        if "valueFrom" in variable:
            key = variable["valueFrom"]["secretKeyRef"]
            found[variable["name"]] = secrets[key["name"]][key["key"]]
        else:
            found[variable["name"]] = variable["value"]
    return found


def made_secrets(folder, *arguments, **environment):
    """The secrets that the script makes, by name, by a kubectl that copies their files into `folder`."""
    kubectl = folder / "kubectl"
    kubectl.write_text('#!/bin/sh\nmkdir "$KEPT/$6" && cp "${7#*=}" "$KEPT/$6"\n')
    kubectl.chmod(0o700)
    environment |= {"PATH": f"{folder}:{os.environ['PATH']}", "KEPT": str(folder)}
    subprocess.run([FOLDER / "make-secrets.sh", *arguments], check=True, env=environment)
    found = {}
    for place in (each for each in folder.iterdir() if each.is_dir()):
        (file,) = place.iterdir()
        text = file.read_text()
        variables = (line.split("=", 1) for line in text.splitlines())
        found[place.name] = dict(variables) if file.suffix == ".env" else {file.name: text}
    return found
