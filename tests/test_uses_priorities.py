"""The uses beyond the paper: the tracked variance, the null, and the measures of agreement."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from uses import agreement, digits, photograph, priorities, use

import cs_kernels as cs

pytestmark = pytest.mark.paper

PART = priorities.part_of("unequal", True)


@pytest.mark.parametrize("shape", [(6, 8, 5, 4), (6, 8)])
def test_the_tracked_variance_is_that_of_batch_normalization(shape: tuple[int, ...]) -> None:
    tracked, plain = priorities.TrackedGroupNorm(4, 8), nn.GroupNorm(4, 8)
    batch = nn.BatchNorm2d(8) if len(shape) == 4 else nn.BatchNorm1d(8)
    for seed in range(3):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * (1 + seed)
        batch(x)
        assert torch.equal(tracked(x), plain(x))
    torch.testing.assert_close(tracked.running_var, batch.running_var)
    before = tracked.running_var.clone()
    tracked.eval()(x)
    assert torch.equal(tracked.running_var, before)


@pytest.mark.parametrize("norm", list(priorities.NORMS))
def test_every_layer_is_prioritized_and_tasks_have_their_own_scales(norm: str) -> None:
    run = priorities.make_run(PART, norm, cs.ConnectionStrength(), 0)
    run.train(digits.make_pictures(PART, 0)[0], 0)
    assert "100.0 %" in str(run.opt.coverage())
    norms = [m for m in run.trunk.modules() if isinstance(m, cs.nn.TaskBatchNorm)]
    assert len(norms) == 3
    left, right = (norms[0].of(task) for task in ("left", "right"))
    assert not torch.equal(left.weight, right.weight)
    # The first layer's output is the same for all tasks, so only the scales differ.
    torch.testing.assert_close(left.running_var, right.running_var)
    assert not torch.equal(norms[1].of("left").running_var, norms[1].of("right").running_var)


def flat(run: digits.Run) -> Tensor:
    return torch.cat([p.detach().flatten() for p in run.trunk.parameters()])


def test_the_null_shuffles_priorities_and_changes_nothing_else() -> None:
    null = priorities.Shuffled(3)
    given = [torch.arange(40), torch.tensor([0, 0, 1, 2])]
    one, other = null.shuffle(given), null.shuffle(given)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert not torch.equal(one[0], given[0])
    assert all(
        torch.equal(a.sort().values, b.sort().values) for a, b in zip(one, given, strict=True)
    )

    class Unshuffled(priorities.Shuffled):
        def shuffle(self, priorities: list[Tensor]) -> list[Tensor]:
            return priorities

    pictures, _ = digits.make_pictures(PART, 0)
    methods = [cs.ConnectionStrength(), Unshuffled(0), priorities.Shuffled(0)]
    runs = [priorities.make_run(PART, "GroupNorm", method, 0) for method in methods]
    for run in runs:
        run.train(pictures, 0)
    torch.testing.assert_close(flat(runs[0]), flat(runs[1]), rtol=1e-4, atol=1e-5)
    assert (flat(runs[0]) - flat(runs[2])).abs().max() > 1e-3


def test_agreement_by_hand() -> None:
    one = [torch.tensor([0, 0, 1, 1]), torch.tensor([2, 2])]
    other = [torch.tensor([0, 1, 1, 0]), torch.tensor([2, 0])]
    same, chance = agreement.agreement(one, other, 3)
    assert same == pytest.approx((2 + 1) / 6)
    assert chance == pytest.approx((4 * 0.5 + 2 * 0.5) / 6)
    shares = [torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.9, 0.8, 0.7, 0.6]])]
    assert agreement.rank_correlation(shares, shares) == pytest.approx(1)
    assert agreement.rank_correlation(shares, [1 - shares[0]]) == pytest.approx(-1)
    assert agreement.rank_correlation(shares, [shares[0][:, [0, 2, 1, 3]]]) == pytest.approx(0.8)


class Checked(agreement.Compared):
    """Compares the last step's updates with the plain formulas, on random gradients."""

    def combine(self, gradients: Any, layout: Any, step: Any) -> None:
        super().combine(gradients, layout, step)
        generator = torch.Generator().manual_seed(step.number)
        gradients.rows = [
            [torch.randn(p.shape, generator=generator) for p in gradients.parameters]
            for _ in gradients.tasks
        ]
        priorities = gradients.priorities(layout.lists)
        found = agreement.removed(gradients, layout.lists, priorities)
        for n, priority, of_layer in zip(
            layout.lists.weight_indices, priorities, found, strict=True
        ):
            rows = [row[n].double() for row in gradients.rows]
            expected = torch.zeros_like(rows[0])
            for i, own in enumerate(rows):
                group = priority == i
                for other in rows:
                    product = (own[group] * other[group]).sum()
                    if product < 0:
                        expected[group] -= product / own[group].square().sum() * own[group]
            torch.testing.assert_close(of_layer, expected.flatten(), rtol=1e-4, atol=1e-5)
        self.last = agreement.compare(gradients, layout.lists, priorities)
        gradients.clear()


@pytest.mark.parametrize("norm", list(priorities.NORMS))
def test_comparisons_of_updates(norm: str) -> None:
    method = Checked(0)
    run = priorities.make_run(PART, norm, method, 0)
    run.train(digits.make_pictures(PART, 0)[0], 0)
    assert method.last["like_random"] == pytest.approx(1)  # The same priorities were given.
    assert method.last["removes"] == method.last["random_removes"] > 0
    assert -1 < method.last["like_pcgrad"] < 1


def test_group_norm_takes_the_place_of_batch_norm() -> None:
    trunk = photograph.with_group_norm(photograph.demo.Trunk(), ["a", "b"])
    kinds = [type(m.of("a")) for m in trunk.modules() if isinstance(m, cs.nn.TaskBatchNorm)]
    assert len(kinds) == 16
    assert set(kinds) == {priorities.TrackedGroupNorm}
    assert not any(isinstance(m, nn.BatchNorm2d) for m in trunk.modules())
    with cs.nn.active_task(trunk, "b"):
        assert trunk(torch.randn(1, 3, 16, 16)).shape == (1, 24, 8, 8)


def test_every_row_trains_and_the_pictures_are_drawn(tmp_path: Path) -> None:
    for module in (priorities, agreement, photograph):
        results = {row: [module.train(row, 0, True)] for row in module.USE.rows}
        use.write(module.USE, results, tmp_path, Console(quiet=True))
        name = module.USE.name
        assert (tmp_path / f"{name}.md").read_text().count("\n") == len(results) + 2
        assert (tmp_path / f"{name}-dark.svg").stat().st_size > 1000
