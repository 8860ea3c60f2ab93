"""Check of a machine's GPU: whether everything works there, and how fast.

Each part runs in a process of its own with a time limit, so that no failure hides what the other parts find. Without a
GPU the same parts run on the CPU, with tiny models.
"""

import argparse
import contextlib
import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.measuring import (
    FREE_PORTS,
    SIZES,
    Record,
    make_checkpoint,
    make_trace,
    timed,
)
from rlhf_triton.actor.algorithms.batch import critic_payload, make_batch
from rlhf_triton.actor.algorithms.method import Method
from rlhf_triton.actor.algorithms.stages import RewardShaper
from rlhf_triton.actor.data.prompt_reader import Prompt
from rlhf_triton.actor.data.rollout_rows import Group, Score
from rlhf_triton.actor.policy.policy import Policy
from rlhf_triton.actor.policy.update import PolicyUpdate
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.errors import RlhfError
from rlhf_triton.models.batching import padded_rows
from rlhf_triton.models.modeling import load_critic, load_reward, quiet_transformers
from rlhf_triton.store.jsonl import append_jsonl, read_jsonl
from rlhf_triton.store.weights import Origin, WeightsStore
from rlhf_triton.trainer.critic_update import CriticUpdate
from rlhf_triton.trainer.publish import copy_checkpoint, initialise_store
from rlhf_triton.trainer.trained_critic import build_critic
from rlhf_triton.wire import contract
from rlhf_triton.wire.training_payload import train_payload

ROOT = Path(__file__).resolve().parents[1]
LLAMA_3 = {
    "vocab_size": 128_256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
}
IN_FLIGHT = 64
REPLY_S = 60.0
MAX_FP32_ERROR = 1e-3  # standard deviations of the scores
MAX_BF16_ERROR = 2.0  # times transformers' own
MAX_SWAP_MEMORY = 1.2  # times the weights, beside those that are served
PROMPT = 96  # tokens
LORA = {"lora_rank": 16, "gradient_checkpointing": True}
PARTS = {  # functions of this module, and the most seconds of each
    "environment": 60,
    "served_score": 60,
    "scoring": 120,
    "swap": 60,
    "ppo_step": 90,
}
ResultRow = dict[str, Any]
Found = Iterator[ResultRow]


