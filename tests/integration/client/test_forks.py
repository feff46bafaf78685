"""Forked children, such as the workers of a DataLoader, leave the learner and its connections alone, and never hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from skerry import ArrayLearner

# Each step adds 1 to an array, and plain averaging of float32 brings all of it into the run.
_LEARNER = """
import gc, itertools, multiprocessing, os, signal, subprocess, sys, time
import numpy as np
from skerry import ArrayLearner, MergeRule, OuterOptimizer, OuterSchedule, Policy, RunsClient, SkerryError
from skerry import leave_on_signal
from skerry.wire import Codec, Encoding

array = np.zeros(4, np.float32)
outer = OuterOptimizer(learning_rate=1.0, momentum=0.0, schedule=OuterSchedule.CONSTANT)
exact = Encoding(codec=Codec.FLOAT32)
policy = Policy(inner_step_count=5, outer=outer, merge=MergeRule.MEAN, delta_encoding=exact, update_encoding=exact)
target = sys.argv[1]

def learn(learner_id="us"):
    return ArrayLearner({"w": array}, target=target, run="fit", learner_id=learner_id, create=True, policy=policy)

def step():
    global array
    array += 1
    learner.step(tokens=1)

os.register_at_fork(after_in_child=lambda: signal.alarm(60))  # no child hangs for longer

def check_end(pid, status):
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == status

def nothing():
    pass
"""


def assert_silent(program: str, target: str, folder: Path) -> None:
    """Runs a program whose learner is `learner`; neither it nor a child of it may fail or say anything."""
    command = [sys.executable, "-c", _LEARNER + program, target]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    complaints = [line for line in ended.stderr.splitlines() if not line.startswith("skerry: ")]
    assert (ended.returncode, complaints) == (0, [])


def _merged(target: str, shape: tuple[int, ...] = (4,), name: str = "w") -> float:
    """Returns how many steps the run has, by which every element of its array has grown."""
    array = np.zeros(shape, np.float32)
    with ArrayLearner({name: array}, target=target, run="fit", learner_id="observer"):
        (count,) = set(array.ravel().tolist())
        return float(count)


def test_training_goes_on_while_children_come_and_go(target: str, tmp_path: Path) -> None:
    program = """
context = multiprocessing.get_context("fork")

def fork_process():
    child = context.Process(target=nothing)
    child.start()
    child.join()
    assert child.exitcode == 0

def fork_pool():
    with context.Pool(2) as pool:
        assert pool.map(abs, [-1, -2]) == [1, 2]

with learn() as learner:
    leave_on_signal(learner)  # which no child may take for its own
    for _ in range(8):
        step()
        fork_process()
        fork_pool()
        assert subprocess.run(["true"], preexec_fn=nothing).returncode == 0
        check_end(os.posix_spawn("/bin/true", ["true"], {}), 0)
        check_end(os.fork() or sys.exit(7), 7)
    assert learner.leave(30, load_merged=True)
"""
    assert_silent(program, target, tmp_path)
    assert _merged(target) == 8


def test_a_forked_child_is_not_the_learner(target: str, tmp_path: Path) -> None:
    # A child says how it ended by its status, also where all that is open is closed and destroyed on its way out.
    program = """
def delete_learner():
    global learner
    del learner
    gc.collect()

def refused(call):
    try:
        call()
    except SkerryError as error:
        assert error.reason == "FORKED" and "\\n" not in str(error)
    else:
        sys.exit(8)

with RunsClient(target) as client, learn() as learner:
    step()
    client.list_runs()
    events = client.watch("fit")
    next(events)
    quiet = (
        nothing,
        learner.close,
        learner.leave_soon,
        lambda: (learner.stats, learner.progress, learner.failure, learner.is_closed, learner.planned_token_count),
        delete_learner,
        client.close,
        events.close,
    )
    loud = (
        lambda: learner.leave(load_merged=True),
        lambda: learner.step(tokens=1),
        lambda: learner.flush(10),
        learner.state_dict,
        lambda: learner.load_state_dict({}),
        lambda: learner.count_from(1, 1),
        learner.merged_weights,
        client.list_runs,
        lambda: learn("eu"),
        lambda: RunsClient(target),
        lambda: next(client.watch("fit")),
    )
    acts = [*quiet, *(lambda call=call: refused(call) for call in loud)]
    for act in acts:
        pid = os.fork()
        if pid == 0:
            act()
            sys.exit(7)
        check_end(pid, 7)
    step()
    assert learner.stats.is_attached
    assert learner.leave(30, load_merged=True)
