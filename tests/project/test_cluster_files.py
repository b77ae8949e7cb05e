"""The files that describe clusters: what Ray's autoscaler, KubeRay, Kubernetes and Grafana make of them.

KubeRay's definition of a RayJob is restated here from its API reference (v1.5), as far as the manifests go; pods are
checked against Kubernetes' own schema, the autoscaler's files against Ray's.
"""

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from cluster.job import app

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "cluster"
KUBERNETES = "1.35"


def fields(required: tuple[str, ...] = (), **types: object) -> dict[str, object]:
    """An object with no other fields than these."""
    return {"type": "object", "properties": types, "required": list(required), "additionalProperties": False}


STRING, NUMBER, BOOLEAN = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
STRINGS = {"type": "object", "additionalProperties": STRING}
POD = fields(("spec",), metadata={"type": "object"}, spec={"type": "object"})
HEAD = fields(
    ("template",),
    rayStartParams=STRINGS,
    template=POD,
    serviceType=STRING,
    enableIngress=BOOLEAN,
    headService={"type": "object"},
)
WORKERS = fields(
    ("groupName", "template"),
    groupName=STRING,
    replicas=NUMBER,
    minReplicas=NUMBER,
    maxReplicas=NUMBER,
    numOfHosts=NUMBER,
    suspend=BOOLEAN,
    idleTimeoutSeconds=NUMBER,
    rayStartParams=STRINGS,
    template=POD,
)
RAY_CLUSTER = fields(
    ("headGroupSpec",),
    rayVersion=STRING,
    authOptions=fields(mode={"enum": ["disabled", "token"]}),
    enableInTreeAutoscaling=BOOLEAN,
    autoscalerOptions={"type": "object"},
    headServiceAnnotations=STRINGS,
    headGroupSpec=HEAD,
    workerGroupSpecs={"type": "array", "items": WORKERS},
)
RAY_JOB = fields(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=fields(("name",), name=STRING, namespace=STRING, labels=STRINGS, annotations=STRINGS),
    spec=fields(
        ("entrypoint", "rayClusterSpec"),
        entrypoint=STRING,
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
        submitterConfig=fields(backoffLimit=NUMBER),
        submitterPodTemplate=POD,
        runtimeEnvYAML=STRING,
        metadata=STRINGS,
        jobId=STRING,
        suspend=BOOLEAN,
        shutdownAfterJobFinishes=BOOLEAN,
        ttlSecondsAfterFinished=NUMBER,
        activeDeadlineSeconds=NUMBER,
        backoffLimit=NUMBER,
        entrypointNumCpus={"type": "number"},
        entrypointNumGpus={"type": "number"},
        entrypointResources=STRING,
        rayClusterSpec=RAY_CLUSTER,
    ),
)


