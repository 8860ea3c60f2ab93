"""A policy for agents that says what a script tells it, and the gateway that serves it."""

import asyncio
import contextlib
import string

from fake_reward import gateway
from run_checkpoints import TEXTS
from tiny_tokenizers import make_text_tokenizer

from rlhf_triton.actor.capture.app import capture_routes, trainer_routes
from rlhf_triton.actor.capture.sessions import SessionLimits, Sessions
from rlhf_triton.actor.data.recorded import PolicyTurn

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or () %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENIZER = make_text_tokenizer("qwen2", [*TEXTS, string.printable], chat_template=TEMPLATE, model_max_length=100_000)
EOS = TOKENIZER.eos_token_id


def ids(text):
    """Return the token ids of a text."""
    return [*TOKENIZER(text, add_special_tokens=False)["input_ids"]]


class ScriptedSampler:
    """Says `replies`, one after the other; then what `reply` makes of the prompt's text. Its version counts calls."""

    def __init__(self, *replies, reply=lambda prompt: "Yes."):
        self.replies = [*replies]
        self.reply = reply
        self.prompts = []
        self.completions = []
        self.samplings = []
        self.in_flight = 0
        self.open = asyncio.Event()
        self.open.set()

    async def sample(self, session, tokens, sampling):
        """Return a reply; waits while `open` is not set."""
        self.in_flight += 1
        try:
            await self.open.wait()
        finally:
            self.in_flight -= 1
        text = self.replies.pop(0) if self.replies else self.reply(TOKENIZER.decode(tokens))
        whole = [*ids(text), EOS]
        found = whole[: sampling.max_tokens]
        self.prompts.append(tokens)
        self.completions.append(found)
        self.samplings.append(sampling)
        logprobs = [-0.5 - i for i in range(len(found))]
        return PolicyTurn(found, found == whole, logprobs, [len(self.prompts)] * len(found))


@contextlib.asynccontextmanager
async def scripted_gateway(
    sampler,
    *,
    export=None,
    tokenizer=TOKENIZER,
    key=None,
    most=1000,
    most_tokens=1_000_000,
    idle_s=600.0,
):
    """Run the gateway with the policy's routes; `most`, `idle_s`: as in `Sessions`; `most_tokens`: of a session."""
    sessions = Sessions(tokenizer, SessionLimits(most_tokens), most=most, idle_s=idle_s)
    routes = capture_routes(sessions, sampler, model="policy", max_tokens=500)
    routes += trainer_routes(sessions, export)
    async with gateway("unused:1", key=key, more=routes) as caller:
        yield caller, sessions
