"""Models for the real tritonserver that need only numpy and load in a tenth of a second, and servers for them."""

import contextlib
import os

import psutil

from rlhf_triton.config.sections import ServerSection
from rlhf_triton.tools.server.shared_memory import SHARED_MEMORY
from rlhf_triton.tools.server.triton_home import find_tritonserver, lay_out_backends
from rlhf_triton.tools.server.tritonserver import TritonServer

_SCORING_CONFIG = """name: "{name}"
backend: "python"
max_batch_size: 64
dynamic_batching {{ }}
input {{ name: "tokens" data_type: TYPE_INT64 dims: [ -1 ] allow_ragged_batch: true optional: true }}
input {{ name: "sequence_lengths" data_type: TYPE_INT64 dims: [ 1 ] optional: true }}
{outputs}
instance_group {{ count: 1 kind: KIND_CPU }}
parameters {{ key: "weights_version" value {{ string_value: "0" }} }}
"""
_JOURNAL_CONFIG = """name: "{name}"
backend: "python"
max_batch_size: 0
input {{ name: "tokens" data_type: TYPE_INT64 dims: [ -1, -1 ] optional: true }}
input {{ name: "dummy_var" data_type: TYPE_INT64 dims: [ 1 ] optional: true }}
output {{ name: "weights_version" data_type: TYPE_INT64 dims: [ 1 ] }}
instance_group {{ count: 1 kind: KIND_CPU }}
"""
_ENSEMBLE_CONFIG = """name: "critic_infer"
platform: "ensemble"
max_batch_size: 64
input { name: "tokens" data_type: TYPE_INT64 dims: [ -1 ] optional: true }
input { name: "sequence_lengths" data_type: TYPE_INT64 dims: [ 1 ] optional: true }
output { name: "rewards" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "values" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "weights_version" data_type: TYPE_INT64 dims: [ 1 ] }
ensemble_scheduling {
  step { model_name: "reward_model" model_version: -1
    input_map { key: "tokens" value: "tokens" }
    input_map { key: "sequence_lengths" value: "sequence_lengths" }
    output_map { key: "rewards" value: "rewards" } }
  step { model_name: "critic" model_version: -1
    input_map { key: "tokens" value: "tokens" }
    input_map { key: "sequence_lengths" value: "sequence_lengths" }
    output_map { key: "values" value: "values" }
    output_map { key: "weights_version" value: "weights_version" } }
}
"""
_REWARDS = 'output { name: "rewards" data_type: TYPE_FP32 dims: [ 1 ] }'
_VALUES = 'output { name: "values" data_type: TYPE_FP32 dims: [ -1 ] }'
_VERSION = 'output { name: "weights_version" data_type: TYPE_INT64 dims: [ 1 ] }'
_SCORING_MODEL = """import json, os, time
import numpy as np
import triton_python_backend_utils as pb

class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.outputs = [output["name"] for output in config["output"]]
        self.version = int(config["parameters"]["weights_version"]["string_value"])
        {on_load}

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        {on_request}
        rows, width = pb.get_input_tensor_by_name(request, "tokens").as_numpy().shape
        answers = {{
            "rewards": np.zeros((rows, 1), np.float32),
            "values": np.zeros((rows, width), np.float32),
            "weights_version": np.full((rows, 1), self.version),
        }}
        return pb.InferenceResponse([pb.Tensor(name, answers[name]) for name in self.outputs])
"""
_JOURNAL_MODEL = """import numpy as np
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        for name in ("tokens", "dummy_var"):
            tensor = pb.get_input_tensor_by_name(request, name)
            if {refuse} and tensor is not None and tensor.as_numpy().min() < 0:
                code = pb.TritonError.INVALID_ARG
                return pb.InferenceResponse(error=pb.TritonError(name + ": negative", code))
        return pb.InferenceResponse([pb.Tensor("weights_version", np.zeros(1, np.int64))])
"""


def write_scoring_model(repository, name, on_load="pass", on_request="pass"):
    """Write a reward_model or critic that answers zeros; `on_load` and `on_request` are statements it runs."""
    outputs = _REWARDS if name == "reward_model" else f"{_VALUES}\n{_VERSION}"
    model = _SCORING_MODEL.format(on_load=on_load, on_request=on_request)
    _write(repository / name, _SCORING_CONFIG.format(name=name, outputs=outputs), model)


def write_journal_model(repository, name, *, refuse=True):
    """Write a critic_train or critic_save that refuses negative input, or accepts everything."""
    _write(repository / name, _JOURNAL_CONFIG.format(name=name), _JOURNAL_MODEL.format(refuse=refuse))


def write_repository(repository):
    """Write all five models."""
    for name in ("reward_model", "critic"):
        write_scoring_model(repository, name)
    for name in ("critic_train", "critic_save"):
        write_journal_model(repository, name)
    _write(repository / "critic_infer", _ENSEMBLE_CONFIG, None)


def tiny_server(folder, log=print, **section):
    """Return a server, not started yet, on `folder/repository` and free ports."""
    home = find_tritonserver(None)
    settings = {"http_port": 0, "grpc_port": 0, "metrics_port": 0, **section}
    return TritonServer(
        home,
        folder / "repository",
        ServerSection.model_validate(settings),
        folder / "logs" / "tritonserver.log",
        backends=lay_out_backends(home, folder / "backends"),
        control_key="tiny",
        log=log,
    )


@contextlib.contextmanager
def ready_server(folder):
    """Run a server in `folder` with all five models loaded."""
    write_repository(folder / "repository")
    with tiny_server(folder) as running:
        running.wait_ready()
        yield running


def regions(parent_pid):
    """Return the names of shared-memory regions of the servers that process `parent_pid` has started."""
    return [path.name for path in SHARED_MEMORY.glob(f"rlhf-{parent_pid}-*")]


def server_processes(parent_pid):
    """Return the servers that process `parent_pid` has started, and their stubs, found by their regions' names."""
    mark = f"rlhf-{parent_pid}-"
    found = psutil.process_iter(["cmdline"])
    return [process for process in found if any(mark in item for item in process.info["cmdline"] or ())]


def stub_of(server, model):
    """Return the process of one model."""
    for child in psutil.Process(server.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # a killed stub is a zombie until its model is unloaded
            if f"{os.sep}{model}{os.sep}" in " ".join(child.cmdline()):
                return child
    raise AssertionError(f"no process of {model}")


def _write(folder, config, model):
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config)
    if model is not None:
        (folder / "1" / "model.py").write_text(model)
