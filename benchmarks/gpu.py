"""Check of a machine's GPU: whether everything works there, and how fast.

Each part runs in a process of its own with a time limit, so that no failure hides what the other parts find. A part
yields its numbers as soon as it has them. Without a GPU the same parts run on the CPU, with tiny models.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measurement import Option, Record, Result, Target, peak_rss_bytes, timed
from benchmarks.workload import SIZES, make_checkpoint, make_trace, noise_payload, trace_lengths, trace_tokenizer
from rlhf_triton.actor.algorithms.method import Method
from rlhf_triton.actor.data.batch import PPOBatch
from rlhf_triton.actor.data.prompt_reader import Prompt
from rlhf_triton.actor.data.sample import padded, rows_of
from rlhf_triton.actor.policy.policy import Policy
from rlhf_triton.actor.policy.update import PolicyUpdate
from rlhf_triton.config import RunConfig
from rlhf_triton.python_backend.models.batching import padded_rows
from rlhf_triton.python_backend.models.modeling import load_critic, load_reward, quiet_transformers, save_critic
from rlhf_triton.store.jsonl import append_jsonl, read_jsonl
from rlhf_triton.store.weights import WeightsStore
from rlhf_triton.tools.server.child import Child
from rlhf_triton.trainer.critic_update import CriticUpdate
from rlhf_triton.trainer.publish import copy_checkpoint, initialise_store
from rlhf_triton.trainer.trained_critic import build_critic
from rlhf_triton.wire import contract

ROOT = Path(__file__).resolve().parents[1]
HUGE = "8b"
HUGE_GIB = 40  # of the card's memory, and of disk space, with which the largest model is measured
IN_FLIGHT = 64
ROUNDS = 16  # of as many requests, to measure throughput
REPLY_S = 60.0
FP32_ERROR = 1e-3  # standard deviations of the scores
MOST_BF16_ERROR = 2.0  # times transformers' own
MOST_SWAP_MEMORY = 1.2  # times the weights, beside those that are served
BAD_EVERY = 8  # requests
PROMPT = 96  # tokens
LORA = {"lora_rank": 16, "gradient_checkpointing": True}
Found = Iterator[Target]


BAD = MISSED, FAILED, TIMED_OUT = "OUTSIDE ITS LIMITS", "FAILED", "TIMED OUT"
SMALL_RUN = "tiny models, as without a GPU or with `--quick`: **its speeds say nothing about a real card**"

PARTS = {  # functions of this module, and the most seconds of each
    "environment": 60,
    "device_tests": 120,
    "served_score": 60,
    "scoring": 120,
    "tritonserver": 60,
    "swap": 60,
    "ppo_step": 90,
    "mixed_requests": 60,
}
OPTIONS = {
    "device": Option("auto", "cuda, cpu, or auto: cuda if there is a GPU", known=("auto", "cuda", "cpu")),
    "parts": Option(list(PARTS), f"any of {', '.join(PARTS)}", known=PARTS),
    "minutes": Option(8.0, "time for all parts together; what is left then is skipped", quick=24.0),
}


def measure(settings: argparse.Namespace, record: Record) -> None:
    """Run the parts one after the other."""
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    small = settings.quick or device == "cpu"
    record.result |= {"device": device, "note": SMALL_RUN if small else ""}
    end = time.monotonic() + 60 * settings.minutes
    with tempfile.TemporaryDirectory() as scratch:
        job = {"device": device, "small": small, "scratch": scratch}
        for name in settings.parts:
            limit_s = min((3 if small else 1) * PARTS[name], end - time.monotonic())
            sample = run_part(name, job, limit_s, record.out / f"{name}.log")
            record.add(sample)
            record.say(f"{name}: {' '.join([sample['state'], *sample['why'].splitlines()[-1:]])}")


def run_part(name: str, job: Mapping[str, Any], limit_s: float, log: Path) -> dict[str, Any]:
    """Run one part in a process of its own, which ends with its descendants at the limit; return its sample."""
    found = log.with_suffix(".jsonl")
    found.unlink(missing_ok=True)
    start = time.monotonic()
    child = Child(name, ["benchmarks.gpu", name, json.dumps(job), str(found)], log, {})
    why = ""
    try:
        state = FAILED if child.process.wait(max(0.0, limit_s)) else "passed"
    except subprocess.TimeoutExpired:
        state, why = TIMED_OUT, f"it did not end within {limit_s:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.process.pid, signal.SIGKILL)
        child.process.wait()
    rows = read_jsonl(found)
    if state == FAILED:
        why = child.obituary()
    elif state == "passed":
        state, why = judged(rows)
    return {"part": name, "state": state, "why": why, "seconds": time.monotonic() - start, "rows": rows}


def judged(rows: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """Return the state of a part that has ended well, by its numbers, and why it was skipped."""
    verdicts = {Target(**row).verdict for row in rows}
    if "miss" in verdicts:
        return MISSED, ""
    return ("skipped", str(rows[0]["detail"])) if verdicts == {"not measured"} else ("passed", "")


def summarise(result: Result) -> list[dict[str, Any]]:
    """Return each part's state and time, and the last line of what went wrong."""
    return [
        {
            "part": sample["part"],
            "state": sample["state"],
            "seconds": sample["seconds"],
            "why": "".join(sample["why"].splitlines()[-1:]),
        }
        for sample in result["samples"]
    ]


