"""Starts a run from Python (`train`), or opens the folder of an existing one (`Run`)."""

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from rlhf_triton.actor.run.settings import last_step
from rlhf_triton.config.algorithms import ALGORITHMS
from rlhf_triton.config.loading import load_config
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.config.yaml_file import read_yaml
from rlhf_triton.errors import RlhfError, reason_of
from rlhf_triton.process import RUN_MODULE, how_ended
from rlhf_triton.store.jsonl import NewLines, each_line
from rlhf_triton.store.run_lock import in_progress, only_run, only_start, run_process
from rlhf_triton.tools.api.live_line import LiveLine
from rlhf_triton.tools.api.sections import PROMPT_FORMS, Sections, new_folder
from rlhf_triton.tools.export import newest_saved_policy
from rlhf_triton.tools.server.child import start_bound
from rlhf_triton.tools.server.server_log import error_in

RUN_YAML = "run.yaml"
POLL_S = 0.2
ALGORITHM = "grpo"  # unless another one is given
GROUP_SIZE = 8  # responses to a prompt, for algorithms that compare them, unless it is given
WARNINGS = ("  | actor: ", "  | critic sidecar: ", "  | warning: ", "  | error: ")  # as `rlhf-triton run` relays them
STOPPED = (0, 130, -signal.SIGINT, -signal.SIGTERM)  # exit codes of a run that has done its work, or was stopped
FolderPath: TypeAlias = str | os.PathLike[str]
Table: TypeAlias = dict[str, "np.ndarray[Any, np.dtype[np.float64]]"]
TRL_NAMES = {  # TRL's name: (our metric, whether TRL's is 1 minus ours)
    "reward": ("train_rollouts/rewards", False),
    "reward_std": ("train_rollouts/rewards_std", False),
    "frac_reward_zero_std": ("train_rollouts/useful_prompts", True),
    "kl": ("train_rollouts/init_policy_kl", False),
    "entropy": ("train_optim/entropy", False),
    "completions/mean_length": ("train_rollouts/generation_length", False),
    "completions/clipped_ratio": ("train_rollouts/fraction_of_samples_properly_ended", True),
    "clip_ratio": ("train_optim/clip_fraction", False),
    "grad_norm": ("train_optim/grad_norm", False),
    "learning_rate": ("train_optim/lr", False),
}
_started: dict[Path, subprocess.Popen[bytes]] = {}  # the last process of each folder's run that this one has started


def train(
    policy: FolderPath,
    *,
    prompts: Any = None,
    reward: Any = None,
    algorithm: str | Mapping[str, Any] = ALGORITHM,
    steps: int | None = None,
    critic: FolderPath | None = None,
    validation: Any = None,
    dir: FolderPath | None = None,
    wait: bool = True,
    **settings: Any,
) -> "Run":
    """Train a policy as `rlhf-triton run` does, in separate processes, and return the run.

    The YAML that runs is written into the run's folder. A folder that has a run already resumes it.

    Args:
        policy: folder of the model to train, or its name on the Hugging Face hub.
        prompts: a file, a `datasets.Dataset`, or a list of texts, chats (lists of messages), or dictionaries.
        reward: a reward function, `"file.py:name"`, the folder of a reward model, or a list of these, in which
            `(reward, weight)` sets a weight in the sum. A function may have TRL's signature. A function that a notebook
            or script defines is copied into the run's folder with what it uses; lambdas and closures are refused.
        algorithm: a name, or the settings of `actor.algorithm`, whose `name` is then `grpo` unless they have one.
        steps: number of steps of the whole run (`actor.steps`).
        critic: the model that the critic starts from; default: the policy, if the algorithm has a critic.
        validation: prompts to which the policy responds before and after the training (`samples`), as `prompts`.
        dir: folder of the run; default: the first free `runs/train-N`.
        wait: if True, return when the run has ended; Ctrl-C saves a checkpoint and stops it, and it ends with this
            process. If False, return once the run has passed its checks; it continues even if this process exits, and
            `Run(dir)` opens it.
        settings: further keys of the YAML, such as `**{"actor.optimizer.lr": 1e-5}`, or sections. Functions may stand
            where the YAML has `file.py:name`.

    Raises:
        RlhfError: `rlhf-triton run` would refuse the arguments, or the run failed; the message says why.
    """
    with new_folder(dir, "train") as folder:
        sections = Sections(folder)
        sections.set_once("run.dir", folder)
        sections.set_model("actor.policy.model", policy)
        sections.set_prompts("actor.prompts.path", prompts, name="prompts")
        sections.set_prompts("actor.validation.prompts", validation, name="validation")
        sections.set_rewards(reward)
        sections.set("actor.algorithm.name", ALGORITHM)
        if not isinstance(algorithm, str):
            sections.set("actor.algorithm", algorithm)
        elif algorithm != ALGORITHM:
            sections.set_once("actor.algorithm.name", algorithm)
        if steps is not None:
            sections.set_once("actor.steps", steps)
        sections.set_model("critic.model", critic)
        for key, value in settings.items():
            sections.set(key, value)
        method = ALGORITHMS.get(str(sections.get("actor.algorithm.name")))
        if method is not None and method.needs_groups:
            sections.set_default("actor.algorithm.responses_per_prompt", GROUP_SIZE)
        _check_given(sections)
        config = sections.check("rlhf_triton.train")
        if config.serves_critic and "critic.model" not in config.written:
            sections.set_model("critic.model", policy)
        with _written(sections):
            run = Run(folder)
            run._start(wait=wait)
    return run


