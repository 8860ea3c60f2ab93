"""The base class of all errors for users, so that an entry point can catch one type, and the tree of all errors.

RlhfError                    the user can fix it; the message names what is wrong and what to do
  ConfigError                the YAML or an override
  PromptError                a prompt file
  CheckpointError            a model's folder
    DamagedCheckpoint        a checkpoint that does not match its checksums
  ContractError              a request's field and value
  BadMessages                messages that are not a conversation
  FunctionError              a user's function, class, loss or advantage, or an option of one
  BadScore                   invalid result of a reward function or an environment
  EnvironmentFailed          a call of an environment
  TemplateError              a chat template that is unusable for conversations
    HistoryChanged           ... because it changes earlier messages
  TurnFailed                 a turn that the policy's engine could not sample
  Unavailable                a request that cannot be served now (503)
  RequestFailed              a request that is no longer retried
    RequestRefused           the server would reject any repetition
    ServerFailed             the server executed it, and it failed
      ServersDiffer            no server has the expected configuration
    ReplyLost                ... because the reply did not arrive
  HttpError                  a request of the gateway or of an agent, with its HTTP status
  ServerStartError           tritonserver cannot start
  ControlPlaneError          a call of Triton's control plane
  WeightsError               a version in the store
    VersionRejected          ... that failed verification or that an instance rejected; the previous one serves
  DamagedEntry               an entry of the journal
  DamagedRecord              a record of the journal of samples
  NotFinite                  NaN or infinity
  OutOfMemory                a GPU too small for the smallest part of the work
  RankOutOfMemory            … while the other ranks wait
  RankFailed                 an error of another rank
Stopped, StopRequested, RankLost    ends that are not errors
AttemptFailed                       a failed attempt, before the next
EnvironmentLost                     raised by a user's environment that is gone, so that its conversation restarts
DifferentStatistics                 statistics of a loss that some micro-batches lack
"""

import re
from collections.abc import Mapping
from typing import Any


class RlhfError(Exception):
    """An error that the user can fix; the message names what is wrong and what to do."""


MAX_REASON = 400


class FunctionError(RlhfError, ValueError):
    """A user's function or class cannot be imported or rejects its options; the message names it and the cause."""


class BadScore(RlhfError, ValueError):
    """A user's function or environment returned an invalid value."""


class NotFinite(RlhfError, FloatingPointError):
    """Logits or a gradient hold NaN or infinity."""


class RankFailed(RlhfError):
    """Another rank failed in an operation of all ranks, has ended, or hangs; the message contains its error."""


def reason_of(error: BaseException) -> str:
    """Return a library's exception as one line for users, without class names and error numbers.

    Permission errors get a remedy.
    """
    if isinstance(error, OSError) and error.strerror:
        name = f"{error.filename}: " if error.filename else ""
        remedy = "; let this user read and write it" if isinstance(error, PermissionError) else ""
        return f"{name}{error.strerror}{remedy}"
    if isinstance(error, KeyError) and error.args:
        return f"{error.args[0]!r} is missing"
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 (byte {error.start})"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[-1] if len(lines) == 2 and lines[0].endswith(":") else " ".join(lines)
    return text[:MAX_REASON] or type(error).__name__


def reason_of_item(item: Mapping[str, Any]) -> str:
    """Return the message of one of the `errors()` of a pydantic ValidationError, such as `must be less than 1`."""
    if item["type"] == "value_error":
        return str(item["ctx"]["error"])
    if item["type"] == "path_type":
        return "must be a path"
    message = re.sub(r", unable to .*| or instance of \w+", "", item["msg"])
    return re.sub(r"^\w+ should ", "must ", message).replace(" after validation", "")


REPORTED = (RlhfError, OSError)
"""Errors that an entry point reports in one sentence. Any other exception is a bug and keeps its traceback."""
