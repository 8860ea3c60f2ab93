"""Run folders written by the actor's own recorder, from rollouts that no model has generated."""

import asyncio
from dataclasses import replace

import numpy as np
import torch
from prompts import one_prompt
from run_checkpoints import make_tokenizer
from safetensors.torch import save_file
from samples import a_sample, groups_of, rewarded
from settings import nested

from rlhf_triton.actor.algorithms.batch import make_batch
from rlhf_triton.actor.algorithms.kl import KLControl
from rlhf_triton.actor.algorithms.method import Method
from rlhf_triton.actor.algorithms.stages import RewardShaper
from rlhf_triton.actor.data.rollout_rows import conversations_of
from rlhf_triton.actor.recording.recorder import Recorder
from rlhf_triton.actor.run.checkpoints import RunCheckpoints, RunState
from rlhf_triton.actor.run.remote_critic import RemoteCritic
from rlhf_triton.actor.run.settings import SETTINGS_FILE
from rlhf_triton.actor.run.validation import Validation
from rlhf_triton.client.retry import RequestCounters
from rlhf_triton.config.actor import ActorSection
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.store.durable import write_json

NUM_ROWS = 4
WIDTH = 8
TOKENIZER = make_tokenizer()


class UntrainedPolicy:
    """The part of a policy that the recorder uses."""

    tokenizer = TOKENIZER
    fingerprint = "of its start"
    halvings = ()

    def __init__(self, device):
        self.generator = torch.nn.Linear(1, 1, device=device)
        self.generator.device = torch.device(device)

    def save(self, folder):
        save_file({"w": torch.zeros(1)}, folder / "model.safetensors")


class RecordedRun:
    """A run without a critic, recorded step by step: its rewards are those of the steps' numbers, over ten."""

    def __init__(self, folder, *, device="cpu", talks=None, **actor):
        self._talks = talks  # what is known of each row beside its tokens
        given = {
            "algorithm_name": "grpo",
            "responses_per_prompt": 2,
            "kl_coef": 0.0,
            "steps": 4,
            "minibatch_size": 128,
            **actor,
        }
        self.config = RunConfig.model_validate(
            {
                "run": {"dir": folder},
                "rewards": {"verdict": {"function": "verdict.py:verdict"}},
                "critic": {"model": "of another algorithm"},
                "actor": nested(ActorSection, given),
            }
        )
        settings = self.config.actor
        self._method = Method.from_settings(settings.algorithm, settings.kl)
        self._shaper = RewardShaper(settings.rewards, max_new_tokens=9)
        policy = UntrainedPolicy(device)
        self._state = RunState(policy, self._shaper, KLControl(0.0, target=None), one_prompt())
        no_client = None
        self._critic = RemoteCritic(no_client, self.config.run, is_trained=False, publish_every=1)
        self._checkpoints = RunCheckpoints(self.config, self._state, self._critic)

    def start(self):
        """Write what a run has before its first step."""
        self.config.run.dir.mkdir(parents=True, exist_ok=True)
        write_json(self.config.run.dir / SETTINGS_FILE, self.config.model_dump(mode="json"))
        first_step = asyncio.run(self._checkpoints.resume()) + 1
        self._recorder = Recorder(self.config, self._state, self._critic, RequestCounters(), first_step=first_step)
        return self

    def steps(self, *numbers):
        """Record these steps."""
        for step in numbers:
            groups = self._groups(step / 10)
            batch = make_batch(groups, self._method, self._shaper, kl_coef=0.0)
            measured = {"timers/generate": 0.5, "timers/step_time": 1.0}
            asyncio.run(self._recorder.log_step(step, groups, [], batch, measured))
        return self

    def validated(self, when, step, reward):
        """Record a validation."""
        result = Validation(conversations_of(self._groups(reward)), 0.25, None)
        asyncio.run(self._recorder.validations.add(when, step, result, seconds=0.1))
        return self

    def finished(self, steps):
        """Write the actor's summary; return the run's folder."""
        scorer = None  # asked only for a critic's values
        asyncio.run(self._checkpoints.finish(steps))
        asyncio.run(self._recorder.finish(scorer, 2.0, steps=steps))
        return self.config.run.dir

    def _groups(self, reward):
        tokens = torch.randint(3, len(TOKENIZER), (NUM_ROWS, WIDTH), generator=torch.Generator().manual_seed(0)).numpy()
        nothing = np.zeros(WIDTH, np.float32) if self.config.actor.kl.uses_reference else None
        rows = []
        for i, talk in enumerate(self._talks or [{}] * NUM_ROWS):
            row = a_sample(tokens[i].tolist(), 2, name=str(i), score=rewarded(reward), **talk)
            prompt = replace(row.prompt, text=TOKENIZER.decode(tokens[i, :2]))
            rows.append(replace(row, prompt=prompt, policy_logprobs=nothing, ref_logprobs=nothing))
        return groups_of(rows, 2)
