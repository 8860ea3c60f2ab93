"""Checks of a configuration, for `tools run`, which refuses to start, and `tools doctor`; and of a running server.

Reads the first rows of the prompt files, calls each reward function once, in a worker as on the server, on the first
prompt of the run, and starts a worker of the environment.
"""

import asyncio
import contextlib
import importlib
import importlib.util
import itertools
import queue
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from actor.data.prompt_files import PromptError, begun, read_rows, source_of
from actor.run.row_limits import check_lengths
from python_backend.checkpoints.inspection import stored_dtypes
from python_backend.checkpoints.tokenization import encode_prompt, load_tokenizer, same_tokenizer
from python_backend.config import ConfigError, EnvironmentSection, RewardTerm, RunConfig
from python_backend.config.required_files import check_files, has_chat_template, tokenizer_folder
from python_backend.environments.pool import Environments
from python_backend.rewards.function import MESSAGES_KEY, PROMPT_KEY, RESPONSE_KEY, FunctionError, Sample
from python_backend.rewards.pool import FunctionCall, ScoreOutcome, WorkerPool
from python_backend.store.durable import refusal
from python_backend.store.run_lock import in_progress
from tools.doctor import Finding, failed, warning
from tools.render_configs import render_configs
from tools.server.health import is_triton
from tools.server.ports import PORT_KEYS, check_ports, is_open, with_free_ports
from tools.server.triton_home import ServerStartError
from tools.server.tritonserver import probe
from tools.server.vllm import check_vllm, starts_vllm
from tools.status import server_urls
from trainer.control_plane import ControlPlane, ControlPlaneError

CHECKED_ROWS = 1000  # of each prompt file
RESPONSE = "This is a trial response."
PROBE_S = 30.0
COPIES = 6  # of a trained model on the disk: two versions, and a checkpoint of weights and two moments twice as large


def check_run(config: RunConfig) -> None:
    """Raise ConfigError with one line for each problem that would end the run, or leave it without rewards."""
    check_files(config, server=True, actor=config.has_actor)
    if not config.has_actor:
        return
    stored_dtypes(config.actor.policy.model)  # reads each file's header: one of several may be missing
    check_prompts(config)
    if starts_vllm(config):
        check_vllm(config)
    problems = [*_missing_trackers(config), *_tokenizers(config), *_functions(config), *_environment(config)]
    if problems:
        raise ConfigError("\n".join(problems))


def check_prompts(config: RunConfig) -> None:
    """Check the prompt files' first rows, and that all models take the longest rows. Raises ConfigError if not."""
    check_lengths(config)
    prompts, validation = config.actor.prompts, config.actor.validation
    held_out = {"actor.validation.prompts": validation.prompts} if validation.size else {}
    for key, path in {**prompts.paths, **held_out}.items():
        try:
            contents = {} if path is None else _first_contents(path, begins=config.environment is not None)
            chats = {where: content for where, content in contents.items() if isinstance(content, list)}
            if chats:
                _check_templates(config, key)
                _check_renderings(config, chats)
        except PromptError as error:
            raise ConfigError(f"{key}: {error}") from error


def _first_contents(path: Path, *, begins: bool) -> dict[str, Any]:
    """Return the text or messages of the first rows of a prompt file by where they are.

    Raises PromptError if it or a row is empty.

    `begins`: an environment begins rows without a prompt.
    """
    contents = {}
    for read in itertools.islice(read_rows(path), CHECKED_ROWS):
        row = begun(read) if begins else read
        contents[row.where] = row.columns[source_of(row)]
        if not contents[row.where]:
            raise PromptError(f"{row.where}: {source_of(row)} is empty")
    if not contents:
        raise PromptError(f"{path} has no prompts")
    return contents


def _check_templates(config: RunConfig, prompts: str) -> None:
    """Check that the models that must render conversations have a chat template.

    Args:
        prompts: configuration key of a prompt file that contains conversations; for the error message.

    Raises:
        ConfigError: the policy has none, or the reward model, which renders them itself.
    """
    policy, reward = config.actor.policy.model, config.reward.model
    if not has_chat_template(policy):
        raise ConfigError(
            f"actor.policy.model: {policy} has no chat template, but {prompts} contains conversations; save a "
            "template there as chat_template.jinja, or give the prompts as plain texts"
        )
    renders = config.uses_reward_model and config.reward.template is None
    if renders and not has_chat_template(reward):
        raise ConfigError(
            f"reward.model: {reward} has no chat template, but must render the conversations in {prompts} itself; save "
            "the template that it was trained with as chat_template.jinja in its folder "
            "(`{{ messages[-1]['content'] }}` scores only the reply), or give the prompts as plain texts"
        )


