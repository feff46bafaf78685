"""When a simulated learner sends and adopts, as a real one does."""

from __future__ import annotations

from skerry.wire.policy import Policy
from skerry_syncer.simulation.learner import SimulatedLearner
from skerry_syncer.simulation.scenario import Region
from skerry_syncer.store.log.entries import AcceptedItem


class Recorded:
    """Carries nothing, keeps what a learner asks for, and lets time pass."""

    def __init__(self, *, fragment_count: int = 1) -> None:
        self.now_s = 0.0
        self.boundaries: list[float] = []
        self.pushes: list[tuple[float, AcceptedItem]] = []
        self.pulls: list[tuple[str, int]] = []
        self.learner = SimulatedLearner("us", Region("us"), Policy(), 0, self)
        self.learner.attach({f"f{index}": 0 for index in range(fragment_count)})

    def at_boundary(self, learner: SimulatedLearner, at_s: float) -> None:
        self.boundaries.append(at_s)

    def push(self, learner: SimulatedLearner, item: AcceptedItem) -> None:
        self.pushes.append((self.now_s, item))

    def pull(self, learner: SimulatedLearner, fragment: str, version: int) -> None:
        self.pulls.append((fragment, version))

    def until(self, end_s: float) -> None:
        while (due := [at_s for at_s in self.boundaries if at_s <= end_s]) != []:
            self.now_s = min(due)
            self.boundaries.remove(self.now_s)
            self.learner.boundary()
        self.now_s = end_s

    @property
    def sent(self) -> list[tuple[float, int, int]]:
        return [(at_s, item.step_count, item.base_version) for at_s, item in self.pushes]


def test_the_fragments_of_a_new_session_are_spread_over_h_steps() -> None:
    world = Recorded(fragment_count=4)
    world.until(60)
    assert [at_s for at_s, _ in world.pushes] == [24, 30, 36, 42]


def test_a_delta_is_due_h_steps_after_the_last_that_is_in_the_adopted_version() -> None:
    world = Recorded()
    world.until(30)
    world.learner.acknowledged("f0")
    world.learner.merged("f0", 1)
    world.learner.version_made("f0", 1)
    world.learner.pulled("f0", *[version for _, version in world.pulls])
    world.until(60)
    assert world.sent == [(24, 24, 0), (48, 24, 1)]


def test_a_round_that_gathers_gets_the_steps_so_far_at_the_next_boundary() -> None:
    world = Recorded()
    world.until(9.5)
    world.learner.round_opened("f0", 1, 0.0)
    world.until(20)
    assert world.sent == [(10, 10, 0)]


def test_a_pause_loses_the_step_that_it_is_in() -> None:
    world = Recorded()
    world.until(10.5)
    world.learner.pause()
    world.until(20)
    world.learner.resume()
    world.until(40)
    assert world.learner.step_count == 30
    assert world.sent == [(34, 24, 0)]


def test_the_steps_of_a_delta_that_is_refused_are_sent_again_from_a_newer_version() -> None:
    world = Recorded()
    world.until(24)
    world.learner.returned("f0", is_base_used=True)
    world.until(30)
    world.learner.version_made("f0", 1)
    world.learner.pulled("f0", 1)
    world.until(40)
    assert world.sent == [(24, 24, 0), (31, 31, 1)]


def test_what_is_not_merged_yet_is_outstanding() -> None:
    world = Recorded()
    world.until(30)
    assert world.learner.outstanding_step_count == 30
    world.learner.merged("f0", 1)
    assert world.learner.outstanding_step_count == 6