def targets(result: Result) -> list[Target]:
    """Return all numbers, those without limits included."""
    return [
        Target(**{**row, "name": f"{sample['part']}: {row['name']}"})
        for sample in result["samples"]
        for row in sample["rows"]
    ]


def has_failed(result: Result) -> bool:
    """Return whether a part has failed or taken too long, or a number lies outside its limits."""
    return any(sample["state"] in BAD for sample in result["samples"])


@dataclass(frozen=True)
class Job:
    """How a part is to run."""

    device: str
    """`cpu` or `cuda`."""
    small: bool
    """Whether to use tiny models."""
    scratch: str
    """Folder for checkpoints, which all parts share."""
    tests: str = "tests/device"
    """Arguments of pytest, which runs the tests of the device code."""

    def config(
        self,
        model: str = "",
        *,
        dtype: str = "bfloat16",
        trained: Mapping[str, Any] = {},
        rows: int = 8,
        max_new_tokens: int = 160,
        algorithm: str = "ppo",
    ) -> RunConfig:
        """Return a run with models of this size on the device, after making their checkpoints if they are missing.

        Args:
            dtype: in which reward, critic, policy and trainer compute.
            trained: further settings of policy and critic trainer.
            rows: responses of a rollout, all generated at once, and all in one minibatch.
        """
        folder = Path(self.scratch) / (model or ("tiny" if self.small else "1b"))
        if not folder.is_dir():
            make_checkpoints(folder.name, folder.with_suffix(".new"), self.device)
            folder.with_suffix(".new").rename(folder)
        budget = 1024 if self.small else 16_384
        scoring = {"device": self.device, "dtype": dtype, "workers": 1, "threads": 1, "token_budget": budget}
        training = {"device": self.device, "precision": dtype, "token_budget": budget, **trained}
        return RunConfig.model_validate(
            {
                "run": {"dir": folder / "run", "share_cards": True},
                "server": {"http_port": 0, "grpc_port": 0, "metrics_port": 0},
                "reward": {"model": folder / "reward", **scoring},
                "critic": {"model": folder / "critic", **scoring},
                "trainer": {"global_batch_size": rows, **training},
                "actor": {
                    "rollout_size": rows,
                    "algorithm": {"name": algorithm},
                    "policy": {"model": folder / "policy", **training},
                    "prompts": {"max_tokens": PROMPT},
                    "generation": {"max_new_tokens": max_new_tokens, "batch_size": rows},
                    "kl": {"coef": 0.0},
                    "update": {"minibatch_size": rows},
                    "validation": {"size": 0},
                },
            }
        )

    @property
    def num_scored(self) -> int:
        """Number of requests with which scoring is measured."""
        return IN_FLIGHT * (2 if self.small else ROUNDS)

    def dense_rate(self) -> float:
        """Return the operations per second of a large bfloat16 matrix product of random numbers."""
        size = 256 if self.small else 16_384
        one, other = (torch.randn(size, size, device=self.device).bfloat16() for _ in range(2))
        return 2.0 * size**3 / min(timed(lambda: (one @ other)[0, 0].item())[0] for _ in range(4))


def make_checkpoints(model: str, folder: Path, device: str) -> None:
    """Write a reward model with random weights, and unless it is huge a policy and a critic of the reward's weights."""
    make_checkpoint(SIZES[model], folder / "reward", "reward", device=device)
    if model == HUGE:
        return
    make_checkpoint(SIZES[model], folder / "policy", "policy", device=device)
    (folder / "critic").mkdir()
    save_critic(load_critic(folder / "reward"), folder / "critic")  # as its versions are stored
    trace_tokenizer().save_pretrained(folder / "critic")


