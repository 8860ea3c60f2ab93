"""Requests to the real server: scores in any batch, refusals by field, and what each key permits."""

import gc
import json
import stat

import grpc
import numpy as np
import psutil
import pytest
from bad_requests import call
from bare_client import Refused, ask, ask_all
from expected_outputs import assert_answer
from live_system import reload_model
from model_inputs import identity, random_rows, scoring_inputs, training_inputs
from pytriton.client import FuturesModelClient
from run_checkpoints import POSITIONS
from settled import settled_statistics
from tritonclient.grpc import service_pb2, service_pb2_grpc
from waiting import wait_for

from rlhf_triton.client.control_plane import ControlPlane, ControlPlaneError
from rlhf_triton.store.control_key import GRPC_HEADER, KEY_HEADER, control_key
from rlhf_triton.tools.server.health import count_failures
from rlhf_triton.tools.server.shared_memory import SHARED_MEMORY
from rlhf_triton.wire.contract import CRITIC, CRITIC_INFER, CRITIC_SAVE, CRITIC_TRAIN, REWARD_MODEL, texts_array

NAMES = ("rewards", "values", "reward_version", "weights_version")
NUM_CONCURRENT = 64
TIMEOUT_S = 120.0
SAVE = {"dummy_var": np.zeros(1, np.int64)}


# ---- rows of tokens ----


def mixed_rows(count, *, seed):
    """Rows of many different lengths."""
    return random_rows(np.random.default_rng(seed).integers(1, POSITIONS + 1, count).tolist(), seed=seed)


def assert_scores(system, rows, answers):
    """Assert that `answers[i]` are the outputs of row i, padded to any S."""
    assert not [answer for answer in answers if isinstance(answer, Refused)]
    for row, answer in zip(rows, answers, strict=True):
        assert_answer(system.run, [row], answer)


def test_concurrent_requests_share_batches_and_keep_their_own_scores(live):
    rows = mixed_rows(NUM_CONCURRENT, seed=3)
    with live.without_probes(REWARD_MODEL):
        before = {model: settled_statistics(live.run.url, model) for model in (REWARD_MODEL, CRITIC)}
        answers = ask_all(live.run.url, [(CRITIC_INFER, scoring_inputs([row])) for row in rows])
        assert mean_batch(before[CRITIC], settled_statistics(live.run.url, CRITIC)) > 2
        # The reward model, second in the ensemble, gets its requests as the critic finishes them: so ask it alone.
        between = settled_statistics(live.run.url, REWARD_MODEL)
        alone = ask_all(live.run.url, [(REWARD_MODEL, scoring_inputs([row])) for row in rows])
        assert mean_batch(between, settled_statistics(live.run.url, REWARD_MODEL)) > 2
    assert between.inference_count - before[REWARD_MODEL].inference_count == NUM_CONCURRENT
    assert {*answers[0]} == {*NAMES}, "the reply has an optional output"
    assert_scores(live, rows, answers)
    assert_scores(live, rows, alone)
    mixed = [scoring_inputs([row]) if i % 2 else {"tokens": row[None]} for i, row in enumerate(rows)]
    assert_scores(live, rows, ask_all(live.run.url, [(CRITIC_INFER, inputs) for inputs in mixed]))


def mean_batch(before, after):
    """Return the rows per execution between two readings of the statistics."""
    return (after.inference_count - before.inference_count) / (after.execution_count - before.execution_count)


def test_critic_infer_skips_the_reward_model_if_only_values_are_requested(live):
    rows = scoring_inputs(mixed_rows(8, seed=6))
    with live.without_probes(REWARD_MODEL):
        before = settled_statistics(live.run.url, REWARD_MODEL)
        for outputs in (["values", "weights_version"], ["values"]):
            assert sorted(ask(live.run.url, CRITIC_INFER, rows, outputs)) == outputs
        assert settled_statistics(live.run.url, REWARD_MODEL).inference_count == before.inference_count
        assert sorted(ask(live.run.url, CRITIC_INFER, rows, ["rewards"])) == ["rewards"]