"""
    assert_silent(program, target, tmp_path)
    assert _merged(target) == 2


def test_a_learner_is_made_in_a_child_if_its_parent_has_connected_nowhere(target: str, tmp_path: Path) -> None:
    program = """
pid = os.fork()
if pid == 0:
    with learn() as learner:
        step()
        assert learner.leave(30, load_merged=True)
    sys.exit(7)
check_end(pid, 7)
"""
    assert_silent(program, target, tmp_path)
    assert _merged(target) == 1


def test_a_child_that_is_terminated_ends_though_its_parent_leaves_on_that_signal(target: str, tmp_path: Path) -> None:
    program = """
context = multiprocessing.get_context("fork")
has_begun = context.Event()

def pause():
    has_begun.set()
    signal.pause()

with learn() as learner:
    leave_on_signal(learner)
    step()
    child = context.Process(target=pause)
    child.start()
    has_begun.wait()
    child.terminate()
    child.join(10)
    assert child.exitcode == -signal.SIGTERM, child.exitcode
    step()
    assert learner.leave(30, load_merged=True)
"""
    assert_silent(program, target, tmp_path)
    assert _merged(target) == 2


_LOADER = """
import torch
from skerry import attach

model = torch.nn.Linear(4, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
torch.nn.init.zeros_(model.weight)
run = {"target": target, "run": "fit", "create": True, "learner_id": "us", "policy": policy}

def train(loader):
    for rows in loader:
        model.weight.grad = -torch.ones(1, 4)
        optimizer.step()
"""


@pytest.mark.long
def test_a_loader_with_workers_is_iterated_in_every_epoch(target: str, tmp_path: Path) -> None:
    program = """
with attach(model, optimizer, tokens_per_step=4, **run) as learner:
    for options in ({}, {"persistent_workers": True, "pin_memory": torch.cuda.is_available()}):
        loader = torch.utils.data.DataLoader(torch.zeros(16, 4), batch_size=4, num_workers=2, **options)
        for epoch in range(4):
            train(loader)
    assert learner.stats.step_count == 32
    assert learner.leave(30, load_merged=True)
"""
    assert_silent(_LOADER + program, target, tmp_path)
    assert _merged(target, (1, 4), "weight") == 32


@pytest.mark.long
def test_a_signal_to_the_whole_group_costs_no_step_though_it_ends_the_loaders_workers(
    target: str, tmp_path: Path
) -> None:
    program = """
class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        return itertools.repeat(torch.zeros(4))

with attach(model, optimizer, tokens_per_step=4, **run) as learner:
    leave_on_signal(learner)
    learner.when_left(lambda: print(learner.stats.step_count, learner.stats.unsent_step_count))
    print("begun", flush=True)
    train(torch.utils.data.DataLoader(Endless(), batch_size=4, num_workers=2))
"""
    command = [sys.executable, "-c", _LEARNER + _LOADER + program, target]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        os.killpg(process.pid, signal.SIGTERM)
        rest, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    step_count, unsent_step_count = map(int, rest.split())
    assert unsent_step_count == 0
    assert _merged(target, (1, 4), "weight") == step_count


@pytest.mark.parametrize(
    ("first", "setting", "says"), [("", "", False), ("import grpc", "", True), ("import grpc", "1", False)]
)
def test_grpc_leaves_forks_alone_unless_it_is_told_or_was_imported_before(first: str, setting: str, says: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    environment |= {"GRPC_ENABLE_FORK_SUPPORT": setting} if setting else {}
    program = f"{first}\nimport os, skerry; print(os.environ['GRPC_ENABLE_FORK_SUPPORT'])"
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == (setting or "0")
    assert ("GRPC_ENABLE_FORK_SUPPORT=0" in ended.stderr) == bool(ended.stderr) == says
