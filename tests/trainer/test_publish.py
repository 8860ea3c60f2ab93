"""`trainer.publish` and `trainer.verification`: a version is verified before CURRENT names it, in every dtype."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from ranks import on_ranks
from safetensors.torch import load_file, save_file
from settings import trainer_section
from tiny_checkpoints import save_tiny
from versions import flip, reseal, tensor_types

import rlhf_triton.store.weights as weights_module
from rlhf_triton.checkpoints.inspection import CONFIG_FILE, WEIGHTS_FILE
from rlhf_triton.client.control_plane import ControlPlaneError
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.digests import digest_of
from rlhf_triton.models.canary import canary_row, check_canary
from rlhf_triton.models.modeling import load_critic as load_on_cpu
from rlhf_triton.store.durable import write_json
from rlhf_triton.store.serving_records import ServingRecord
from rlhf_triton.store.weights import Manifest, Origin, WeightsError, WeightsStore
from rlhf_triton.trainer.critic_update import load_update
from rlhf_triton.trainer.publish import Publication as PublishedWeights
from rlhf_triton.trainer.publish import Publisher
from rlhf_triton.trainer.trained_critic import build_critic
from rlhf_triton.trainer.verification import holds_weights, verify_alone, verify_version

ABOUT = {"run_id": "run", "parent": None, "epoch": 1}


def publisher_of(store, reload="swap"):
    sections = {"critic": {"reload": reload}, "trainer": {"servers": ["127.0.0.1:1"], "publish": {"keep": 9}}}
    return Publisher(RunConfig.model_validate(sections), store, run_id="run", epoch=1)


# ---- verification ----


@pytest.fixture
def critic(checkpoint):
    return build_critic(checkpoint, trainer_section(), seed=0)


@pytest.fixture
def store(tmp_path, critic):
    store = WeightsStore(tmp_path / "weights")
    for step in range(2):
        with torch.no_grad():
            critic.model.classifier.bias += 0.25
        store.add(critic.write, Origin(step=step, **ABOUT))
    store.set_current(0)
    return store


def rewrite(folder, change):
    """Write other tensors and a manifest that fits them, as a faulty writer would, not a faulty disk."""
    path = folder / WEIGHTS_FILE
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    path.unlink()
    save_file(tensors, path)
    reseal(folder)


def edit_json(path, **changes):
    data = {**json.loads(path.read_text()), **changes}
    path.unlink()
    path.write_text(json.dumps(data))


def unreadable(folder):
    """Replace the folder with a file, so that not even root can list it."""
    shutil.rmtree(folder)
    folder.write_text("")


DAMAGE = {
    "one bit flipped": (
        lambda folder: flip(folder / WEIGHTS_FILE),
        r"version 1: model\.safetensors has digest xxh3:[0-9a-f]{12}…, but its manifest says",
    ),
    "no config file": (lambda folder: (folder / CONFIG_FILE).unlink(), r"version 1: cannot read config\.json: "),
    "unreadable folder": (unreadable, r"version 1: cannot read manifest\.json: .*Not a directory"),
    "not a number": (
        lambda folder: rewrite(folder, lambda tensors: tensors["classifier.weight"].fill_(float("nan"))),
        r"version 1: .*: classifier\.weight has values that are not finite",
    ),
    "a tensor is missing": (
        lambda folder: rewrite(folder, lambda tensors: tensors.pop("classifier.bias")),
        r"version 1: .*does not fit the served model: .*classifier\.bias",
    ),
    "another dtype": (
        lambda folder: rewrite(
            folder, lambda tensors: tensors.update({"classifier.bias": tensors["classifier.bias"].half()})
        ),
        r"version 1: classifier\.bias has dtype F16, but the published model's has F32",
    ),
    "config.json edited": (
        lambda folder: edit_json(folder / CONFIG_FILE, reward_standardization={"mean": 0.0, "std": 9.0}),
        r"version 1: config\.json has digest xxh3:[0-9a-f]{12}…, but its manifest says",
    ),
    "another number": (
        lambda folder: rewrite(folder, lambda tensors: tensors["classifier.bias"].add_(0.01)),
        "version 1: the values for the canary row differ by 0.01",
    ),
}
ALONE_TOO = ("one bit flipped", "not a number", "config.json edited")


@pytest.mark.parametrize("kind", DAMAGE)
def test_verify_version_detects_damage(store, critic, kind):
    damage, message = DAMAGE[kind]
    verify_version(store, 1, critic)
    assert verify_alone(store, 1).step == 1
    damage(store.folder(1))
    with pytest.raises(WeightsError, match=message):
        verify_version(store, 1, critic)
    if kind in ALONE_TOO:
        with pytest.raises(WeightsError, match=message):
            verify_alone(store, 1)


def test_failed_verification_fails_the_step_and_training_continues(rig, monkeypatch):
    """Through the sidecar: the step fails with the cause, the old version serves on, the next step is served."""
    rig.train(1)
    damage, message = DAMAGE["another number"]
    with monkeypatch.context() as patch:

        def damaging(store, version, **critic):
            damage(store.folder(version))
            verify_version(store, version, **critic)

        patch.setattr("rlhf_triton.trainer.critic_versions.verify_version", damaging)
        (result,) = rig.train(2)
    assert re.search(message.replace("version 1", "version 2"), str(result.error)), result.error
    assert (rig.store.current(), rig.instances[0].served) == (1, [0, 1])
    (after,) = rig.train(3)
    assert after.error is None
    assert rig.store.current() == after.weights_version == 3


# ---- the dtype of versions ----

CASES = {
    "all weights": {},
    "merged adapters": {"lora_rank": 2},
    "merged adapters in bfloat16": {"lora_rank": 2, "precision": "bfloat16"},
}


@pytest.fixture
def llama(tmp_path):
    """A store whose version 0 is a Llama."""
    save_tiny(tmp_path / "critic", "llama", "critic")
    store = WeightsStore(tmp_path / "store")
    critic = load_on_cpu(tmp_path / "critic")
    store.set_current(store.add(critic.write, Origin(step=0, **ABOUT)).version)
    return store


def dtypes_of(store, version):
    """The stored dtypes of head and body."""
    tensors = tensor_types(store.folder(version))
    return [
        {dtype for name, (dtype, _) in tensors.items() if name.startswith("score") == head} for head in (True, False)
    ]


def train_a_little(critic):
    """Change all trained weights so that bfloat16 does not hold them."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in critic.model.parameters():
            if parameter.requires_grad:
                parameter += 1e-3 * torch.randn_like(parameter)


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_version_serves_the_same_values_as_a_float32_one(llama, case):
    critic = build_critic(llama.folder(0), trainer_section(**CASES[case]), seed=0, dtype="bfloat16")
    critic.own_weights()
    train_a_little(critic)
    first = llama.add(critic.write, Origin(step=1, **ABOUT)).version
    critic.stored_as = None
    second = llama.add(critic.write, Origin(step=2, **ABOUT)).version
    assert [dtypes_of(llama, version) for version in (first, second)] == [[{"F32"}, {"BF16"}], [{"F32"}, {"F32"}]]
    served = [load_on_cpu(llama.folder(version), dtype="bfloat16") for version in (first, second)]
    row = [np.arange(16)]
    np.testing.assert_array_equal(served[0].values(row)[0], served[1].values(row)[0])
    check_canary(served[0], served[0].values(row)[0], critic.values(row)[0].tolist())