def number(
    name: str, value: float | None, *, least: float | None = None, most: float | None = None, of: str = ""
) -> ResultRow:
    """Return the row of a measured number and the limits that it must keep; None: not measured, and `of` says why."""
    is_outside = value is not None and ((least is not None and value < least) or (most is not None and value > most))
    state = "OUTSIDE" if is_outside else ""
    return {"": state, "number": name, "value": value, "at least": least, "at most": most, "of": of}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options."""
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), help="default: cuda if there is a GPU")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--minutes", type=float, default=8.0, help="time for all parts together; what is left then fails")
    add("--quick", action="store_true", help="tiny models: only shows that everything works")


def measure(settings: argparse.Namespace, record: Record) -> list[ResultRow]:
    """Run the parts one after the other; return their numbers."""
    device = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
    small = settings.quick or device == "cpu"
    rows = []
    end = time.monotonic() + 60 * settings.minutes
    with tempfile.TemporaryDirectory() as scratch:
        job = {"device": device, "small": small, "scratch": scratch}
        for part in settings.parts:
            limit_s = min((3 if small else 1) * PARTS[part], end - time.monotonic())
            sample = run_part(part, job, limit_s, record.out / f"{part}.log")
            record.add(sample)
            record.say(f"{part}: {sample['state']}")
            record.has_failed |= sample["state"] != "passed"
            of = "tiny models: its speeds say nothing about a real GPU" if small else ""
            rows.append({"part": part, "": sample["state"], "number": "seconds", "value": sample["seconds"], "of": of})
            rows += sample["numbers"]
    return rows


def run_part(part: str, job: Mapping[str, Any], limit_s: float, log: Path) -> ResultRow:
    """Run one part in a process of its own, which ends at the limit; return its sample."""
    rows_file = log.with_suffix(".jsonl")
    rows_file.unlink(missing_ok=True)
    start = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.gpu", part, json.dumps(job), str(rows_file)]
    with log.open("wb") as output:
        try:
            done = subprocess.run(command, stdout=output, stderr=output, cwd=ROOT, timeout=max(0.0, limit_s))
            state = "passed" if done.returncode == 0 else f"FAILED: see {log}"
        except subprocess.TimeoutExpired:
            state = "TIMED OUT"
    numbers = read_jsonl(rows_file)
    if state == "passed" and any(row[""] for row in numbers):
        state = "OUTSIDE ITS LIMITS"
    return {"part": part, "state": state, "seconds": time.monotonic() - start, "numbers": numbers}


@dataclass(frozen=True)
class PartJob:
    """The settings of a part."""

    device: str
    """`cpu` or `cuda`."""
    small: bool
    """Whether to use tiny models."""
    scratch: str
    """Folder for checkpoints, which all parts share."""

    @property
    def model(self) -> str:
        """The size of the models."""
        return "tiny" if self.small else "1b"

    def config(
        self,
        *,
        dtype: str = "bfloat16",
        trained: Mapping[str, Any] = {},
        rows: int = 8,
        max_new_tokens: int = 160,
        algorithm: str = "ppo",
    ) -> RunConfig:
        """Return a run on the device, after making its checkpoints if they are missing.

        Args:
            dtype: in which reward, critic, policy and trainer compute.
            trained: further settings of policy and critic trainer.
            rows: responses of a rollout, all generated at once, and all in one minibatch.
        """
        folder = Path(self.scratch) / self.model
        if not folder.is_dir():
            make_checkpoints(self.model, folder.with_suffix(".new"), self.device)
            folder.with_suffix(".new").rename(folder)
        budget = 1024 if self.small else 16_384
        scoring = {"device": self.device, "dtype": dtype, "threads": 1, "token_budget": budget}
        training = {"device": self.device, "precision": dtype, "token_budget": budget, **trained}
        return RunConfig.model_validate(
            {
                "run": {"dir": folder / "run"},
                "server": FREE_PORTS,
                "reward": {"model": folder / "reward", **scoring},
                "critic": {"model": folder / "critic", **scoring},
                "trainer": {"global_batch_size": rows, **training},
                "actor": {
                    "rollout_size": rows,
                    "algorithm": {"name": algorithm, "mask_unfinished": False},
                    "policy": {"model": folder / "policy", **training},
                    "prompts": {"max_tokens": PROMPT},
                    "generation": {"max_new_tokens": max_new_tokens, "batch_size": rows},
                    "kl": {"coef": 0.0},
                    "update": {"minibatch_size": rows},
                    "validation": {"size": 0},
                },
            }
        )

    def trace(self) -> list[np.ndarray]:
        """Return the rows with which scoring is measured."""
        return make_trace(IN_FLIGHT * (2 if self.small else 16))

    def dense_rate(self) -> float:
        """Return the operations per second of a large bfloat16 matrix product of random numbers."""
        size = 256 if self.small else 16_384
        one, other = (torch.randn(size, size, device=self.device).bfloat16() for _ in range(2))
        return 2.0 * size**3 / min(timed(lambda: (one @ other)[0, 0].item())[0] for _ in range(4))


def make_checkpoints(model: str, folder: Path, device: str) -> None:
    """Write a reward model and a policy with random weights, and a critic of the reward's."""
    shape: dict[str, Any] = {} if model == "tiny" else LLAMA_3
    for kind in ("reward", "policy"):
        make_checkpoint(kind, model, folder / kind, device=device, **shape)
    (folder / "critic").mkdir()
    load_critic(folder / "reward").write(folder / "critic")  # as its versions are stored
    AutoTokenizer.from_pretrained(folder / "reward").save_pretrained(folder / "critic")


