"""`python -m tools fuzz --count N --seed S --out DIR`: sends bad requests while a client scores valid rows.

A third of the requests each: to all models of a plain server and of one with `rewards`, a training key and a reference,
over HTTP and gRPC; and to the gateway. Exit code 0: every request was answered within 30 s, no answer was wrong, the
scoring client was always served and never waited long, no process had to be restarted, and the gateway stayed small.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import yaml
from hypothesis import strategies as st

from benchmarks.support.benchmark import Record
from benchmarks.support.children import free_ports
from benchmarks.support.random_models import random_llama, train_bpe
from chaos.command import run_test
from chaos.fuzz.client import Answer, GoodClient, StageOutcome, grpc_sender, send_http
from chaos.fuzz.gateway import HEADERS, Attack, GatewayProcess, attacks
from chaos.fuzz.gateway import KEY_VARIABLE as GATEWAY_KEY_VARIABLE
from chaos.fuzz.requests import POSITIONS, VOCAB_SIZE, Request, requests
from chaos.traffic import Background
from chaos.verdict import Verdict
from python_backend.config import RunConfig, load_config
from python_backend.config.command_line import reporting
from python_backend.config.sections import UNMEASURED
from python_backend.monitoring.log_lines import say
from python_backend.wire.contract import CRITIC_INFER
from tools.arguments import parse_or_complete
from tools.serve import start_server
from tools.server.supervisor import Supervisor

SENDERS = 4
LOOK_EVERY_S = 0.1
ROWS_AT_GATEWAY = {"inputs": [{"text": "A list of words"}, {"prompt": "A list", "response": " of words"}]}
KEY_VARIABLE, KEY = "FUZZ_TRAINING_KEY", "open sesame"
MIXTURE: dict[str, Any] = {
    "rewards": {"model": {}, "length": {"function": "chaos.fuzz.requests:num_tokens", "weight": 0.1}},
    "reward": {"text": "pair"},
}
STAGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "guarded": {
        **MIXTURE,
        "server": {"training_key_env": KEY_VARIABLE},
        "actor": {"kl": {"reference": "triton"}},
    },
    "gateway": {**MIXTURE, "gateway": {"port": 0, "key_env": GATEWAY_KEY_VARIABLE}},
}


@reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Run all stages, print their findings; return 1 if one failed (not with `--kill-server`), 2 after an error."""
    parser = argparse.ArgumentParser(description="Send bad requests while a client scores valid rows.")
    parser.add_argument("--count", type=int, default=5000, help="number of requests; default: 5000, about ten minutes")
    parser.add_argument("--seed", type=int, default=1, help="seed of the requests; default: 1")
    parser.add_argument("--out", type=Path, default=Path("runs/fuzz"), help="default: runs/fuzz")
    parser.add_argument(
        "--kill-server", action="store_true", help="also send requests that are known to kill tritonserver 2.51 itself"
    )
    args = parse_or_complete(parser, argv)
    code = run_test(args.out, args.seed, partial(_run_stages, args))
    return 0 if code == 1 and args.kill_server else code


