"""The checks of a configuration: `rlhf-triton run` and `serve` do not start if one fails, `doctor` prints all."""

import importlib.util
import time
from collections.abc import Callable, Iterable, Iterator

from rlhf_triton.checkpoints.inspection import CheckpointError, stored_dtypes
from rlhf_triton.checkpoints.tokenization import encode_prompt
from rlhf_triton.checkpoints.tokenizer_loading import load_tokenizer, same_tokenizer
from rlhf_triton.client.control_plane import ControlPlane, ControlPlaneError
from rlhf_triton.config.required_files import check_files, missing_gpus
from rlhf_triton.config.run_config import ConfigError, RunConfig
from rlhf_triton.config.without_effect import without_effect
from rlhf_triton.python_backend.serving.parameters import Parameters
from rlhf_triton.store.durable import refusal
from rlhf_triton.store.run_lock import in_progress
from rlhf_triton.tools.checks.findings import Check, Finding, Level, failed, warning
from rlhf_triton.tools.checks.machine import existing_folder
from rlhf_triton.tools.checks.prompt_form import reward_findings
from rlhf_triton.tools.checks.prompt_rows import CheckedRun
from rlhf_triton.tools.checks.special_tokens import token_findings, token_problems
from rlhf_triton.tools.checks.user_code import environment, reward_functions
from rlhf_triton.tools.render_configs import parse_pbtxt, render_configs
from rlhf_triton.tools.server.health import is_triton
from rlhf_triton.tools.server.ports import PORT_KEYS, check_ports, is_open, with_free_ports
from rlhf_triton.tools.server.triton_home import ServerStartError
from rlhf_triton.tools.server.vllm import check_vllm, starts_vllm
from rlhf_triton.wire.contract import REWARD_CHECKPOINT, REWARD_MODEL

PROBE_S = 30.0
# A trained model needs this many times its size on the disk: two versions, and a checkpoint of weights and two moments
# twice as large.
COPIES = 6
MAX_LOADED_BYTES = 4e9  # of one model, which `doctor` then loads in a few seconds


def settings(run: CheckedRun) -> Iterator[Finding]:
    """Name the settings without effect in this run, a line for each reason."""
    for settings_without_effect in without_effect(run.config):
        yield warning("settings", f"without effect in this run: {settings_without_effect}")


def devices(run: CheckedRun) -> Iterator[Finding]:
    """Check that torch can use the GPUs that the configuration names; for `serve`, only the served models' GPUs."""
    roles = run.config.served_sections if run.serves_only else ()
    yield from (failed("devices", problem) for problem in missing_gpus(run.config, *roles))


def files(run: CheckedRun) -> Iterator[Finding]:
    """Check the checkpoints and files that the configuration names; for `serve`, those that the server reads."""
    config = run.config
    has_actor = config.has_actor and not run.serves_only
    check_files(config, server=True, actor=has_actor)
    if has_actor:
        stored_dtypes(config.actor.policy.model)  # reads each file's header: one of several may be missing
    yield Finding("files", "checkpoints and other files are there")


def weights(run: CheckedRun) -> Iterator[Finding]:
    """Load each served model of at most `MAX_LOADED_BYTES` on the CPU: its tensors must fit and be finite."""
    from rlhf_triton.models.modeling import quiet_transformers  # deferred: torch takes seconds to import
    from rlhf_triton.python_backend.serving.loaders import load_model, loader_of

    quiet_transformers()
    texts = render_configs(run.config)
    reward = REWARD_CHECKPOINT if run.config.rewards else REWARD_MODEL
    for role, section in run.config.served_sections.items():
        size = sum(file.stat().st_size for file in section.model.glob("*.safetensors"))
        if size > MAX_LOADED_BYTES:
            yield Finding("weights", f"{role}.model: {size / 1e9:.1f} GB, not loaded")
            continue
        name = reward if role == "reward" else role
        values = parse_pbtxt(name, texts[name]).parameters
        parameters = Parameters(name, {key: value.string_value for key, value in values.items()})
        loader, options = loader_of(parameters)
        try:
            load_model(loader, section.model, None, {**options, "dtype": section.dtype})
        except CheckpointError as error:
            yield failed("weights", f"{role}.model: {error}")
        else:
            yield Finding("weights", f"{role}.model loads, and its weights are finite")