def _check_renderings(config: RunConfig, chats: dict[str, list[Any]]) -> None:
    """Render conversations as the reward model does. Raises PromptError if its chat template refuses one."""
    reward = config.reward
    if not config.uses_reward_model or reward.template is not None:
        return
    tokenizer = load_tokenizer(reward.model.absolute())
    reply = [] if reward.process or reward.text == "pair" else [{"role": "assistant", "content": RESPONSE}]
    for where, messages in chats.items():
        try:
            tokenizer.apply_chat_template([*messages, *reply], tokenize=False)
        except Exception as error:  # templates are programs and may raise anything
            raise PromptError(f"{where}: the chat template of reward.model refuses the messages: {error}") from error


def _missing_trackers(config: RunConfig) -> list[str]:
    missing = [name for name in config.actor.trackers if importlib.util.find_spec(name) is None]
    return [f"actor.trackers: {name} is not installed; pip install {name}, or remove it" for name in missing]


def _tokenizers(config: RunConfig) -> Iterator[str]:
    """The critic's values belong to the policy's tokens; a reward model with another tokenizer receives texts."""
    policy, critic = config.actor.policy.model, config.critic.model
    if config.serves_critic and not same_tokenizer(policy, critic):
        yield (
            f"critic.model: the tokenizer of {critic} differs from that of actor.policy.model "
            f"({policy}), but values belong to the policy's tokens; start the critic from a model with the policy's"
        )


def _functions(config: RunConfig) -> Iterator[str]:
    """Call each reward function on the first prompt, with a made-up response."""
    if not config.functions:
        return
    row = next(iter(read_rows(next(iter(config.actor.prompts.paths.values())))))
    row = row if config.environment is None else begun(row)
    content = row.columns[source_of(row)]
    tokenizer = load_tokenizer(tokenizer_folder(config).absolute())
    for name, term in config.functions.items():
        size = config.actor.algorithm.responses_per_prompt if term.groupwise else 1
        group = [_sample(row.columns, content, tokenizer)] * size
        if error := trial(term, group, hidden_variables=config.hidden_variables(term.options)):
            yield f"rewards.{name}.function: {term.function} fails on the first prompt ({row.where}): {error}"


def trial(term: RewardTerm, group: list[Sample], *, hidden_variables: Sequence[str]) -> str:
    """Call a reward function once, in a worker of its own; return what went wrong, "" for nothing."""
    call = FunctionCall(str(term.function), term.timeout_s, term.groupwise, term.options, hidden_variables)
    outcomes: queue.SimpleQueue[list[ScoreOutcome]] = queue.SimpleQueue()
    try:
        with contextlib.closing(WorkerPool(call, num_workers=1, memory_mib=term.memory_mib)) as pool:
            pool.submit([(group, outcomes.put)])
            return next((outcome.error for outcome in outcomes.get() if outcome.error), "")
    except FunctionError as error:
        return str(error)


def _environment(config: RunConfig) -> Iterator[str]:
    """Start a worker of the environment, which imports its class or agent, and its reward; make an instance."""

    async def start(settings: EnvironmentSection) -> None:
        environments = Environments(
            settings.model_copy(update={"workers": 1}), hidden_variables=config.hidden_variables(settings.options)
        )
        await environments.start()
        await environments.close()

    try:
        if config.environment is not None:
            asyncio.run(start(config.environment))
    except FunctionError as error:
        yield str(error)


def _sample(columns: dict[str, Any], content: Any, tokenizer: Any) -> Sample:
    is_chat = isinstance(content, list)
    prompt = "\n".join(str(message["content"]) for message in content) if is_chat else content
    text = RESPONSE if is_chat else f"{prompt}{RESPONSE}"
    metadata = {**columns, PROMPT_KEY: prompt, RESPONSE_KEY: RESPONSE, **({MESSAGES_KEY: content} if is_chat else {})}
    return Sample(text, tokenizer(text, add_special_tokens=False)["input_ids"], metadata)


