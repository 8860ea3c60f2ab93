"""Tests of environments in real worker processes: both kinds of class, and their failures."""

import asyncio
import contextlib
import itertools
import os
import re
import signal
from pathlib import Path

import environment_classes
import psutil
import pytest
from aiohttp import web
from openenv_server import OpenEnvServer

from rlhf_triton.actor.environments.pool import EnvironmentFailed, Environments, StepResult
from rlhf_triton.config.environment import EnvironmentSection
from rlhf_triton.errors import FunctionError

FILE = Path(environment_classes.__file__)
LIMIT_S = 3.0
OPENENV = "rlhf_triton.actor.environments.openenv:OpenEnv"


@contextlib.asynccontextmanager
async def running(name="Doing", **settings):
    """Start environments; no worker process may be left at the end."""
    settings["class"] = name if ":" in name else f"{FILE}:{name}"
    environments = Environments(EnvironmentSection.model_validate(settings))
    await environments.start()
    try:
        yield environments
    finally:
        await environments.close()
    assert workers() == []


def workers():
    """Return the worker processes of this process."""
    return [
        child for child in psutil.Process().children() if "rlhf_triton.actor.environments.worker" in child.cmdline()
    ]


async def failure(call, name=f"{FILE}:Doing"):
    """Return the message of a call that fails, without the environment's name and the place in the code."""
    with pytest.raises(EnvironmentFailed) as caught:
        await call
    assert str(caught.value).startswith(f"{name}: ")
    return re.sub(r" \((environment_classes|openenv|connector).py:\d+\)$", "", str(caught.value)[len(name) + 2 :])


# ---- the two shapes of class ----


async def test_trl_environment_class_runs_unchanged():
    async with running("IncrementEnv") as environments:
        (tool,) = environments.tools
        assert tool["function"] == {
            "name": "increment",
            "description": "Increment the internal counter.",
            "parameters": {
                "type": "object",
                "properties": {"step": {"type": "integer", "description": "Value to add to the counter."}},
                "required": ["step"],
            },
            "return": {"type": "integer", "description": "The updated counter value."},
        }
        one, other = [await environments.open({"prompt": "x"}) for _ in range(2)]
        target = int(re.fullmatch(r"Increment the counter by (\d)\.", str(one.observation))[1])
        assert [await one.call("increment", {"step": step}) for step in (7, -7)] == ["7", "0"]
        assert await one.reward() == 0.0
        assert await one.call("increment", {"step": target}) == str(target)
        assert await one.reward() == 1.0
        assert await other.call("increment", {"step": 1}) == "1", "two instances share a counter"


async def test_tool_call_errors_are_returned_as_the_tools_answer(tmp_path):
    log = tmp_path / "log"
    name = f"{FILE}:Tools"
    async with running("Tools", options={"log": str(log)}, reward=f"{FILE}:by_state") as environments:
        assert [tool["function"]["name"] for tool in environments.tools or []] == ["fail", "look"]
        assert log.read_text() == "closed", "the instance that was made to list the tools is open"
        one, other = [await environments.open({"target": 4, "prompt": "p", "x": 1}) for _ in range(2)]
        assert one.observation is None
        calls = [
            ("look", {"where": "up"}, "up 1 ['prompt', 'x']"),
            ("look", {}, "error: TypeError: Tools.look() missing 1 required positional argument: 'where'"),
            ("look", {"self": 1}, "error: TypeError: Tools.look() got multiple values for argument 'self'"),
            ("look", ["up"], "error: the arguments are ['up']; write an object with a value for each name"),
            ("close", {}, "error: there is no tool close; the tools: fail, look"),
            ("_secret", {}, "error: there is no tool _secret; the tools: fail, look"),
            ("fail", {"how": "raise"}, "error: KeyError: 'key'"),
            ("fail", {"how": "huge"}, "error: the result has 30000 characters, must have at most 20000"),
        ]
        for tool, arguments, text in calls:
            assert (await one.call(tool, arguments)).startswith(text)
        assert await one.reward() == 4.0 + (10.0 * 4 + 4)
        await one.close()
        assert log.read_text() == "closed" * 2
        dead = "the worker process ended with exit code 3"
        assert await failure(other.call("fail", {"how": "exit"}), name) == f"tool fail: {dead}"
        await other.close()