@pytest.mark.slow
def test_full_queue_and_passed_deadline_return_503(live):
    def one_forward_a_row(config):
        config["parameters"]["token_budget"] = {"string_value": "1"}
        config["dynamic_batching"].setdefault("default_queue_policy", {})["max_queue_size"] = 4

    reload_model(live.run, REWARD_MODEL, one_forward_a_row)
    many = scoring_inputs(random_rows([POSITIONS] * 200, seed=7))
    row = scoring_inputs(random_rows([5], seed=8))
    answers = ask_all(
        live.run.url, [(REWARD_MODEL, many)] + [(REWARD_MODEL, row)] * 40 + [(REWARD_MODEL, row, (), 1000)] * 2
    )
    refused = [answer for answer in answers if isinstance(answer, Refused)]
    assert {answer.code for answer in refused} == {"503"}
    assert any("Exceeds maximum queue size" in answer.message for answer in refused)
    reload_model(live.run, CRITIC, one_forward_a_row)
    for _ in range(8):  # through the ensemble, too: 2.51 crashed when both its steps were refused
        answers = ask_all(live.run.url, [(CRITIC_INFER, many), *[(CRITIC_INFER, row)] * 32])
        assert {answer.code for answer in answers if isinstance(answer, Refused)} == {"503"}
    for model in (REWARD_MODEL, CRITIC):  # the next tests send more at once
        reload_model(live.run, model, lambda config: None)


# ---- the replaced system's client ----


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_nemo_aligners_requests_work_unchanged(live):
    """Sends NeMo-Aligner's calls, names, dtypes and shapes with PyTriton's FuturesModelClient."""

    def client(model):  # one per endpoint; PyTriton warns where little of 60 s is left
        return FuturesModelClient(live.run.url, model, init_timeout_s=4 * TIMEOUT_S, inference_timeout_s=TIMEOUT_S)

    batches = [random_rows([5, 24, 1, 13], seed=seed) for seed in range(6)]
    width = POSITIONS + 12  # padding may be wider than the model has positions
    before = live.run.journal.last_step()
    with client("critic_infer") as critic:
        futures = [critic.infer_batch(**scoring_inputs(rows, width=width)) for rows in batches]
        answers = [future.result(timeout=TIMEOUT_S) for future in futures]
    with client("critic_train") as train, client("critic_save") as save:
        trained = train.infer_sample(**training_inputs(seed=12, width=24)).result(timeout=TIMEOUT_S)
        saved = save.infer_sample(dummy_var=np.asarray([0])).result(timeout=TIMEOUT_S)
    with client("reward_model") as reward:
        sentences = np.char.encode(np.asarray([["Open the file."], ["Bad weather."]]), "utf-8")
        assert reward.infer_batch(sentences=sentences).result(timeout=TIMEOUT_S)["rewards"].shape == (2, 1)
    for rows, answer in zip(batches, answers, strict=True):
        assert (answer["rewards"].shape, answer["values"].shape) == ((4, 1), (4, width))
        assert [answer[name].dtype for name in NAMES] == [np.float32, np.float32, np.int64, np.int64]
        assert_answer(live.run, rows, answer)
    assert (trained["loss_mean"].shape, trained["loss_mean"].dtype) == ((1,), np.float32)
    assert np.isfinite(trained["loss_mean"]).all()
    assert saved["status"].tolist() == [0]
    assert live.run.journal.last_step() == before + 1
    assert (live.run.config.run.dir / "checkpoints" / "critic" / str(before + 1)).is_dir()
    gc.collect()  # PyTriton leaves sockets open: their warnings are ignored here, and would be another test's later


# ---- refusals ----


def refusal(system, model, arrays):
    """Return the server's message for a request that it must refuse."""
    with pytest.raises(Refused) as caught:
        ask(system.run.url, model, arrays)
    assert caught.value.code == "400"
    return caught.value.message


def changed(array, index, value):
    """Return a copy with one changed entry."""
    copy = array.copy()
    copy[index] = value
    return copy


ROW = scoring_inputs(random_rows([6], seed=0))
TWO_ROWS = scoring_inputs(random_rows([6, 3], seed=0))


