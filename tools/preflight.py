"""The checks of a configuration: `rlhf-triton run` and `serve` do not start if one fails, `doctor` prints all.

Reads, renders and tokenises the first rows of the prompt files, calls each reward function once, in a worker as on the
server, on the first prompt of the run, and starts a worker of the environment.
"""

import asyncio
import contextlib
import importlib
import importlib.util
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_triton.actor.data.chat import Chat, TemplateError
from rlhf_triton.actor.data.prompt_files import CONVERSATIONS, PromptError, read_rows
from rlhf_triton.actor.data.prompt_reader import Prompt, PromptReader, check_columns
from rlhf_triton.actor.environments.pool import SEED, EnvironmentFailed, Environments
from rlhf_triton.actor.run.row_limits import REPLY, check_lengths, check_renderings
from rlhf_triton.checkpoints.inspection import CheckpointError, stored_dtypes
from rlhf_triton.checkpoints.tokenization import encode_prompt, load_tokenizer, num_embeddings, same_tokenizer
from rlhf_triton.client.control_plane import ControlPlane, ControlPlaneError
from rlhf_triton.client.served import ServedModel
from rlhf_triton.config import ConfigError, EnvironmentSection, RewardTerm, RunConfig
from rlhf_triton.config.required_files import check_files, has_chat_template, missing_gpus, tokenizer_folder
from rlhf_triton.config.rewards import text_parameters
from rlhf_triton.config.without_effect import without_effect
from rlhf_triton.python_backend.serving.reward_reader import reward_reader
from rlhf_triton.rewards.function import MESSAGES_KEY, PROMPT_KEY, RESPONSE_KEY, FunctionError, Sample
from rlhf_triton.rewards.pool import FunctionCall, WorkerPool
from rlhf_triton.store.durable import refusal
from rlhf_triton.store.run_lock import in_progress
from rlhf_triton.tools.checks import Check, Finding, Level, failed, warning
from rlhf_triton.tools.input_checks import reward_findings, template_problem, token_findings, token_problems
from rlhf_triton.tools.render_configs import render_configs
from rlhf_triton.tools.served_rewards import reward_parameters
from rlhf_triton.tools.server.health import is_triton
from rlhf_triton.tools.server.ports import PORT_KEYS, check_ports, is_open, server_urls, with_free_ports
from rlhf_triton.tools.server.triton_home import ServerStartError
from rlhf_triton.tools.server.vllm import check_vllm, starts_vllm
from rlhf_triton.wire.contract import ContractError, Limits

CHECKED_ROWS = 1000  # of each prompt file
PROBE_S = 30.0
COPIES = 6  # of a trained model on the disk: two versions, and a checkpoint of weights and two moments twice as large


def check_run(config: RunConfig) -> list[Prompt]:
    """Return the prompts of the files' first rows.

    Raises ConfigError with one line for each problem that would end the run, or leave it without rewards.
    """
    check_files(config, server=True, actor=config.has_actor)
    if not config.has_actor:
        return []
    stored_dtypes(config.actor.policy.model)  # reads each file's header: one of several may be missing
    prompts = check_prompts(config)
    if starts_vllm(config):
        check_vllm(config)
    problems = [*_tokenizers(config), *_functions(config, prompts)]
    problems += [*_environment(config, prompts), *_lora_targets(config)]
    if problems:
        raise ConfigError("\n".join(problems))
    return prompts


def check_prompts(config: RunConfig) -> list[Prompt]:
    """Check the prompt files' first rows as the run will read them, and that all models take the longest rows.

    Returns the prompts of these rows, without those for validation. Raises ConfigError if a row or length is refused.
    """
    check_lengths(config)
    policy, prompts, validation = config.actor.policy.model.absolute(), config.actor.prompts, config.actor.validation
    reader = PromptReader.from_config(config, load_tokenizer(policy), num_embeddings(policy))
    held_out = {"actor.validation.prompts": validation.prompts} if validation.size else {}
    paths = {key: path for key, path in {**prompts.paths, **held_out}.items() if path is not None}
    found = {key: _first_prompts(config, reader, key, path) for key, path in paths.items()}
    return [prompt for key in prompts.paths for prompt in found[key]]


def _first_prompts(config: RunConfig, reader: PromptReader, key: str, path: Path) -> list[Prompt]:
    """Return the prompts of a file's first rows; `key` names it in the configuration. Raises ConfigError."""
    declared = {name: value for name, value in reward_parameters(config).items() if value is not None}
    try:
        rows = [*itertools.islice(read_rows(path), CHECKED_ROWS)]
        if not rows:
            raise PromptError(f"{path} has no prompts")
        if any(isinstance(row.columns.get(name), list) for row in rows for name in CONVERSATIONS):
            _check_templates(config, key)
        found = [reader.prompt(row) for row in rows]
        if config.serves_rewards:
            check_columns(ServedModel.of(declared), found)
        if config.uses_reward_model:
            fitted = [prompt for prompt in map(reader.fitted, found) if prompt is not None]
            _check_rendering(config, reader.tokenizer, fitted)
    except PromptError as error:
        raise ConfigError(f"{key}: {error}") from error
    return found


