"""The phases that schedules choose."""

import pytest

import cs_kernels as cs

pytestmark = pytest.mark.loop


def test_fixed_schedules() -> None:
    assert cs.Joint().phase(None, 0) == 2
    assert cs.Sequential().phase(None, 0) == 1
    assert [cs.Switch(2).phase(e, 0) for e in range(4)] == [1, 1, 2, 2]


def test_mixed_begins_with_phase_1_and_ends_with_phase_2() -> None:
    for seed in range(50):
        assert cs.Mixed(10, seed).phase(0, 0) == 1
        assert cs.Mixed(10, seed).phase(10, 0) == 2


@pytest.mark.parametrize("draw", ["epoch", "step"])
def test_share_of_phase_2_is_e_over_epochs(draw: str) -> None:
    for epoch in (5, 10, 15):
        drawn = [
            cs.Mixed(20, seed if draw == "epoch" else 0, draw).phase(epoch, seed) == 2
            for seed in range(2000)
        ]
        # Three standard deviations of 2000 draws.
        assert abs(sum(drawn) / 2000 - epoch / 20) < 0.034


def test_draws_belong_to_seed_and_epoch() -> None:
    first = [cs.Mixed(100, 1).phase(e, 0) for e in range(100)]
    assert first == [cs.Mixed(100, 1).phase(e, 7 * e) for e in range(100)]
    assert first != [cs.Mixed(100, 2).phase(e, 0) for e in range(100)]
    steps = cs.Mixed(100, 1, "step")
    assert len({steps.phase(50, step) for step in range(20)}) == 2