def files(config: RunConfig) -> Iterator[Finding]:
    """Check the files, reward functions and environment that the configuration names, a line for each problem."""
    try:
        check_run(config)
    except ConfigError as error:
        for line in str(error).splitlines():
            yield failed("files", line)
    else:
        yield Finding("files", "checkpoints, prompts, reward functions and environment are there")
        if config.has_actor:
            yield _text_prompts(config)


def _text_prompts(config: RunConfig) -> Finding:
    """Return what plain-text prompts begin with."""
    tokenizer = load_tokenizer(config.actor.policy.model.absolute())
    before = tokenizer.convert_ids_to_tokens(encode_prompt(tokenizer, "text")[0])
    if before and not config.actor.prompts.add_special_tokens:
        return warning(
            "prompts",
            f"text prompts lack {' '.join(before)}, with which the policy's tokenizer begins a text; set "
            "actor.prompts.add_special_tokens to true, unless the policy was trained without",
        )
    return Finding("prompts", f"text prompts begin with {' '.join(before) or 'no special token'}")


def devices(config: RunConfig) -> Iterator[Finding]:
    """Check that torch can use the GPUs that the configuration names."""
    on_gpus = [place for place in config.places if place.cards]
    if not on_gpus:
        return
    torch = importlib.import_module("torch")
    usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cuda = torch.version.cuda
    for place in on_gpus:
        last = place.cards[-1]
        needed = int(last.partition(":")[2]) + 1
        if needed > usable:
            found = (
                f"torch, built for CUDA {cuda}, can use {usable}: update the driver if nvidia-smi shows a lower version"
                if cuda
                else "this torch is built for the CPU: install one that is built for CUDA"
            )
            yield failed(
                "devices", f"{place.key}: {last} needs {needed} GPU{'s'[: needed > 1]}; {found}, or set it to cpu"
            )


def rendering(config: RunConfig) -> Iterator[Finding]:
    """Check that the model repository can be rendered."""
    yield Finding("rendering", ", ".join(sorted(render_configs(config))))


def ports(config: RunConfig) -> Iterator[Finding]:
    """Check that the server's ports are free, or are those of this run's server."""
    if is_running(config):
        yield Finding("ports", "used by this run's server")
        return
    section = with_free_ports(config.server)
    check_ports(section)
    numbers = ", ".join(str(getattr(section, key)) for key in PORT_KEYS)
    yield Finding("ports", f"{numbers} are free" if section == config.server else "chosen when the server starts")


def monitoring(config: RunConfig) -> Iterator[Finding]:
    """Check that the ports of actor and sidecar for Prometheus are free, and no others of the run."""
    section, used = config.monitoring, {getattr(config.server, key): f"server.{key}" for key in PORT_KEYS}
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


def server_dir(config: RunConfig) -> Iterator[Finding]:
    """Check that files can be written in `server.dir`, if it is set; `run.dir` is checked as part of the disk."""
    folder = config.server_dir.absolute()
    if folder.is_relative_to(config.run.dir.absolute()):
        return
    place = next(path for path in (folder, *folder.parents) if path.exists())
    if error := refusal(place):
        yield failed("server.dir", f"{folder} cannot be written: {error.strerror}; set it to another folder")


def is_running(config: RunConfig) -> bool:
    """Return whether the run's own server answers: another run's, or another program, may use the configured ports."""
    return (config.server_dir / "server.json").is_file() and is_triton(server_urls(config)["http"])


def server(config: RunConfig) -> Iterator[Finding]:
    """Send a request to every model of the run's server, if it is up."""
    if not is_running(config):
        yield Finding("server", "not running")
        return
    with ControlPlane(server_urls(config)["grpc"]) as control:
        for model in sorted(render_configs(config)):
            start = time.monotonic()
            try:
                probe(control, model, PROBE_S)
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


CHECKS = {
    "files": files,
    "devices": devices,
    "rendering": rendering,
    "server.dir": server_dir,
    "ports": ports,
    "monitoring": monitoring,
    "server": server,
}
"""The checks of a configuration by name, in the order in which they run."""
