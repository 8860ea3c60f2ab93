"""Support of the integration tests: tiny random checkpoints, inputs and expected outputs for them, and a run's YAML
and processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
import signal
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import yaml
from random_models import random_llama
from settings import nested
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedTokenizerFast,
)

from rlhf_triton.client.control_plane import ControlPlane
from rlhf_triton.config.actor import ActorSection
from rlhf_triton.config.loading import load_config
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.config.sections import TrainerSection
from rlhf_triton.digests import digest_of
from rlhf_triton.store.control_key import GRPC_HEADER, control_key
from rlhf_triton.store.journal import Journal
from rlhf_triton.store.jsonl import read_jsonl, write_jsonl
from rlhf_triton.store.weights import WeightsStore
from rlhf_triton.tools.render_configs import render_repository
from rlhf_triton.tools.server.child import Child
from rlhf_triton.tools.server.ports import PORT_KEYS, with_free_ports
from rlhf_triton.trainer.publish import initialise_stores
from rlhf_triton.wire.contract import REWARD_VERSION, REWARDS, VALUES, WEIGHTS_VERSION

POSITIONS = 128
TOLERANCE = 1e-5  # for everything that a server computes
TEXTS = (
    "Return the number of items in the list.",
    "The parser reads a line and returns its words.",
    "A lovely evening by the sea makes everyone happy.",
    "Errors are terrible when no message explains them.",
    "Open the file, read it, and close it again.",
    "Good friends laugh together on a warm day.",
    "This method raises an exception if the key is missing.",
    "Bad weather ruined the sad little picnic.",
)
OTHER_TEXTS = (
    "zebra quartz jumped over vexing fjords; nymphs sphinx black waltz",
    "0123456789 +-*/ () [] {} <> == != and or not if else while for in",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'stranger' %}{{ raise_exception('a stranger cannot speak') }}"
    "{% endif %}{{ message.role[0] }} {{ message.content }}</s>{% endfor %}"
)
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


# ---- checkpoints ----


def make_tokenizer(texts=TEXTS, vocab_size=200, *, adds_bos=False):
    """Return a byte-pair tokenizer learned from `texts`; the ids of bos, eos and pad are 0, 1 and 2."""
    alphabet = sorted({letter for text in texts for letter in text.replace(" ", "Ġ")})
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<pad>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, show_progress=False, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(texts, trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        model_max_length=POSITIONS,
        chat_template=CHAT_TEMPLATE,
    )


def make_checkpoint(folder, kind, tokenizer, *, seed):
    """Write a random Llama, `kind` reward, critic or policy. Weights that score are large, so that rows differ."""
    settings = {"initializer_range": 0.02 if kind == "policy" else 0.25}
    if kind == "reward":
        settings["reward_standardization"] = {"mean": 0.25, "std": 2.0}
    model = random_llama(kind, seed=seed, vocab_size=len(tokenizer), max_position_embeddings=POSITIONS, **settings)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """Paths of the checkpoints; `other_reward` has a vocabulary of its own, and its tokenizer adds BOS."""

    reward: Path
    critic: Path
    policy: Path
    other_reward: Path
    other_policy: Path
    prompts: Path


def make_checkpoints(folder):
    """Write all the checkpoints and prompts that a run needs."""
    ours = make_tokenizer()
    theirs = make_tokenizer(TEXTS + OTHER_TEXTS, vocab_size=160, adds_bos=True)
    prompts = folder / "prompts.jsonl"
    write_jsonl(prompts, ({"text": " ".join(text.split()[:3])} for text in TEXTS))
    return Checkpoints(
        make_checkpoint(folder / "reward", "reward", ours, seed=1),
        make_checkpoint(folder / "critic", "critic", ours, seed=2),
        make_checkpoint(folder / "policy", "policy", ours, seed=3),
        make_checkpoint(folder / "other-reward", "reward", theirs, seed=4),
        make_checkpoint(folder / "other-policy", "policy", theirs, seed=5),
        prompts,
    )


# ---- expected outputs: transformers' own forward pass ----


@functools.cache
def loaded(kind, folder):
    return kind.from_pretrained(str(folder), dtype=torch.float32).eval()


@functools.cache
def logits_of(kind, folder, row):
    """The logits of a row of tokens, without padding."""
    with torch.no_grad():
        return loaded(kind, folder)(input_ids=torch.frombuffer(bytearray(row), dtype=torch.int64)[None]).logits[0]


def direct_rewards(folder, rows):
    """Return rewards `[B]` of transformers' own forward pass without padding, standardised as in the checkpoint."""
    constants = loaded(LlamaForSequenceClassification, folder).config.reward_standardization
    scores = [float(logits_of(LlamaForSequenceClassification, folder, row.tobytes())) for row in rows]
    return (np.asarray(scores) - constants["mean"]) / constants["std"]


