"""A YAML without a section `actor`, for another trainer: what it names is served, and nothing else is demanded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import reward_functions
import yaml
from live_system import Checkpoints

import tools.serve
from python_backend.config import ConfigError, load_config
from python_backend.config.required_files import check_critic, check_files
from python_backend.config.sections import UNMEASURED
from tools import render_configs
from tools.plan.command import roles_of
from tools.plan.traffic import traffic_lines

FUNCTION = {"verdict": {"function": f"{reward_functions.__file__}:token_sum", "workers": 1}}
CRITIC = {"critic", "critic_infer", "critic_train", "critic_save"}
REWARD = {"reward_model"}
TERMS = {"reward_model", "reward_mixture", "reward_function_verdict", "reward_checkpoint"}


@pytest.mark.parametrize(
    ("sections", "served"),
    [
        ({"critic"}, CRITIC),
        ({"reward"}, REWARD),
        ({"rewards", "reward"}, TERMS),
        ({"critic", "reward"}, CRITIC | REWARD),
    ],
)
def test_without_an_actor_the_models_that_the_yaml_names_are_served(
    sections: set[str], served: set[str], tmp_path: Path, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    every: dict[str, Any] = {"rewards": {"model": {}, **FUNCTION}}
    every |= {name: {"checkpoint": str(getattr(checkpoints, name)), **UNMEASURED} for name in ("reward", "critic")}
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "policy").symlink_to(checkpoints.policy)  # the default, so that a run can be planned
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "my.yaml"
    path.write_text(yaml.safe_dump({"run": {"dir": str(tmp_path / "run")}, **{name: every[name] for name in sections}}))
    for overrides in ([], ["run.deterministic=true"], ["actor.client.deadline_s=120"]):  # the gateway has that client
        config = load_config(path, overrides)
        check_files(config, server=True)
        rendered = render_configs.render_configs(config)
        assert set(rendered) == served
        ensemble = rendered.get("critic_infer", "")
        assert ('output { name: "rewards"' in ensemble) == (sections == {"critic", "reward"})
    if sections == {"reward"}:
        assert traffic_lines(config, roles_of(config))
    made: list[str] = []
    monkeypatch.setattr(tools.serve, "_run_module", lambda what, arguments: made.append(what))
    tools.serve.ensure_first_version(config, path, [])
    assert bool(made) == ("critic" in sections)
    if "critic" not in sections:
        with pytest.raises(ConfigError, match="the YAML has no section `critic`, so there is nothing to train"):
            check_critic(config)
