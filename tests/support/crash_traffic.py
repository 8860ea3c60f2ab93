"""The crash test's traffic: a scripted writer of training steps, and clients that score the same rows repeatedly."""

import asyncio
import functools
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from unittest.mock import patch

import numpy as np
from crash_system import Background

import rlhf_triton.client.client
from rlhf_triton.client.client import TritonClient
from rlhf_triton.client.errors import RequestFailed, RequestRefused
from rlhf_triton.config.client import ClientSettings
from rlhf_triton.wire.contract import REWARDS, VALUES, WEIGHTS_VERSION

VOCAB_SIZE = 100
# rows per batch, and most tokens per row
ROWS = 48
LONGEST = 96
SAVE_EVERY = 10  # steps; each writes a checkpoint
SCORERS = 3
SCORER_PAUSE_S = 0.06
WRITER_PAUSE_S = 0.8  # at most; limits the number of versions, which must fit on the disk
STEP_PATIENCE_S = 240.0
# every fifth batch has eight times the rows: accepting it leaves time for other requests
LARGE_EVERY = 5
LARGE = 8
REWIND_BY = 3  # most steps of a rewind; not beyond the last save or rewind, whose checkpoint replaces older entries
# A killed stub leaves its callers without an answer, so deadlines are short and the loops below send again. With
# max_outage_s = 0 the clients do not wait for a healthy server, so that outages show in the record.
IMPATIENT = ClientSettings(deadline_s=5.0, max_outage_s=0)
WRITING_RETRIES = 2
WRITING_DEADLINE_S = 10.0


@dataclass(frozen=True)
class Served:
    """A scoring answer; equal answers are counted together."""

    probe: int
    """Index of the probe request."""
    versions: tuple
    """weights_version of each row."""
    rewards: bytes
    """Bytes of a float32 array `[n]`."""
    values: bytes
    """Bytes of a float32 array `[n * S]`."""


@dataclass
class RequestRecord:
    """Record of requests and answers; times are seconds since the start."""

    start: float = field(default_factory=time.monotonic)
    trained: list = field(default_factory=list)
    """(step, time, answer), in the order of the answers."""
    repeated: list = field(default_factory=list)
    """(step, answer) of steps that were sent again after their answer."""
    saved: list = field(default_factory=list)
    """(step, time, weights_version) of critic_save."""
    rewound: list = field(default_factory=list)
    """(step, time, weights_version) of rewinds; answers that a rewind invalidated are removed from the lists above."""
    served: Counter = field(default_factory=Counter)
    """Distinct scoring answers and how often each came."""
    stale: list = field(default_factory=list)
    """(time, version, served version) of scores by a version older than one that the server had reported as served."""
    failures: list = field(default_factory=list)
    """(time, client, reason) of requests that a client gave up; the client then sends another."""
    refusals: list = field(default_factory=list)
    """Requests of the writer that were rejected, or not answered in time, although all are valid."""

    def now(self):
        """Return the seconds since the start."""
        return time.monotonic() - self.start

    def rewind(self, step, version):
        """Record a rewind to `step`, and remove the answers about later steps."""
        self.rewound.append((step, self.now(), version))
        self.trained = [item for item in self.trained if item[0] <= step]
        self.repeated = [item for item in self.repeated if item[0] <= step]
        self.saved = [item for item in self.saved if item[0] <= step]


