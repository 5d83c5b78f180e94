"""cluster.yaml, as Ray's own launcher reads it: no AWS account, no network."""

from pathlib import Path

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

CLUSTER_YAML = Path(__file__).parents[1] / "cluster.yaml"


@pytest.fixture
def config():
    return yaml.safe_load(CLUSTER_YAML.read_text())


def test_ray_accepts_the_config(config):
    prepared = prepare_config(config)
    validate_config(prepared)
    assert set(prepared["available_node_types"]) == {"head", "extract_8gpu", "train"}


def test_ray_refuses_the_config_with_an_unknown_key(config):
    config["available_node_types"]["train"]["gpus"] = 4
    with pytest.raises(Exception, match="gpus"):
        validate_config(prepare_config(config))


def test_an_engine_of_8_gpus_fits_a_worker_and_a_job_without_gpus_fits_the_head(config):
    types = config["available_node_types"]
    assert types["extract_8gpu"]["resources"]["GPU"] == 8
    assert types["head"]["resources"]["GPU"] == 0 and types["head"]["resources"]["CPU"] > 0
    assert types["extract_8gpu"]["max_workers"] + types["train"]["max_workers"] <= config["max_workers"]


def test_every_node_gets_the_pinned_ray(config):
    # one `pip install` of the project for all nodes: head and workers cannot differ in Ray's version
    assert any("eagle3-ray[sglang]" in command for command in config["setup_commands"])
    assert not any(" ray" in command for command in config["setup_commands"] + config["head_setup_commands"])
