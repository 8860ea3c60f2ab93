"""Builds a configuration from Python values, and the files that it names: functions, prompts, downloaded models."""

import contextlib
import enum
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf_triton.client.rows import plain
from rlhf_triton.config.keys import value_at
from rlhf_triton.config.loading import parse_config
from rlhf_triton.config.rewards import MODEL_TERM, OTHER_NAMES
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.config.yaml_file import dump_yaml
from rlhf_triton.errors import RlhfError, reason_of
from rlhf_triton.store.durable import is_locked, replace_file
from rlhf_triton.store.run_lock import read_phase
from rlhf_triton.tools.api.functions import function_spec
from rlhf_triton.tools.server.ports import PORT_KEYS
from rlhf_triton.user_code import FILE_SPEC, MODULE_SPEC, with_absolute_path

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
PROMPT_FORMS = "texts, chats, dictionaries, a data set or a file"
HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")  # no pickles, which are refused anyway


class Sections:
    """Sections of a configuration, set one by one, and the files to write beside them."""

    def __init__(self, folder: Path, data: dict[str, Any] | None = None) -> None:
        """`data`: initial sections; default: `run.dir` and a server on free ports."""
        self.folder = folder
        self.data: dict[str, Any] = data or {"run": {"dir": str(folder)}, "server": dict.fromkeys(PORT_KEYS, 0)}
        self._fixed: dict[str, Any] = {}
        self._files: dict[Path, str] = {}
        self._tables: dict[Path, Any] = {}

    def set(self, key: str, value: Any) -> None:
        """Set `section.key`. A dictionary is merged into the section; a function is copied into a file.

        Raises RlhfError for a value that cannot be written into a YAML.
        """
        _merge(self.data, _nested(key, self._plain(key, value)))

    def set_once(self, key: str, value: Any) -> None:
        """Set `section.key`, which nothing may change: `check` raises RlhfError if it has another value."""
        self._fixed[key] = self._plain(key, value)
        self.set(key, value)

    def get(self, key: str) -> Any:
        """Return the value of `section.key`; None if it is not set."""
        return value_at(self.data, key)

    def set_default(self, key: str, value: Any) -> None:
        """Set `section.key` unless it is set."""
        if self.get(key) is None:
            self.set(key, value)

    def set_model(self, key: str, model: str | os.PathLike[str] | None) -> None:
        """Set the folder of a model, which is downloaded if `model` is `organization/name` and there is no such folder.

        Raises RlhfError if it cannot be downloaded, or is not a path. None: do nothing, as in the other methods.
        """
        if model is None:
            return
        if not isinstance(model, (str, os.PathLike)):
            raise RlhfError(
                f"{key}: {type(model).__name__}, must be the folder of a model; `save_pretrained(folder)` of model and "
                "tokenizer writes one"
            )
        folder = Path(model).expanduser()
        if isinstance(model, str) and HUB_NAME.fullmatch(model) and not folder.parent.exists():
            folder = _download(key, model)
        self.set_once(key, folder.absolute())

    def set_rewards(self, rewards: Any) -> None:
        """Set `reward` and `rewards` to a model's folder, a function, or a list of these and of `(reward, weight)`.

        Raises RlhfError for more than one model, and FunctionError for a function that cannot be written down.
        """
        if rewards is None:
            return
        terms: dict[str, dict[str, Any]] = {}
        pairs: list[Any] = rewards if isinstance(rewards, list) else [rewards]
        for term in pairs:
            reward, weight = term if isinstance(term, tuple) and len(term) == 2 else (term, 1.0)
            if not hasattr(weight, "__float__"):
                raise RlhfError(f"reward: the weight of {reward!r:.80} is {weight!r:.40}, must be a number")
            if (spec := self._function("reward", reward)) is not None:
                name = _term_name(spec.rpartition(":")[2], terms)
                terms[name] = {"function": spec, "weight": float(weight)}
            elif MODEL_TERM in terms:
                first = self.data["reward"]["model"]
                raise RlhfError(f"reward: {first} and {reward} are two models, but a server has one reward model")
            else:
                self.set_model("reward.model", reward)
                terms[MODEL_TERM] = {"weight": float(weight)}
        if terms != {MODEL_TERM: {"weight": 1.0}}:  # which is the default
            self.set("rewards", terms)

    def set_prompts(self, key: str, prompts: Any, *, name: str) -> None:
        """Set prompts to a file, or write rows into one: a data set, texts, chats, or dictionaries.

        `name`: the argument, for messages. Raises RlhfError for a row that is not a prompt or not valid JSON.
        """
        if prompts is None:
            return
        if isinstance(prompts, (str, os.PathLike)):
            path = Path(prompts).expanduser().absolute()
        elif isinstance(prompts, Mapping):
            raise RlhfError(
                f"{name}: a dictionary with the splits {', '.join(map(str, prompts))}; give one of them, such as "
                f"prompts[{next(iter(prompts), 'train')!r}]"
            )
        elif hasattr(prompts, "to_parquet") and getattr(prompts, "format", {}).get("type") != "custom":  # a transform
            path = self.folder / f"{name}.parquet"
            self._tables[path] = prompts
        elif isinstance(prompts, Iterable):
            path = self.folder / f"{name}.jsonl"
            self._files[path] = "".join(_line(f"{name}[{i}]", row) for i, row in enumerate(prompts))
            if not self._files[path]:
                raise RlhfError(f"{name}: there are no prompts; give {PROMPT_FORMS}")
        else:
            raise RlhfError(f"{name}: {prompts!r:.80}, must be {PROMPT_FORMS}")
        self.set_once(key, path)

    def check(self, source: str) -> RunConfig:
        """Return the configuration. Raises ConfigError, whose message starts with `source`."""
        config = parse_config(self.data, source)
        for key, value in self._fixed.items():
            if (other := self.get(key)) != value:
                raise RlhfError(f"{key}: {value!r} and {other!r} are given; give one of them")
        return config

    def write(self, path: Path) -> None:
        """Write the YAML, and the files that it names. Raises RlhfError for a table that cannot be written."""
        self._files[path] = dump_yaml(self.data)
        for file, text in self._files.items():
            file.parent.mkdir(exist_ok=True)
            replace_file(file, text.encode(), durable=False)
        for file, table in self._tables.items():
            try:
                table.to_parquet(str(file))
            except Exception as error:  # pyarrow is missing, or cannot express a value
                raise RlhfError(f"{file.stem}: {reason_of(error)}; give rows that Parquet can express") from error

    def _plain(self, key: str, value: Any) -> Any:
        if isinstance(value, enum.Enum):
            return self._plain(key, value.value)
        if isinstance(value, Mapping):
            return {str(name): self._plain(f"{key}.{name}", inner) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self._plain(key, inner) for inner in value]
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if hasattr(value, "tolist"):  # a NumPy array or scalar
            return value.tolist()
        if callable(value):
            return self._function(key, value)
        if isinstance(value, str | int | float | None):
            return value
        raise RlhfError(f"{key}: {value!r:.80} cannot be written into a YAML; give numbers, texts, lists or functions")

    def _function(self, key: str, value: Any) -> str | None:
        """Return `file.py:name` of a function; None for the folder of a model."""
        if isinstance(value, str) and (FILE_SPEC.fullmatch(value) or MODULE_SPEC.fullmatch(value)):
            return with_absolute_path(value, Path.absolute)
        if not callable(value) or hasattr(value, "save_pretrained"):
            return None
        try:
            return function_spec(value, self.folder / "functions", self._files)
        except RlhfError as error:
            raise type(error)(f"{key}: {error}") from error


