"""What a seed adds to the losses of all arms, and how far chance moved them."""

from dataclasses import replace

import numpy as np
import pytest

from experiments.comparing.finished_runs import FinishedRun
from experiments.worth.bootstrap import SeedFit, replicates
from tests.support.files.synthetic_runs import DENSE

RUN = FinishedRun(
    name="a", arm="a", seed=0, config=DENSE, loss=0.0, stretches=(), seconds=1.0
)


def seed_effects(groups):
    """The effect of each seed, and the deviations that are left."""
    fit = SeedFit.of(groups)
    losses = np.array([run.loss for of in groups for run in of])
    effects = dict(zip(fit.seeds, fit.effects(losses).tolist(), strict=True))
    return effects, fit.deviations(losses)


def group(losses: dict[int, float]) -> list[FinishedRun]:
    return [replace(RUN, seed=seed, loss=loss) for seed, loss in losses.items()]


def test_what_seeds_add_is_left_out_where_an_arm_lacks_one():
    """Seed 1 is 0.02 lower than seed 0 in every arm, and the third arm has only it."""
    groups = {
        "dense": group({0: 1.0, 1: 0.98}),
        "sparse": group({0: 0.9, 1: 0.88}),
        "other": group({1: 0.93}),
    }
    effects, deviations = seed_effects(list(groups.values()))
    assert effects == pytest.approx({0: 0.01, 1: -0.01})
    np.testing.assert_allclose(deviations, 0, atol=1e-12)
    losses = replicates(groups, np.random.default_rng(0))
    means = {name: of[0] for name, of in losses.items()}
    assert means == pytest.approx({"dense": 0.99, "sparse": 0.89, "other": 0.94})


def test_deviations_are_as_large_as_those_that_were_drawn():
    generator = np.random.default_rng(0)
    of_seed = [0.05, -0.03, 0.0, 0.02]
    groups = [
        group({s: 1 + of_seed[s] + generator.normal(0, 1e-3) for s in range(4)})
        for _ in range(200)
    ]
    effects, deviations = seed_effects(groups)
    middle = np.mean(of_seed)
    for seed, expected in enumerate(of_seed):
        # Two hundred draws of 1e-3: 7e-5, and four times that.
        assert effects[seed] == pytest.approx(expected - middle, abs=3e-4)
    # 800 deviations know theirs to 2.5 %; without the factor it would be 0.87 of it.
    assert np.std(deviations) == pytest.approx(1e-3, rel=0.08)


def test_seeds_that_never_occur_together_are_not_compared():
    groups = [group({0: 1.0, 1: 1.1}), group({0: 2.0, 1: 2.1}), group({7: 5.0})]
    effects, _ = seed_effects(groups)
    assert effects == pytest.approx({0: -0.05, 1: 0.05, 7: 0.0})


def test_one_arm_of_two_seeds_says_only_how_far_they_lie_apart():
    groups = {"dense": group({0: 1.0, 1: 1.2}), "sparse": group({0: 0.9})}
    effects, deviations = seed_effects(list(groups.values()))
    assert effects == {0: 0.0, 1: 0.0}
    np.testing.assert_allclose(deviations, 0.1 * np.sqrt(2) * np.array([-1, 1]))
    losses = replicates(groups, np.random.default_rng(0))
    assert losses["dense"][0] == pytest.approx(1.1) and losses["sparse"][0] == 0.9
    assert np.std(losses["sparse"][1:]) == pytest.approx(0.1 * np.sqrt(2), rel=0.1)


def test_without_two_seeds_nothing_moves():
    groups = {"dense": group({0: 1.0}), "sparse": group({0: 0.9})}
    for name, of in replicates(groups, np.random.default_rng(0)).items():
        assert (of == groups[name][0].loss).all()


def test_a_group_that_lacks_a_seed_knows_its_loss_less_well():
    """The effect of its one seed is taken out, and is known by three pairs alone."""
    generator = np.random.default_rng(1)
    noise = lambda: 1 + generator.normal(0, 1e-3)
    groups = {str(n): group({0: noise(), 1: noise()}) for n in range(3)}
    groups["one"] = group({0: noise()})
    losses = replicates(groups, np.random.default_rng(0))
    widths = {name: np.std(of[1:]) for name, of in losses.items()}
    deviation = np.std(seed_effects(list(groups.values()))[1])
    # Of two: the mean of two deviations, without any effect of seeds, which cancel. Of
    # one: a deviation, and half the difference between means over three of each seed.
    pair, single = 1 / np.sqrt(2), np.sqrt(1 + (1 / 4) * (2 / 3))
    for name in "012":
        assert widths[name] == pytest.approx(deviation * pair, rel=0.05)
    assert widths["one"] == pytest.approx(deviation * single, rel=0.05)