def environment(job: PartJob) -> Found:
    """The device's rates at best."""
    yield number("GPUs", torch.cuda.device_count())
    if job.device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        yield number("memory, GiB", gpu.total_memory / 2**30, of=f"{gpu.name}, CUDA {torch.version.cuda}")
    yield number("bfloat16 matrix product, TFLOP/s", job.dense_rate() / 1e12)


def served_score(job: PartJob) -> Found:
    """Served scores against transformers' own."""
    rows = make_trace(IN_FLIGHT)
    folder = job.config().reward.model

    @torch.no_grad()
    def direct(dtype: torch.dtype) -> np.ndarray:
        model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype).to(job.device).eval()
        return np.asarray([[float(model(torch.from_numpy(row)[None].to(job.device)).logits)] for row in rows])

    exact = direct(torch.float32)
    scores = [direct(torch.bfloat16)]
    for dtype in ("bfloat16", "float32"):
        with served(job.config(dtype=dtype), contract.REWARD_MODEL, contract.REWARDS) as send:
            scores.append(send(rows)[contract.REWARDS])
    own, bf16, fp32 = (float(np.abs(scored - exact).max() / exact.std()) for scored in scores)
    yield number("float32: error of served scores", fp32, most=MAX_FP32_ERROR)
    yield number("bfloat16: error of transformers' own scores", own)
    yield number("bfloat16: error of served scores, times that", bf16 / own, most=MAX_BF16_ERROR)


def scoring(job: PartJob) -> Found:
    """Tokens/s of the serving code in this process; on a GPU, also the share of its dense rate that is useful."""
    rows = job.trace()
    config = job.config(algorithm="reinforce++")
    with served(config, contract.REWARD_MODEL, contract.REWARDS) as send, ThreadPoolExecutor(IN_FLIGHT) as threads:
        list(threads.map(lambda row: send([row]), rows[:IN_FLIGHT]))
        seconds, _ = timed(lambda: list(threads.map(lambda row: send([row]), rows)))
    lengths = np.asarray([row.size for row in job.trace()])
    yield number(f"{job.model}: tokens/s", lengths.sum() / seconds)
    if job.device == "cuda":
        layers, width, feed_forward = SIZES[job.model]
        weights = layers * width * (2.5 * width + 3 * feed_forward)  # a quarter as many heads for keys and values
        operations = 2.0 * weights * lengths.sum() + 2.0 * layers * width * (lengths**2).sum()
        yield number(f"{job.model}: share of the dense rate", operations / seconds / job.dense_rate())


def swap(job: PartJob) -> Found:
    """A new critic version under requests."""
    config = job.config()
    store = WeightsStore(config.run.weights_dir)
    initialise_store(store, config.critic, run_id="check")
    write = partial(copy_checkpoint, store.folder(0))
    version = store.add(write, Origin(run_id="check", step=1, parent=0, epoch=0), reuse=False).version
    outputs = (contract.VALUES, contract.WEIGHTS_VERSION)
    with served(config, contract.CRITIC, *outputs) as send, ThreadPoolExecutor(8) as threads:

        def replies() -> list[Any]:
            return list(threads.map(lambda row: send([row]), make_trace(32)))

        replies()
        if job.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        store.set_current(version)
        while replies()[-1][contract.WEIGHTS_VERSION][0, 0] != version:
            continue
        yield number("published to served, s", time.perf_counter() - start)
    if job.device == "cuda":
        weights = (config.critic.model / "model.safetensors").stat().st_size / 2  # bfloat16 of float32
        more = (torch.cuda.max_memory_allocated() - before) / weights
        limit = None if job.small else MAX_SWAP_MEMORY  # beside a tiny model, requests need more
        yield number("most memory beside the served version, times its weights", more, most=limit)