async def test_reset_receives_the_row_or_its_columns():
    async with running("Doing", options={"first": "hi"}, reward=f"{FILE}:two") as environments:
        assert environments.tools is None
        instance = await environments.open({"name": "Bob", "other": [1]})
        assert instance.observation == "hi Bob 600"
        assert (await environments.open({"do": "info"})).observation == "a start"
        assert await failure(instance.reward()) == "get_reward: the function returned 2 scores for a group of 1"
    async with running("Coroutines") as environments:
        instance = await environments.open({"name": "Bob", "other": [1]})
        assert instance.observation == "Bob default"
        assert await instance.reward() is None


@pytest.mark.parametrize("name", ["Doing", "Coroutines"])
async def test_worker_runs_steps_of_64_instances_concurrently(name):
    """No step ends before all have begun."""
    async with running(name) as environments:
        instances = await asyncio.gather(*(environments.open({"name": "n"}) for _ in range(64)))
        results = await asyncio.gather(*(instance.step("meet") for instance in instances))
        assert {(result.observation, result.reward) for result in results} == {
            ("meet", 4.0 if name == "Doing" else 0.5)
        }
        assert len(workers()) == 1


# ---- faults ----


async def test_invalid_results_and_exceptions_fail_only_their_call():
    causes = {
        "two": "returned ('two', 1.0); return a tuple (observation, reward, done)",
        "number": "the observation is 3; return a str",
        "bytes": "the observation is b'x'; return a str",
        "dict": "the observation is {}; return a str",
        "text reward": "the reward is '1.0'; return a finite number or None",
        "nan": "the reward is nan; return a finite number or None",
        "done": "done is 1; return True or False",
        "huge": "the observation has 20001 characters, must have at most 20000",
        "surrogate": "the observation has a lone surrogate, which UTF-8 cannot express; decode with errors=replace",
        "raise": "ValueError: invalid literal for int() with base 10: 'no such move'",
        "stop": "StopIteration",
        "exit": "SystemExit",
        "memory": "MemoryError",
    }
    async with running() as environments:
        one, other = [await environments.open({}) for _ in range(2)]
        for action, cause in causes.items():
            assert await failure(one.step(action)) == f"step: {cause}"
        for action in ("dict", "raise", "stop", "exit", "memory"):
            assert await failure(environments.open({"do": action})) == f"reset: {causes[action]}"
        assert await one.step("fork") == StepResult("fork", 4.0, False), "the forked process answered, too"
        assert await one.step("print") == StepResult("print", 5.0, False)
        assert await one.step("five") == StepResult("five", 1.0, True)
        assert await one.step("no reward") == StepResult("a", None, False)
        assert await one.step("end") == StepResult("end", 3.0, True)
        pids = [(await instance.step("pid")).observation for instance in (one, other)]
        assert pids[0] == pids[1]
        (fork,) = psutil.Process(int(pids[0])).children()
        while fork.status() != psutil.STATUS_ZOMBIE:  # it has ended instead of going on with the thread's next call
            await asyncio.sleep(0.01)


async def test_dead_worker_fails_its_own_instances_and_is_replaced():
    async with running(workers=2) as environments:
        one, two, three = [await environments.open({}) for _ in range(3)]
        pids = [int((await instance.step("pid")).observation) for instance in (one, two, three)]
        assert pids[0] == pids[2] != pids[1], "a new instance is not in the worker with the fewest"
        dead = "the worker process ended with exit code 3"
        hanging = asyncio.create_task(failure(three.step("hang")))
        assert await failure(one.step("die")) == f"step: {dead}"
        assert await hanging == f"step: {dead}"
        assert await failure(three.step("pid")) == f"step: {dead}"
        await one.close()
        assert (await two.step("x")).observation == "x"
        four = await environments.open({})
        assert int((await four.step("pid")).observation) not in pids
        os.kill(pids[1], signal.SIGKILL)
        assert await failure(two.step("x")) == "step: the worker process was killed by SIGKILL"


async def test_a_worker_that_replaces_another_runs_the_same_code(tmp_path):
    """Whoever edits class and reward during a run gets the rewards of one all the same."""
    one, two = [tmp_path / name for name in ("one.py", "two.py")]
    for file in (one, two):
        file.write_text(FILE.read_text().replace("return [1.0, 2.0]", "return [1.5]"))
    async with running(f"{one}:Doing", reward=f"{two}:two", workers=1) as environments:
        for file in (one, two):
            file.write_text("")
        dying = await environments.open({})
        await failure(dying.step("die"), f"{one}:Doing")
        assert await (await environments.open({})).reward() == 1.5


