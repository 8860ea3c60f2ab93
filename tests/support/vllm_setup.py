"""A policy whose responses come from fake vLLM servers."""

import numpy as np
from random_models import word_tokenizer
from tiny_checkpoints import VOCAB, save_tiny

from rlhf_triton.actor.data.prompt_reader import Prompt
from rlhf_triton.actor.data.recorded import PolicyTurn
from rlhf_triton.actor.policy.policy import Policy
from rlhf_triton.actor.vllm.generation import VllmGeneration
from rlhf_triton.config.run_config import RunConfig

PROMPTS = [Prompt("", "", np.asarray(tokens)) for tokens in ([3, 4], [5], [6, 7, 8])]
END = [5, 6, 7, 1]


def save_word_policy(folder):
    """Write a tiny language model with a tokenizer; return the folder."""
    save_tiny(folder, "llama", "language", eos_token_id=1)
    words = ["<pad>", "<eos>", *(f"w{i}" for i in range(2, VOCAB))]
    word_tokenizer(words, unknown="<pad>").save_pretrained(folder)
    return folder


class VllmSetup:
    """A policy in `folder` that generates with fake servers."""

    def __init__(self, folder, checkpoint, servers, **changes):
        generation = {"engine": "vllm", "max_new_tokens": 8, "vllm": {"servers": servers}}
        given = changes.pop("generation", {})
        generation |= {**given, "vllm": {**generation["vllm"], **given.get("vllm", {})}}
        actor = {
            "policy": {"model": str(checkpoint), **changes.pop("policy", {})},
            "generation": generation,
            "prompts": {"max_tokens": 8},
            **changes.pop("actor", {}),
            "client": {"max_outage_s": 120, **changes},
        }
        self.config = RunConfig.model_validate({"run": {"dir": str(folder)}, "actor": actor})
        self.policy = Policy(self.config.actor, make_generation=lambda policy, _: VllmGeneration(self.config, policy))
        self.generation = self.policy.generation
        self.policy.renew_generator()

    def update(self):
        """Make a new version of the policy, as an update does."""
        self.policy.trained.optimizer_step += 1
        self.policy.renew_generator(self.policy.trained.optimizer_step)

    def run(self, *, seed=3, greedy=False):
        """Generate a response to each of PROMPTS."""
        found = {}

        def finished(row, conversation):
            (sample,) = conversation
            logprobs = None if sample.logprobs is None else sample.logprobs[sample.sampled].tolist()
            found[row] = PolicyTurn(sample.tokens[sample.sampled].tolist(), sample.ended, logprobs)

        self.generation.run_rows(dict(enumerate(PROMPTS)), finished, seed=seed, greedy=greedy)
        return found