def _check_rendering(config: RunConfig, tokenizer: Any, prompts: Sequence[Prompt]) -> None:
    """Check that the server can render the prompts with a reply for the reward model, and that it takes all of them.

    `tokenizer`: the policy's. Raises PromptError, ConfigError.
    """
    section = config.reward
    reader = reward_reader(section.model.absolute(), Limits(1), text_parameters(section).get)

    def size_of(prompt: Prompt) -> int:
        is_chat = MESSAGES_KEY in prompt.metadata
        try:
            if section.process is not None:  # whose rows have another form; it reads replies without the template
                reader.rendered(0, *_texts(prompt, ""))
                return 0
            text, metadata = _texts(prompt, REPLY)
            if section.text == "pair" and not is_chat:
                return len(reader.encoded(0, prompt.text, metadata, REPLY).ids)
            return len(reader.encoded(0, text, metadata).ids)
        except ContractError as error:
            raise PromptError(f"{prompt.where}: reward.model: {error.of_only_row}") from error

    check_renderings(config, tokenizer, prompts, size_of)


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
    folders = {"actor.policy.model": policy, **({"reward.model": reward} if renders else {})}
    for key, folder in folders.items():
        if problem := template_problem(folder):
            raise ConfigError(f"{key}: {problem}, or give the prompts in {prompts} as plain texts")


def _tokenizers(config: RunConfig) -> Iterator[str]:
    """The critic's values belong to the policy's tokens; a reward model with another tokenizer receives texts."""
    policy, critic = config.actor.policy.model, config.critic.model
    if config.serves_critic and not same_tokenizer(policy, critic):
        yield (
            f"critic.model: the tokenizer of {critic} differs from that of actor.policy.model "
            f"({policy}), but values belong to the policy's tokens; start the critic from a model with the policy's"
        )
    yield from token_problems(config)


def _lora_targets(config: RunConfig) -> Iterator[str]:
    """Find the layers that are named for adapters in models without weights."""
    try:
        if config.actor.policy.lora_targets != "all-linear":
            from rlhf_triton.actor.policy import loading  # deferred, as below: torch takes seconds to import

            loading.check_lora_targets(config.actor.policy)
    except CheckpointError as error:
        yield str(error)
    try:
        if config.serves_critic and config.trainer.lora_targets != "all-linear":
            from rlhf_triton.trainer import trained_critic

            trained_critic.check_lora_targets(config.critic.model, config.trainer)
    except CheckpointError as error:
        yield str(error)


def _functions(config: RunConfig, prompts: Sequence[Prompt]) -> Iterator[str]:
    """Call each reward function on the first prompt, with a made-up response."""
    if not config.functions:
        return
    tokenizer = load_tokenizer((tokenizer_folder(config) or config.actor.policy.model).absolute())
    columns = sorted({name for prompt in prompts for name in prompt.metadata})
    for name, term in config.functions.items():
        size = config.actor.algorithm.responses_per_prompt if term.groupwise else 1
        group = [_sample(prompts[0], tokenizer)] * size
        if error := trial(term, group, columns, hidden_variables=config.hidden_variables(term.options)):
            where = f"{term.function} fails on the first prompt ({prompts[0].where})"
            yield f"rewards.{name}.function: {where}: {error}"


def trial(
    term: RewardTerm, group: list[Sample], columns: Sequence[str] | None = None, *, hidden_variables: Sequence[str]
) -> str:
    """Call a reward function once, in its own worker; return the problem, "" if there is none.

    `columns`: the columns of the run's rows; None: unknown.
    """
    call = FunctionCall(
        spec=str(term.function),
        timeout_s=term.timeout_s,
        groupwise=term.groupwise,
        options=term.options,
        hidden_variables=hidden_variables,
        columns=columns,
    )
    try:
        with contextlib.closing(WorkerPool(call, num_workers=1)) as pool:
            (outcomes,) = pool.submit([group]).result()
            return next((outcome.error for outcome in outcomes if outcome.error), "")
    except FunctionError as error:
        return str(error)