def published_by_a_rank(ranks, root, case):
    """Publish a version from two ranks; return whether it holds the critic's weights, before and after training."""
    ranks.announce = lambda *_, **__: None
    settings = trainer_section(**CASES[case])
    update = load_update(root / "0", settings, seed=0, dtype="bfloat16", ranks=ranks)
    store = WeightsStore(root)
    ranks.run_on_all_ranks(lambda: (root / "1").mkdir(exist_ok=True))
    files = update.critic.write(root / "1")
    if ranks.rank == 0:
        assert files == {path.name: digest_of(path) for path in weights_module.weights_files(root / "1")}
        manifest = Manifest(version=1, step=1, files=files, **ABOUT)
        write_json(root / "1" / "manifest.json", manifest.to_json())
    torch.distributed.barrier()
    verify_version(store, 1, update.critic)
    found = [holds_weights(store, 1, update.critic)]
    train_a_little(update.critic)
    return [*found, holds_weights(store, 1, update.critic)]


@pytest.mark.parametrize("case", ["all weights", "merged adapters in bfloat16"])
def test_ranks_publish_in_bfloat16(llama, case):
    assert on_ranks(2, published_by_a_rank, llama.root, case) == [[True, False]] * 2
    assert dtypes_of(llama, 1) == [{"F32"}, {"BF16"}]


