"""Worker process of a reward function: `python -m rlhf_triton.rewards.worker SPEC FD`.

Receives the function's settings over the socket `FD`, then one group of samples at a time (a single sample unless the
function is groupwise). Replies with the function's counts and, for each sample, `{"score": …}`, `{"error": …}`, or `{}`
if the function does not apply to it. A reply repeats the message's number. Ends when its parent ends. The function runs
in the main thread and may crash the process; the pool then starts another one.
"""

import sys
from typing import Any

from rlhf_triton.errors import FunctionError
from rlhf_triton.rewards.counters import take_counts
from rlhf_triton.rewards.function import ScoreFunction, load_function
from rlhf_triton.rewards.sample import Sample
from rlhf_triton.rewards.scores import NOT_APPLICABLE, checked, group_scores
from rlhf_triton.user_code import describe
from rlhf_triton.workers.child import Parent, receive_frame


def score_group(function: ScoreFunction, samples: list[Sample], *, groupwise: bool) -> list[dict[str, Any]]:
    """Return `{"score": …}`, `{"error": …}` or `{}` for each sample."""
    try:
        scores = group_scores(function(samples), len(samples)) if groupwise else [function(samples[0])]
    except BaseException as error:  # process edge: anything the function raises, even SystemExit, fails these samples
        return [{"error": describe(error)}] * len(samples)
    return [_result(score) for score in scores]


def _result(score: Any) -> dict[str, Any]:
    try:
        return {} if score is NOT_APPLICABLE else {"score": checked(score)}
    except Exception as error:  # process edge: the score may be any object of the user's code
        return {"error": describe(error)}


def main(argv: list[str]) -> int:
    """Score samples in a child process until the socket is closed; return 1 if the function cannot be imported."""
    parent = Parent(argv)
    settings = parent.settings
    try:
        function = load_function(
            parent.spec, settings["options"], timeout_s=settings["timeout_s"], columns=settings["columns"]
        )
    except FunctionError as error:
        parent.reply(settings, {"refused": str(error)})
        return 1
    parent.reply(settings, {"ready": True})
    while True:
        try:
            message = receive_frame(parent.channel)
        except (EOFError, OSError):
            return 0
        samples = [Sample(**sample) for sample in message["samples"]]
        results = score_group(function, samples, groupwise=settings["groupwise"])
        parent.reply(message, {"results": results, "counts": take_counts()})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