def pods(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    cluster = spec["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **group["template"]}


def ray_version() -> str:
    return re.findall(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[0]


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_ray_jobs_are_what_kuberay_and_kubernetes_take(kind: str) -> None:
    claim, job = yaml.safe_load_all((CLUSTER / "kuberay" / f"rayjob-{kind}.yaml").read_text())
    jsonschema.validate(job, RAY_JOB)
    for resource in (claim, *pods(job["spec"])):
        kubernetes_validate.validate(resource, KUBERNETES, strict=True)
    spec = job["spec"]["rayClusterSpec"]
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["rayVersion"] == ray_version()
    workers = spec["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert ("nvidia.com/gpu" in workers) == (kind == "gpu") == ("--device cuda" in job["spec"]["entrypoint"])


def test_the_server_on_kubernetes_is_what_kuberay_and_kubernetes_take() -> None:
    claim, service, job = yaml.safe_load_all((CLUSTER / "kuberay" / "rayjob-serve-cpu.yaml").read_text())
    jsonschema.validate(job, RAY_JOB)
    for resource in (claim, service, *pods(job["spec"])):
        kubernetes_validate.validate(resource, KUBERNETES, strict=True)
    spec = job["spec"]["rayClusterSpec"]
    head = spec["headGroupSpec"]["template"]
    words = job["spec"]["entrypoint"].split()
    assert words[:4] == ["python", "-m", "cluster.job", "serve"]
    assert head["metadata"]["labels"] == service["spec"]["selector"]
    assert words[words.index("--port") + 1] == str(service["spec"]["ports"][0]["targetPort"])
    assert spec["workerGroupSpecs"][0]["replicas"] == int(words[words.index("--stages") + 1])
    container = head["spec"]["containers"][0]
    assert container["readinessProbe"]["exec"]["command"] == ["python", "-m", "cluster.health", "--ready"]
    assert "livenessProbe" not in container, "KubeRay's own looks at Ray; a server without workers ends by itself"
    assert "PPD_API_KEY" in [variable["name"] for variable in head["spec"]["containers"][0]["env"]]
    assert (spec["rayVersion"], spec["authOptions"]) == (ray_version(), {"mode": "token"})


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_ray_jobs_have_room_for_their_workers(kind: str) -> None:
    *_, job = yaml.safe_load_all((CLUSTER / "kuberay" / f"rayjob-{kind}.yaml").read_text())
    words = job["spec"]["entrypoint"].split()
    assert job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replicas"] == 1 + int(words[words.index("--k") + 1])
    assert words[:4] == ["python", "-m", "cluster.job", "generate"]
    helped = CliRunner().invoke(app, ["generate", "--help"], env={"COLUMNS": "200"}).stdout
    assert all(word in helped for word in words if word.startswith("--"))


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_autoscaler_files_are_what_ray_takes(kind: str) -> None:
    config = yaml.safe_load((CLUSTER / "autoscaler" / f"aws-{kind}.yaml").read_text())
    found = importlib.util.find_spec("ray")
    assert found is not None and found.origin is not None
    schema = json.loads((Path(found.origin).parent / "autoscaler" / "ray-schema.json").read_text())
    jsonschema.validate(config, schema)
    starts = [config[f"{role}_start_ray_commands"][-1] for role in ("head", "worker")]
    assert all(command.startswith("RAY_AUTH_MODE=token ray start ") for command in starts)
    assert config["head_node_type"] in config["available_node_types"]
    types = config["available_node_types"].values()
    assert any("GPU" in node_type["resources"] for node_type in types) == (kind == "gpu")


def test_an_image_is_well_without_settings() -> None:
    (check,) = re.findall(r"^HEALTHCHECK .* CMD (.*)$", (CLUSTER / "Dockerfile").read_text(), re.MULTILINE)
    assert json.loads(check) == ["python", "-m", "cluster.health"]
    assert "cluster" not in (CLUSTER / "Dockerfile.dockerignore").read_text().split()


def test_nothing_is_pinned_to_latest() -> None:
    files = [CLUSTER / "Dockerfile", *CLUSTER.glob("*/*.yaml")]
    images = [image for file in files for image in re.findall(r"(?:image: .*?|BASE=)(\S+/\S+:\S+)", file.read_text())]
    assert len(images) == 7
    assert not [image for image in images if image.endswith(":latest")]
    assert f"rayproject/ray:{ray_version()}-py312-cpu" in images


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    """The fields that each panel needs; that its metrics are exported is tested on a real node."""
    dashboard = json.loads((CLUSTER / "grafana_dashboard.json").read_text())
    assert {"uid", "title", "schemaVersion", "panels", "templating", "time"} <= dashboard.keys()
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        assert {"id", "type", "title", "description", "datasource", "gridPos", "fieldConfig", "targets"} <= panel.keys()
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + 8)}
        assert place["x"] + place["w"] <= 24 and not cells & taken
        taken |= cells
        for target in panel["targets"]:
            used = set(re.findall(r"\$(?!__)\{?(\w+)", target["expr"] + target["datasource"]["uid"]))
            assert used <= variables
            assert target["expr"].count("(") == target["expr"].count(")")
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