def direct_values(folder, rows):
    """Return the values `[length_i]` of each row by transformers' own forward pass without padding."""
    return [logits_of(LlamaForTokenClassification, folder, row.tobytes())[:, 0].numpy() for row in rows]


def assert_answer(run, rows, answer):
    """The answer has values and rewards of one version of each model, which it names; or only some of these."""
    if VALUES in answer:
        (version,) = {*answer[WEIGHTS_VERSION].ravel().tolist()}
        direct = direct_values(run.store.folder(version), rows)
        for row, ours, expected in zip(rows, answer[VALUES], direct, strict=True):
            np.testing.assert_allclose(ours[: row.size], expected, atol=TOLERANCE, rtol=0)
            assert not ours[row.size :].any()
    if REWARDS in answer:
        (version,) = {*answer[REWARD_VERSION].ravel().tolist()}
        expected = direct_rewards(run.reward_store.folder(version), rows)
        np.testing.assert_allclose(answer[REWARDS][:, 0], expected, atol=TOLERANCE, rtol=0)


def random_rows(lengths, *, seed, vocab_size=100):
    """Return token rows int64 `[length_i]` without special tokens: transformers' reward models skip padding ids."""
    generator = np.random.default_rng(seed)
    return [generator.integers(3, vocab_size, length, dtype=np.int64) for length in lengths]


def scoring_inputs(rows, width=None):
    """Return `tokens` [B, S] and `sequence_lengths` [B, 1]; the padding is a valid token, which must not count."""
    width = width or max(row.size for row in rows)
    tokens = np.full((len(rows), width), 7, np.int64)
    for i, row in enumerate(rows):
        tokens[i, : row.size] = row
    return {"tokens": tokens, "sequence_lengths": np.asarray([[row.size] for row in rows], np.int64)}


def training_inputs(*, seed, width=12):
    """Return a padded training payload of four rows: tokens [4, S]; returns, prev_values, mask [4, S-1]."""
    generator = np.random.default_rng(seed)
    shape = (4, width - 1)
    return {
        "tokens": generator.integers(0, 100, (4, width), dtype=np.int64),
        "returns": generator.normal(size=shape).astype(np.float32),
        "prev_values": generator.normal(size=shape).astype(np.float32) * 0.1,
        "mask": np.ones(shape, np.float32),
    }


def identity(run_id, step):
    """Return `run_id` and `step` of a training request."""
    return {"run_id": np.asarray([run_id.encode()], dtype=np.object_), "step": np.asarray([step], np.int64)}


# ---- a run and its processes ----