# One of each kind: tests/library/test_contract.py has all of them.
BAD_SCORING = [
    (
        {**TWO_ROWS, "tokens": changed(TWO_ROWS["tokens"], (1, 2), -5)},
        "tokens[1, 2]: -5 is outside the vocabulary [0, 200)",
    ),
    (
        {"sentences": texts_array(["x"]), "metadata": texts_array(["{"])},
        "metadata[0]: '{' is not JSON",
    ),
    # An exception that leaves `execute` answers the other requests of the batch twice: heap corruption.
    (
        {"sentences": texts_array(["x"]), "metadata": texts_array([json.dumps({"messages": "\ud800 \x1b[2J"})])},
        "\\ud800 \\x1b[2J",
    ),
]


def test_a_bad_scoring_request_fails_alone(live):
    """Bad and good rows are sent at the same time, so that they share batches."""
    rows = random_rows(range(3, 35), seed=6)
    bad = [(CRITIC_INFER, arrays) for arrays, _ in BAD_SCORING]
    answers = ask_all(live.run.url, [*bad, *((CRITIC_INFER, scoring_inputs([row])) for row in rows), *bad])
    for answer, (_, sentence) in zip(answers[: len(bad)] + answers[-len(bad) :], BAD_SCORING * 2, strict=True):
        assert (answer.code, sentence in answer.message) == ("400", True), (sentence, answer.message)
    assert_scores(live, rows, answers[len(bad) : -len(bad)])


GOOD = training_inputs(seed=1)
NAN = np.float32("nan")

OTHER_RUN = {"run_id": np.asarray([b"other"], dtype=np.object_)}
REFUSED = [
    # by Triton itself
    (CRITIC_INFER, {**ROW, "tokens": ROW["tokens"].astype(np.float32)}, ("tokens", "FP32", "INT64")),
    (CRITIC_INFER, {**ROW, "sequence_lengths": np.asarray([[6, 6]])}, ("sequence_lengths", "[-1,1]", "[1,2]")),
    (CRITIC_INFER, {**ROW, "attention_mask": ROW["tokens"]}, ("attention_mask",)),
    (CRITIC_INFER, {"tokens": np.zeros((8193, 1), np.int64)}, ("batch-size must be <= 8192",)),
    # by the models that write the journal
    (
        CRITIC_TRAIN,
        {**GOOD, "returns": changed(GOOD["returns"], (1, 2), NAN)},
        ("returns[1, 2]: nan, must be finite",),
    ),
]


def test_refused_requests_name_the_field(live):
    ask(live.run.url, CRITIC_TRAIN, GOOD)
    last = live.run.journal.last_step()
    for model, arrays, words in REFUSED:
        message = refusal(live, model, arrays)
        assert [word for word in words if word not in message] == []
    other = {**training_inputs(seed=24), **identity("test", last)}
    assert f"step: {last} of run 'test' was already sent with other content" in refusal(live, CRITIC_TRAIN, other)
    assert live.run.journal.last_step() == last


def test_refused_requests_are_counted_by_status(live):
    """Triton counts it as a success, since there was a response. A refused probe does not count."""

    def refused(status, model=CRITIC):
        return live.run.metric("requests_refused_total", model=model, status=status)

    before = refused("400"), refused("503")
    refused_saves = refused("400", CRITIC_SAVE)
    refusal(live, CRITIC, {"tokens": np.asarray([[10**6]])})
    with ControlPlane(live.run.config.server.grpc_url) as control:
        control.probe(CRITIC_SAVE, TIMEOUT_S)
    assert refused("400", CRITIC_SAVE) == refused_saves
    (answer,) = ask_all(live.run.url, [(CRITIC, ROW, (), None, {"exact_version": 10**6})])
    assert answer.code == "503"
    assert (refused("400"), refused("503")) == (before[0] + 1, before[1] + 1)