def _environment(config: RunConfig, prompts: Sequence[Prompt]) -> Iterator[str]:
    """Start a worker of the environment, which imports its class or agent, and its reward; try the first prompt.

    Its tools must be in the reward model's rendering, too.
    """

    async def tools_of(settings: EnvironmentSection) -> Sequence[dict[str, Any]] | None:
        environments = Environments(
            settings.model_copy(update={"workers": 1}), hidden_variables=config.hidden_variables(settings.options)
        )
        try:
            await environments.start()
            if settings.class_ is not None and prompts:
                await _try_environment(environments, prompts[0])
        finally:
            await environments.close()
        return environments.tools

    if config.environment is None:
        return
    try:
        chat = Chat(load_tokenizer(config.actor.policy.model.absolute()), asyncio.run(tools_of(config.environment)))
        first = next((prompt for prompt in prompts if MESSAGES_KEY in prompt.metadata), None)
        if config.uses_reward_model and first is not None:
            tokens = chat.tokenizer(chat.prompt(first.metadata[MESSAGES_KEY]), add_special_tokens=False)["input_ids"]
            known = {**first.metadata, **chat.options}
            _check_rendering(config, chat.tokenizer, [replace(first, tokens=np.array(tokens), metadata=known)])
    except (FunctionError, EnvironmentFailed, PromptError, TemplateError, ConfigError) as error:
        yield str(error)


async def _try_environment(environments: Environments, prompt: Prompt) -> None:
    """Reset an instance with the prompt, and let it answer a made-up reply if it has no tools.

    Raises EnvironmentFailed if it returns what no environment may, or has a defect; it may refuse this prompt or reply.
    """
    instance = None
    try:
        shown = {} if MESSAGES_KEY in prompt.metadata else {PROMPT_KEY: prompt.text}
        instance = await environments.open({SEED: 0, **prompt.metadata, **shown})
        if environments.tools is None:
            await instance.step(REPLY)
    except EnvironmentFailed as error:
        if error.is_misused:
            raise
    finally:
        if instance is not None:
            await instance.close()


def _texts(prompt: Prompt, reply: str) -> tuple[str, dict[str, Any]]:
    """Return the text and the metadata of a row with a made-up reply, as a run sends them."""
    known = {**prompt.metadata, **({RESPONSE_KEY: reply} if reply else {})}
    if MESSAGES_KEY in prompt.metadata:
        return reply, known
    return f"{prompt.text}{reply}", {**known, PROMPT_KEY: prompt.text}


def _sample(prompt: Prompt, tokenizer: Any) -> Sample:
    text, metadata = _texts(prompt, REPLY)
    return Sample(text, tokenizer(text, add_special_tokens=False)["input_ids"], metadata)


def files(config: RunConfig) -> Iterator[Finding]:
    """Check the files, reward functions and environment that the configuration names."""
    prompts = check_run(config)
    yield Finding("files", "checkpoints, prompts, reward functions and environment are there")
    if config.has_actor:
        yield _text_prompts(config)
        yield from reward_findings(config, prompts)
        yield from token_findings(config)


def served_files(config: RunConfig) -> Iterator[Finding]:
    """Check the files that the server alone reads."""
    check_files(config, server=True)
    yield Finding("files", "checkpoints and reward functions are there")


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


def settings(config: RunConfig) -> Iterator[Finding]:
    """Name the settings without effect in this run, a line for each reason."""
    for each in without_effect(config):
        yield warning("settings", f"without effect in this run: {each}")


def devices(config: RunConfig) -> Iterator[Finding]:
    """Check that torch can use the GPUs that the configuration names."""
    yield from (failed("devices", problem) for problem in missing_gpus(config))


def served_devices(config: RunConfig) -> Iterator[Finding]:
    """Check that torch can use the GPUs of the served models."""
    yield from (failed("devices", problem) for problem in missing_gpus(config, *config.served_sections))


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


CHECKS = (
    Check("settings", ("doctor",), settings),
    Check("devices", ("doctor", "run"), devices),
    Check("devices", ("serve",), served_devices),
    Check("files", ("doctor", "run"), files),
    Check("files", ("serve",), served_files),
    Check("rendering", ("doctor",), rendering),
    Check("server.dir", ("doctor",), server_dir),
    Check("ports", ("doctor",), ports),
    Check("monitoring", ("doctor",), monitoring),
    Check("server", ("doctor",), server),
)
"""All checks of a configuration, in their order."""


def check(config: RunConfig, command: str) -> list[str]:
    """Return the warnings of the checks that `command` makes, `run` or `serve`.

    Raises RlhfError with a line for each problem that the first failed check found.
    """
    found: list[Finding] = []
    for each in CHECKS:
        if command in each.when:
            found += each.find(config)
            if problems := [finding.text for finding in found if finding.level is Level.FAILED]:
                raise ConfigError("\n".join(problems))
    return [finding.text for finding in found if finding.level is Level.WARNING]