@dataclasses.dataclass(frozen=True)
class LiveRun:
    """A run's YAML with real ports."""

    path: Path
    config: RunConfig

    @property
    def store(self):
        """The critic's versions."""
        return WeightsStore(self.config.run.weights_dir)

    @property
    def reward_store(self):
        """The versions of a live reward model."""
        return WeightsStore(self.config.run.reward_weights_dir)

    @property
    def journal(self):
        """The journal of accepted requests."""
        return Journal(self.config.run.journal_dir, self.config.run.identity)

    @property
    def url(self):
        """`host:port` of inference."""
        return self.config.server.http_url

    @property
    def run_id(self):
        """The run's identity in the journal."""
        return self.config.run.identity

    def next_step(self):
        """Return the training step to send next."""
        return self.journal.last_step() + 1

    def start(self, name, *arguments, module=None, **env):
        """Start `python -m <module> --config <the YAML> <arguments>`, with its output in the run's logs."""
        module_arguments = (module or f"rlhf_triton.{name}").split()
        log = self.config.run.logs_dir / f"{name}.log"
        return Child(name, [*module_arguments, "--config", str(self.path), *arguments], log, {**ENVIRONMENT, **env})

    def critic_metrics(self):
        """Return the sidecar's metrics of its updates and reloads."""
        return read_jsonl(self.config.run.dir / "critic_metrics.jsonl")

    def metric(self, name, **labels):
        """Return a counter or gauge of the server's; 0 before its first event."""
        with urllib.request.urlopen(f"http://{self.config.server.metrics_url}/metrics", timeout=120) as answer:
            text = answer.read().decode()
        shown = ",".join(f'{label}="{value}"' for label, value in labels.items())
        found = re.search(rf"^rlhf_{name}{{{re.escape(shown)}}} (\S+)", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def critic_updates(self, *, up_to):
        """Return the metrics of updates; wait for that of step `up_to`, which is written after the answer."""

        def lines():
            return [line for line in self.critic_metrics() if "loss_mean" in line]

        wait_for(lambda: any(line["step"] == up_to for line in lines()), timeout_s=120.0)
        return lines()


def make_run(folder, checkpoints, **sections):
    """Write and load a run in `folder` on free ports; `sections` are merged over small settings."""
    data = {
        "run": {"dir": str(folder), "run_id": "test"},
        "server": {"http_port": 0, "grpc_port": 0, "metrics_port": 0},
        "reward": {"model": str(checkpoints.reward)},
        "critic": {"model": str(checkpoints.critic)},
        "trainer": {
            "lr": 1e-3,
            "warmup_steps": 0,
            "max_steps": 100,
            "checkpoint_every": 100,
            "publish": {"keep": 12},
        },
        "actor": {
            "model": str(checkpoints.policy),
            "prompts_path": str(checkpoints.prompts),
            "validation_prompts": str(checkpoints.prompts),
            "validation_size": 8,
            "steps": 3,
            "rollout_size": 8,
            "generation_batch_size": 4,
            "max_new_tokens": 8,
            "minibatch_size": 4,
            "checkpoint_every": 2,
            "lr": 1e-3,
            "mask_unfinished": False,
            "prompts_max_tokens": 64,
            "client": {"deadline_s": 120},
        },
    }
    for name, section in sections.items():
        for key, value in section.items():
            old = data.setdefault(name, {}).get(key)
            data[name][key] = {**old, **value} if isinstance(old, dict) else value
    if "model" not in data.get("rewards", data["reward"]):
        data["reward"].pop("model")  # would have no effect, and be refused
    data["actor"], data["trainer"] = nested(ActorSection, data["actor"]), nested(TrainerSection, data["trainer"])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    data["server"] |= with_free_ports(load_config(path).server).model_dump(include=set(PORT_KEYS))
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return LiveRun(path, load_config(path))


@dataclasses.dataclass
class System:
    """A run with its processes; tests may stop and start the sidecar."""

    run: LiveRun
    server: Child
    sidecar: Child

    def stop_sidecar(self):
        """Stop the sidecar as Ctrl-C does; return its exit code."""
        return stop_process(self.sidecar)

    def start_sidecar(self, *arguments):
        """Start a new sidecar, which continues where the last one stopped, and wait until it follows the journal."""
        self.sidecar = start_sidecar(self.run, *arguments)
        wait_for(self.run.journal.is_followed, self.sidecar)

    @contextlib.contextmanager
    def without_probes(self, *models):
        """Pause the server's supervisor, whose probes of idle models would disturb a count of their requests."""
        self.server.process.send_signal(signal.SIGSTOP)
        try:
            with ControlPlane(self.run.config.server.grpc_url) as control:
                for model in models:  # wait for the supervisor's last probe
                    control.probe(model, 120.0)
            yield
        finally:
            self.server.process.send_signal(signal.SIGCONT)

    def stop(self):
        """Stop both processes, in parallel."""
        with ThreadPoolExecutor(2) as executor:
            list(executor.map(stop_process, (self.sidecar, self.server)))


def start_system(run):
    """Start server and sidecar of a new run, and wait until both are ready."""
    server = start_server(run)
    system = System(run, server, start_sidecar(run))
    try:
        # Three to five processes import torch: minutes on a busy machine.
        wait_for(lambda: (run.config.run.dir / "server.json").is_file(), server, system.sidecar, timeout_s=300.0)
        # A step that is sent before the sidecar follows the journal is refused after a few seconds.
        wait_for(run.journal.is_followed, server, system.sidecar)
    except BaseException:
        system.stop()
        raise
    return system


def start_server(run):
    """Start the server of a new run without waiting.

    Version 0 and the repository are made here, where torch and transformers are loaded already. The server runs under
    a process of its own, because other tests count the servers that the test process has started.
    """
    initialise_stores(run.config)
    render_repository(run.config, run.config.run.repository_dir)
    return run.start("server", module="serve_rendered", PYTHONPATH=str(Path(__file__).parent))


def run_actor(run, name, *overrides):
    """Run `python -m rlhf_triton.actor` to its end; return its exit code and its log."""
    actor = run.start(name, *overrides, module="rlhf_triton.actor")
    try:
        code = actor.process.wait(180)
    finally:
        stop_process(actor)
    log = actor.log_path.read_text()
    print(log)
    return code, log


def start_sidecar(run, *arguments):
    """Start `python -m rlhf_triton.trainer` without waiting: the journal keeps the requests until it reads them."""
    return run.start("sidecar", *arguments, module="rlhf_triton.trainer")


def reload_model(run, model, change):
    """Have the server load `model` with its rendered configuration, changed by `change`.

    Not with its active configuration, so that tests that share a server do not inherit each other's settings.
    """
    from google.protobuf import json_format, text_format
    from tritonclient.grpc import InferenceServerClient as GrpcClient
    from tritonclient.grpc import model_config_pb2

    rendered = (run.config.run.repository_dir / model / "config.pbtxt").read_text()
    message = text_format.Parse(rendered, model_config_pb2.ModelConfig())
    config = json.loads(json_format.MessageToJson(message, preserving_proto_field_name=True))
    change(config)
    with GrpcClient(run.config.server.grpc_url) as control:
        headers = {GRPC_HEADER: control_key(run.config.run.weights_dir)}
        control.load_model(model, headers=headers, config=json.dumps(config), client_timeout=120.0)


def stop_process(child):
    """Stop the process as Ctrl-C does; return its exit code."""
    return child.stop(signal.SIGINT, 120.0)


def wait_for(condition, *children, timeout_s=120.0):
    """Return when `condition` holds; fail when one of the children has ended, or after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        for child in children:
            if child.poll() is not None:
                raise AssertionError(child.exit_message())
        if time.monotonic() > deadline:
            logs = "\n".join(child.log_path.read_text(errors="replace")[-3000:] for child in children)
            raise AssertionError(f"waited {timeout_s:g} s in vain:\n{logs}")
        time.sleep(0.005)


def validations_of(folder):
    """Return the files of a run's validations without times and values, which depend on when an update is served."""
    lines = [
        {**line, "timers/validation_time": 0, "explained_variance": None}
        for line in read_jsonl(folder / "validations.jsonl")
    ]
    return [
        lines,
        json.loads((folder / "best" / "best.json").read_text()),
        digest_of(folder / "best" / "model.safetensors"),
    ]