def batch_of(tokens: Any, lengths: Any) -> PPOBatch:
    """Return a training batch of `tokens` `[B, S]` whose rows have prompts of `PROMPT` tokens; all advantages are 1."""
    weights = torch.zeros(tokens.shape[0], tokens.shape[1] - 1)
    weights[:, PROMPT - 1 :] = 1.0
    zeros = torch.zeros_like(weights)
    return PPOBatch(tokens, lengths, weights, weights, zeros, None, weights, zeros, zeros, None)


def reset_peak(device: str) -> int:
    """Set the peak of `peak_bytes` to what is allocated now; return that."""
    if device == "cpu":
        Path("/proc/self/clear_refs").write_text("5")
        return peak_rss_bytes()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak_bytes(device: str) -> int:
    """Return the largest memory of this process: that of its tensors on a GPU, or all of it on the CPU."""
    return peak_rss_bytes() if device == "cpu" else torch.cuda.max_memory_allocated(device)


def environment(job: Job) -> Found:
    """The device's rates at best."""
    yield Target("GPUs", torch.cuda.device_count())
    if job.device == "cuda":
        card = torch.cuda.get_device_properties(0)
        yield Target("memory, GiB", card.total_memory / 2**30, detail=f"{card.name}, CUDA {torch.version.cuda}")
    yield Target("bfloat16 matrix product, TFLOP/s", job.dense_rate() / 1e12)
    one = torch.zeros(1, device=job.device)
    kernels = min(timed(lambda: [one.add_(1) for _ in range(1000)][-1].item())[0] for _ in range(3))
    yield Target("a small kernel, mean of 1,000, us", kernels * 1e3)


def device_tests(job: Job) -> Found:
    """The tests of the device code."""
    if job.device == "cpu":
        yield Target("skipped", None, detail="there is no GPU")
        return
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *job.tests.split()]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    print(done.stdout)
    yield Target("exit status of pytest", done.returncode, None, 0, done.stdout.splitlines()[-1])


def served_score(job: Job) -> Found:
    """Served scores against transformers' own."""
    from transformers import AutoModelForSequenceClassification

    rows, folder = make_trace(IN_FLIGHT), job.config().reward.model

    @torch.no_grad()
    def direct(dtype: torch.dtype) -> np.ndarray:
        model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype).to(job.device).eval()
        return np.asarray([[float(model(torch.from_numpy(row)[None].to(job.device)).logits)] for row in rows])

    exact = direct(torch.float32)
    scores = [direct(torch.bfloat16)]
    for dtype in ("bfloat16", "float32"):
        with served(job.config(dtype=dtype), contract.REWARD_MODEL, contract.REWARDS) as send:
            scores.append(send(rows)[contract.REWARDS])
    own, bf16, fp32 = (float(np.abs(found - exact).max() / exact.std()) for found in scores)
    yield Target("float32: error of served scores", fp32, None, FP32_ERROR)
    yield Target("bfloat16: error of transformers' own scores", own)
    yield Target("bfloat16: error of served scores, times that", bf16 / own, None, MOST_BF16_ERROR)


def scoring(job: Job) -> Found:
    """Scoring by the serving code in this process, for each model."""
    rows = make_trace(job.num_scored)
    for model in ["tiny"] if job.small else ["1b", HUGE]:
        if model == HUGE and torch.cuda.mem_get_info()[0] < HUGE_GIB << 30:
            yield Target(model, None, detail=f"skipped: needs {HUGE_GIB} GiB of the card's memory")
            continue
        config = job.config(model, algorithm="reinforce++")
        with served(config, contract.REWARD_MODEL, contract.REWARDS) as send, ThreadPoolExecutor(IN_FLIGHT) as threads:
            one_each = partial(threads.map, lambda row, send=send: send([row]))
            list(one_each(rows[:IN_FLIGHT]))
            seconds, _ = timed(partial(lambda replies: list(replies(rows)), one_each))
        yield from _speed(job, model, seconds)


def tritonserver(job: Job) -> Found:
    """Scoring by a real tritonserver."""
    if importlib.util.find_spec("pytriton") is None or np.lib.NumpyVersion(np.__version__) >= "2.0.0":
        yield Target("skipped", None, detail="needs nvidia-pytriton, whose wheel has a tritonserver, and numpy<2")
        return
    from benchmarks.processes import running_triton
    from benchmarks.scoring import Cell, measure_server

    config = job.config(algorithm="reinforce++")
    with running_triton(config) as server:
        measured = measure_server(Cell(1, IN_FLIGHT, job.num_scored), urls=[server.section.http_url], pids=[])
        yield from _speed(job, config.reward.model.parent.name, measured["seconds"])


