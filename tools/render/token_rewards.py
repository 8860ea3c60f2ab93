"""Parameters of rewards that are read at single tokens; nothing is rendered for any other reward."""

from __future__ import annotations

import json

from python_backend.config import ConfigError, RewardSection, RunConfig
from python_backend.config.token_rewards import read_template
from python_backend.serving.rows.templates import RowTemplate
from python_backend.wire import contract


def process_of(config: RunConfig) -> str | None:
    """Return the granularity of the served process reward, or None."""
    section = config.reward.process
    return section.granularity if section is not None and config.uses_reward_model else None


def token_reward_parameters(reward: RewardSection) -> dict[str, str]:
    """Return the model parameters of `reward.logit`, `reward.process` and `reward.template`, without those unset.

    Raises:
        ConfigError: the template is not valid.
    """
    process, found = reward.process, client_parameters(reward)
    if process is not None:
        found |= {"aggregate": process.aggregate, "step_separator": process.separator, "step_mark": process.mark}
    if reward.logit is not None:
        found["logit"] = json.dumps(reward.logit.model_dump())
    if reward.template is not None:
        try:
            found["template"] = template = read_template(reward.template)
            RowTemplate(template)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    found |= {"score": None if reward.score == "auto" else reward.score}
    found |= {"generation_prompt": "true" if reward.generation_prompt else None}
    return {name: value for name, value in found.items() if value is not None}


def client_parameters(reward: RewardSection) -> dict[str, str | None]:
    """Return the parameters that a client needs: what the reward replies with, and what it takes."""
    process = reward.process
    return {
        contract.PROCESS: None if process is None else process.granularity,
        contract.TEXTS_ONLY: "true" if reward.template or (process is not None and process.mark) else None,
    }