# ---- staging of a version of several ranks, of which none holds the whole critic ----


class Publication:
    """A version to publish, and the records that instances write at each poll of the publisher."""

    def __init__(self, store, reload="swap"):
        self.critic = load_on_cpu(store.folder(0))
        self.store = store
        self.publisher = publisher_of(store, reload)
        self.canary = self.critic.values([canary_row(self.critic)])[0].tolist()
        self.manifest = store.add(self.critic.write, Origin(step=1, **ABOUT), canary=self.canary)
        self.waited = 0

    def say(self, name, version=0, **more):
        self.store.records.put(ServingRecord.of_this_process(name, version, **more))

    def wait(self, *sayings):
        """Await the staging; each poll (`on_wait`) lets an instance write its next record."""
        left = list(sayings)

        def on_wait(state):
            self.waited += 1
            assert state == "waiting until version 1 is staged"
            self.say(**left.pop(0))

        self.publisher.await_staging(self.manifest, on_wait)
        assert not left
        assert self.store.current() == 0


def test_publish_waits_for_every_serving_instance_to_stage(llama):
    publication = Publication(llama)
    publication.wait()  # no instance is there
    publication.say("critic_0")
    publication.say("critic_1")
    publication.say("starting", None, loading=0)  # it looks at CURRENT after its start
    publication.wait({"name": "critic_1", "staged": 1}, {"name": "critic_0", "staged": 1})
    publication.wait()
    publication.say("critic_0", 1)  # serves it already: a replay after a crash
    publication.wait()
    assert publication.waited == 2
    publication.say("critic_1", staged=1, staging_error="it looks odd")  # one that refuses is enough
    with pytest.raises(WeightsError, match=r"version 1 was refused by critic_1 .*: it looks odd"):
        publication.wait()


def test_a_version_that_could_not_be_staged_is_published_again_under_a_new_number(llama):
    publication = Publication(llama)
    publication.say("critic_0", staged=1, staging_error="it does not fit into the memory")
    again = PublishedWeights(write=publication.critic.write, verify=lambda *_: None, step=1, canary=publication.canary)

    def serve(state):
        publication.say("critic_0", llama.current(), staged=llama.announced())

    assert publication.publisher.publish(again, serve).version == 2


def test_reload_reaches_the_ports_that_a_server_chose(tmp_path, llama, monkeypatch):
    """It may restart on others. `rt.serve` has the server choose them."""
    asked = []

    class Refused:
        def __init__(self, addresses, *_, **__):
            asked.extend(addresses)

        def load(self, version, **_):
            raise ControlPlaneError("it is not there")

    monkeypatch.setattr("rlhf_triton.trainer.publish.ModelServers", Refused)
    sections = {"run": {"dir": tmp_path}, "server": {"grpc_port": 0}, "critic": {"reload": "triton"}}
    publisher = Publisher(RunConfig.model_validate(sections), llama, run_id="run", epoch=1)
    llama.records.put(ServingRecord.of_this_process("critic_0", 9))
    for port in (7001, 7002):
        write_json(tmp_path / "server.json", {"grpc": f"127.0.0.1:{port}"})
        publication = PublishedWeights(write=load_on_cpu(llama.folder(0)).write, verify=lambda *_: None)
        publisher.publish(publication, lambda _: None)
    assert asked == ["127.0.0.1:7001", "127.0.0.1:7002"]


def test_publish_does_not_wait_for_instances_under_reload(llama):
    publication = Publication(llama, "triton")
    publication.say("critic_0")
    publication.wait()
