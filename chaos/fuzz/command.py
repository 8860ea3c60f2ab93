"""`python -m tools fuzz --count N --seed S --out DIR`: sends bad requests while a client scores valid rows.

A third of the requests each: to all models of a plain server and of one with `rewards`, a training key and a reference,
over HTTP and gRPC; and to the gateway. Exit code 0: every request was answered within 30 s, no answer was wrong, the
scoring client was always served and never waited long, no process had to be restarted, and the gateway stayed small.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from chaos.fuzz.client import grpc_sender, send_http
from chaos.fuzz.gateway import HEADERS, GatewayProcess, make_attack
from chaos.fuzz.good_client import GoodClient, numbers_of, scored_tokens
from chaos.fuzz.models import KEY, KEY_VARIABLE, STAGES, make_models, write_config
from chaos.fuzz.outcome import StageOutcome
from chaos.fuzz.requests import VOCAB_SIZE, Request, make_request
from python_backend.config import RunConfig
from python_backend.config.command_line import reporting
from python_backend.monitoring.log_lines import say
from python_backend.wire.contract import CRITIC_INFER
from tools.arguments import parse_or_complete
from tools.serve import start_server
from tools.server.supervisor import Supervisor

SENDERS = 4
LOOK_EVERY_S = 0.1
ROWS_AT_GATEWAY = {"inputs": [{"text": "A list of words"}, {"prompt": "A list", "response": " of words"}]}


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
    outcomes = _run_stages(args)
    return 0 if all(outcome.passed for outcome in outcomes) or args.kill_server else 1


def _run_stages(args: argparse.Namespace) -> list[StageOutcome]:
    make_models(args.out / "checkpoints")
    resource.setrlimit(resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE)[1:] * 2)
    outcomes = []
    for number, stage in enumerate(STAGES):
        seed, count = args.seed + number, args.count // len(STAGES)
        outcomes.append(run_stage(args.out, stage, count, seed, kills=args.kill_server))
        say(outcomes[-1].describe())
    (args.out / "result.json").write_text(json.dumps([vars(outcome) for outcome in outcomes], indent=1))
    return outcomes


def run_stage(out: Path, stage: str, count: int, seed: int, *, kills: bool) -> StageOutcome:
    """Start a server, send it the requests, and stop it. Call from the main thread."""
    outcome = StageOutcome(stage)
    os.environ[KEY_VARIABLE] = KEY  # read at each start of the server, when the repository is rendered
    config = write_config(out, stage)
    supervisor = Supervisor(lambda: start_server(config, log=lambda line: None), log=partial(_note, outcome))
    gateway = GatewayProcess(config, out / stage / "fuzz.yaml") if stage == "gateway" else None
    if gateway:
        good = GoodClient(outcome, gateway.address, "/v1/rewards", ROWS_AT_GATEWAY, _rewards_of, HEADERS)
        send_all = partial(_attack_all, outcome, gateway)
    else:
        rows = np.random.default_rng(seed).integers(0, VOCAB_SIZE, (3, 17), dtype=np.int64)
        path = f"/v2/models/{CRITIC_INFER}/infer"
        good = GoodClient(outcome, config.server.http_url, path, scored_tokens(rows), numbers_of, {})
        models = sorted(path.parent.name for path in config.run.repository_dir.glob("*/config.pbtxt"))
        requests = partial(make_request, models=models, key=KEY if stage == "guarded" else None, kills=kills)
        send_all = partial(_send_all, outcome, config, requests)
    shares = [[f"{seed}/{number}" for number in range(i, count, SENDERS)] for i in range(SENDERS)]
    senders = [threading.Thread(target=send_all, args=(share,), daemon=True) for share in shares]
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
    if good.thread.error is not None:
        raise good.thread.error
    return outcome


def _note(outcome: StageOutcome, line: str) -> None:
    say(f"  {line}")
    if "restarting the server" in line or "reloading the model" in line:
        outcome.restarts.append(line)


def _send_all(
    outcome: StageOutcome, config: RunConfig, request_of: Callable[[random.Random], Request], names: Sequence[str]
) -> None:
    """Send the requests with these names, which are also the seeds of their content."""
    with grpc_sender(config.server.grpc_url) as send_grpc:
        for name in names:
            generator = random.Random(name)
            request = request_of(generator)
            over_grpc = request.body is None and generator.random() < 0.5
            answer = send_grpc(request) if over_grpc else send_http(config.server.http_url, request)
            what = f"{request.model} over {'gRPC' if over_grpc else 'HTTP'}"
            outcome.judge(f"{name}: {what}, {'+'.join(request.wrong) or 'nothing wrong'}", answer)


def _attack_all(outcome: StageOutcome, gateway: GatewayProcess, names: Sequence[str]) -> None:
    for name in names:
        attack = make_attack(random.Random(name))
        outcome.judge(f"{name}: {attack.name} at the gateway", gateway.send(attack))


def _rewards_of(answer: Any) -> dict[str, Any]:
    return {"rewards": answer["rewards"], **answer["components"]}


if __name__ == "__main__":
    sys.exit(main())
