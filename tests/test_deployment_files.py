"""Containers and the kubernetes template: what can be known about them without a daemon and a cluster."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import prefect
import pytest
import typer
import yaml
from prefect.utilities.templating import apply_values, find_placeholders

from flows.cli import app
from flows.deploy import POOL

ROOT = Path(__file__).parents[1]
COMPOSE = ("compose.yaml", "compose.gpu.yaml")
TEMPLATE = ROOT / "deploy" / "kubernetes-job-template.json"
USER = "10001"
"""The images' user; the pod must run as the same one, and the two images share a volume."""


def compose() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))


def instructions(name: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile with their arguments, continued lines joined."""
    text = (ROOT / "docker" / name).read_text(encoding="utf-8")
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#")).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in lines.splitlines() if line.strip()]  # type: ignore[misc]


@pytest.mark.parametrize("name", COMPOSE)
def test_compose_files_follow_the_compose_specification(name: str) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose is not here")
def test_compose_resolves_every_profile_with_the_example_s_settings(tmp_path: Path) -> None:
    settings = (ROOT / ".env.example").read_text(encoding="utf-8")
    env = tmp_path / "env"
    env.write_text(settings.replace("POSTGRES_PASSWORD=", "POSTGRES_PASSWORD=abc"), encoding="utf-8")
    files = [part for name in COMPOSE for part in ("-f", name)]
    command = ["docker-compose", "--env-file", str(env), *files, "--profile", "*", "config", "--quiet"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "is not set" not in done.stderr


def test_every_setting_of_compose_stands_in_the_example_and_the_other_way_round() -> None:
    text = (ROOT / "compose.yaml").read_text(encoding="utf-8")
    bare = {
        name
        for service in compose()["services"].values()
        for name, value in _environment(service)
        if value is None
    }
    used = set(re.findall(r"\$\{([A-Z0-9_]+)", text)) | bare
    offered = set(
        re.findall(r"^(?:# )?([A-Z0-9_]+)=", (ROOT / ".env.example").read_text(encoding="utf-8"), re.M)
    )
    assert used - {"HF_HUB_OFFLINE"} == offered


def _environment(service: dict[str, Any]) -> list[tuple[str, Any]]:
    return list(service.get("environment", {}).items())


def test_no_secret_has_a_value() -> None:
    example = (ROOT / ".env.example").read_text(encoding="utf-8")
    for name, value in re.findall(r"^(?:# )?([A-Z0-9_]+)=(.*)$", example, re.MULTILINE):
        assert not value or not re.search("PASSWORD|SECRET|KEY", name), name
    assert ".env" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()


def test_services_wait_for_the_healthy_ones_and_are_reachable_from_this_machine_only() -> None:
    services = compose()["services"]
    for name, service in services.items():
        for other, how in service.get("depends_on", {}).items():
            assert how == {"condition": "service_healthy"}, name
            assert "healthcheck" in services[other], other
        for port in service.get("ports", []):
            assert port.startswith("${BIND_ADDRESS:-127.0.0.1}:"), name
    published = set(services["worker"]["volumes"])
    assert {v for v in services["vllm"]["volumes"] if v.startswith("runs:")} <= published


def test_commands_of_the_containers_are_those_of_the_programs() -> None:
    services = compose()["services"]
    script = services["worker"]["command"][-1]
    assert re.search(rf"--pool {POOL}\b", script)
    (command,) = re.findall(r"\bebft ([a-z-]+)", script)
    assert command in vars(typer.main.get_command(app))["commands"]
    for name, program in (("prefect", ["prefect", "server", "start"]), ("mlflow", ["mlflow", "server"])):
        given = services[name]["command"]
        assert given[: len(program)] == program
        text = help_of(program)
        for option in (word.split("=")[0] for word in given if word.startswith("--")):
            assert option in text, f"{name}: {option}"


def help_of(program: list[str]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *program, "--help"], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout


@pytest.mark.parametrize("name", ["Dockerfile.trainer", "Dockerfile.vllm"])
def test_images_have_a_fixed_base_and_no_root(name: str) -> None:
    found = instructions(name)
    assert found[0][0] == "FROM"
    assert re.search(r":[\w.-]*\d", found[0][1]), "a base without a version"
    user = [argument for keyword, argument in found if keyword == "USER"]
    assert user[-1] == "ebft"
    assert any(f"useradd --create-home --uid {USER} ebft" in argument for _, argument in found)
    installs = [argument for _, argument in found if "apt-get install" in argument]
    assert all("--no-install-recommends" in i and "rm -rf /var/lib/apt/lists" in i for i in installs)


def test_everything_that_is_copied_exists_and_is_sent_to_the_builder() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for keyword, argument in instructions("Dockerfile.trainer"):
        if keyword == "COPY":
            for source in argument.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert f"!{source}" in ignored, source
    constrained = [
        a for _, a in instructions("Dockerfile.trainer") if "pip install" in a and "--no-deps" not in a
    ]
    assert all("--constraint constraints.txt" in argument for argument in constrained)


@pytest.mark.parametrize("name", ["trainer", "vllm"])
def test_the_image_s_user_owns_the_folders_of_the_volumes(name: str) -> None:
    document = compose()
    services = [s for s in document["services"].values() if s["image"] == f"ebft-{name}"]
    mounts = {volume for service in services for volume in service.get("volumes", [])}
    targets = {
        target for source, target, *_ in (m.split(":") for m in mounts) if source in document["volumes"]
    }
    owned = {
        word
        for _, argument in instructions(f"Dockerfile.{name}")
        for chown in re.findall(r"chown ebft:ebft ([^&]+)", argument)
        for word in chown.split()
    }
    assert targets
    assert targets <= owned


@pytest.fixture
def template() -> dict[str, Any]:
    return json.loads(TEMPLATE.read_text(encoding="utf-8"))


def of_prefect() -> dict[str, Any]:
    """Prefect's own template for kubernetes, as its server hands it out."""
    views = Path(prefect.__file__).parent / "server" / "api" / "collections_data" / "views"
    known = json.loads((views / "aggregate-worker-metadata.json").read_text(encoding="utf-8"))
    return known["prefect-kubernetes"]["kubernetes"]["default_base_job_configuration"]


def test_the_template_has_all_that_prefect_s_worker_reads(template: dict[str, Any]) -> None:
    original = of_prefect()
    assert template["job_configuration"].keys() == original["job_configuration"].keys()
    assert original["variables"]["properties"].keys() <= template["variables"]["properties"].keys()
    jsonschema.Draft7Validator.check_schema(template["variables"])
    for name, variable in template["variables"]["properties"].items():
        if "default" in variable:
            (
                jsonschema.validate(variable["default"], {k: v for k, v in variable.items() if k != "allOf"}),
                name,
            )


def test_every_placeholder_is_a_variable_and_every_variable_is_used(template: dict[str, Any]) -> None:
    used = {placeholder.name for placeholder in find_placeholders(template["job_configuration"])}
    assert used == set(template["variables"]["properties"])


def job(template: dict[str, Any], **values: Any) -> dict[str, Any]:
    """The manifest that the worker would send, before it adds the labels and variables of the run."""
    variables = template["variables"]["properties"]
    given = {name: variable["default"] for name, variable in variables.items() if "default" in variable}
    jsonschema.validate(values, template["variables"])
    return apply_values(template["job_configuration"]["job_manifest"], {**given, **values})


def test_a_job_gets_its_gpus_its_workspace_and_its_secret(template: dict[str, Any]) -> None:
    values = {"name": "run", "gpus": 2, "image": "registry/ebft:1", "secret": "keys", "volume_claim": "disk"}
    pod = job(template, **values)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 2}
    assert container["image"] == "registry/ebft:1"
    assert container["envFrom"] == [{"secretRef": {"name": "keys", "optional": True}}]
    places = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[places["/app/runs"]]["persistentVolumeClaim"] == {"claimName": "disk"}
    assert volumes[places["/dev/shm"]]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    assert pod["securityContext"]["runAsUser"] == int(USER)
    assert "serviceAccountName" not in pod  # not given: left out, not null
    with pytest.raises(jsonschema.ValidationError):
        job(template, gpus=-1)


def test_a_job_is_one_for_kubernetes(template: dict[str, Any]) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    values = {"name": "run", "labels": {"a": "b"}, "command": ["prefect", "flow-run", "execute"]}
    validate.validate(job(template, **values), validate.latest_version(), strict=True)
