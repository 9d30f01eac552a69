"""The use with a table of survey answers: its rows, masks and steps."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from uses import tabular
from uses.tabular import TASKS

pytestmark = pytest.mark.paper


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trains on 640 rows; networks of single tasks are not kept for other tests."""
    monkeypatch.setattr(tabular, "TRAINED", 640)
    tabular.single_tasks.cache_clear()
    yield
    tabular.single_tasks.cache_clear()


def test_rows_are_disjoint_and_masked() -> None:
    trained, held_out = tabular.split(3)
    assert sorted([*trained.tolist(), *held_out.tolist()]) == list(range(6366))
    assert (tabular.split(4)[0] != trained).any()
    train, test = tabular.load(3)
    assert len(train.inputs) == len(trained)
    assert len(test.inputs) == len(held_out)
    for task in TASKS:
        assert train.known[task].float().mean() == pytest.approx(tabular.KEPT[task], abs=0.03)
        assert test.known[task].all()
        assert train.targets[task].isfinite().all()
    numbers = train.inputs[:, :4]  # Scaled by the rows to train on only.
    torch.testing.assert_close(numbers.mean(0), torch.zeros(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(numbers.std(0), torch.ones(4))
    assert (train.inputs[:, 4:].sum(1) == 2).all()
    # The metrics need both classes, and counts with zeros.
    assert train.targets["affair"].unique().tolist() == [0, 1]
    assert train.targets["kids"].min() == 0


def test_batches_without_a_label_occur() -> None:
    train, _ = tabular.load(0)
    batches = [train[index] for index in torch.arange(tabular.TRAINED).split(tabular.BATCH)]
    labeled = [batch.labeled(TASKS) for batch in batches]
    assert 0 < sum("kids" not in tasks for tasks in labeled) < len(batches) / 2
    assert all("years" in tasks for tasks in labeled)


@pytest.mark.parametrize("task", TASKS)
def test_a_masked_label_never_changes_a_loss(task: str) -> None:
    train, _ = tabular.load(0)
    targets, known = train.targets[task], train.known[task].clone()
    known[::2] = False
    outputs = torch.randn(len(targets), requires_grad=True)
    loss = tabular.masked_loss(task, outputs, targets, known)
    (gradient,) = torch.autograd.grad(loss, outputs)
    assert not gradient[~known].any()
    assert gradient[known].all()
    spoiled = targets.where(known, torch.nan)
    assert torch.equal(tabular.masked_loss(task, outputs, spoiled, known), loss)


def plain_losses(
    network: tabular.Network, batch: tabular.Rows, tasks: list[str]
) -> tuple[dict[str, Tensor], dict[str, list[Tensor]]]:
    """Losses from the plain formulas, and by task the parameters that are no other's."""
    linears, norms = network.trunk[0::3], network.trunk[1::3]
    losses, own = {}, {}
    for task in tasks:
        x, known = batch.inputs, batch.known[task]
        own[task] = list(network.heads[task].parameters())
        for linear, norm in zip(linears, norms, strict=True):
            gamma, beta = norm.of(task).parameters()
            own[task] += [gamma, beta]
            x = functional.batch_norm(x @ linear.weight.T, None, None, gamma, beta, training=True)
            x = x.relu()
        out = network.heads[task](x)[:, 0][known]
        target = batch.targets[task][known]
        each = {
            "years": lambda out=out, target=target: (out - target) ** 2,
            "kids": lambda out=out, target=target: out.exp() - target * out,
            "affair": lambda out=out, target=target: functional.softplus(out) - target * out,
        }
        losses[task] = each[task]().mean()
    return losses, own


def doubled(rows: tabular.Rows) -> tabular.Rows:
    """The same rows in float64."""
    targets = {task: values.double() for task, values in rows.targets.items()}
    return rows._replace(inputs=rows.inputs.double(), targets=targets)


@pytest.mark.parametrize("row", ["Sum", "PCGrad"])
def test_steps_with_missing_tasks_are_those_of_a_plain_loop(row: str) -> None:
    """Two tasks have labels in each step, so that PCGrad's random order does not matter."""
    rows = doubled(tabular.load(1)[0][:128])
    missing = ("kids", "affair", "years", "kids")
    networks = []
    for _ in range(2):
        torch.manual_seed(0)
        networks.append(tabular.Network(rows.inputs.shape[1], TASKS).double())
    network, plain = networks
    opt = tabular.make_optimizer(row, network, TASKS, seed=0, epochs=1)
    adam = torch.optim.AdamW(plain.parameters(), lr=tabular.RATE, weight_decay=tabular.DECAY)
    shared = [linear.weight for linear in plain.trunk[0::3]]
    conflicts = 0
    for number, task in enumerate(missing):
        batch = rows[32 * number : 32 * number + 32]
        half = torch.arange(32) % 2 == number % 2
        batch = batch._replace(known={each: half & (each != task) for each in TASKS})
        opt_losses = tabular.step(opt, network, batch)
        present = [each for each in TASKS if each != task]
        losses, own = plain_losses(plain, batch, present)
        assert list(opt_losses) == present
        adam.zero_grad()
        gradients = []
        for each, loss in losses.items():
            for_own = torch.autograd.grad(loss, own[each], retain_graph=True)
            for parameter, gradient in zip(own[each], for_own, strict=True):
                parameter.grad = gradient
            gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, shared)]))
        a, b = gradients
        update = a + b
        if row == "PCGrad" and a @ b < 0:
            conflicts += 1
            update = update - (a @ b) / (b @ b) * b - (a @ b) / (a @ a) * a
        parts = update.split([weight.numel() for weight in shared])
        for weight, part in zip(shared, parts, strict=True):
            weight.grad = part.view_as(weight)
        adam.step()
    assert conflicts or row == "Sum"
    for parameter, expected in zip(network.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, atol=1e-10, rtol=1e-9)


def test_a_batch_without_labels_makes_no_step() -> None:
    rows = tabular.load(0)[0][:8]
    rows = rows._replace(known=dict.fromkeys(TASKS, torch.zeros(8, dtype=torch.bool)))
    network = tabular.Network(rows.inputs.shape[1], TASKS)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    assert tabular.step(tabular.make_optimizer("Sum", network, TASKS, 0, 1), network, rows) == {}
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("row", ["Single-task", "Mixed", "Sum+UncertaintyWeights"])
def test_a_quick_run_is_reproducible(row: str) -> None:
    first, second = (tabular.train(row, 5, True) for _ in range(2))
    tabular.single_tasks.cache_clear()
    torch.manual_seed(99)  # A run begins with its own seed.
    third = tabular.train(row, 5, True)
    keys = {column.key for column in tabular.USE.columns} - {"seconds"}
    for result in (second, third):
        assert {key: result.get(key) for key in keys} == {key: first.get(key) for key in keys}


@pytest.mark.usefixtures("few_rows")
def test_every_row_trains_and_the_pictures_are_drawn(tmp_path: Path) -> None:
    results = {row: [tabular.train(row, 0, True)] for row in tabular.ROWS}
    tabular.USE.draw(results, tmp_path)
    for of_row in results.values():
        assert all(0 < of_row[0][task] < 10 for task in TASKS)
    for look in ("", "-dark"):
        assert (tmp_path / f"tabular{look}.svg").stat().st_size > 1000
