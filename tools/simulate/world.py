"""One simulated job: the real policies decide, simpy keeps the clock, and every second is accounted for.

What is real: `SavePolicy` (when to save), `seconds_until_stop` (the deadline), `decide` (the
supervisor), `reason_not_to_requeue` (the queue). What is simulated: steps, saves, failures, waiting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import simpy

from ci_llm.checkpoints.due import SavePolicy
from ci_llm.cluster.deadline import seconds_until_stop
from ci_llm.cluster.slurm import Job, JobInfo, reason_not_to_requeue
from ci_llm.supervisor.policy import Kind as Ending
from ci_llm.supervisor.policy import Outcome, Policy, decide
from tools.simulate.model import Cluster, Kind, Planned, Strike, generators, moments, strike

Spent = Literal["steps", "saving", "start-up", "unnoticed", "queue", "pause", "person"]
SPENT: Final[tuple[Spent, ...]] = ("steps", "saving", "start-up", "unnoticed", "queue", "pause", "person")
#: A job that has not ended in so many times its work makes no progress worth waiting for.
PATIENCE: Final = 20
#: What a scheduler says of a batch job that runs and may be requeued.
_RUNNING: Final = JobInfo("RUNNING", "", is_batch=True, may_requeue=True, end=None)
_ENDING: Final[dict[Kind, Ending]] = {"process": "killed", "damaged": "killed", "silent": "hang", "node": "killed"}

Events: TypeAlias = "Generator[simpy.Event, Any, Any]"


@dataclass
class Story:
    """The fate of a job.

    Attributes:
        steps: that the job needs, or that it came to.
        elapsed_s: from the first launch to the end.
        seconds: what these went into.
        lost: steps that were taken again, of every fault that ended an attempt, with its kind.
        endings: why a person had to call it again.
    """

    steps: int
    step_s: float
    completed: bool = False
    attempts: int = 0
    saves: int = 0
    elapsed_s: float = 0.0
    seconds: dict[Spent, float] = field(default_factory=lambda: dict.fromkeys(SPENT, 0.0))
    lost: list[tuple[Kind, int]] = field(default_factory=list)
    endings: list[str] = field(default_factory=list)

    @property
    def lost_s(self) -> float:
        return max(0.0, self.seconds["steps"] - self.steps * self.step_s)

    @property
    def goodput(self) -> float:
        """The share of the time that went into steps that are part of the result."""
        return self.steps * self.step_s / max(self.elapsed_s, 1e-9)


def simulate(cluster: Cluster, repeat: int = 0, plan: Sequence[Planned] | None = None) -> Story:
    """One job from its first launch to its last step.

    Args:
        repeat: draws other failures.
        plan: faults at steps, instead of failures in time.
    """
    return _Job(cluster, repeat, plan).run()


def steps_until_due(policy: SavePolicy, step: int, elapsed_s: float, step_s: float, *, most: int) -> int:
    """In how many steps a policy first says that a save is due: so that none of the steps before has to be asked.

    Args:
        elapsed_s: seconds since the last save was tried.
        step_s: seconds of a step.
        most: steps that are left.
    """
    found = [most]
    if policy.every_seconds is not None:
        found.append(max(1, math.ceil((policy.every_seconds - elapsed_s) / step_s - 1e-9)))
    if policy.every_steps is not None:
        found.append(policy.every_steps - step % policy.every_steps)
    return min(found)


class _Job:
    def __init__(self, cluster: Cluster, repeat: int, plan: Sequence[Planned] | None) -> None:
        self.cluster, self.env = cluster, simpy.Environment()
        self.plan = sorted(plan or (), key=lambda fault: fault.step)
        self.story = Story(math.ceil(cluster.work / cluster.step), cluster.step)
        self.disk: list[int] = []  # the steps of its checkpoints, ascending; the newest two suffice
        self.mirror: int | None = None
        self.step = 0
        self.running: simpy.Process | None = None  # what a failure interrupts
        self.history: list[Outcome] = []  # of the present supervisor
        self.restarts = 0  # of the present job in the queue
        self.in_vain = 0  # attempts in a row that began at the same step
        self.job_began = 0.0
        self.disk_is_full = False
        self.dice = generators(cluster, repeat)
        self.policy = Policy(max_retries=cluster.max_retries)

    def run(self) -> Story:
        cluster, env = self.cluster, self.env
        if not self.plan:
            env.process(self._strikes(moments(cluster.mtbf_s, self.dice[0]), lambda: strike(cluster, self.dice[1])))
            if cluster.preemption is not None:
                at = moments(cluster.preemption, self.dice[2])
                env.process(self._strikes(at, lambda: Strike("preempted")))
        job = env.process(self._live())
        env.run(until=simpy.AnyOf(env, [job, env.timeout(PATIENCE * cluster.work)]))
        self.story.completed = self.step >= self.story.steps
        self.story.steps, self.story.elapsed_s = self.step, self.env.now
        return self.story

    # What strikes it

    def _strikes(self, at: Iterator[float], drawn: Callable[[], Strike]) -> Events:
        for moment in at:
            yield self.env.timeout(moment - self.env.now)
            fault = drawn()
            if self.running is not None and self.running.is_alive:
                self.running.interrupt(fault)

    # Its life

    def _live(self) -> Events:
        while self.step < self.story.steps:
            attempt = _Attempt(self)
            self.running = self.env.process(attempt.run())
            fault = yield self.running
            self.running = None
            if fault is not None:
                yield from self._recover(attempt, fault)

    def _recover(self, attempt: _Attempt, fault: Strike) -> Events:
        """Do what follows the end of an attempt by the policies."""
        if fault.kind == "silent":
            yield from self.spend("unnoticed", self.cluster.watchdog)
        done = self.step
        self._go_back(fault)
        if fault.kind != "preempted" or done > self.step:
            self.story.lost.append((fault.kind, done - self.step))
        progress = self.step > attempt.first_step
        self.in_vain = 0 if progress else self.in_vain + 1
        if fault.kind == "node":  # the supervisor is gone too, and the scheduler requeues the job by itself
            yield from self._run_again()
            return
        outcome = Outcome(
            "interrupted" if fault.kind == "preempted" else _ENDING[fault.kind],
            progress=progress,
            duration_s=self.env.now - attempt.launched,
        )
        decision = decide(self.history, outcome, self.policy)
        self.history.append(outcome)
        if decision.action == "requeue":
            job = Job("simulated", self.restarts)
            why = reason_not_to_requeue(job, _RUNNING, "walltime", self.in_vain, self.cluster.max_requeues)
            yield from self._run_again() if why is None else self._call_a_person(why)
        elif decision.action == "give up":
            yield from self._call_a_person(decision.why)
        else:
            yield from self.spend("pause", decision.wait_s)

    def _go_back(self, fault: Strike) -> None:
        """To the newest checkpoint that the fault has left."""
        if fault.kind == "damaged" and self.disk:
            self.disk.pop()
        if fault.disk_lost:
            self.disk = [] if self.mirror is None else [self.mirror]
        self.step = self.disk[-1] if self.disk else 0

    def _run_again(self) -> Events:
        """The scheduler runs the same job again."""
        self.restarts += 1
        self.history.clear()
        yield from self.spend("queue", self.cluster.queue)
        self.job_began = self.env.now

    def _call_a_person(self, why: str) -> Events:
        self.story.endings.append(why)
        self.restarts, self.in_vain = 0, 0
        self.history.clear()
        yield from self.spend("person", self.cluster.person)
        self.job_began = self.env.now

    def spend(self, kind: Spent, seconds: float) -> Events:
        """Let time pass; what passes before an interruption counts as well."""
        began = self.env.now
        try:
            yield self.env.timeout(seconds)
        finally:
            self.story.seconds[kind] += self.env.now - began


class _Attempt:
    """From a launch to the end of the processes. `run` returns what ended it; None at the end of the job."""

    def __init__(self, job: _Job) -> None:
        self._job, self._cluster, self._env = job, job.cluster, job.env
        self.first_step, self.launched = job.step, job.env.now
        job.story.attempts += 1
        self._tried = job.env.now
        self._writer: simpy.Process | None = None
        self._saves_s: list[float] = []

    def run(self) -> Events:
        try:
            yield from self._job.spend("start-up", self._cluster.start_s)
            self._tried = self._env.now
            return (yield from self._train())
        except simpy.Interrupt as interruption:
            fault: Any = interruption.cause
            return (yield from self._end(fault))

    def _end(self, fault: Strike) -> Any:
        """Do what is still done after a fault; returns the fault that ended the attempt."""
        if fault.kind == "preempted":
            try:
                yield from self._leave(self._cluster.notice)
            except simpy.Interrupt as second:  # it is struck while it leaves
                struck: Any = second.cause
                fault = struck
        # The thread that writes still comes to its end in a process that hangs; damage is done to what is there.
        self._end_writer(finishes=fault.kind in ("silent", "damaged"))
        return fault

    def _train(self) -> Any:
        job = self._job
        while job.step < job.story.steps:
            policy = self._policy
            until, cause = self._next_stop(policy)
            yield from self._take_steps(until - job.step)
            if cause == "planned" and (fault := self._strike_by_plan()) is not None:
                return (yield from self._end(fault))
            if cause == "deadline":
                yield from self._leave(math.inf)
                return Strike("preempted")
            due = policy.due(job.step, newest=self._newest, elapsed_s=self._env.now - self._tried)
            if due or job.step == job.story.steps:
                yield from self._save()
        yield from self._wait_for_writer()
        return None

    def _next_stop(self, policy: SavePolicy) -> tuple[int, str]:
        """The next step after which something is to be done, and what."""
        job = self._job
        waited_s, left = self._env.now - self._tried, job.story.steps - job.step
        due = steps_until_due(policy, job.step, waited_s, self._cluster.step, most=left)
        stops = [(job.step + due, "save or end")]
        if job.plan:
            stops.append((max(job.plan[0].step, job.step), "planned"))
        if self._cluster.walltime is not None:
            left_s = job.job_began + self._cluster.walltime - self._env.now
            spare_s = seconds_until_stop(left_s, [self._cluster.step], self._saves_s)
            stops.append((job.step + max(0, math.ceil(spare_s / self._cluster.step)), "deadline"))
        return min(stops, key=lambda stop: stop[0])

    @property
    def _policy(self) -> SavePolicy:
        seconds = self._cluster.save_interval
        return SavePolicy(self._cluster.save_steps, None if math.isinf(seconds) else seconds)

    def _take_steps(self, count: int) -> Events:
        job, began, before = self._job, self._env.now, self._job.step
        try:
            yield from job.spend("steps", count * self._cluster.step)
            job.step = before + count
        except simpy.Interrupt:
            job.step = before + min(count, int((self._env.now - began) / self._cluster.step + 1e-9))
            raise

    def _strike_by_plan(self) -> Strike | None:
        """The fault that the plan has for this step; None if the attempt continues after it."""
        fault = self._job.plan.pop(0)
        if fault.kind == "disk_full":
            self._job.disk_is_full = True
            return None
        return Strike(fault.kind)

    # Its saves

    @property
    def _newest(self) -> int | None:
        return self._job.disk[-1] if self._job.disk else None

    def _save(self, *, left: bool = False) -> Events:
        """Save this step. One save is in flight at a time: the next one waits for it."""
        yield from self._wait_for_writer()
        self._tried = self._env.now
        self._writing = self._job.step
        self._writer = self._env.process(self._write())
        yield from self._job.spend("saving", self._cluster.stall + (0.0 if left else self._cluster.slowdown))

    def _write(self) -> Events:
        try:
            yield self._env.timeout(self._cluster.durable_s)
        except simpy.Interrupt:
            return
        self._commit()

    def _commit(self) -> None:
        job = self._job
        if job.disk_is_full:
            job.disk_is_full = False
            return
        if job.disk and job.disk[-1] >= self._writing:
            return
        job.disk = [*job.disk[-1:], self._writing]
        job.story.saves += 1
        self._saves_s = [*self._saves_s[-99:], self._cluster.durable_s]
        if self._cluster.mirror_lag is not None:
            self._env.process(self._upload(self._writing, self._cluster.mirror_lag))

    def _upload(self, saved: int, lag_s: float) -> Events:
        yield self._env.timeout(lag_s)
        if self._job.mirror is None or saved > self._job.mirror:
            self._job.mirror = saved

    def _wait_for_writer(self) -> Events:
        if self._writer is not None and self._writer.is_alive:
            began = self._env.now
            try:
                yield self._writer
            finally:
                self._job.story.seconds["saving"] += self._env.now - began

    def _leave(self, within_s: float) -> Events:
        """Finish the step under way, save and go, if it fits into the time that is left."""
        needed_s = self._cluster.step + self._cluster.durable_s
        if self._env.now - self.launched < self._cluster.start_s or needed_s > within_s:
            yield from self._job.spend("unnoticed", min(within_s, needed_s))
            return
        if within_s < math.inf:
            yield from self._take_steps(min(1, self._job.story.steps - self._job.step))
        yield from self._save(left=True)
        yield from self._wait_for_writer()

    def _end_writer(self, *, finishes: bool) -> None:
        """The processes end, or hang: then the thread that writes still comes to its end."""
        if self._writer is not None and self._writer.is_alive:
            self._writer.interrupt()
            if finishes:
                self._commit()