def _run_stages(args: argparse.Namespace, enough: threading.Event, record: Record) -> list[Verdict]:
    make_models(record.out / "checkpoints")
    resource.setrlimit(resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE)[1:] * 2)
    verdicts = []
    for number, stage in enumerate(STAGES):
        if not enough.is_set():
            outcome = StageOutcome(stage)
            run_stage(outcome, record.out, args.count // len(STAGES), args.seed + number, kills=args.kill_server)
            record.add(vars(outcome))
            say(f"{stage}: {dict(outcome.sent)}; longest wait of the good client {outcome.longest_good_wait_s:.2f} s")
            verdicts += outcome.verdicts()
    return verdicts


def run_stage(outcome: StageOutcome, out: Path, count: int, seed: int, *, kills: bool) -> None:
    """Start a server, send it the requests, and stop it. Call from the main thread."""
    os.environ[KEY_VARIABLE] = KEY  # read at each start of the server, when the repository is rendered
    config = write_config(out, outcome.stage)
    path = out / outcome.stage / "fuzz.yaml"
    supervisor = Supervisor(lambda: start_server(config, log=lambda line: None), log=partial(_note, outcome))
    gateway = GatewayProcess(config, path) if outcome.stage == "gateway" else None
    strategies: Sequence[st.SearchStrategy[Any]]
    if gateway:
        good = GoodClient(outcome, gateway.address, "/v1/rewards", ROWS_AT_GATEWAY, _rewards_of, HEADERS)
        strategies, sender = [attacks()], partial(_to_gateway, gateway)
    else:
        rows = np.random.default_rng(seed).integers(0, VOCAB_SIZE, (3, 17), dtype=np.int64)
        tensor = {"name": "tokens", "datatype": "INT64", "shape": list(rows.shape), "data": rows.ravel().tolist()}
        address = config.server.http_url, f"/v2/models/{CRITIC_INFER}/infer"
        good = GoodClient(outcome, *address, {"inputs": [tensor]}, numbers_of, {})
        models = sorted(path.parent.name for path in config.run.repository_dir.glob("*/config.pbtxt"))
        strategies = requests(models, KEY if outcome.stage == "guarded" else None, kills=kills)
        sender = partial(_to_server, config)
    send = partial(send_examples, outcome, strategies, sender)
    senders = [
        Background(f"sender {i}", partial(send, len(range(i, count, SENDERS)), seed * SENDERS + i))
        for i in range(SENDERS)
    ]
    try:
        for thread in (good.thread, *senders):
            thread.start()
        while any(sender.is_alive() for sender in senders):
            supervisor.look()
            if gateway:
                gateway.look()
                outcome.gateway_mb = gateway.peak_mb
            time.sleep(LOOK_EVERY_S)
    finally:
        good.thread.give_up()
        if gateway:
            gateway.stop()
        supervisor.stop()
    for thread in (good.thread, *senders):
        if thread.error is not None:
            raise thread.error


Send = Callable[[Any], tuple[str, Answer]]


def send_examples(
    outcome: StageOutcome,
    strategies: Sequence[st.SearchStrategy[Any]],
    sender: Callable[[], contextlib.AbstractContextManager[Send]],
    count: int,
    number: int,
) -> None:
    """Send `count` examples, as many of each strategy, and judge the answers; `number` decides which examples."""

    def send_of(strategy: st.SearchStrategy[Any], share: int) -> None:
        @hypothesis.seed(number)
        @hypothesis.settings(
            max_examples=share,
            database=None,
            deadline=None,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(strategy)
        def send_one(example: Any) -> None:
            what, answer = send(example)
            outcome.judge(f"{number}: {what}", answer)

        send_one()

    order = random.Random(number).sample(strategies, len(strategies))  # which ones get one more, or none of a few
    with sender() as send:
        for i in range(min(count, len(order))):
            send_of(order[i], len(range(i, count, len(order))))


@contextlib.contextmanager
def _to_server(config: RunConfig) -> Iterator[Send]:
    """Yield a function that sends every other request over gRPC, if that can carry it."""
    turn = itertools.cycle((True, False))
    with grpc_sender(config.server.grpc_url) as send_grpc:

        def send(request: Request) -> tuple[str, Answer]:
            over_grpc = next(turn) and request.body is None
            answer = send_grpc(request) if over_grpc else send_http(config.server.http_url, request)
            way = "gRPC" if over_grpc else "HTTP"
            return f"{request.model} over {way}, {'+'.join(request.wrong) or 'nothing wrong'}", answer

        yield send


@contextlib.contextmanager
def _to_gateway(gateway: GatewayProcess) -> Iterator[Send]:
    def send(attack: Attack) -> tuple[str, Answer]:
        return f"{attack.name} at the gateway", gateway.send(attack)

    yield send


def _note(outcome: StageOutcome, line: str) -> None:
    say(f"  {line}")
    if "restarting the server" in line or "reloading the model" in line:
        outcome.restarts.append(line)


def numbers_of(answer: Any) -> dict[str, Any]:
    """Return the outputs of an inference request that are numbers, by name."""
    return {item["name"]: item["data"] for item in answer["outputs"] if item["datatype"] == "FP32"}


def _rewards_of(answer: Any) -> dict[str, Any]:
    return {"rewards": answer["rewards"], **answer["components"]}


def write_config(out: Path, stage: str) -> RunConfig:
    """Return the configuration of a stage, on free ports; version 0 is written here, so no sidecar is needed."""
    from python_backend.store.weights import WeightsStore
    from trainer.publish import initialise_store  # torch: not for --help

    folder, checkpoints = out / stage, out / "checkpoints"
    data: dict[str, Any] = {
        "run": {"dir": str(folder)},
        "server": {**free_ports(), "exit_timeout_s": 1},
        **{name: {"checkpoint": str(checkpoints / name), **UNMEASURED} for name in ("reward", "critic")},
        "reference": dict(UNMEASURED),
        "actor": {"policy": {"checkpoint": str(checkpoints / "policy")}},
    }
    for section, values in STAGES[stage].items():
        data[section] = {**data.get(section, {}), **values}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "fuzz.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    config = load_config(path)
    initialise_store(WeightsStore(config.run.weights_dir), config.critic, run_id=config.run.identity)
    return config


def make_models(folder: Path) -> None:
    """Write tiny random checkpoints with a byte-level tokenizer and a chat template, unless they exist."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=train_bpe([]),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template="{% for m in messages %}{{ m.role }} {{ m.content }}</s>{% endfor %}",
    )
    sizes = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": POSITIONS, "initializer_range": 0.2}
    for name in ("reward", "critic", "policy"):
        if not (folder / name / "config.json").is_file():
            random_llama(name, seed=len(name), **sizes).save_pretrained(folder / name)
            tokenizer.save_pretrained(folder / name)


if __name__ == "__main__":
    sys.exit(main())
