"""`python -m tools gateway` in front of the real server: every protocol's scores against transformers' own forward."""

from __future__ import annotations

import json
import math
import os
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from certificate import make_certificate
from live_system import POSITIONS, TEXTS, Checkpoints, System, direct_rewards
from transformers import AutoTokenizer

CHAT = [{"role": "user", "content": "Read the file."}]
KEY = "open sesame"


class Peer:
    """A client with the key and the gateway's certificate."""

    def __init__(self, url: str, certificate: Path) -> None:
        self.url, self.context = url, ssl.create_default_context(cafile=certificate)

    def post(self, path: str, body: Any, key: str = KEY) -> Any:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, context=self.context) as reply:
            return json.load(reply)


@pytest.fixture
def peer(live: System, tmp_path: Path) -> Iterator[Peer]:
    """The command with a key and TLS, stopped by SIGTERM."""
    tls = make_certificate(tmp_path)
    overrides = ["port=0", "key_env=GATEWAY_TEST_KEY", *(f"{name}={path}" for name, path in tls.items())]
    command = [sys.executable, "-m", "tools", "gateway", "--config", str(live.run.path)]
    command += [f"gateway.{override}" for override in overrides]
    environment = {**os.environ, "GATEWAY_TEST_KEY": KEY}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert live.run.url in line
            yield Peer(line.partition("gateway: ")[2].partition(",")[0], tls["tls_certificate"])
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(120)
    assert code == 0


@pytest.mark.slow
def test_every_protocol_agrees_with_transformers(live: System, checkpoints: Checkpoints, peer: Peer) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(checkpoints.reward))

    def expected(*texts: str) -> np.ndarray:
        rows = [np.asarray(tokenizer(text)["input_ids"][:POSITIONS], np.int64) for text in texts]
        return direct_rewards(checkpoints.reward, rows)

    def check(found: list[float], *texts: str) -> None:
        np.testing.assert_allclose(found, expected(*texts), atol=1e-5)

    chat = str(tokenizer.apply_chat_template([*CHAT, {"role": "assistant", "content": "Good day."}], tokenize=False))
    long = "bad weather " * 200
    inputs = [
        *({"text": text} for text in (*TEXTS, long)),
        {"tokens": tokenizer(TEXTS[0])["input_ids"]},
        {"prompt": CHAT, "response": "Good day."},
    ]
    check(peer.post("/v1/rewards", {"inputs": inputs})["rewards"], *TEXTS, long, TEXTS[0], chat)
    check(peer.post("/get_reward", {"query": [*TEXTS]})["rewards"], *TEXTS)
    found = peer.post("/remote_rm", {"prompt": "Open ", "response": "the file.", "label": None})
    check([found, peer.post("/remote_rm", {"prompt": CHAT, "response": "Good day."})], "Open the file.", chat)
    raw = {"model": "reward_model", "use_activation": False}
    check([row["probs"][0] for row in peer.post("/classify", {"input": [*TEXTS], **raw})["data"]], *TEXTS)
    messages = [*CHAT, {"role": "assistant", "content": "Good day."}]
    check(peer.post("/pooling", {"messages": messages, **raw})["data"][0]["data"], chat)
    found = peer.post("/pooling", {"input": TEXTS[0]})["data"][0]["data"][0]
    logit = 2.0 * expected(TEXTS[0])[0] + 0.25  # of the label, before standardisation
    assert found == pytest.approx(1 / (1 + math.exp(-logit)), abs=1e-5)

    with pytest.raises(urllib.error.HTTPError, match="401"):
        peer.post("/get_reward", {"query": ["a"]}, key="wrong")
