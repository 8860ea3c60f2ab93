"""Agents as users write them, with a client of their own: `urllib`."""

import asyncio
import contextlib
import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor


def ask(base_url, messages, **more):
    """Return the policy's reply as a message."""
    body = json.dumps({"model": "policy", "messages": messages, "temperature": 0.3, **more}).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", body, headers={"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as reply:
        return json.load(reply)["choices"][0]["message"]


def converse(base_url, task, turns=2, tools=None):
    """A conversation of some turns; the reward is the number of characters of the last reply."""
    messages = [*task["messages"]]
    for turn in range(turns):
        messages.append(ask(base_url, messages, tools=tools))
        messages.append({"role": "user", "content": f"More {turn}."})
    return len(messages[-2]["content"])


async def in_two_contexts(base_url, task):
    """Two conversations at the same time, and a third that continues the first one's begin in another way."""
    one = [*task["messages"]]
    two = [{"role": "user", "content": "Plan."}]
    with ThreadPoolExecutor(2) as pool:
        loop = asyncio.get_running_loop()
        replies = await asyncio.gather(*(loop.run_in_executor(pool, ask, base_url, each) for each in (one, two)))
    for said in ("left", "right"):
        ask(base_url, [*one, replies[0], {"role": "user", "content": said}])
    return 1.5


def rewarding(base_url, task):
    """Post a reward for the first of two calls."""
    messages = [*task["messages"], ask(base_url, task["messages"])]
    reward = urllib.request.Request(base_url.removesuffix("/v1") + "/reward", b'{"reward": 0.25}')
    urllib.request.urlopen(reward, timeout=120).close()
    ask(base_url, [*messages, {"role": "user", "content": "More."}])


def impatient(base_url, task):
    """Hang up during some calls."""
    address = urllib.parse.urlsplit(base_url)
    for _ in range(4):
        call = http.client.HTTPConnection(address.netloc)
        call.request("POST", f"{address.path}/chat/completions", json.dumps({"messages": task["messages"]}))
        call.close()
    return converse(base_url, task)


def stubborn(base_url, task):
    """Repeat a call that fails, and return a reward nevertheless."""
    for _ in range(3):
        with contextlib.suppress(urllib.error.HTTPError):
            ask(base_url, task["messages"])
    return 1.0


def failing(base_url, task):
    """Fail after a call."""
    ask(base_url, task["messages"])
    raise ValueError("lost the way")


def lingering(base_url, task):
    """Never end after a call."""
    ask(base_url, task["messages"])
    time.sleep(3600)


def asleep(base_url, task):
    """Never begin."""
    time.sleep(3600)


def stopping(base_url, task, stop):
    """Want a reply to end at a string; say why it cannot."""
    try:
        ask(base_url, task["messages"], stop=stop)
    except urllib.error.HTTPError as error:
        raise ValueError(json.load(error)["error"]["message"]) from None


def idle(base_url, task):
    """Return a reward without calling the policy."""
    return 1.0


def wrong(base_url, task):
    """Return what is no reward."""
    ask(base_url, task["messages"])
    return "good"