def test_request_that_an_ensemble_refuses_is_one_failure(live):
    """Triton counts two failures of the ensemble, also for a 503."""
    url = live.run.config.server.metrics_url
    models = (REWARD_MODEL, CRITIC, CRITIC_TRAIN, CRITIC_SAVE)
    before = count_failures(url, models)
    refusal(live, CRITIC_INFER, {"tokens": np.asarray([[10**6]])})
    (answer,) = ask_all(live.run.url, [(CRITIC_INFER, ROW, (), None, {"exact_version": 10**6})])
    assert isinstance(answer, Refused)
    assert count_failures(url, models) == before + 1


def refused_json(system, model, body, headers):
    """Return the refusal of a request in plain JSON."""
    answer = call(system.run.url, f"/v2/models/{model}/infer", json.dumps(body).encode(), headers)
    assert answer.status == "400"
    return answer.text


def test_json_requests_without_rows_are_refused_instead_of_hanging(live):
    """Triton lets requests of no rows pass; without an answer the caller would wait indefinitely."""
    for model in (REWARD_MODEL, CRITIC, CRITIC_INFER):
        for name, shape, kind in (("tokens", [0, 5], "INT64"), ("sentences", [0, 1], "BYTES")):
            refused_json(live, model, {"inputs": [{"name": name, "shape": shape, "datatype": kind, "data": []}]}, {})


NUMBERS = {
    model: {"name": name, "shape": [1], "datatype": "INT64", "data": [1]}
    for model, name in ((CRITIC_TRAIN, "step"), (CRITIC_SAVE, "dummy_var"))
}


def test_training_and_saving_need_the_key(live, training_key):
    """The key is in a header, whose name is case-insensitive; scoring needs no key."""
    before = live.run.journal.last_step()
    for model, arrays in ((CRITIC_TRAIN, GOOD), (CRITIC_SAVE, SAVE)):
        for headers in ({}, {"x-triton-training-key": "open barley"}):
            with pytest.raises(Refused, match="HTTP 400: header x-triton-training-key: missing or wrong"):
                ask(live.run.url, model, arrays, headers=headers)
        body = {"parameters": {"x-triton-training-key": 5}, "inputs": [NUMBERS[model]]}
        assert "header x-triton-training-key: missing or wrong" in refused_json(live, model, body, {})
        with pytest.raises(Refused, match="this critic belongs to run 'test'"):  # with the key, content is looked at
            ask(live.run.url, model, {**arrays, **OTHER_RUN}, headers={"X-Triton-Training-Key": training_key})
    assert live.run.journal.last_step() == before
    assert ask(live.run.url, CRITIC_INFER, ROW)["rewards"].shape == (1, 1)


@pytest.mark.parametrize("name", ["Origin", "origin"])
def test_requests_with_an_origin_header_can_neither_train_nor_save(live, name):
    """Browsers send such requests without asking the server first; a parameter in the body does not hide the header."""
    before = live.run.journal.last_step()
    for model, tensor in NUMBERS.items():
        headers = {"Content-Type": "text/plain", name: "http://elsewhere.example"}
        body = {"parameters": {name: ""}, "inputs": [tensor]}
        assert "header origin: web pages" in refused_json(live, model, body, headers)
    assert live.run.journal.last_step() == before


# ---- steps ----


def test_step_sent_concurrently_is_trained_once(live):
    """Half of them pad the same content otherwise; one comes again, later."""
    step = live.run.next_step()
    narrow = {**training_inputs(seed=21), "sequence_lengths": np.full((4, 1), 12), **identity("test", step)}
    padded = {name: np.pad(array, ((0, 0), (0, 5))) for name, array in training_inputs(seed=21).items()}
    requests = [(CRITIC_TRAIN, narrow), (CRITIC_TRAIN, {**narrow, **padded})] * 4
    answers = [*ask_all(live.run.url, requests), ask(live.run.url, CRITIC_TRAIN, narrow)]
    assert not [answer for answer in answers if isinstance(answer, Refused)]
    assert len({(float(a["loss_mean"][0]), int(a["weights_version"][0])) for a in answers}) == 1
    assert live.run.store.manifest(int(answers[0]["weights_version"][0])).step == step
    assert [line["step"] for line in live.run.critic_updates(up_to=step)].count(step) == 1
    assert live.run.journal.last_step() == step
    others = ask_all(live.run.url, [(CRITIC_TRAIN, training_inputs(seed=70 + i)) for i in range(3)])
    steps = [live.run.store.manifest(int(answer["weights_version"][0])).step for answer in others]
    assert sorted(steps) == [step + 1, step + 2, step + 3]