def _speed(job: Job, model: str, seconds: float) -> Found:
    """Yield tokens/s and, on a GPU, the share of its dense rate that is useful; half of causal attention is."""
    lengths = trace_lengths(job.num_scored)
    yield Target(f"{model}: tokens/s", lengths.sum() / seconds)
    if job.device == "cuda":
        size = SIZES[model]
        layers, width, feed_forward = size.layers, size.width, size.feed_forward
        weights = layers * width * (2.5 * width + 3 * feed_forward)  # a quarter as many heads for keys and values
        operations = 2.0 * weights * lengths.sum() + 2.0 * layers * width * (lengths**2).sum()
        yield Target(f"{model}: share of the dense rate", operations / seconds / job.dense_rate())


def swap(job: Job) -> Found:
    """A new critic version under requests."""
    config = job.config()
    store = WeightsStore(config.run.weights_dir)
    initialise_store(store, config.critic, run_id="check")
    write = partial(copy_checkpoint, store.folder(0))
    version = store.add(write, run_id="check", step=1, parent=0, epoch=0, reuse=False).version
    with (
        served(config, contract.CRITIC, contract.VALUES, contract.WEIGHTS_VERSION) as send,
        ThreadPoolExecutor(8) as threads,
    ):

        def replies() -> list[tuple[float, Any]]:
            return list(threads.map(lambda row: timed(lambda: send([row])), make_trace(32)))

        replies()
        quiet, before = replies(), reset_peak(job.device)
        start = time.perf_counter()
        store.set_current(version)
        during = replies()
        while during[-1][1][contract.WEIGHTS_VERSION][0, 0] != version:
            during += replies()
        yield Target("published to served, s", time.perf_counter() - start)
    yield Target("slowest request before it, ms", 1e3 * max(seconds for seconds, _ in quiet))
    yield Target("slowest request during the swap, ms", 1e3 * max(seconds for seconds, _ in during))
    if job.device == "cuda":
        weights = (config.critic.model / "model.safetensors").stat().st_size / 2  # bfloat16 of float32
        more = (peak_bytes(job.device) - before) / weights
        limit = None if job.small else MOST_SWAP_MEMORY  # beside a tiny model, requests need more
        yield Target("most memory beside the served version, times its weights", more, None, limit)


def ppo_step(job: Job) -> Found:
    """What a PPO step computes, phase by phase; the second time, when all kernels are known."""
    num_rows, longest = (8, 24) if job.small else (64, 256)
    config = job.config(trained=LORA, rows=num_rows, max_new_tokens=longest)
    torch.manual_seed(0)
    policy = Policy.of(config.actor)
    policy_update = PolicyUpdate.of(config.actor, policy, Method.of(config.actor.algorithm, config.actor.kl))
    reward = load_reward(config.reward.model, device=job.device, dtype=config.reward.dtype)
    critic_update = CriticUpdate(build_critic(config.critic.model, config.trainer, seed=0), config.trainer)
    prompts = [Prompt(str(i), "", np.full(PROMPT, 5 + i)) for i in range(num_rows)]
    found: dict[str, Target] = {}

    def phase(name: str, do: Callable[..., Any], *arguments: Any, **others: Any) -> Any:
        reset_peak(job.device)
        # `item` waits for the kernels that are still queued.
        seconds, (result, _) = timed(lambda: (do(*arguments, **others), torch.zeros(1, device=job.device).item()))
        found[name] = Target(f"{name}, s", seconds, detail=f"peak {peak_bytes(job.device) / 2**30:.1f} GiB")
        return result

    for _ in range(2):
        samples = rows_of(phase("generation", policy.generate, prompts, seed=0))
        rows = [sample.tokens for sample in samples]
        phase("rewards", reward.score, rows)
        phase("values", critic_update.critic.values, rows)
        phase("log-probs", policy.logprobs, samples)
        phase("log-probs of the reference", policy.logprobs, samples, reference=True)
        report = phase("critic's update", critic_update.train, noise_payload(rows), lambda _: None)
        batch = batch_of(padded(rows), torch.tensor([len(row) for row in rows]))
        metrics = phase("policy's update", policy_update.run, batch, seed=0, kl_coef=0.0)
    yield from found.values()
    tokens, new = sum(map(len, rows)), sum(int(sample.sampled.sum()) for sample in samples)
    whole = sum(target.value or 0.0 for target in found.values())
    yield Target("all of them, s", whole, detail=f"{num_rows} rows, {tokens} tokens, {new} of them generated")
    yield Target("decoding, tokens/s", new / (found["generation"].value or 1.0), detail=f"{num_rows} responses at once")
    yield Target("critic's loss", report.loss_mean, 1e-6)
    yield Target("norm of the policy's gradient", metrics["train_optim/grad_norm"], 1e-6)


