"""`python -m tools fuzz --count N --seed S --out DIR`: sends bad requests while a client scores valid rows.

A third of the requests each: to all models of a plain server and of one with `rewards`, a training key and a reference,
over HTTP and gRPC; and to the gateway. Exit code 0: every request was answered within 30 s, no answer was wrong, the
scoring client was always served and never waited long, no process had to be restarted, and the gateway stayed small.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import resource
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from chaos.fuzz.client import HANG_S, Answer, GoodClient, GrpcSender, numbers_of, scored_tokens, send_http
from chaos.fuzz.gateway import HEADERS, GatewayProcess, make_attack
from chaos.fuzz.models import KEY, KEY_VARIABLE, STAGES, make_models, write_config
from chaos.fuzz.requests import VOCAB_SIZE, Request, make_request
from python_backend.config import RunConfig
from python_backend.config.command_line import reporting
from python_backend.wire.contract import CRITIC_INFER
from tools.arguments import parse_or_complete
from tools.serve import start_server
from tools.server.supervisor import Supervisor

SENDERS = 4
LOOK_EVERY_S = 0.1
LONGEST_WAIT_S = {"plain": 1.0, "guarded": 1.0, "gateway": 2.0}
GATEWAY_MB = 300.0  # above its memory at the start
ROWS_AT_GATEWAY = {"inputs": [{"text": "A list of words"}, {"prompt": "A list", "response": " of words"}]}
# A status 500 counts as a defect, unless its message contains one of these, which tritonserver's own parsers send.
TRITONS_OWN = ("failed to parse the request JSON buffer", "Unable to parse", "unexpected", "Unexpected")


@dataclass
class StageOutcome:
    """Findings of one stage."""

    stage: str
    sent: collections.Counter[str] = field(default_factory=collections.Counter)
    """Number of requests by the status of their answer."""
    hangs: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    restarts: list[str] = field(default_factory=list)
    outages: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """Requests whose connection broke; if the server died, one of the first of them killed it."""
    longest_good_wait_s: float = 0.0
    good_answers: int = 0
    gateway_mb: float = 0.0
    """Most memory of the gateway, above that at the start."""

    @property
    def passed(self) -> bool:
        """Whether no defect was found, the good client never waited long, and the gateway stayed small."""
        is_quick = self.longest_good_wait_s <= LONGEST_WAIT_S[self.stage] and self.gateway_mb <= GATEWAY_MB
        return is_quick and not (self.hangs or self.wrong or self.restarts or self.outages)


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
        outcomes.append(run_stage(args.out, stage, count, seed, kills=args.kill_server, log=_say))
        _say(describe(outcomes[-1]))
    (args.out / "result.json").write_text(json.dumps([vars(outcome) for outcome in outcomes], indent=1))
    return outcomes


def _say(line: str) -> None:
    print(line, flush=True)


def describe(outcome: StageOutcome) -> str:
    """Return the findings in a few lines."""
    counts = ", ".join(f"{status}: {count}" for status, count in sorted(outcome.sent.items()))
    lines = [
        f"{outcome.stage}: {sum(outcome.sent.values())} requests ({counts})",
        f"  {len(outcome.wrong)} wrong answers, {len(outcome.hangs)} hangs above {HANG_S:g} s, "
        f"{len(outcome.outages)} outages, {len(outcome.restarts)} restarts",
        f"  good client: {outcome.good_answers} answers, longest wait {outcome.longest_good_wait_s:.2f} s "
        f"(at most {LONGEST_WAIT_S[outcome.stage]:g} s); gateway: {outcome.gateway_mb:.0f} of {GATEWAY_MB:g} MB",
    ]
    kinds = [outcome.wrong, outcome.hangs, outcome.restarts, outcome.lost, outcome.outages]
    return "\n".join([*lines, *(f"  ! {line[:400]}" for found in kinds for line in found[:8])])


def run_stage(out: Path, stage: str, count: int, seed: int, *, kills: bool, log: Callable[[str], None]) -> StageOutcome:
    """Start a server, send it the requests, and stop it. Call from the main thread."""
    outcome = StageOutcome(stage)
    os.environ[KEY_VARIABLE] = KEY  # read at each start of the server, when the repository is rendered
    config = write_config(out, stage)
    supervisor = Supervisor(lambda: start_server(config, log=lambda line: None), log=_restarts(outcome, log))
    models = [path.parent.name for path in config.run.repository_dir.glob("*/config.pbtxt")]
    gateway = GatewayProcess(config, out / stage / "fuzz.yaml") if stage == "gateway" else None
    if gateway:
        good = GoodClient(gateway.address, "/v1/rewards", ROWS_AT_GATEWAY, _rewards_of, HEADERS)
        work = [partial(_attack_all, gateway, seed * SENDERS + i, count // SENDERS) for i in range(SENDERS)]
    else:
        rows = np.random.default_rng(seed).integers(0, VOCAB_SIZE, (3, 17), dtype=np.int64)
        path = f"/v2/models/{CRITIC_INFER}/infer"
        good = GoodClient(config.server.http_url, path, scored_tokens(rows), numbers_of, {})
        requests = _Requests(random.Random(seed), models, KEY if stage == "guarded" else None, count, kills)
        work = [partial(_send_all, config, requests)] * SENDERS
    senders = [threading.Thread(target=each, args=(outcome,), daemon=True) for each in work]
    try:
        good.start()
        for sender in senders:
            sender.start()
        while any(sender.is_alive() for sender in senders):
            supervisor.look()
            if gateway:
                gateway.look()
                outcome.gateway_mb = gateway.peak_mb
            time.sleep(LOOK_EVERY_S)
    finally:
        good.stop()
        if gateway:
            gateway.stop()
        supervisor.stop()
    outcome.outages += good.outages
    outcome.wrong += good.wrong
    outcome.good_answers, outcome.longest_good_wait_s = good.answered, good.longest_s
    return outcome


def _restarts(outcome: StageOutcome, log: Callable[[str], None]) -> Callable[[str], None]:
    def note(line: str) -> None:
        log(f"  {line}")
        if "restarting the server" in line or "reloading the model" in line:
            outcome.restarts.append(line)

    return note


@dataclass
class _Sent:
    """A request; `number` is its position, from 1, in the sequence that the seed determines."""

    number: int
    request: Request
    over_grpc: bool

    def __str__(self) -> str:
        protocol = "gRPC" if self.over_grpc else "HTTP"
        return f"{self.number}: {self.request.model} over {protocol}, {'+'.join(self.request.wrong) or 'nothing wrong'}"


class _Requests:
    """Generates the requests; thread-safe, so that all senders share it."""

    def __init__(
        self, generator: random.Random, models: Sequence[str], key: str | None, count: int, kills: bool
    ) -> None:
        self._generator, self._models, self._key = generator, sorted(models), key
        self._number, self._count, self._kills = 0, count, kills
        self._lock = threading.Lock()

    def next(self) -> _Sent | None:
        """Return the next request to send; None at the end."""
        with self._lock:
            if self._number == self._count:
                return None
            self._number += 1
            request = make_request(self._generator, self._models, self._key, kills=self._kills)
            return _Sent(self._number, request, request.body is None and self._generator.random() < 0.5)


def _send_all(config: RunConfig, requests: _Requests, outcome: StageOutcome) -> None:
    sender = GrpcSender(config.server.grpc_url)
    try:
        while (sent := requests.next()) is not None:
            request = sent.request
            answer = sender.send(request) if sent.over_grpc else send_http(config.server.http_url, request)
            outcome.sent[str(answer.status)] += 1
            _judge(sent, answer, outcome)
    finally:
        sender.close()


def _attack_all(gateway: GatewayProcess, seed: int, count: int, outcome: StageOutcome) -> None:
    generator = random.Random(seed)
    for number in range(count):
        attack = make_attack(generator)
        answer = gateway.send(attack)
        outcome.sent[str(answer.status)] += 1
        _judge(f"{seed}/{number}: {attack.name} at the gateway", answer, outcome)


def _rewards_of(answer: Any) -> dict[str, Any]:
    return {"rewards": answer["rewards"], **answer["components"]}


def _judge(sent: object, answer: Answer, outcome: StageOutcome) -> None:
    what = f"{sent}: {answer.status} {answer.text}"
    if answer.hung:
        outcome.hangs.append(what)
    elif answer.status is None or "Socket closed" in answer.text:
        outcome.lost.append(what)
    elif answer.status in ("500", "INTERNAL", "UNKNOWN") and not any(words in answer.text for words in TRITONS_OWN):
        outcome.wrong.append(what)
    elif answer.status == "200":
        outcome.wrong += [f"{what} {name} has shape {shape}" for name, shape in answer.outputs.items() if 0 in shape]


if __name__ == "__main__":
    sys.exit(main())