async def test_worker_with_a_hanging_call_is_killed_with_all_its_instances():
    late_at_once = itertools.count(0.0, 601.0).__next__
    async with running() as environments:
        hung, other = [await environments.open({}) for _ in range(2)]
        (killed,) = workers()
        waiting = asyncio.create_task(other.step("hang"))
        late = r"step: took longer than 600 s and was killed; raise environment\.timeout_s, or "
        with pytest.raises(EnvironmentFailed, match=late) as caught:
            await hung.step("hang", late_at_once)
        assert not caught.value.is_lost
        with pytest.raises(EnvironmentFailed, match="because another call took longer than 600 s") as caught:
            await waiting
        assert caught.value.is_lost
        await hung.close()
        assert (await (await environments.open({})).step("x")).observation == "x"
        await asyncio.to_thread(killed.wait, 120)


async def test_cancelled_open_leaves_no_worker_behind():
    async with running(timeout_s=LIMIT_S) as environments:
        other = await environments.open({})
        (worker,) = workers()
        opening = asyncio.create_task(environments.open({"do": "hang"}))
        await other.step("x", lambda: 0.0)  # the worker reads in order: it has the request
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await asyncio.to_thread(worker.wait, 120)  # killed, as the instance cannot be closed
        opening = asyncio.create_task(environments.open({}))
        while not workers():
            await asyncio.sleep(0.01)
        (starting,) = workers()
        opening.cancel()
        await asyncio.to_thread(starting.wait, 120)
    with pytest.raises(EnvironmentFailed, match="its workers have been killed"):
        await environments.open({})


@pytest.mark.parametrize("how", ["cancelled", "closed"])
async def test_a_start_that_ends_while_it_connects_has_no_process(monkeypatch, how):
    connecting = asyncio.Event()
    may_connect = asyncio.Event()
    connect = asyncio.open_connection

    async def connect_later(**options):
        reader, writer = await connect(**options)
        connecting.set()
        try:
            await may_connect.wait()
        except asyncio.CancelledError:
            writer.transport.abort()  # as `open_connection` does
            raise
        return reader, writer

    monkeypatch.setattr(asyncio, "open_connection", connect_later)
    environments = Environments(EnvironmentSection.model_validate({"class": f"{FILE}:Doing"}))
    starting = asyncio.create_task(environments.start())
    await connecting.wait()
    assert workers() == [], "no one knows this process yet"
    if how == "cancelled":
        starting.cancel()
    await environments.close()
    may_connect.set()
    with pytest.raises((asyncio.CancelledError, FunctionError), match=r"its workers have been killed|^$"):
        await starting
    assert workers() == []


@pytest.mark.parametrize(
    ("text", "settings", "cause"),
    [
        ("", {}, "env.py has no 'Env'"),
        ("class Env:\n def step(self, x): ...", {}, "the class has no method reset, which starts an episode"),
        ("class Env:\n def reset(self): ...\n def f(self): ...", {}, "JSON schema for f because it has no docstring"),
        (
            "class Env:\n def reset(self): ...\n def __init__(self): 1 / 0",
            {},
            "ZeroDivisionError: division by zero (en",
        ),
        ("class Env:\n def reset(self): ...", {"reward": "env.py:f"}, "env.py:f cannot be imported: env.py has no 'f'"),
    ],
)
async def test_unusable_environment_class_raises_one_sentence_at_the_start(
    tmp_path, monkeypatch, text, settings, cause
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(FILE.parents[2]))
    Path("env.py").write_text(text)
    with pytest.raises(FunctionError, match=rf"^environment\.class env\.py:Env: .*{re.escape(cause)}"):
        async with running("env.py:Env", **settings):
            pass
    assert workers() == []


@pytest.mark.parametrize("section", [{}, {"class": "a.py:B", "agent": "a.py:c"}, {"agent": "a.py:c", "reward": "a:b"}])
def test_environment_section_needs_either_class_or_agent(section):
    with pytest.raises(ValueError, match=r"set either class or agent|remove one of them"):
        EnvironmentSection.model_validate(section)


# ---- OpenEnv ----


@contextlib.asynccontextmanager
async def served():
    """Yield a server, its URL, and its listening site."""
    server = OpenEnvServer()
    app = web.Application()
    app.router.add_get("/ws", server.session)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield server, f"http://127.0.0.1:{runner.addresses[0][1]}", site
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def playing(**options):
    """Yield a server and environments that are played on it."""
    async with served() as (server, url, _), running(OPENENV, options={"url": url, **options}) as environments:
        yield server, environments