def ppo_step(job: PartJob) -> Found:
    """Time a PPO step phase by phase, on its second run, when all kernels are compiled."""
    num_rows, longest = (8, 24) if job.small else (64, 256)
    config = job.config(trained=LORA, rows=num_rows, max_new_tokens=longest)
    torch.manual_seed(0)
    policy = Policy(config.actor)
    method = Method.from_settings(config.actor.algorithm, config.actor.kl)
    policy_update = PolicyUpdate(config.actor, policy, method)
    reward = load_reward(config.reward.model, device=job.device, dtype=config.reward.dtype)
    critic_update = CriticUpdate(build_critic(config.critic.model, config.trainer, seed=0), config.trainer)
    prompts = [Prompt(str(i), "", np.full(PROMPT, 5 + i)) for i in range(num_rows)]
    durations: dict[str, float] = {}

    def phase(name: str, do: Callable[..., Any], *arguments: Any, **others: Any) -> Any:
        # `item` waits for the kernels that are still queued.
        durations[name], (result, _) = timed(
            lambda: (do(*arguments, **others), torch.zeros(1, device=job.device).item())
        )
        return result

    for _ in range(2):
        sampled = [row for (row,) in phase("generation", policy.generate, prompts, seed=0)]
        rows = [row.tokens for row in sampled]
        rewards = phase("rewards", reward.score, rows)
        values = phase("values", critic_update.critic.values, rows)
        logprobs = phase("log-probs", policy.logprobs, sampled)
        phase("log-probs of the reference", policy.logprobs, sampled, reference=True)
        groups = []
        for row, own, score, row_values in zip(sampled, logprobs, rewards[:, 0].tolist(), values, strict=True):
            scored = replace(row, policy_logprobs=own, score=Score(reward=score, outcome=score, values=row_values))
            groups.append(Group(((scored,),)))
        batch = make_batch(groups, method, RewardShaper(config.actor.rewards, longest), kl_coef=0.0)
        payload = train_payload(critic_payload(batch), critic_update.critic.limits)
        report = phase("critic's update", critic_update.train, payload, lambda _: None)
        metrics = phase("policy's update", policy_update.run, batch, seed=0, kl_coef=0.0).metrics
    yield from (number(f"{name}, s", seconds) for name, seconds in durations.items())
    new = sum(int(row.sampled.sum()) for row in sampled)
    rows_text = f"{num_rows} rows, {sum(map(len, rows))} tokens, {new} of them generated"
    yield number("all of them, s", sum(durations.values()), of=rows_text)
    yield number("decoding, tokens/s", new / durations["generation"], of=f"{num_rows} responses at once")
    if job.device == "cuda":
        yield number("peak memory, GiB", torch.cuda.max_memory_allocated() / 2**30)
    yield number("critic's loss", report.loss_mean, least=1e-6)
    yield number("norm of the policy's gradient", metrics["train_optim/grad_norm"], least=1e-6)


@contextlib.contextmanager
def served(config: RunConfig, name: str, *outputs: str) -> Iterator[Callable[[Any], Any]]:
    """Load a served model into this process as the project's tests do, with their stand-in for Triton's module.

    Yields a function that sends token rows and returns the outputs by name. It may be called from any thread.
    """
    sys.path += [str(ROOT / "tests" / "support"), str(ROOT / "tests" / "support" / "stub")]
    make = importlib.import_module("triton_python_backend_utils").Request
    with importlib.import_module("served_model").served_model(config, name, model_instance_device_id="0") as model:

        def send(rows: Sequence[np.ndarray]) -> Any:
            lengths = np.asarray([[row.size] for row in rows])
            tokens = padded_rows(rows, int(lengths.max()), np.int64)
            request = make({contract.TOKENS: tokens, contract.SEQUENCE_LENGTHS: lengths}, outputs)
            model.execute([request])
            reply = request.responses.get(timeout=REPLY_S)
            if reply.error is not None:
                raise RlhfError(reply.error)
            return reply.outputs

        yield send


if __name__ == "__main__":  # the part, its job, and the file to which each number is appended as a line of JSON
    quiet_transformers()
    for row in globals()[sys.argv[1]](PartJob(**json.loads(sys.argv[2]))):
        append_jsonl(Path(sys.argv[3]), [row])