def mixed_requests(job: Job) -> Found:
    """Good and bad requests, many at a time."""
    pool, count = make_trace(IN_FLIGHT), 200 if job.small else 1000
    chosen = [[i * 7 % IN_FLIGHT, *range(i % 4)] for i in range(count)]  # rows of each request
    requests = [inputs_of([pool[k] for k in rows]) for rows in chosen]
    for i in range(0, count, 5):
        texts = [" ".join(f"w{token}" for token in pool[k]).encode() for k in chosen[i]]
        requests[i] = {contract.SENTENCES: np.asarray(texts, np.object_)[:, None]}
    for i in range(0, count, BAD_EVERY):
        bad = bad_requests(pool[chosen[i][0]])
        requests[i] = bad[i // BAD_EVERY % len(bad)]
    with (
        served(job.config(dtype="float32"), contract.REWARD_MODEL, contract.REWARDS) as send,
        ThreadPoolExecutor(16) as threads,
    ):
        alone = np.concatenate([send([row])[contract.REWARDS] for row in pool])
        replies = list(threads.map(send, requests))
    good = {i: reply for i, reply in enumerate(replies) if i % BAD_EVERY and isinstance(reply, dict)}
    refused = sum("INVALID_ARG" in reply for reply in replies[::BAD_EVERY])
    yield Target("good requests with scores", len(good), sum(i % BAD_EVERY > 0 for i in range(count)))
    yield Target("bad requests refused as invalid", refused, len(replies[::BAD_EVERY]))
    error = max(np.abs(reply[contract.REWARDS] - alone[chosen[i]]).max() for i, reply in good.items()) / alone.std()
    yield Target("largest difference from the row scored alone", float(error), None, FP32_ERROR)


def bad_requests(row: np.ndarray) -> list[dict[str, np.ndarray]]:
    """Return requests that a server must refuse, made of a good row."""
    tokens = row[None]
    return [
        inputs_of([np.append(row, 10_000_000)]),  # outside the vocabulary
        inputs_of([np.append(row, -1)]),
        inputs_of([np.full(100_000, 3)]),  # more than the model's positions
        {contract.TOKENS: tokens, contract.SEQUENCE_LENGTHS: np.asarray([[0]])},
        {contract.TOKENS: tokens, contract.SEQUENCE_LENGTHS: np.asarray([[row.size + 1]])},
        {contract.TOKENS: tokens.astype(np.float32)},
        {contract.TOKENS: tokens[:0]},
        {contract.SENTENCES: np.asarray([[b"\xff"]], np.object_)},
    ]


def inputs_of(rows: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Return the inputs of a request with these token rows."""
    lengths = np.asarray([[row.size] for row in rows])
    tokens = padded_rows(rows, int(lengths.max()), np.int64)
    return {contract.TOKENS: tokens, contract.SEQUENCE_LENGTHS: lengths}


@contextlib.contextmanager
def served(config: RunConfig, name: str, *outputs: str) -> Iterator[Callable[[Any], Any]]:
    """Load a served model into this process as the project's tests do, with their stand-in for Triton's module.

    Yields a function that sends a request, given as token rows or inputs by name, and returns the outputs by name, or
    the error of a request that was refused. It may be called from any thread.
    """
    os.environ.setdefault("TRITON_SERVER_VERSION", "none")  # the wheel's tritonserver refuses NumPy 2, the stand-in not
    sys.path += [str(ROOT / "tests" / "support"), str(ROOT / "tests" / "support" / "stub")]
    make = importlib.import_module("triton_python_backend_utils").Request
    with importlib.import_module("served_model").served_model(config, name, model_instance_device_id="0") as model:

        def send(sent: Any) -> Any:
            request = make(sent if isinstance(sent, dict) else inputs_of(sent), outputs)
            model.execute([request])
            reply = request.responses.get(timeout=REPLY_S)
            return reply.outputs if reply.error is None else reply.error

        yield send


if __name__ == "__main__":  # the part, its job, and the file to which each number is appended as a line of JSON
    quiet_transformers()
    for number in globals()[sys.argv[1]](Job(**json.loads(sys.argv[2]))):
        append_jsonl(Path(sys.argv[3]), [vars(number)])
