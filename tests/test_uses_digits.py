"""The pictures of digits: what they show, and that runs on them are reproducible."""

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from uses import digits

pytestmark = pytest.mark.paper


@pytest.mark.parametrize("name", ["three", "few"])
def test_digits_for_training_and_testing_are_disjoint(name) -> None:
    training, testing = digits.make_pictures(digits.PARTS[name], seed=1)
    assert not set(training.digits.flatten().tolist()) & set(testing.digits.flatten().tolist())
    assert len(training.images) == digits.PARTS[name].pictures


@pytest.mark.parametrize("name", ["two", "three"])
def test_labels_are_those_of_the_digits_from_left_to_right(name) -> None:
    """A digit may be where no pixel of the picture is darker than its own."""
    data = load_digits()
    small = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    large = F.interpolate(small, size=(digits.SIDE, digits.SIDE), mode="bilinear")
    for pictures in digits.make_pictures(digits.PARTS[name], seed=0):
        assert pictures.labels.tolist() == data.target[pictures.digits].tolist()
        # By picture and place: [N, height, width, SIDE, SIDE].
        places = pictures.images[:, 0].unfold(1, digits.SIDE, 1).unfold(2, digits.SIDE, 1)
        for i, shown in enumerate(pictures.digits.T):
            near = places[:, :, digits.APART * i : digits.APART * i + 2]
            fits = (near >= large[shown][:, None]).flatten(3).all(3)
            assert fits.flatten(1).any(1).all()


@pytest.mark.parametrize("row", ["two/Single-task", "few/UPGrad", "three/Phase 2", "unequal/Mixed"])
def test_runs_are_reproducible(row) -> None:
    def run() -> dict:
        torch.manual_seed(3)
        result = digits.USE.train(row, 3, True)
        del result["seconds"]
        return result

    first = run()
    assert first == run()
    tasks = digits.PARTS[row.split("/")[0]].tasks
    assert first["worst"] == min(first[task] for task in tasks)
    assert all(0 <= first[task] <= 1 for task in tasks)
    # In Phase 1 and for one task alone, there is nothing to compare.
    joint = row in ("few/UPGrad", "three/Phase 2")
    assert not joint or (0 <= first["conflict"] <= 1 and None not in first["conflicts"])