def prompts(run: CheckedRun) -> Iterator[Finding]:
    """Read the first prompts as the run will; find what in their form does not fit the models."""
    found = run.prompts
    yield _text_prompts(run.config)
    yield from reward_findings(run.config, found)


def tokenizers(run: CheckedRun) -> Iterator[Finding]:
    """Check that each model takes the policy's tokens; name what ends a response."""
    policy = run.config.actor.policy.model
    critic = run.config.critic.model
    if run.config.serves_critic and not same_tokenizer(policy, critic):  # another reward model receives texts
        yield failed(
            "tokenizers",
            f"critic.model: the tokenizer of {critic} differs from that of actor.policy.model "
            f"({policy}), but values belong to the policy's tokens; start the critic from a model with the policy's",
        )
    yield from (failed("tokenizers", problem) for problem in token_problems(run.config))
    yield from token_findings(run.config)


def vllm(run: CheckedRun) -> Iterator[Finding]:
    """Check the vLLM that the run starts."""
    if starts_vllm(run.config):
        check_vllm(run.config)
        yield Finding("vllm", "can be started")


def adapters(run: CheckedRun) -> Iterator[Finding]:
    """Find the layers that are named for adapters, in models without weights."""
    config = run.config
    try:
        if config.has_actor and config.actor.policy.lora_targets != "all-linear":
            from rlhf_triton.actor.policy import loading  # deferred, as below: torch takes seconds to import

            loading.check_lora_targets(config.actor.policy)
    except CheckpointError as error:
        yield failed("adapters", str(error))
    try:
        if config.serves_critic and config.trainer.lora_targets != "all-linear":
            from rlhf_triton.trainer import trained_critic

            trained_critic.check_lora_targets(config.critic.model, config.trainer)
    except CheckpointError as error:
        yield failed("adapters", str(error))


def _text_prompts(config: RunConfig) -> Finding:
    """Return what plain-text prompts begin with."""
    tokenizer = load_tokenizer(config.actor.policy.model)
    before = tokenizer.convert_ids_to_tokens(encode_prompt(tokenizer, "text")[0])
    if before and not config.actor.prompts.add_special_tokens:
        return warning(
            "prompts",
            f"text prompts lack {' '.join(before)}, with which the policy's tokenizer begins a text; set "
            "actor.prompts.add_special_tokens to true, unless the policy was trained without",
        )
    return Finding("prompts", f"text prompts begin with {' '.join(before) or 'no special token'}")


def rendering(run: CheckedRun) -> Iterator[Finding]:
    """Check that the model repository can be rendered."""
    yield Finding("rendering", ", ".join(sorted(render_configs(run.config))))


def ports(run: CheckedRun) -> Iterator[Finding]:
    """Check that the server's ports are free or belong to this run's server."""
    if is_running(run.config):
        yield Finding("ports", "used by this run's server")
        return
    section = with_free_ports(run.config.server)
    check_ports(section)
    numbers = ", ".join(str(getattr(section, key)) for key in PORT_KEYS)
    yield Finding("ports", f"{numbers} are free" if section == run.config.server else "chosen when the server starts")


def monitoring(run: CheckedRun) -> Iterator[Finding]:
    """Check that the ports of actor and sidecar for Prometheus are free, and no others of the run."""
    config = run.config
    section = config.monitoring
    used = {getattr(config.server, key): f"server.{key}" for key in PORT_KEYS}
    for key in ("actor_port", "trainer_port"):
        port = getattr(section, key)
        if not port:
            continue
        if port in used:
            yield failed("monitoring", f"monitoring.{key}: {port} is {used[port]}, too; choose another port")
        elif not in_progress(config.run.dir) and is_open(f"{section.host}:{port}"):
            yield warning(
                "monitoring", f"monitoring.{key}: {port} is taken, so there would be no metrics; choose another port"
            )
        elif importlib.util.find_spec("prometheus_client") is None:
            yield warning("monitoring", f"monitoring.{key} needs prometheus-client: install it, or remove the key")
        else:
            yield Finding("monitoring", f"monitoring.{key}: {port}")
        used[port] = f"monitoring.{key}"


