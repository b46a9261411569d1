"""stable-baselines3 archives: names by part of the policy, the class from its settings."""

from __future__ import annotations

import importlib.util
import io
import json
import zipfile
from pathlib import Path

import pytest
import torch

import squisher
from squisher.errors import FileError, NamingError

FIXTURES = Path(__file__).parent.parent / "fixtures"
SB3 = FIXTURES / "sb3"
spec = importlib.util.spec_from_file_location("make_sb3", FIXTURES / "make_sb3.py")
maker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(maker)


def truth(folder, name):
    return {key: torch.tensor(value) for key, value in json.loads((folder / f"{name}.json").read_text()).items()}


def assert_same(importance, expected):
    assert set(importance) == set(expected)
    for name, value in expected.items():
        assert torch.equal(importance[name], value), name


def changed(tmp_path, name, change):
    """The archive with other content: `change` gets and returns its entries."""
    with zipfile.ZipFile(SB3 / f"{name}.zip") as archive:
        content = change({entry: archive.read(entry) for entry in archive.namelist()})
    with zipfile.ZipFile(tmp_path / "changed.zip", "w") as archive:
        for entry, value in content.items():
            archive.writestr(entry, value)
    return tmp_path / "changed.zip"


@pytest.mark.parametrize("name", maker.NAMES)
def test_every_optimizer_of_an_agent_is_read_under_the_policys_names(name):
    assert_same(squisher.extract(SB3 / f"{name}.zip", bias_correction=False), truth(SB3, name))


def test_targets_are_never_named():
    assert not any("target" in name for name in squisher.extract(SB3 / "td3.zip"))


def test_actor_and_critic_have_their_own_steps():
    steps = squisher.extract(SB3 / "td3.zip").provenance.steps
    assert steps["per_parameter"]["actor.mu.0.weight"] * 2 == steps["per_parameter"]["critic.qf0.0.weight"]


def test_an_average_that_started_at_one_is_freed_of_it():
    stored = truth(SB3, "a2c_tf")
    importance = squisher.extract(SB3 / "a2c_tf.zip")
    steps = importance.provenance.steps["max"]
    assert importance.provenance.optimizer["class"] == "RMSpropTFLike"
    for name, value in stored.items():
        expected = (value.double() - 0.9**steps).clamp(min=0) / (1 - 0.9**steps)
        assert torch.allclose(importance[name].double(), expected, rtol=1e-3, atol=1e-6)


def test_plain_rmsprop_started_at_zero():
    stored = truth(SB3, "a2c")
    importance = squisher.extract(SB3 / "a2c.zip")
    steps = importance.provenance.steps["max"]
    for name, value in stored.items():
        assert torch.allclose(importance[name], value / (1 - 0.99**steps), rtol=1e-5)


def test_clipping_is_said():
    provenance = squisher.extract(SB3 / "ppo.zip").provenance
    assert provenance.after_clipping is True
    assert [(one.code, one.numbers) for one in provenance.pollution] == [("clipping", {"norm": 0.5})]


def test_an_archive_without_its_optimizer_is_refused(tmp_path):
    def drop(content):
        return {name: value for name, value in content.items() if "optimizer" not in name}

    with pytest.raises(FileError, match="policy.*no optimizer"):
        squisher.extract(changed(tmp_path, "ppo", drop))


def test_an_optimizer_of_another_policy_gets_no_names(tmp_path):
    def exchange(content):
        with zipfile.ZipFile(SB3 / "dqn.zip") as other:
            return {**content, "policy.pth": other.read("policy.pth")}

    with pytest.raises(NamingError):
        squisher.extract(changed(tmp_path, "ppo", exchange))


def test_settings_that_cannot_be_read_do_no_harm(tmp_path):
    path = changed(tmp_path, "ppo", lambda content: {**content, "data": b"{" * 10})
    importance = squisher.extract(path, bias_correction=False)
    assert_same(importance, truth(SB3, "ppo"))
    assert "after_clipping" not in importance.provenance.optimizer


@pytest.mark.formats
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", maker.NAMES)
def test_fresh_agents_are_read(name, tmp_path):
    maker.save(name, tmp_path)
    assert_same(squisher.extract(tmp_path / f"{name}.zip", bias_correction=False), truth(tmp_path, name))


def test_a_dqn_whose_optimizer_was_given_the_target_network_too(tmp_path):
    """As versions before 2.3 and sb3-contrib's QR-DQN build it: entries without a state, after those of the network."""

    def with_targets(content):
        state = torch.load(io.BytesIO(content["policy.optimizer.pth"]), weights_only=True)
        count = len(state["param_groups"][0]["params"])
        state["param_groups"][0]["params"] = list(range(2 * count))
        buffer = io.BytesIO()
        torch.save(state, buffer)
        return {**content, "policy.optimizer.pth": buffer.getvalue()}

    importance = squisher.extract(changed(tmp_path, "dqn", with_targets), bias_correction=False)
    assert_same(importance, truth(SB3, "dqn"))
    assert all("target" in name for name in importance.provenance.absent)


def test_an_entropy_coefficient_that_nothing_names_does_not_block_actor_and_critic(tmp_path):
    def drop(content):
        return {name: value for name, value in content.items() if name != "pytorch_variables.pth"}

    with pytest.warns(squisher.SquisherWarning, match="single number.*entropy coefficient"):
        imp = squisher.extract(changed(tmp_path, "sac", drop))
    assert {name.partition(".")[0] for name in imp} == {"actor", "critic"}


def test_rmsprop_whose_settings_cannot_be_read_may_have_begun_at_one(tmp_path):
    path = changed(tmp_path, "a2c_tf", lambda content: {**content, "data": b"{" * 10})
    with pytest.raises(FileError, match="RMSpropTFLike"):
        squisher.extract(path)
    said, known = squisher.extract(path, optimizer_class="RMSpropTFLike"), squisher.extract(SB3 / "a2c_tf.zip")
    assert all(torch.equal(said[name], known[name]) for name in known)