@contextlib.contextmanager
def new_folder(name: str | os.PathLike[str] | None, kind: str) -> Iterator[Path]:
    """Yield the folder `name`, by default the first free `runs/<kind>-N`.

    If the block fails, a new folder is removed, unless a run has started in it, or another program starts one.

    Raises RlhfError if it cannot be made.
    """
    try:
        is_new, folder = _make_folder(name, kind)
    except OSError as error:
        raise RlhfError(f"dir: {reason_of(error)}; name another folder") from error
    try:
        yield folder
    except Exception:
        if is_new and not read_phase(folder) and not any(map(is_locked, folder.rglob("*.lock"))):
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _make_folder(name: str | os.PathLike[str] | None, kind: str) -> tuple[bool, Path]:
    number = 1
    while True:
        folder = Path("runs", f"{kind}-{number}").absolute() if name is None else Path(name).expanduser().absolute()
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700)
            return True, folder
        except FileExistsError:
            if name is not None and folder.is_dir():
                return False, folder
            if name is not None:
                raise
        number += 1


def _nested(key: str, value: Any) -> dict[str, Any]:
    first, _, rest = key.partition(".")
    return {first: _nested(rest, value) if rest else value}


def _merge(data: dict[str, Any], added: Mapping[str, Any]) -> None:
    for key, value in added.items():
        if isinstance(value, dict) and isinstance(data.get(key), dict):
            _merge(data[key], value)
        else:
            data[key] = value


def _term_name(name: str, used: Mapping[str, Any]) -> str:
    """Return a valid name of a term of `rewards` for a function."""
    base = re.sub("[^a-z0-9_]", "_", name.lower()).lstrip("_0123456789")[:36] or "reward"
    names = [base, *(f"{base}_{number}" for number in range(2, 100))]
    taken = {*used, MODEL_TERM}
    return next(name for name in names if name not in taken and not OTHER_NAMES.fullmatch(name))


def _line(where: str, row: Any) -> str:
    """Return a row of prompts as a line of JSONL."""
    if isinstance(row, str):
        row = {"text": row}
    elif isinstance(row, list) and row and all(isinstance(message, Mapping) for message in row):
        row = {"messages": row}
    if not isinstance(row, Mapping):
        raise RlhfError(f"{where}: {row!r:.80}, must be a text, the messages of a chat, or a dictionary")
    return json.dumps(plain(where, dict(row)), ensure_ascii=False) + "\n"


def _download(key: str, name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, allow_patterns=[*HUB_FILES]))
    except Exception as error:  # huggingface_hub is missing, or the download failed
        raise RlhfError(
            f"{key}: {name} is no folder here, and cannot be downloaded from the hub: "
            f"{reason_of(error.__cause__ or error)}; give the folder of a model"
        ) from error