def test_shared_memory_and_metrics_files_are_private(live):
    def modes():
        paths = SHARED_MEMORY.glob(f"rlhf-{live.server.process.pid}-*")
        return [stat.S_IMODE(path.stat().st_mode) for path in paths]

    # A model that is being loaded has received no request yet.
    wait_for(lambda: {*modes()} == {0o600} and len(modes()) >= 4, live.server)
    written = [live.run.config.run.dir / name for name in ("metrics.jsonl", "critic_metrics.jsonl")]
    assert [stat.S_IMODE(path.stat().st_mode) for path in written] == [0o600, 0o600]


# ---- keys ----


SERVICE = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
CLOSED = ("Repository", "SystemSharedMemory", "CudaSharedMemory", "Trace", "Log")  # so begin the methods' names
CLOSED_PATHS = {  # and what is sent; None: GET
    "repository/index": b"{}",
    "systemsharedmemory/status": None,
    "systemsharedmemory/unregister": b"{}",
    "cudasharedmemory/status": None,
    "trace/setting": None,
    "models/critic/trace/setting": None,
    "logging": b"{}",
}
OPEN_PATHS = ("health/live", "health/ready", "", "models/critic", "models/critic/config", "models/critic/stats")


def is_closed_over_grpc(channel, method, headers):
    """Call the method with an empty request."""
    call = getattr(service_pb2_grpc.GRPCInferenceServiceStub(channel), method.name)
    request = getattr(service_pb2, method.input_type.name)()
    try:
        if method.client_streaming:
            list(call(iter([request]), metadata=[*headers.items()], timeout=TIMEOUT_S))
        else:
            call(request, metadata=[*headers.items()], timeout=TIMEOUT_S)
    except grpc.RpcError as error:
        return "restricted" in error.details()
    return False


@pytest.mark.parametrize("holder", ["none", "wrong", "training", "control"])
def test_apis_that_change_the_server_need_the_control_key(live, holder):
    """docs/operating.md has the table. Over gRPC, every method is called."""
    control = control_key(live.run.config.run.weights_dir)
    key = {"none": "", "wrong": "guessed", "training": "open sesame", "control": control}[holder]
    headers = dict.fromkeys((KEY_HEADER, GRPC_HEADER), key) if key else {}
    paths = {**CLOSED_PATHS, **dict.fromkeys(OPEN_PATHS)}
    answers = {path: call(live.run.url, f"/v2/{path}", body, headers) for path, body in paths.items()}
    closed = {path for path, answer in answers.items() if "restricted" in answer.text}
    assert closed == (set() if holder == "control" else set(CLOSED_PATHS))
    with grpc.insecure_channel(live.run.config.server.grpc_url) as channel:
        methods = {method.name for method in SERVICE.methods if is_closed_over_grpc(channel, method, headers)}
    everything = {method.name for method in SERVICE.methods if method.name.startswith(CLOSED)}
    assert methods == (set() if holder == "control" else everything)


@pytest.mark.slow
def test_load_without_the_control_key_is_refused_and_the_key_is_masked_in_argv(live):
    refusal = pytest.raises(
        ControlPlaneError, match=r"the key for model control .* is missing or wrong; set TRITON_CONTROL_KEY"
    )
    with ControlPlane(live.run.config.server.grpc_url, "") as control, refusal:
        control.load("critic_save", parameters={"weights_version": "1"}, timeout_s=120)
    key = control_key(live.run.config.run.weights_dir)
    (server,) = [
        process
        for process in psutil.Process(live.server.process.pid).children(recursive=True)
        if process.name() == "tritonserver"
    ]
    shown = " ".join(server.cmdline())
    assert (key in shown, f"{KEY_HEADER}={'*' * len(key)}" in shown) == (False, True)