class Run:
    """A run, in progress or ended, read from its folder. `train` returns one; `Run(folder)` opens it again."""

    def __init__(self, path: FolderPath) -> None:
        """Raises RlhfError if the folder is not a run's."""
        self.path = Path(path).expanduser().absolute()
        self._folder()

    def __repr__(self) -> str:
        return f"rlhf_triton.Run({str(self.path)!r})"

    @property
    def config_path(self) -> Path:
        """The YAML that the run was started with, for `rlhf-triton run --config`.

        Raises RlhfError if `train` did not start it.
        """
        path = self._folder() / RUN_YAML
        if not path.is_file():
            raise RlhfError(f"{path} is missing, because a command started this run; resume it with the same command")
        return path

    @property
    def log_path(self) -> Path:
        """The console output of the run; the logs of actor, sidecar and server are in the same folder."""
        return self.path / "logs" / "run.log"

    @property
    def is_running(self) -> bool:
        """Whether the run is in progress, started from here or elsewhere."""
        process = _started.get(self.path)
        return (process is not None and process.poll() is None) or in_progress(self.path)

    @property
    def url(self) -> str:
        """`host:port` of the run's server, for clients. Raises RlhfError unless the run is in progress."""
        if not self.is_running:
            raise RlhfError(f"{self.path} is not in progress, so it has no server; `resume` starts it")
        return self._config().server_url("http")

    @property
    def metrics(self) -> Table:
        """The steps so far, as {name: float array `[steps]`}; NaN for a step without that metric.

        `step` has the numbers of the steps. Beside the names of metrics.jsonl, it has TRL's: `reward`,
        `reward_std` (over all responses of the step), `frac_reward_zero_std`, `kl`, `entropy`,
        `completions/mean_length`, `completions/clipped_ratio`, `clip_ratio`, `grad_norm`, `learning_rate`, and
        `rewards/<name>/mean` of each term of a sum; as far as the run measures them.
        """
        from rlhf_triton.tools.report.data import REWARD_PREFIX, components, number, read_steps

        rows = read_steps(self._folder() / "metrics.jsonl", math.inf)
        names = dict.fromkeys(name for row in rows for name, value in row.items() if number(value) is not None)
        always = ("step", TRL_NAMES["reward"][0])  # also before the first step
        columns = {name: [number(row.get(name)) for row in rows] for name in (*always, *names)}
        table = {name: np.array(values, np.float64) for name, values in columns.items()}
        for name, (ours, is_rest) in TRL_NAMES.items():
            if ours in table:
                table[name] = 1.0 - table[ours] if is_rest else table[ours]
        for term in components(rows):
            table[f"rewards/{term}/mean"] = table[REWARD_PREFIX + term]
        return table

    def samples(self, when: Literal["before", "after", "training"] = "after") -> list[dict[str, Any]]:
        """Return the responses to the validation prompts before or after training, or some of those trained on.

        Each has `prompt`, `response`, `reward` and more. The list is empty as long as there are none.
        """
        if when not in ("before", "after", "training"):
            raise RlhfError(f"when: {when!r}, must be 'before', 'after' or 'training'")
        if when == "training":
            return [*each_line(self._folder() / "rollouts.jsonl")]
        return [row for row in each_line(self._folder() / "samples.jsonl") if row["when"] == when]

    @property
    def policy_path(self) -> Path:
        """The newest policy, a Hugging Face folder; after an error it is made from the newest checkpoint.

        Raises RlhfError if there is none yet.
        """
        folder = self._folder()
        if saved := newest_saved_policy(folder):
            return saved
        step = last_step(folder)
        if not step:
            raise RlhfError(f"{folder} has no policy yet: the first checkpoint is written after actor.checkpoint_every")
        exported = folder / "export" / f"step-{step}"
        if not exported.is_dir():  # in a process of its own, which imports torch
            command = [sys.executable, RUN_MODULE, "rlhf_triton.tools", "export", str(folder), "--step", str(step)]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            if done.returncode:
                raise RlhfError(done.stderr.rpartition("error: ")[2].strip())
        return exported

    def report(self) -> Path:
        """Write report.html into the run's folder and return its path."""
        from rlhf_triton.tools.report.data import load_run
        from rlhf_triton.tools.report.page import write_page

        out = self.path / "report.html"
        write_page(load_run(self.path), out)
        return out

    def plot(self) -> Any:
        """Return the report's curves as one matplotlib figure. Raises RlhfError before the second step."""
        from rlhf_triton.tools.report.curves import figure_of, pictures
        from rlhf_triton.tools.report.data import load_run

        run = load_run(self.path)
        drawn = pictures(run)
        if not drawn:
            raise RlhfError(f"{self.path} has no curves yet: a curve needs two steps")
        picture = StringIO()
        num_rows = math.ceil(len(drawn) / 2)
        with figure_of(picture, (12, 3.5 * num_rows)) as figure:
            for position, (_, draw) in enumerate(drawn, start=1):
                draw(figure.add_subplot(num_rows, 2, position), run)
        size = r'width="([\d.]+pt)" height="[\d.]+pt"'
        shown = re.sub(size, r'width="100%" style="max-width: \1"', picture.getvalue(), count=1)
        figure._repr_svg_ = lambda: shown  # by a notebook, not wider than its cell
        return figure

    def status(self) -> str:
        """Return what `rlhf-triton status` prints: what serves, what runs, the last step, and the last problem."""
        from rlhf_triton.tools.status import status

        return "\n".join(status(self._config()))

    def wait(self) -> "Run":
        """Show a live line until the run has ended. Ctrl-C ends the waiting, not the run; `stop` ends that.

        Raises RlhfError with the run's error if it fails meanwhile.
        """
        process = _started.get(self.path)
        if process is not None and process.poll() is not None and run_process(self.path) is not None:
            process = None
            del _started[self.path]  # the run was resumed elsewhere since, so how its process ended does not count
        log = NewLines(self.log_path)
        written = self._log_changed()
        with LiveLine() as line:
            while True:
                is_last = not self.is_running
                _relay_log(line, log.read())
                if is_last:
                    break
                time.sleep(POLL_S)
            if process is None and self._log_changed() != written and (error := error_in(self.log_path)):
                raise RlhfError(error)
            self._raise_if_failed()
            if len(steps := self.metrics["step"]):
                line.show(f"ended after step {steps[-1]:g}: {self.path}")
        return self

    def stop(self) -> None:
        """Stop the run as Ctrl-C does, with a checkpoint and the policy, and return when it has ended.

        Raises RlhfError if it was not started by `rlhf-triton run` on this host.
        """
        if not self.is_running:
            return
        process = _started.get(self.path)
        number = process.pid if process is not None and process.poll() is None else run_process(self.path)
        if number is None:
            raise RlhfError(
                f"{self.path} was not started by `rlhf-triton run` on this host; stop it where it was started"
            )
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(number, signal.SIGINT)
        while self.is_running:
            time.sleep(POLL_S)

    def resume(self, *, wait: bool = True, accept_changes: bool = False, **settings: Any) -> "Run":
        """Resume the run from its newest checkpoint; `wait` as in `train`.

        Args:
            accept_changes: go on although settings of reward, environment, algorithm or policy have changed.
            settings: keys of the YAML to change, such as `**{"actor.steps": 200}`.

        Raises:
            RlhfError: it is running, or as `train`.
        """
        sections = Sections(self.path, read_yaml(self.config_path.read_text(encoding="utf-8")))
        for key, value in settings.items():
            sections.set(key, value)
        sections.check(str(self.config_path))
        with _written(sections):
            self._start(wait=wait, arguments=["--accept-changes"] if accept_changes else [])
        return self

    def push_to_hub(self, name: str, *, private: bool = True) -> str:
        """Upload the policy to the Hugging Face hub as `organization/name`; return its address.

        Raises RlhfError if there is no policy yet, or the hub refuses or cannot be reached.
        """
        folder = self.policy_path
        try:
            from huggingface_hub import HfApi

            api = HfApi()
            api.create_repo(name, private=private, exist_ok=True)
            api.upload_folder(repo_id=name, folder_path=str(folder))
        except Exception as error:  # huggingface_hub is missing, or the upload failed
            raise RlhfError(f"{folder} cannot be uploaded as {name}: {reason_of(error)}") from error
        return f"https://huggingface.co/{name}"

    def _start(self, *, wait: bool, arguments: Sequence[str] = ()) -> None:
        """Start the command; with `wait` it ends with this thread."""
        program = [sys.executable, "-u", RUN_MODULE, "rlhf_triton.tools", "run", "--config", str(self.config_path)]
        self.log_path.parent.mkdir(exist_ok=True)
        with self.log_path.open("wb") as log:
            if wait:
                process = start_bound([*program, *arguments], log, os.environ)
            else:
                process = subprocess.Popen(
                    [*program, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        _started[self.path] = process
        try:
            while not wait and process.poll() is None and run_process(self.path) != process.pid:
                time.sleep(POLL_S)  # the checks come first
            self._raise_if_failed()
            if wait:
                self.wait()
        except KeyboardInterrupt:
            print(f"stopping; {self!r}.resume() goes on from the newest checkpoint", file=sys.stderr)
            self.stop()
            raise

    def _raise_if_failed(self) -> None:
        """Raise RlhfError if the process that was started from here has failed."""
        process = _started.get(self.path)
        if process is not None and process.poll() not in (None, *STOPPED):
            why = f"the run {how_ended(process.returncode)}; its log is {self.log_path}"
            if not self.log_path.is_file():
                why = f"the run {how_ended(process.returncode)}, and files of {self.path} were deleted meanwhile"
            raise RlhfError(error_in(self.log_path) or why)

    def _config(self) -> RunConfig:
        """Return the configuration that the run was started with."""
        from rlhf_triton.actor.run.settings import started_with

        return started_with(self._folder()) or load_config(self.config_path)

    def _folder(self) -> Path:
        """Return the run's folder. Raises RlhfError if it is not there any more."""
        from rlhf_triton.tools.report.data import check_run

        check_run(self.path)
        return self.path

    def _log_changed(self) -> int:
        return self.log_path.stat().st_mtime_ns if self.log_path.is_file() else 0


@contextlib.contextmanager
def _written(sections: Sections) -> Iterator[None]:
    """Write the YAML into the run's folder; no other program may start a run there until the block ends.

    Raises RlhfError if the run is in progress or being started.
    """
    with only_start(sections.folder):
        with only_run(sections.folder):
            sections.write(sections.folder / RUN_YAML)
        yield


def _check_given(sections: Sections) -> None:
    """Raise RlhfError if there are no prompts or no reward."""
    if sections.get("actor.prompts") is None:
        raise RlhfError(f"prompts: give {PROMPT_FORMS}")
    if not {"reward", "rewards", "environment"} & sections.data.keys():
        raise RlhfError("reward: give a function, the folder of a reward model, or a list of these")


def _relay_log(line: LiveLine, new: Iterable[bytes]) -> None:
    """Show the newest phase, step or validation, and keep what the processes warn of."""
    for log_line in new:
        text = log_line.decode(errors="replace").rstrip()
        if text.startswith(("[", "step ", "validation ")):
            line.show(text)
        elif text.startswith(WARNINGS):
            line.keep(text.removeprefix("  | "))