def batch(seed, step):
    """Return the padded training payload of `step`: ragged rows of several micro-batches, the same on every machine."""
    generator = np.random.default_rng([seed, step])
    rows = ROWS * (LARGE if step % LARGE_EVERY == 0 else 1)
    lengths = generator.integers(LONGEST // 8, LONGEST, rows, endpoint=True)
    width = int(lengths.max())
    targets = (rows, width - 1)
    scored = np.arange(width - 1)[None] < lengths[:, None] - 1
    return {
        "tokens": generator.integers(3, VOCAB_SIZE, (rows, width), dtype=np.int64),
        "sequence_lengths": lengths.astype(np.int64)[:, None],
        "returns": generator.normal(size=targets).astype(np.float32),
        "prev_values": generator.normal(size=targets).astype(np.float32) * np.float32(0.1),
        "mask": scored.astype(np.float32),
    }


def probes(seed):
    """Return the requests that are sent repeatedly: four requests, with one to four rows."""
    generator = np.random.default_rng([seed, 0])
    return [
        [generator.integers(3, VOCAB_SIZE, length) for length in generator.integers(2, LONGEST // 2, rows)]
        for rows in (1, 2, 3, 4)
    ]


class Traffic:
    """Runs the writer, which begins with step 1, and the scorers in its `thread`, until the writer ends."""

    def __init__(self, url, run_id, seed, stop_accepting):
        """`stop_accepting` stops critic_train (SIGSTOP) during a write to the journal; it returns what continues it."""
        self.record = RequestRecord()
        self.hold = threading.Event()
        """While set, the writer sends no further request."""
        self.save_now = threading.Event()
        """Once set, the writer saves after its next step."""
        self.rewind_now = threading.Event()
        """Once set, the writer rewinds before its next large step, while that step is being accepted."""
        self._url = url
        self._run_id = run_id
        self._seed = seed
        self._stop_accepting = stop_accepting
        self._probes = probes(seed)
        self._choice = np.random.default_rng([seed, 1, 1])
        self._promised = 0
        self._last_step = None
        self._done = threading.Event()
        self.thread = Background("traffic", lambda: asyncio.run(self._converse()))
        self._give_up = self.thread.given_up

    def finish(self, more_steps):
        """Let the writer send `more_steps` further steps and a save, and then end."""
        self._last_step = self.last_step + more_steps

    @property
    def last_step(self):
        """The last step that the server acknowledged; 0 if there is none."""
        return self.record.trained[-1][0] if self.record.trained else 0

    async def _converse(self):
        with patch.object(rlhf_triton.client.client, "TRAIN_DEADLINE_S", WRITING_DEADLINE_S):
            await self._send_until_done()

    async def _send_until_done(self):
        async with (
            TritonClient(self._url, IMPATIENT, retries=1) as scoring,
            TritonClient(self._url, IMPATIENT, retries=WRITING_RETRIES) as writing,
        ):
            scorers = [asyncio.create_task(self._score(scoring, number)) for number in range(SCORERS)]
            try:
                await self._write(writing)
            finally:
                self._done.set()
                await asyncio.gather(*scorers)

    async def _write(self, client):
        step = 0
        while not self._give_up.is_set() and step != self._last_step:
            if self.rewind_now.is_set() and (step + 1) % LARGE_EVERY == 0:
                self.rewind_now.clear()
                step = await self._rewind(client, step)
            step += 1
            answer = await self._until_answered(f"step {step}", self._training(client, step))
            if answer is None:
                return
            self.record.trained.append((step, self.record.now(), answer))
            self._promised = answer.weights_version
            if self._choice.random() < 0.25:
                await self._repeat(client, int(self._choice.integers(max(1, step - 8), step, endpoint=True)))
            if step % SAVE_EVERY == 0 or self.save_now.is_set() or step == self._last_step:
                self.save_now.clear()
                ask = functools.partial(client.save, run_id=self._run_id, step=step)
                version = await self._until_answered(f"save at {step}", ask)
                if version is not None:
                    self.record.saved.append((step, self.record.now(), version))
            await asyncio.sleep(self._choice.uniform(0, WRITER_PAUSE_S))
            while self.hold.is_set() and not self._give_up.is_set():
                await asyncio.sleep(0.005)

    def earliest_rewind(self, step):
        """Return the earliest step to which the critic can go back from `step`; see `REWIND_BY`."""
        return max(step - REWIND_BY, 0, *(done for done, _, _ in (*self.record.saved, *self.record.rewound[-1:])))

    async def _rewind(self, client, step):
        """Rewind while the next step is being accepted, as if an actor died and resumed; return the new last step."""
        target = int(self._choice.integers(self.earliest_rewind(step), step, endpoint=True))
        async with TritonClient(self._url, IMPATIENT, retries=WRITING_RETRIES) as earlier:
            sent = asyncio.ensure_future(self._training(earlier, step + 1)())
            resume = await asyncio.to_thread(self._stop_accepting)
            try:
                ask = functools.partial(client.rewind, run_id=self._run_id, step=target)
                version = await self._until_answered(f"rewind to {target}", ask)
            finally:
                resume()
            await asyncio.gather(sent, return_exceptions=True)  # refused, failed, or done before the rewind
        if version is None:
            return step
        self.record.rewind(target, version)
        self._promised = version
        return target

    async def _repeat(self, client, step):
        answer = await self._until_answered(f"step {step}, repeated", self._training(client, step))
        if answer is not None:
            self.record.repeated.append((step, answer))

    def _training(self, client, step):
        return functools.partial(client.train, batch(self._seed, step), run_id=self._run_id, step=step)

    async def _until_answered(self, what, ask):
        """Retry until answered; return the answer, or None if rejected, after STEP_PATIENCE_S, or when traffic ends."""
        give_up_at = time.monotonic() + STEP_PATIENCE_S
        while not self._give_up.is_set():
            try:
                return await ask()
            except RequestFailed as error:
                self.record.failures.append((self.record.now(), "writer", str(error)))
                if isinstance(error, RequestRefused) or time.monotonic() > give_up_at:  # all requests here are valid
                    self.record.refusals.append(f"{what}: {error}")
                    return None
            await asyncio.sleep(0.2)
        return None

    async def _score(self, client, number):
        turn = number
        while not self._done.is_set():
            turn += 1
            await self._score_once(client, turn % len(self._probes))
            await asyncio.sleep(SCORER_PAUSE_S)

    async def _score_once(self, client, probe):
        promised = self._promised
        try:
            answer = await client.score(self._probes[probe], (REWARDS, VALUES, WEIGHTS_VERSION))
        except RequestFailed as error:
            self.record.failures.append((self.record.now(), "scorer", str(error)))
            return
        now = self.record.now()
        versions = tuple(answer[WEIGHTS_VERSION].ravel().tolist())
        values = np.ascontiguousarray(answer[VALUES], np.float32).tobytes()
        rewards = np.ascontiguousarray(answer[REWARDS], np.float32).tobytes()
        self.record.served[Served(probe, versions, rewards, values)] += 1
        if min(versions) < promised:
            self.record.stale.append((now, min(versions), promised))