async def test_openenv_server_works_as_an_environment_and_survives_a_restart():
    async with served() as (server, url, site), running(OPENENV, options={"url": url}) as environments:
        one = await environments.open({"seed": 7, "x": 1})
        two = await environments.open({})
        assert (one.observation, server.resets) == ("start", [{"seed": 7}, {}])
        assert await one.step("hello") == StepResult("hello", 0.5, False)
        assert await one.step("end") == StepResult("end", 0.5, True)
        assert await failure(one.step("raise"), OPENENV) == "step: RuntimeError: no (EXECUTION_ERROR)"
        waiting = asyncio.create_task(environments.open({}))
        while not server.refused:
            await asyncio.sleep(0.01)
        await one.close()
        three = await waiting
        gone = "EnvironmentLost: the server has closed the connection"
        assert await failure(three.step("go"), OPENENV) == f"step: {gone}"
        await three.close()
        await site.stop()
        for transport in server.transports:
            transport.abort()
        with pytest.raises(EnvironmentFailed, match=gone) as caught:
            await two.step("x")
        assert caught.value.is_lost
        waiting = asyncio.create_task(environments.open({}))
        again = web.TCPSite(site._runner, "127.0.0.1", int(url.rpartition(":")[2]))
        await again.start()
        assert (await waiting).observation == "start"


@pytest.mark.parametrize(
    ("action", "is_lost"), [("no file", False), ("hang up", False), ("lost", True), ("die", True), ("raise", False)]
)
async def test_policy_mistakes_do_not_count_as_a_lost_environment(action, is_lost):
    """A lost conversation restarts: if failing actions counted, it would restart until the policy acts otherwise."""
    async with running() as environments:
        instance = await environments.open({})
        with pytest.raises(EnvironmentFailed) as caught:
            await instance.step(action)
        assert caught.value.is_lost == is_lost


async def test_tool_that_raises_environment_lost_gives_the_policy_no_answer():
    async with running("Tools") as environments:
        instance = await environments.open({"target": 1})
        with pytest.raises(EnvironmentFailed, match="tool fail: EnvironmentLost: the sandbox is gone") as caught:
            await instance.call("fail", {"how": "lost"})
        assert caught.value.is_lost


async def test_idle_openenv_session_answers_the_servers_pings():
    async with playing() as (server, environments):
        instance = await environments.open({})
        while server.pongs < 1:
            await asyncio.sleep(0.01)
        assert await instance.step("hello") == StepResult("hello", 0.5, False)


def proxy_without_server(request):
    return web.Response(status=502)


async def test_wrong_openenv_path_fails_without_a_retry():
    async with playing() as (server, environments):
        server.failing = [lambda request: web.Response(status=404)]
        with pytest.raises(EnvironmentFailed, match="404, message=") as failed:
            await environments.open({})
        assert not failed.value.is_lost
        assert server.refused == 1


def hang_up(request):
    request.transport.abort()
    return web.Response()


async def test_open_retries_while_the_openenv_server_behind_a_proxy_is_away():
    async with playing() as (server, environments):
        server.failing = [proxy_without_server, hang_up]
        assert (await environments.open({})).observation == "start"
        assert server.refused == 2


@pytest.mark.parametrize(
    ("trouble", "cause"),
    [
        (proxy_without_server, "EnvironmentLost: no session at {url}/ws: 502, message="),
        (hang_up, "EnvironmentLost: no session at {url}/ws: Server disconnected"),
        ("full", "RuntimeError: full (CAPACITY_REACHED)"),
    ],
)
async def test_open_gives_up_if_the_openenv_server_starts_no_session(trouble, cause):
    async with served() as (server, url, _), running(OPENENV, options={"url": url}, timeout_s=1.0) as environments:
        environments.limit_s = 120.0  # the worker gives up a server after 0.9 s; this process waits for its reason
        if trouble == "full":
            server.sessions = 2
        else:
            server.failing = [trouble] * 1000
        with pytest.raises(EnvironmentFailed, match=re.escape(f"reset: {cause.format(url=url)}")) as caught:
            await environments.open({})
        assert caught.value.is_lost or trouble == "full"


async def test_openenv_action_and_observation_fields_are_configurable():
    async with playing(observation="board") as (_, environments):
        assert (await environments.open({})).observation == '[1, "é"]'
    async with playing(action="text", observation="b") as (_, environments):
        message = "options.observation is 'b', but the observation has echo, board, metadata"
        assert await failure(environments.open({}), OPENENV) == f"reset: ValueError: {message}"
