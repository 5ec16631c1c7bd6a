"""The recipes for machines that vanish: a manifest of Kubernetes against its published schema, and calls that parse."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from ci_llm.cli.serve import _options
from ci_llm.config import read_config
from ci_llm.serve import Options

RECIPES = Path(__file__).parents[2] / "examples/machines_that_vanish"


def manifest() -> Any:
    return yaml.safe_load((RECIPES / "kubernetes.yaml").read_text(encoding="utf-8"))


def test_the_job_is_valid_by_the_schema_of_kubernetes() -> None:
    job = manifest()
    kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)
    job["spec"]["template"]["spec"]["restart_policy"] = "Never"
    with pytest.raises(kubernetes_validate.ValidationError, match="restart_policy"):
        kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)


def test_the_grace_of_the_pod_outlasts_that_of_the_run_and_an_interruption_is_retried() -> None:
    pod = manifest()["spec"]["template"]["spec"]
    [container] = pod["containers"]
    config = read_config(None, container["args"], {}).config
    assert config.grace_s < pod["terminationGracePeriodSeconds"]
    assert config.mirror is not None
    rules = manifest()["spec"]["podFailurePolicy"]["rules"]
    ignored = [rule["onExitCodes"]["values"] for rule in rules if rule["action"] == "Ignore" and "onExitCodes" in rule]
    assert [config.interrupted_exit_code] in ignored


def test_the_other_recipes_call_train_with_keys_that_exist() -> None:
    job = yaml.safe_load((RECIPES / "skypilot.yaml").read_text(encoding="utf-8"))
    unit = (RECIPES / "ci-llm.service").read_text(encoding="utf-8")
    [started] = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    for command in (job["run"], started):
        words = shlex.split(command)
        config = read_config(None, words[words.index("train") + 1 :], {}).config
        assert (config.mirror, config.interrupted_exit_code) == ("s3://bucket/crowd", 75)
    assert "SuccessExitStatus=75" in unit


def served_by(words: list[str]) -> Options:
    return _options(words[words.index("serve") + 1 :])


def test_the_served_crowd_is_valid_by_the_schema_of_kubernetes_and_ends_in_time() -> None:
    deployment, service = yaml.safe_load_all((RECIPES / "kubernetes-serve.yaml").read_text(encoding="utf-8"))
    for each in (deployment, service):
        kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    call = served_by([*container["command"], *container["args"]])
    [*_, sleeps] = container["lifecycle"]["preStop"]["exec"]["command"]
    assert call.drain_s + int(sleeps) < pod["terminationGracePeriodSeconds"]
    assert container["ports"][0]["containerPort"] == call.port
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] == "/healthz"
