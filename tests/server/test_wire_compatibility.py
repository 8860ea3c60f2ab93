"""The replaced system's own client against the plain server: PyTriton's FuturesModelClient, its calls word for word.

Calls, names, dtypes and shapes: reference/nemo_aligner.md section 1.
"""

from __future__ import annotations

import contextlib
import gc
import http.client
import json
import stat
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from live_system import Checkpoints, FinishedRun, direct_rewards, direct_values, random_rows, scoring_inputs
from pytriton.client import FuturesModelClient, ModelClient

from tools.server.shared_memory import SHARED_MEMORY

TIMEOUT_S = 60.0
INIT_S = 4 * TIMEOUT_S  # PyTriton warns where less than TIMEOUT_S is left of it, as on a busy machine
WIDTH = 24

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def sockets_that_pytriton_leaves_open() -> Iterator[None]:
    """Collect them here, where their warnings are ignored: later they would be another test's."""
    yield
    gc.collect()


def client(finished: FinishedRun, model: str) -> FuturesModelClient:
    """One client per endpoint, as the replaced system has it."""
    return FuturesModelClient(finished.run.url, model, init_timeout_s=INIT_S, inference_timeout_s=TIMEOUT_S)


def padded(rows: list[np.ndarray]) -> dict[str, np.ndarray]:
    """What a rollout sends: everything padded to one width."""
    return scoring_inputs(rows, width=WIDTH)


def test_combined_many_futures_in_flight(finished: FinishedRun, checkpoints: Checkpoints) -> None:
    batches = [random_rows([5, 24, 1, 13], seed=seed) for seed in range(6)]
    with client(finished, "critic_infer") as critic:
        futures = [critic.infer_batch(**padded(rows)) for rows in batches]
        answers = [future.result(timeout=TIMEOUT_S) for future in futures]
    for rows, answer in zip(batches, answers, strict=True):
        assert (answer["rewards"].shape, answer["rewards"].dtype) == ((4, 1), np.float32)
        assert (answer["values"].shape, answer["values"].dtype) == ((4, WIDTH), np.float32)
        np.testing.assert_allclose(answer["rewards"][:, 0], direct_rewards(checkpoints.reward, rows), atol=1e-5)
        expected = direct_values(finished.run.store.folder(int(answer["weights_version"][0, 0])), rows)
        for found, values in zip(answer["values"], expected, strict=True):
            np.testing.assert_allclose(found[: values.size], values, atol=1e-5)


def test_train_and_save(finished: FinishedRun) -> None:
    generator = np.random.default_rng(12)
    before = finished.run.journal.last_step()
    payload = {
        "tokens": generator.integers(3, 100, (4, WIDTH), dtype=np.int64),
        "returns": generator.normal(size=(4, WIDTH - 1)).astype(np.float32),
        "prev_values": np.zeros((4, WIDTH - 1), np.float32),
        "mask": np.ones((4, WIDTH - 1), np.float32),
    }
    with client(finished, "critic_train") as train, client(finished, "critic_save") as save:
        trained = train.infer_sample(**payload).result(timeout=TIMEOUT_S)
        saved = save.infer_sample(dummy_var=np.asarray([0])).result(timeout=TIMEOUT_S)
    assert (trained["loss_mean"].shape, trained["loss_mean"].dtype) == ((1,), np.float32)
    assert np.isfinite(trained["loss_mean"]).all()
    assert saved["status"].tolist() == [0]
    assert finished.run.journal.last_step() == before + 1
    assert (finished.run.config.run.dir / "checkpoints" / "critic" / str(before + 1)).is_dir()


def test_no_other_user_can_read_requests_in_shared_memory_or_what_actor_and_sidecar_write(
    finished: FinishedRun,
) -> None:
    def modes() -> list[int]:
        found = SHARED_MEMORY.glob(f"rlhf-{finished.server.process.pid}-*")
        return [stat.S_IMODE(path.stat().st_mode) for path in found]

    deadline = time.monotonic() + TIMEOUT_S  # a model that is being loaded has received no request yet
    while set(modes()) != {0o600}:
        assert time.monotonic() < deadline, modes()
        time.sleep(0.1)
    assert len(modes()) >= 4
    written = [finished.run.config.run.dir / name for name in ("metrics.jsonl", "critic_metrics.jsonl")]
    assert [stat.S_IMODE(path.stat().st_mode) for path in written] == [0o600, 0o600]


@pytest.mark.parametrize("hiding", [{}, {"Origin": 5}, {"origin": ""}])
@pytest.mark.parametrize("name", ["Origin", "origin"])
def test_a_web_page_can_neither_train_nor_save(finished: FinishedRun, name: str, hiding: dict[str, Any]) -> None:
    """As a browser sends it without asking the server first; parameters in the body do not hide the header."""
    before = finished.run.journal.last_step()
    inputs = {
        "critic_train": [("tokens", "INT64", [[3, 4]])]
        + [(n, "FP32", [[1]]) for n in ("returns", "prev_values", "mask")],
        "critic_save": [("dummy_var", "INT64", [0])],
    }
    for model, tensors in inputs.items():
        body = {
            "parameters": hiding,
            "inputs": [
                {"name": n, "datatype": kind, "shape": list(np.shape(data)), "data": data} for n, kind, data in tensors
            ],
        }
        headers = {"Content-Type": "text/plain", name: "http://elsewhere.example"}
        connection = http.client.HTTPConnection(finished.run.config.server.http_url, timeout=TIMEOUT_S)
        with contextlib.closing(connection):  # urllib would capitalise the header's name
            connection.request("POST", f"/v2/models/{model}/infer", json.dumps(body), headers)
            refused = connection.getresponse()
            assert (refused.status, "header origin: web pages" in refused.read().decode()) == (400, True)
    assert finished.run.journal.last_step() == before


def test_the_plain_client_works_too_and_sends_sentences(finished: FinishedRun) -> None:
    sentences = np.char.encode(np.asarray([["Open the file."], ["Bad weather."]]), "utf-8")
    with ModelClient(finished.run.url, "reward_model", init_timeout_s=INIT_S) as reward:
        assert reward.infer_batch(sentences=sentences)["rewards"].shape == (2, 1)
    with ModelClient(finished.run.url, "critic_infer", init_timeout_s=INIT_S) as critic:
        assert critic.infer_batch(**padded(random_rows([4, 9], seed=14)))["values"].shape == (2, WIDTH)
