"""Weights that something other than training has replaced in place: what is refused, and what is not taken for it."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from skerry import ArrayLearner, Learner, Policy
from skerry.algorithm.movement import Jump, Move, find_jump, move, squares
from skerry.errors import StopExchangingError
from skerry.model.interface import ArrayParameters
from skerry.model.movement import Movement
from skerry.model.torch.parameters import TorchParameters
from skerry.wire import FragmentLayout
from tests.support.quadratic import Quadratic

QUICK = Policy(inner_step_count=8, lease_term_s=1.0)
MOST_STEPS = 20_000


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))


class Adapter(nn.Module):
    """A frozen layer with a low-rank addition, of which one factor begins with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(32, 64).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(16, 32) / 6)
        self.b = nn.Parameter(torch.zeros(64, 16))
        self.head = nn.Linear(64, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.relu(self.base(inputs) + inputs @ self.a.T @ self.b.T))  # type: ignore[no-any-return]


class Zeros(nn.Module):
    """A layer that begins with zeros alone."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(32, 64))

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs @ self.w).tanh().sum(1, keepdim=True)


def loss_of(model: nn.Module) -> Tensor:
    kind = next(model.parameters()).dtype
    inputs = torch.randn(32, 32)
    outputs = model(inputs.to(kind)).float()
    return nn.functional.mse_loss(outputs, inputs.sum(1, keepdim=True).sin())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rates: Iterable[float]) -> Iterator[int]:
    """Takes a step at each rate, and yields their numbers after it."""
    for step, rate in enumerate(rates):
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss_of(model).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        yield step


def moves_of(model: nn.Module, steps: Iterable[int]) -> list[Move]:
    """Returns how the model moves in the steps, without those that do not move it."""
    parameters = TorchParameters(model)
    last, found = parameters.sample(), []
    for step in steps:
        now = parameters.sample()
        found.append(move(step, *squares(last, now)))
        last = now
    return [one for one in found if one.distances.any()]


def first_jump(moves: list[Move]) -> Jump | None:
    """Returns what a learner would find that looks at every step."""
    return next(
        (jump for count in range(len(moves) + 1) if (jump := find_jump(moves[:count])) and jump.is_certain), None
    )


ADAM, SGD = torch.optim.Adam, torch.optim.SGD
WARM_UP = [1e-5 * step for step in range(1, 60)]
RESTARTS = ([1e-6] * 20 + [1e-2] * 20 + [1e-6] * 20) * 2
TRAININGS: dict[str, tuple[Callable[[], nn.Module], Callable[..., torch.optim.Optimizer], list[float]]] = {
    "the rate warms up": (network, ADAM, WARM_UP),
    "the rate restarts, 10 000 times as high": (network, ADAM, RESTARTS),
    "the rate is ten times as high for a step": (network, SGD, [*[1e-2] * 30, 1e-1, *[1e-2] * 30]),
    "a high rate from the first step": (network, ADAM, [0.1] * 60),
    "a rate that falls fast": (network, ADAM, [0.5**step for step in range(40)]),
    "plain gradients": (network, SGD, [0.1] * 60),
    "zeros": (Zeros, ADAM, [1e-3] * 60),
    "zeros, plain gradients": (Zeros, SGD, [1e-1] * 60),
    "an adapter": (Adapter, ADAM, [1e-2] * 60),
    "float16": (lambda: network().half(), SGD, [1e-2] * 60),
    "bfloat16": (lambda: network().bfloat16(), ADAM, [1e-3] * 60),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", TRAININGS)
def test_training_is_not_taken_for_weights_that_were_replaced(kind: str, seed: int) -> None:
    torch.manual_seed(seed)
    make, optimizer, rates = TRAININGS[kind]
    model = make()
    assert first_jump(moves_of(model, train(model, optimizer(model.parameters(), lr=1e-3), rates))) is None


def test_accumulated_gradients_scaled_and_pruned_weights_are_training() -> None:
    torch.manual_seed(0)
    model = network()

    def edited() -> Iterator[int]:
        for step in train(model, ADAM(model.parameters()), [1e-2 if number % 8 == 7 else 0 for number in range(160)]):
            with torch.no_grad():
                for weight in model.parameters() if step == 79 else ():
                    if weight.dim() == 2:
                        weight.div_(weight.norm(dim=1, keepdim=True))
                        weight.mul_(weight.abs() >= weight.abs().median() / 2)
            yield step

    assert first_jump(moves_of(model, edited())) is None


def trained(seed: int, step_count: int = 200) -> list[Tensor]:
    """Returns the weights of another training."""
    torch.manual_seed(seed)
    model = network()
    for _ in train(model, ADAM(model.parameters()), [1e-2] * step_count):
        pass
    return [one.detach().clone() for one in model.parameters()]


@pytest.mark.parametrize("at", [0, 3, 40])
@pytest.mark.parametrize("restored", [lambda: trained(7), lambda: trained(7, 0)], ids=["a checkpoint", "new weights"])
def test_other_weights_are_found_wherever_they_come(restored: Callable[[], list[Tensor]], at: int) -> None:
    others = restored()
    torch.manual_seed(0)
    model = network()

    def replaced() -> Iterator[int]:
        optimizer = ADAM(model.parameters())
        yield from train(model, optimizer, [1e-3] * at)
        load(model, others)
        yield from (at + step for step in train(model, optimizer, [1e-3] * 20))

    moves = moves_of(model, replaced())
    assert first_jump(moves) == Jump(at, is_certain=True)
    assert not first_jump(moves[: at + 4])


class Masters(torch.optim.Optimizer):
    """Signs of gradients, taken from float32 copies of the weights."""

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                copy_ = self.state[weight].setdefault("copy", weight.float().clone())
                copy_.sub_(weight.grad.float().sign(), alpha=group["lr"])
                weight.copy_(copy_)


class Lookahead(Masters):
    """Every fifth step goes half the way from slow weights."""

    count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            for weight in group["params"]:
                slow = self.state[weight].setdefault("copy", weight.clone())
                weight.sub_(weight.grad.sign(), alpha=group["lr"])
                if self.count % 5 == 0:
                    weight.copy_(slow.lerp_(weight, 0.5))


def adopting(
    model: nn.Module, steps: Iterable[int], copies: Callable[[Tensor], Tensor | None] | None = None
) -> Movement:
    """Returns what a learner has noticed that adopts a version every 12 steps, half of it work of others."""
    parameters = TorchParameters(model, copies)
    layout = FragmentLayout("f", parameters.tensors)
    source = np.random.default_rng(0)
    movement = Movement(parameters)
    movement.settle()
    begin, end = parameters.buffer(layout), parameters.buffer(layout)
    parameters.snapshot(layout, begin)()
    for step in steps:
        movement.trained(step)
        movement.is_clear()
        if step % 12 == 11:
            parameters.snapshot(layout, end)()
            noise = source.normal(scale=0.05, size=layout.numel).astype(np.float32)
            parameters.add(layout, (end - begin) * np.float32(0.5) + noise)()
            parameters.snapshot(layout, begin)()
            movement.settle(has_adopted=True)
    return movement


@pytest.mark.parametrize("rate", [0.0, 1e-3])
@pytest.mark.parametrize(
    ("keeping", "make"), [(Masters, network), (Masters, lambda: network().bfloat16()), (Lookahead, network)]
)
def test_an_optimizer_that_writes_its_own_weights_over_adopted_ones_is_noticed(
    keeping: Callable[..., torch.optim.Optimizer], make: Callable[[], nn.Module], rate: float
) -> None:
    torch.manual_seed(0)
    model = make()
    seen: list[int] = []

    def steps() -> Iterator[int]:
        for step in train(model, keeping(model.parameters(), lr=1e-3), [rate] * 120):
            seen.append(step)
            yield step

    with pytest.raises(StopExchangingError, match=r"the optimizer keeps weights of its own.*`copies`") as caught:
        adopting(model, steps())
    assert caught.value.reason == "WEIGHTS_REPLACED"
    assert seen[-1] < 40  # after two or three versions


@pytest.mark.parametrize("rate", [0.0, 1e-3])
@pytest.mark.parametrize(
    ("keeping", "make"), [(Masters, network), (Masters, lambda: network().bfloat16()), (Lookahead, network)]
)
def test_copies_that_are_named_get_what_the_weights_get(
    keeping: Callable[..., torch.optim.Optimizer], make: Callable[[], nn.Module], rate: float
) -> None:
    torch.manual_seed(0)
    model = make()
    optimizer = keeping(model.parameters(), lr=1e-3)
    adopting(model, train(model, optimizer, [rate] * 120), lambda weight: optimizer.state[weight].get("copy"))
    if rate == 0:
        for weight in model.parameters():
            assert torch.equal(optimizer.state[weight]["copy"].to(weight.dtype), weight)


HONEST: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, float], list[float]]] = {
    "rates that diverge nearly": (SGD, {}, [0.9] * 240),
    "high rates with momentum": (SGD, {"momentum": 0.9}, [0.1] * 240),
    "high rates of Adam": (ADAM, {}, [0.3] * 240),
    "weight decay": (torch.optim.AdamW, {"weight_decay": 0.1}, [1e-2] * 240),
    "much weight decay": (torch.optim.AdamW, {"weight_decay": 30.0}, [1e-2] * 240),
    "rates that restart": (ADAM, {}, ([1e-6] * 20 + [1e-2] * 20) * 6),
    "no rate": (ADAM, {}, [0.0] * 240),
    "a rate of every eighth step": (ADAM, {}, [1e-2 if step % 8 == 7 else 0.0 for step in range(240)]),
}


@pytest.mark.parametrize("make", [network, lambda: network().bfloat16(), Zeros, Adapter])
@pytest.mark.parametrize("kind", HONEST)
def test_training_does_not_take_back_what_a_learner_adopts(kind: str, make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    optimizer, options, rates = HONEST[kind]
    weights = [one for one in model.parameters() if one.requires_grad]

    def steps() -> Iterator[int]:
        averages = [one.detach().clone() for one in weights]
        for step in train(model, optimizer(weights, lr=1e-3, **options), rates):
            nn.utils.clip_grad_norm_(weights, 1.0)
            for average, weight in zip(averages, weights, strict=True):
                average.lerp_(weight.detach(), 0.01)
            if step % 30 == 29:  # an evaluation with the averages
                own = [one.detach().clone() for one in weights]
                for values in (averages, own):
                    with torch.no_grad():
                        for weight, value in zip(weights, values, strict=True):
                            weight.copy_(value)
            yield step

    movement = adopting(model, steps())
    assert sum(verdict.put_back for verdict in movement._verdicts) < 12


def load(model: nn.Module, weights: list[Tensor]) -> None:
    with torch.no_grad():
        for parameter, values in zip(model.parameters(), weights, strict=True):
            parameter.copy_(values)


def train_after(model: nn.Module, weights: list[Tensor]) -> Iterator[int]:
    load(model, weights)
    yield from train(model, ADAM(model.parameters()), [1e-3] * 60)


def attach(target: str, learner_id: str, model: nn.Module, **options: Any) -> Learner:
    options = {"policy": QUICK, "fragment_count": 2, **options}
    return Learner(model, target=target, run="mine", learner_id=learner_id, create=True, **options)


def until_refused(step: Callable[[], object]) -> StopExchangingError:
    """Returns the error with which a learner refuses a step."""

    def go_on() -> None:
        for _ in range(MOST_STEPS):
            step()

    with pytest.raises(StopExchangingError, match="replaced after attaching: load your checkpoint first") as caught:
        go_on()
    assert caught.value.reason == "WEIGHTS_REPLACED"
    return caught.value


@pytest.mark.parametrize("inner_step_count", [1, 8])
def test_a_checkpoint_that_is_copied_into_attached_weights_is_not_sent(target: str, inner_step_count: int) -> None:
    checkpoint = trained(7)
    torch.manual_seed(0)
    model = network()
    learner = attach(target, "us", model, policy=Policy(inner_step_count=inner_step_count, lease_term_s=1.0))
    before = copy.deepcopy(learner.merged_weights())
    steps = train_after(model, checkpoint)
    error = until_refused(lambda: (next(steps, None), learner.step(tokens=1)))
    assert "step=1" in str(error)
    assert learner.failure is error
    with pytest.raises(StopExchangingError):
        learner.leave()
    assert learner.stats.deltas_acknowledged == 0
    other = attach(target, "them", network())
    for name, weights in other.merged_weights().items():
        np.testing.assert_array_equal(weights, before[name])
    other.close()


def test_a_checkpoint_that_comes_later_ends_the_exchange_with_what_was_sent_before(target: str) -> None:
    torch.manual_seed(0)
    model = network()
    learner = attach(target, "us", model)
    optimizer = ADAM(model.parameters())
    while learner.stats.deltas_merged < 4:
        next(train(model, optimizer, [1e-3]))
        learner.step(tokens=1)
    at = learner.stats.step_count + 1
    load(model, trained(7))

    def step() -> None:
        next(train(model, optimizer, [1e-3]))
        learner.step(tokens=1)

    assert f"step={at}" in str(until_refused(step))
    learner.close()


def test_arrays_that_are_restored_in_place_are_not_sent(target: str) -> None:
    problem = Quadratic()
    for array in problem.arrays.values():
        array[...] = np.random.default_rng(1).normal(size=array.shape)
    learner = ArrayLearner(problem.arrays, target=target, run="fit", learner_id="us", create=True, policy=QUICK)
    for array in problem.arrays.values():
        array[...] = np.random.default_rng(2).normal(size=array.shape)

    def step() -> None:
        for array in problem.arrays.values():
            array[...] -= 0.01 * np.sign(array)
        learner.step(tokens=1)

    until_refused(step)
    assert learner.stats.deltas_acknowledged == 0
    learner.close()


def test_a_first_step_that_goes_far_is_sent_once_the_next_ones_go_as_far(target: str) -> None:
    torch.manual_seed(0)
    model = network()
    policy = Policy(inner_step_count=1, lease_term_s=1.0)
    optimizer = ADAM(model.parameters())
    with attach(target, "us", model, policy=policy) as learner:
        while not learner.stats.deltas_merged:
            next(train(model, optimizer, [0.3]))
            learner.step(tokens=1)
            assert learner.stats.step_count < MOST_STEPS
    assert learner.failure is None


def test_work_of_weights_that_stand_still_after_one_step_is_sent(target: str) -> None:
    arrays = {"a": np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)}
    options: dict[str, Any] = {"target": target, "run": "still", "create": True, "policy": QUICK}
    with ArrayLearner(arrays, learner_id="a", **options) as learner:
        arrays["a"] += np.random.default_rng(1).normal(size=(64, 64)).astype(np.float32)
        for _ in range(MOST_STEPS):
            learner.step(tokens=1)
            if learner.stats.deltas_merged:
                break
            time.sleep(0.001)
        assert learner.stats.deltas_merged
        assert learner.failure is None


def test_what_the_exchange_itself_loads_is_not_taken_for_it(target: str) -> None:
    """Two learners so far apart that adoption moves the weights more than training does."""
    torch.manual_seed(0)
    models = [network(), network()]
    learners = [attach(target, name, model) for name, model in zip(("us", "them"), models, strict=True)]
    optimizers = [SGD(model.parameters(), lr=1.0) for model in models]
    signs = (1.0, -1.0)
    while min(learner.stats.deltas_merged for learner in learners) < 6:
        for model, learner, optimizer, sign in zip(models, learners, optimizers, signs, strict=True):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.01 * sign)
            optimizer.step()
            learner.step(tokens=1)
            assert learner.stats.step_count < MOST_STEPS
    for learner in learners:
        assert learner.failure is None
        learner.close()


@pytest.mark.parametrize("shapes", [{"scalar": (), "w": (40, 30)}, {"w": (2, 3, 50, 5)}, {"v": (5000,)}])
def test_torch_and_numpy_take_the_same_samples_of_any_shapes(shapes: dict[str, tuple[int, ...]]) -> None:
    arrays = {name: np.random.default_rng(0).normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
    ours, theirs = TorchParameters(tensors), ArrayParameters(arrays)
    before = theirs.sample()
    for name, array in arrays.items():
        array[...] += 1
        tensors[name] += 1
    assert before.any(-1).all()
    np.testing.assert_array_equal(ours.sample(), theirs.sample())
    assert (theirs.sample() != before).any(-1).all()


def test_of_a_small_model_nothing_is_sampled() -> None:
    assert len(ArrayParameters({"w": np.zeros(1000)}).sample()) == 0
    assert len(TorchParameters({"w": torch.zeros(10, 100)}).sample()) == 0
    assert find_jump([move(1, *squares(np.zeros((0, 64)), np.zeros((0, 64))))] * 9) is None