def server_dir(run: CheckedRun) -> Iterator[Finding]:
    """Check that files can be written in `server.dir`, if it is set; `run.dir` is checked as part of the disk."""
    config = run.config
    folder = config.server_dir.absolute()
    if folder.is_relative_to(config.run.dir.absolute()):
        return
    if error := refusal(existing_folder(folder)):
        yield failed("server.dir", f"{folder} cannot be written: {error.strerror}; set it to another folder")


def is_running(config: RunConfig) -> bool:
    """Return whether the run's own server answers: another run's, or another program, may use the configured ports."""
    return config.server_file.is_file() and is_triton(config.server_url("http"))


def server(run: CheckedRun) -> Iterator[Finding]:
    """Send a request to every model of the run's server, if it is up."""
    config = run.config
    if not is_running(config):
        yield Finding("server", "not running")
        return
    with ControlPlane(config.server_url("grpc")) as control:
        for model in sorted(render_configs(config)):
            start = time.monotonic()
            try:
                control.probe(model, PROBE_S)
            except (ControlPlaneError, ServerStartError) as error:
                text = str(error).removeprefix(f"{model}: ")
                yield failed(model, f"{text}; the log is {config.server_dir / 'logs' / 'tritonserver.log'}")
            else:
                yield Finding(model, f"answers in {(time.monotonic() - start) * 1000:.0f} ms")


def disk_bytes(config: RunConfig) -> int:
    """Return the bytes that a run keeps on its disk, about: of the models that it trains."""
    trained = [config.actor.policy.model] if config.has_actor else []
    trained += [config.critic.model] if config.serves_critic else []
    files = [file for folder in trained for file in folder.glob("*.safetensors")]
    return COPIES * sum(file.stat().st_size for file in files if file.exists())  # a link may dangle


RUN = ("doctor", "run")
DRY = ("run --dry-run", "serve --dry-run")
CHECKS = (
    Check("settings", ("doctor",), settings),
    Check("devices", (*RUN, "serve"), devices),
    Check("files", (*RUN, "serve", *DRY), files),
    Check("weights", ("doctor",), weights, needs="files"),
    Check("prompts", (*RUN, DRY[0]), prompts, needs="files", needs_actor=True),
    Check("vllm", RUN, vllm, needs_actor=True),
    Check("tokenizers", RUN, tokenizers, needs="files", needs_actor=True),
    Check("rewards", RUN, reward_functions, needs="prompts", needs_actor=True),
    Check("environment", RUN, environment, needs="prompts", needs_actor=True),
    Check("adapters", RUN, adapters, needs="files"),
    Check("rendering", ("doctor",), rendering),
    Check("server.dir", ("doctor",), server_dir),
    Check("ports", ("doctor",), ports),
    Check("monitoring", ("doctor",), monitoring),
    Check("server", ("doctor",), server),
)
"""All checks of a configuration, in their order."""


def findings(config: RunConfig, command: str, attempt: Callable[..., Iterator[Finding]]) -> Iterator[Finding]:
    """Yield what the checks of `command` find, and at the end which of them were left out because another failed.

    `attempt`: called with a check's name, its `find` and its argument; yields the findings.
    """
    run = CheckedRun(config, serves_only=command.startswith("serve"))
    passed = {""}
    left_out = []
    for row in CHECKS:
        if command not in row.when or (row.needs_actor and not config.has_actor):
            continue
        if row.needs not in passed:
            left_out.append(row.name)
            continue
        levels = set()
        for finding in attempt(row.name, row.find, run):
            yield finding
            levels.add(finding.level)
        if Level.FAILED not in levels:
            passed.add(row.name)
    if left_out:
        yield warning("configuration", f"not checked: {', '.join(left_out)}; correct the problems above first")


def check(config: RunConfig, command: str) -> list[str]:
    """Return the warnings of the checks that `command` makes, `run` or `serve`.

    Raises RlhfError with a line for each problem that the first failed check found.
    """

    def attempt(name: str, find: Callable[[CheckedRun], Iterable[Finding]], run: CheckedRun) -> Iterator[Finding]:
        found = [*find(run)]
        if problems := [finding.text for finding in found if finding.level is Level.FAILED]:
            raise ConfigError("\n".join(problems))
        yield from found

    return [finding.text for finding in findings(config, command, attempt) if finding.level is Level.WARNING]
