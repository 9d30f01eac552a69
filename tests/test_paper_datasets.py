"""The paper's data sets: targets against hand values, augmentation, errors, and the small data.

The trees are written here, in the published layouts, so that `paper.small` and `paper.datasets`
cannot agree on a wrong one.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import stereo
import torch
from paper import datasets, small
from paper.datasets import FOLDERS, SIZES, SOURCES, open_dataset
from paper.small import make_small
from paper.tasks import IGNORE, TASKS
from PIL import Image
from scipy.io import loadmat, savemat
from skimage.morphology import thin
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

pytestmark = pytest.mark.paper

NAMES = list(FOLDERS)
MEAN = torch.tensor([0.485, 0.456, 0.406]).reshape(3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).reshape(3, 1, 1)


def made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def image(path: Path, array: np.ndarray) -> None:
    Image.fromarray(np.asarray(array, np.uint8)).save(made(path), quality=100)


def npy(path: Path, array: np.ndarray) -> None:
    np.save(made(path), array)


def structure(fields: list[str], *rows: tuple[object, ...]) -> np.ndarray:
    return np.array([list(rows)], [(field, object) for field in fields])


def parts_file(path: Path, *things: tuple[int, np.ndarray, list[tuple[str, np.ndarray]]]) -> None:
    rows = [
        (
            "thing",
            float(index),
            mask,
            structure(["part_name", "mask"], *parts) if parts else np.zeros((0, 0)),
        )
        for index, mask, parts in things
    ]
    objects = structure(["class", "class_ind", "mask", "parts"], *rows)
    savemat(made(path), {"anno": structure(["imname", "objects"], ("name", objects))})


GREY = np.full((6, 6, 3), 128)
ORDINALS = np.arange(1, 37).reshape(6, 6)


def write_nyud(root: Path) -> None:
    """Training pictures n1 and n2, alike; n3 to evaluate."""
    folder = root / "NYUD_MT"
    normals = np.broadcast_to(np.array([0.6, 0.0, 0.8], np.float32), (6, 6, 3)).copy()
    normals[0] = 0
    edge = np.zeros((6, 6), np.float32)
    edge[:, 2] = 1
    for name in ("n1", "n2", "n3"):
        image(folder / "images" / f"{name}.jpg", GREY)
        image(folder / "segmentation" / f"{name}.png", np.where(ORDINALS == 36, 0, ORDINALS))
        npy(folder / "depth" / f"{name}.npy", np.where(ORDINALS == 1, 0, ORDINALS / 8).astype("f4"))
        npy(folder / "normals" / f"{name}.npy", normals)
        npy(folder / "edge" / f"{name}.npy", edge)
    made(folder / "gt_sets" / "train.txt").write_text("n1\nn2\n")
    (folder / "gt_sets" / "val.txt").write_text("n3\n")


def write_pascal(root: Path) -> None:
    """p1 has a person; p2 has none, and its segmentation is the one of pascal-context."""
    folder = root / "PASCAL_MT"
    masks = np.zeros((3, 6, 6), np.uint8)
    masks[0] = 1
    masks[1, 0, :2] = 1
    masks[2, 5] = 1
    semseg = np.zeros((6, 6))
    semseg[1, 1], semseg[2, 2] = 20, 255
    labels = np.full((6, 6), 2, np.uint16)  # An aeroplane, and right of it a bag, which NYUD has.
    labels[:, 3:] = 9
    sal = np.zeros((6, 6))
    sal[0, :3] = 127, 128, 255
    colours = np.full((6, 6, 3), (255, 0, 255))
    parts_file(
        folder / "human_parts" / "p1.mat",
        (5, masks[0], [("tail", masks[2])]),
        (15, masks[0], [("hair", masks[1]), ("rfoot", masks[2])]),
        (15, masks[0], []),
    )
    parts_file(folder / "human_parts" / "p2.mat", (5, masks[0], []))
    image(folder / "semseg" / "VOC12" / "p1.png", semseg)
    for name in ("p1", "p2"):
        image(folder / "JPEGImages" / f"{name}.jpg", GREY)
        image(folder / "semseg" / "pascal-context" / f"{name}.png", np.full((6, 6), 3))
        image(folder / "normals_distill" / f"{name}.png", colours)
        image(folder / "sal_distill" / f"{name}.png", sal)
        savemat(made(folder / "pascal-context" / "trainval" / f"{name}.mat"), {"LabelMap": labels})
    made(folder / "ImageSets" / "Context" / "train.txt").write_text("p1\np2\n")
    (folder / "ImageSets" / "Context" / "val.txt").write_text("p2\n")


def write_cityscapes(root: Path) -> None:
    """Pictures that grow from left to right, and depth that names each pixel."""
    picture = np.broadcast_to(np.arange(6, dtype=np.float32)[None, :, None] / 10, (6, 6, 3))
    for split, count in (("train", 2), ("val", 1)):
        for index in range(count):
            folder = root / "cityscapes" / split
            npy(folder / "image" / f"{index}.npy", picture)
            npy(folder / "label_7" / f"{index}.npy", ORDINALS % 8 - 1.0)
            depth = np.where(ORDINALS == 36, 0, ORDINALS / 100)[..., None]
            npy(folder / "depth" / f"{index}.npy", depth.astype("f4"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_nyud(tmp_path)
    write_pascal(tmp_path)
    write_cityscapes(tmp_path)
    return tmp_path


def open_small(name: str, root: Path, split: str = "train", **options) -> datasets.MultiTaskDataset:
    return open_dataset(name, root, split, size=(6, 6), **options)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def equal(actual: Tensor, expected: object) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype))


@pytest.mark.parametrize("name", NAMES)
def test_items(root: Path, name: str) -> None:
    for split, count in (("train", 2), ("val", 1)):
        data = open_small(name, root, split)
        assert len(data) == len(data.names) == count
        assert data.tasks == TASKS[name]
        item = data[0]
        assert list(item) == ["picture", *data.tasks]
        assert item["picture"].dtype == torch.float32
        assert item["picture"].shape == (3, 6, 6)
        for task, target in data.tasks.items():
            classes = target.kind == "classes"
            assert item[task].shape == ((6, 6) if classes else (target.channels, 6, 6))
            assert item[task].dtype == (torch.int64 if classes else torch.float32)
        assert default_collate([item, data[-1]])["picture"].shape == (2, 3, 6, 6)
        with pytest.raises(IndexError, match=f"index {count} is out of range"):
            data[count]


@pytest.mark.parametrize("name", NAMES)
def test_published_sizes(root: Path, name: str) -> None:
    assert open_dataset(name, root, "val")[0]["picture"].shape[1:] == SIZES[name]


def test_nyud(root: Path) -> None:
    data = open_small("nyud", root)
    assert data.names == ["n1", "n2"]
    item = data[0]
    equal(item["picture"], ((128 / 255 - MEAN) / STD).expand(3, 6, 6))
    equal(item["semseg"], np.where(ORDINALS == 36, 255, ORDINALS - 1))
    equal(item["depth"][0], np.where(ORDINALS == 1, 255, ORDINALS / 8))
    assert item["edge"][0, 0].tolist() == [0, 0, 1, 0, 0, 0]
    assert (item["normals"][:, 0] == 255).all()
    equal(item["normals"][:, 1:], torch.tensor([0.6, 0, 0.8]).reshape(3, 1, 1).expand(3, 5, 6))


def test_pascal(root: Path) -> None:
    data = open_small("pascal", root)
    one, two = data
    equal(one["picture"], ((128 / 255 - MEAN) / STD).expand(3, 6, 6))
    semseg = torch.zeros(6, 6, dtype=torch.int64)
    semseg[1, 1], semseg[2, 2] = 20, 255
    equal(one["semseg"], semseg)
    equal(two["semseg"], np.full((6, 6), 3))
    parts = torch.zeros(6, 6, dtype=torch.int64)
    parts[0, :2], parts[5] = 1, 6
    equal(one["human_parts"], parts)
    assert (two["human_parts"] == 255).all()
    assert one["sal"][0, :2].tolist() == [[0, 1, 1, 0, 0, 0], [0] * 6]
    assert (one["normals"][..., :3] == 255).all()
    direction = torch.tensor([1.0, -1.0, 1.0]) / 3**0.5
    equal(one["normals"][..., 3:], direction.reshape(3, 1, 1).expand(3, 6, 3))
    # Two columns differ from a neighbour; thinning leaves one pixel of them in a row.
    assert (one["edge"][0, :, [0, 1, 4, 5]] == 0).all()
    assert (one["edge"][0, 1:5].sum(1) == 1).all()


def test_edges_of_pascal(root: Path) -> None:
    """The definition, written out; the border pixel is not repeated."""
    labels = np.random.default_rng(0).choice([1, 2, 3], (6, 6))
    savemat(root / "PASCAL_MT" / "pascal-context" / "trainval" / "p1.mat", {"LabelMap": labels})

    def edges(mode: str) -> np.ndarray:
        padded = np.pad(labels, 1, mode=mode)
        neighbours = padded[:-2, 1:-1] + padded[2:, 1:-1] + padded[1:-1, :-2] + padded[1:-1, 2:]
        return thin(neighbours - 4 * labels != 0)

    assert (edges("reflect") != edges("symmetric")).any()
    equal(open_small("pascal", root)[0]["edge"][0], edges("reflect"))


def test_groups_of_parts() -> None:
    assert len(datasets.PARTS) == 24
    assert sorted(set(datasets.PARTS.values())) == [1, 2, 3, 4, 5, 6]
    for right, group in datasets.PARTS.items():  # So a flip needs no exchange of the sides.
        if right.startswith("r"):
            assert datasets.PARTS["l" + right[1:]] == group


def test_classes_with_normals() -> None:
    classes = datasets.NORMALS_CLASSES
    assert list(classes) == sorted(set(classes))
    # A bag, fork, person, table, tvmonitor and wall; not aeroplane, grass, sky, train or unknown.
    assert {9, 165, 284, 397, 427, 440} <= set(classes)
    assert not {2, 187, 360, 416, 431} & set(classes)


def test_cityscapes(root: Path) -> None:
    item = open_small("cityscapes", root)[1]
    equal(item["picture"], (torch.arange(6) / 10).expand(3, 6, 6))
    labels = ORDINALS % 8 - 1
    equal(item["semseg"], np.where(labels == -1, 255, labels))
    equal(item["depth"][0], np.where(ORDINALS == 36, 255, ORDINALS / 100))


def test_pictures_of_cityscapes_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for index in range(11):
        folder = tmp_path / "cityscapes" / "train"
        npy(folder / "image" / f"{index}.npy", np.full((2, 2, 3), index / 10, np.float32))
        npy(folder / "label_7" / f"{index}.npy", np.zeros((2, 2)))
        npy(folder / "depth" / f"{index}.npy", np.ones((2, 2, 1), np.float32))
    data = open_dataset("cityscapes", tmp_path, "train", size=(2, 2))
    equal(torch.stack([item["picture"].mean() for item in data]), torch.arange(11) / 10)


# The indices that a zoom by 1, 1.2 and 1.5 about the centre takes from six.
ZOOMS = {1.0: [0, 1, 2, 3, 4, 5], 1.2: [0, 1, 2, 3, 4, 5], 1.5: [1, 2, 2, 3, 4, 4]}


def test_augmentation_of_nyud(root: Path) -> None:
    data = open_small("nyud", root, augment=True)
    plain = open_small("nyud", root)[0]
    seen = set()
    for epoch in range(40):
        data.set_epoch(epoch)
        item = data[0]
        matches = []
        for zoom, indices in ZOOMS.items():
            for flipped in (False, True):
                columns = indices[::-1] if flipped else indices
                cells = np.ix_(indices, columns)
                depth = plain["depth"][0][cells]
                depth = torch.where(depth == 255, depth, depth / zoom)
                if torch.allclose(item["depth"][0], depth):
                    matches.append((zoom, flipped, cells))
        assert len(matches) == 1
        zoom, flipped, cells = matches[0]
        seen.add((zoom, flipped))
        assert torch.equal(item["semseg"], plain["semseg"][cells])
        assert torch.equal(item["edge"][0], plain["edge"][0][cells])
        unknown = 0 if zoom == 1.5 else 1  # Row 0.
        assert (item["normals"][:, :unknown] == 255).all()
        normal = torch.tensor([-0.6 if flipped else 0.6, 0, 0.8]).reshape(3, 1, 1)
        equal(item["normals"][:, unknown:], normal.expand(3, 6 - unknown, 6))
        equal(item["picture"], plain["picture"])
    assert seen == {(zoom, flipped) for zoom in ZOOMS for flipped in (False, True)}


def test_augmentation_of_pascal(root: Path) -> None:
    data = open_small("pascal", root, augment=True)
    seen = set()
    for epoch in range(40):
        data.set_epoch(epoch)
        item = data[0]
        # The valid half of the normals tells the side, the row of feet the zoom by 1.5.
        flipped = bool((item["normals"][0, 0] != 255)[0])
        zoomed = not (item["human_parts"] == 6).any()
        seen.add((flipped, zoomed))
        known = item["normals"][0][item["normals"][0] != 255]
        equal(known, torch.full_like(known, (-1 if flipped else 1) / 3**0.5))
        if zoomed:  # Head and feet are outside.
            assert (item["human_parts"] == 255).all()
        else:
            assert item["human_parts"][0].tolist() == [0, 0, 0, 0, 1, 1][:: 1 if flipped else -1]
    assert len(seen) == 4


def test_augmentation_of_cityscapes(root: Path) -> None:
    data = open_small("cityscapes", root, augment=True)
    plain = open_small("cityscapes", root)[0]
    enlarged = {1.0: [0, 1, 2, 3, 4, 5], 1.2: [0, 1, 2, 2, 3, 4], 1.5: [0, 1, 1, 2, 3, 3]}
    seen = set()
    for epoch in range(120):
        data.set_epoch(epoch)
        item = data[0]
        matches = []
        for scale, indices in enlarged.items():
            places = range(6 - max(indices))
            for top, left, flipped in np.ndindex(len(places), len(places), 2):
                columns = [left + index for index in indices][:: -1 if flipped else 1]
                cells = np.ix_([top + index for index in indices], columns)
                depth = plain["depth"][0][cells]
                depth = torch.where(depth == 255, depth, depth / scale)
                if torch.allclose(item["depth"][0], depth):
                    matches.append((scale, top, left, flipped, cells))
        assert len(matches) == 1
        scale, top, left, flipped, cells = matches[0]
        seen.add((scale, top, left, flipped))
        assert torch.equal(item["semseg"], plain["semseg"][cells])
        size = {1.0: 6, 1.2: 5, 1.5: 4}[scale]
        centres = left + (torch.arange(6) + 0.5) * size / 6 - 0.5
        row = centres.clamp(0, 5) / 10
        equal(item["picture"], (row.flip(0) if flipped else row).expand(3, 6, 6))
    assert len({(scale, top, left) for scale, top, left, _ in seen}) == 1 + 2 * 2 + 3 * 3
    assert {flipped for *_, flipped in seen} == {0, 1}


@pytest.mark.parametrize("name", NAMES)
def test_draws_depend_on_seed_epoch_and_index_alone(root: Path, name: str) -> None:
    def epoch_of(data: datasets.MultiTaskDataset, epoch: int) -> dict[str, Tensor]:
        data.set_epoch(epoch)
        return default_collate([data[index] for index in range(len(data))])

    data = open_small(name, root, augment=True)
    first = [epoch_of(data, epoch) for epoch in range(8)]
    np.random.seed(1)
    torch.manual_seed(1)
    again = open_small(name, root, augment=True)
    assert all(same(epoch_of(again, epoch), first[epoch]) for epoch in reversed(range(8)))
    assert not all(same(item, first[0]) for item in first)
    other = open_small(name, root, augment=True, seed=1)
    assert not all(same(epoch_of(other, epoch), first[epoch]) for epoch in range(8))
    # Both training pictures of NYUD are alike.
    assert any(not torch.equal(*item["semseg"]) for item in first)
    plain = open_small(name, root)
    assert same(epoch_of(plain, 0), epoch_of(plain, 1))


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_see_the_epoch(root: Path, persistent: bool) -> None:
    def batches(data: datasets.MultiTaskDataset, **options) -> list[dict[str, Tensor]]:
        loader = DataLoader(data, batch_size=2, **options)
        found = []
        for epoch in range(6):
            data.set_epoch(epoch)
            found += list(loader)
        return found

    expected = batches(open_small("nyud", root, augment=True))
    assert not all(same(batch, expected[0]) for batch in expected)
    actual = batches(
        open_small("nyud", root, augment=True), num_workers=2, persistent_workers=persistent
    )
    assert len(actual) == len(expected)
    assert all(map(same, actual, expected))


def test_resized_targets(root: Path) -> None:
    # 6 x 6 to 2 x 3: the pixels around (1.5, 4.5) and (1, 3, 5) of the edges' scale.
    cells = np.ix_([1, 4], [1, 3, 5])
    nyud = open_dataset("nyud", root, "train", size=(2, 3))[0]
    equal(nyud["semseg"], np.where(ORDINALS == 36, 255, ORDINALS - 1)[cells])
    equal(nyud["depth"][0], (ORDINALS / 8)[cells])
    assert nyud["edge"].unique().tolist() == [0]
    equal(nyud["normals"], torch.tensor([0.6, 0, 0.8]).reshape(3, 1, 1).expand(3, 2, 3))
    # Twice as large: between the rows, normals are those of the known row, and still unit vectors.
    large = open_dataset("nyud", root, "train", size=(12, 12))[0]
    equal(large["depth"][0], np.where(ORDINALS == 1, 255, ORDINALS / 8).repeat(2, 0).repeat(2, 1))
    assert (large["normals"][:, :2] == 255).all()
    equal(large["normals"][:, 2:].norm(dim=0), torch.ones(10, 12))


def test_normals_are_interpolated(root: Path) -> None:
    normals = np.zeros((1, 2, 3), np.float32)
    normals[0, 0], normals[0, 1] = (1, 0, 0), (0, 0, 1)
    folder = root / "NYUD_MT"
    image(folder / "images" / "n3.jpg", GREY[:1, :2])
    image(folder / "segmentation" / "n3.png", np.ones((1, 2)))
    npy(folder / "depth" / "n3.npy", np.ones((1, 2), np.float32))
    npy(folder / "edge" / "n3.npy", np.zeros((1, 2)))
    npy(folder / "normals" / "n3.npy", normals)
    item = open_dataset("nyud", root, "val", size=(1, 4))[0]
    between = torch.tensor([3.0, 0, 1]) / 10**0.5
    equal(
        item["normals"][:, 0].T,
        torch.stack([torch.tensor([1.0, 0, 0]), between, between.flip(0), torch.eye(3)[2]]),
    )


def test_resized_pictures_stay_in_range(root: Path) -> None:
    step = np.zeros((8, 16, 3))
    step[:, 8:] = 255
    folder = root / "NYUD_MT"
    image(folder / "images" / "n3.jpg", step)
    image(folder / "segmentation" / "n3.png", np.ones((8, 16)))
    npy(folder / "depth" / "n3.npy", np.ones((8, 16), np.float32))
    npy(folder / "edge" / "n3.npy", np.zeros((8, 16)))
    npy(folder / "normals" / "n3.npy", np.zeros((8, 16, 3), np.float32))
    item = open_dataset("nyud", root, "val", size=(16, 32))[0]
    picture = item["picture"] * STD + MEAN
    assert picture.min() > -1e-6
    assert picture.max() < 1 + 1e-6
    # Cubic, with the weights of a = -0.75 a quarter of a pixel beside the step.
    equal(picture[:, :, 15], torch.full((3, 16), 0.2265625))


N, P, C = Path("NYUD_MT"), Path("PASCAL_MT"), Path("cityscapes/train")
MISSING = [
    *[("nyud", N), ("pascal", P), ("cityscapes", Path("cityscapes")), ("cityscapes", C / "image")],
    *[("nyud", N / folder) for folder in ("images", "segmentation", "depth", "normals", "edge")],
    *[("nyud", N / "gt_sets" / "train.txt"), ("pascal", P / "ImageSets" / "Context" / "train.txt")],
    *[("nyud", N / file) for file in ("images/n2.jpg", "segmentation/n2.png", "depth/n2.npy")],
    *[("nyud", N / file) for file in ("normals/n2.npy", "edge/n2.npy")],
    *[("pascal", P / folder) for folder in ("JPEGImages", "human_parts", "normals_distill")],
    *[("pascal", P / file) for file in ("JPEGImages/p2.jpg", "human_parts/p2.mat")],
    *[("pascal", P / file) for file in ("normals_distill/p2.png", "sal_distill/p2.png")],
    *[("pascal", P / file) for file in ("pascal-context/trainval/p2.mat",)],
    *[("pascal", P / file) for file in ("semseg/pascal-context/p2.png", "semseg/pascal-context")],
    *[("cityscapes", C / file) for file in ("label_7", "depth", "label_7/1.npy", "depth/1.npy")],
]


@pytest.mark.parametrize(("name", "path"), MISSING, ids=lambda value: str(value))
def test_missing_files(root: Path, name: str, path: Path) -> None:
    open_small(name, root)
    target = root / path
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    with pytest.raises(FileNotFoundError) as error:
        open_small(name, root)
    assert str(target) in str(error.value)
    assert f"the README of {SOURCES[name]}" in str(error.value)


def test_a_gap_in_the_numbers_of_cityscapes(root: Path) -> None:
    (root / C / "image" / "0.npy").unlink()
    with pytest.raises(FileNotFoundError, match=r"image/0\.npy is missing"):
        open_small("cityscapes", root)


def test_one_folder_of_segmentations_is_enough(root: Path) -> None:
    shutil.rmtree(root / P / "semseg" / "VOC12")
    equal(open_small("pascal", root)[0]["semseg"], np.full((6, 6), 3))


@pytest.mark.parametrize("path", [N / "gt_sets", P / "ImageSets" / "Context"], ids=str)
def test_empty_splits(root: Path, path: Path) -> None:
    (root / path / "train.txt").write_text("\n")
    with pytest.raises(ValueError, match="lists no pictures") as error:
        open_small("nyud" if path.parts[0] == "NYUD_MT" else "pascal", root)
    assert str(root / path / "train.txt") in str(error.value)


def test_empty_cityscapes(root: Path) -> None:
    for file in (root / C / "image").iterdir():
        file.unlink()
    with pytest.raises(ValueError, match="image contains no pictures"):
        open_small("cityscapes", root)


def text(path: Path) -> None:
    path.write_text("not the format")


def shortened(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def filled(value: float, dtype: str = "f4", shape: tuple[int, ...] = (6, 6)) -> Callable:
    return lambda path: npy(path, np.full(shape, value, dtype))


def drawn(value: int, shape: tuple[int, ...] = (6, 6)) -> Callable:
    return lambda path: image(path, np.full(shape, value))


def labelled(value: float, shape: tuple[int, ...] = (6, 6), key: str = "LabelMap") -> Callable:
    return lambda path: savemat(path, {key: np.full(shape, value)})


def person(part: str, shape: tuple[int, ...] = (6, 6)) -> Callable:
    mask = np.ones(shape, np.uint8)
    return lambda path: parts_file(path, (15, mask, [(part, mask)]))


BROKEN = [
    ("nyud", N / "images/n1.jpg", text, "cannot be read"),
    ("nyud", N / "images/n1.jpg", shortened, "cannot be read"),
    ("nyud", N / "segmentation/n1.png", shortened, "cannot be read"),
    ("nyud", N / "segmentation/n1.png", drawn(1, (6, 5)), r"\[6, 5\].*6 x 6"),
    ("nyud", N / "segmentation/n1.png", drawn(41), "contains 41, expected 0 to 40"),
    ("nyud", N / "segmentation/n1.png", drawn(1, (6, 6, 3)), r"\[6, 6, 3\]"),
    ("nyud", N / "depth/n1.npy", text, "cannot be read"),
    ("nyud", N / "depth/n1.npy", shortened, "cannot be read"),
    ("nyud", N / "depth/n1.npy", filled(1, shape=(5, 6)), r"\[5, 6\].*6 x 6"),
    ("nyud", N / "depth/n1.npy", filled(1, "i4"), "dtype int32, expected floating point"),
    ("nyud", N / "depth/n1.npy", filled(255), "contains 255.0, expected"),
    ("nyud", N / "depth/n1.npy", filled(-1), "contains -1.0"),
    ("nyud", N / "depth/n1.npy", filled(np.nan), "contains nan"),
    ("nyud", N / "normals/n1.npy", filled(0, shape=(3, 6, 6)), r"\[3, 6, 6\]"),
    ("nyud", N / "normals/n1.npy", filled(2, shape=(6, 6, 3)), "contains 2.0"),
    ("nyud", N / "normals/n1.npy", filled(0, "u1", (6, 6, 3)), "dtype uint8"),
    ("nyud", N / "edge/n1.npy", filled(255, "u1"), "contains 255, expected 0 to 1"),
    ("nyud", N / "edge/n1.npy", filled(1, shape=(6, 7)), r"\[6, 7\]"),
    ("nyud", N / "edge/n1.npy", filled(1, "c8"), "dtype complex64"),
    ("pascal", P / "JPEGImages/p1.jpg", text, "cannot be read"),
    ("pascal", P / "semseg/VOC12/p1.png", drawn(21), "contains 21, expected 0 to 20 or 255"),
    ("pascal", P / "semseg/VOC12/p1.png", drawn(0, (7, 6)), r"\[7, 6\]"),
    ("pascal", P / "pascal-context/trainval/p1.mat", text, "cannot be read"),
    ("pascal", P / "pascal-context/trainval/p1.mat", labelled(1, key="Map"), "LabelMap"),
    ("pascal", P / "pascal-context/trainval/p1.mat", labelled(460), "expected 0 to 459"),
    ("pascal", P / "pascal-context/trainval/p1.mat", labelled(1.5), "expected whole numbers"),
    ("pascal", P / "pascal-context/trainval/p1.mat", labelled(1, (6, 1)), r"\[6, 1\]"),
    ("pascal", P / "normals_distill/p1.png", drawn(9), r"\[6, 6\], expected \[6, 6, 3\]"),
    ("pascal", P / "normals_distill/p1.png", text, "cannot be read"),
    ("pascal", P / "sal_distill/p1.png", drawn(0, (6, 8)), r"\[6, 8\]"),
    ("pascal", P / "human_parts/p1.mat", text, "cannot be read"),
    ("pascal", P / "human_parts/p1.mat", labelled(1, key="other"), "anno"),
    ("pascal", P / "human_parts/p1.mat", person("tail"), "unknown part 'tail'"),
    ("pascal", P / "human_parts/p1.mat", person("head", (5, 5)), r"\[5, 5\]"),
    ("cityscapes", C / "image/0.npy", text, "cannot be read"),
    (
        "cityscapes",
        C / "image/0.npy",
        filled(9, shape=(6, 6, 3)),
        "contains 9.0, expected -0.001 to 1",
    ),
    ("cityscapes", C / "image/0.npy", filled(1, "u1", (6, 6, 3)), "dtype uint8"),
    ("cityscapes", C / "image/0.npy", filled(1, shape=(3, 6, 6)), r"expected \[H, W, 3\]"),
    ("cityscapes", C / "label_7/0.npy", filled(7), "expected -1 to 6"),
    ("cityscapes", C / "label_7/0.npy", filled(0.5), "expected whole numbers"),
    ("cityscapes", C / "label_7/0.npy", filled(0, shape=(6, 5)), r"\[6, 5\]"),
    ("cityscapes", C / "depth/0.npy", filled(0), r"\[6, 6\], expected \[6, 6, 1\]"),
    ("cityscapes", C / "depth/0.npy", filled(np.inf, shape=(6, 6, 1)), "contains inf"),
]


@pytest.mark.parametrize(("name", "path", "break_it", "message"), BROKEN)
def test_broken_files(root: Path, name: str, path: Path, break_it: Callable, message: str) -> None:
    assert open_small(name, root)[0]
    break_it(root / path)
    with pytest.raises(ValueError, match=message) as error:
        open_small(name, root)[0]
    assert str(root / path) in str(error.value)


def test_what_cityscapes_may_contain(root: Path) -> None:
    """Pictures a little outside [0, 1], inverse depth below 0, and files of an archiver."""
    folder = root / C
    npy(folder / "image/0.npy", np.full((6, 6, 3), 1.0000001, "f4"))
    npy(folder / "depth/0.npy", np.full((6, 6, 1), -0.0039, "f4"))
    (folder / "image/._0.npy").write_bytes(b"Mac OS X")
    dataset = open_small("cityscapes", root)
    assert len(dataset) == 2
    equal(dataset[0]["picture"], np.ones((3, 6, 6)))
    equal(dataset[0]["depth"], np.full((1, 6, 6), -0.0039))


@pytest.mark.parametrize("name", NAMES)
def test_a_fingerprint_is_of_pictures_and_splits(root: Path, tmp_path: Path, name: str) -> None:
    first = datasets.fingerprint(name, root)
    assert first == datasets.fingerprint(name, root)
    copied = tmp_path / "copied"
    shutil.copytree(root, copied)
    assert datasets.fingerprint(name, copied) == first
    dataset = open_small(name, copied)
    path = dataset.picture_file(dataset.names[0])
    path.write_bytes(path.read_bytes() + b" ")
    assert datasets.fingerprint(name, copied) != first


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "kitti"}, "name must be one of nyud, pascal, cityscapes, got 'kitti'"),
        ({"split": "test"}, "split must be 'train' or 'val', got 'test'"),
        ({"size": (0, 4)}, r"size must be .*, got \(0, 4\)"),
        ({"seed": -1}, "seed must not be negative, got -1"),
    ],
)
def test_bad_arguments(root: Path, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_dataset(**{"name": "nyud", "root": root, "split": "train", **arguments})


def files(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize(
    ("name", "size"), [("nyud", (32, 40)), ("pascal", (32, 32)), ("cityscapes", (32, 64))]
)
def test_small_data(tmp_path: Path, name: str, size: tuple[int, int]) -> None:
    make_small(tmp_path, name, train=8, val=4, size=size)
    assert [path.name for path in tmp_path.iterdir()] == [FOLDERS[name]]
    used = dict.fromkeys(TASKS[name], torch.tensor([]))
    for split, count in (("train", 8), ("val", 4)):
        data = open_dataset(name, tmp_path, split, size=size)
        assert len(data) == count
        for item in data:
            assert item["picture"].shape == (3, *size)
            assert item["picture"].std() > 0.05
            for task, target in TASKS[name].items():
                known = item[task][item[task] != IGNORE]
                used[task] = torch.cat([used[task], known.unique()]).unique()
                if target.kind == "normals":
                    lengths = item[task].norm(dim=0)[item[task][0] != IGNORE]
                    equal(lengths, torch.ones_like(lengths))
                    assert len(lengths) > 0.4 * size[0] * size[1]
                elif task != "human_parts":
                    assert len(known) > 0.6 * size[0] * size[1]
    for task, target in TASKS[name].items():
        if task == "depth":
            # Up to 59.9 pixels of disparity.
            assert 0 < used[task].min() < used[task].max() <= {"nyud": 2, "cityscapes": 0.5}[name]
        if target.kind in ("edges", "saliency"):
            assert used[task].tolist() == [0, 1]
    classes = {"nyud": 6, "pascal": 6, "cityscapes": 7}
    assert used["semseg"].tolist() == list(range(classes[name]))
    before = files(tmp_path)
    make_small(tmp_path, name, train=8, val=4, size=size)
    assert files(tmp_path) == before
    with pytest.raises(FileExistsError, match="exists with the settings"):
        make_small(tmp_path, name, train=9, val=4, size=size)
    assert files(tmp_path) == before
    (tmp_path / FOLDERS[name] / "settings.json").unlink()  # As the archive itself.
    with pytest.raises(FileExistsError, match="no settings of a small data set"):
        make_small(tmp_path, name, train=8, val=4, size=size)


def test_parts_of_small_data(tmp_path: Path) -> None:
    """Where the published reader finds them, by position; some pictures have none."""
    make_small(tmp_path, "pascal", train=8, val=4)
    groups: list[set[int]] = []
    classes = []
    for path in sorted((tmp_path / "PASCAL_MT" / "human_parts").iterdir()):
        thing = loadmat(path)["anno"][0][0][1][0][0]
        assert thing[2].shape == (64, 64)
        parts = thing[3][0] if len(thing[3]) else []
        classes.append(int(thing[1][0][0]))
        groups.append({datasets.PARTS[str(part[0][0])] for part in parts})
        assert len(groups[-1]) == len(parts)
    assert classes == [15, 15, 15, 5] * 3
    assert not any(groups[3::4])
    assert set.union(*groups) == {1, 2, 3, 4, 5, 6}
    data = [open_dataset("pascal", tmp_path, split, size=(64, 64)) for split in ("train", "val")]
    unknown = [bool((item["human_parts"] == IGNORE).all()) for part in data for item in part]
    assert unknown == [not parts for parts in groups]
    assert any(unknown)


def test_small_crops_keep_to_their_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The photograph is replaced by one whose red channel tells the part."""
    photograph, scene = stereo.read()
    marked = np.zeros_like(photograph)
    marked[:, :230] = 80
    marked[:, 250:490] = 160
    marked[:, 510:740] = 240
    monkeypatch.setattr(small, "read", lambda: (marked, scene))
    make_small(tmp_path, "cityscapes", train=20, val=20, size=(32, 64))
    for split, values in (("train", [80, 240] * 10), ("val", [160] * 20)):
        data = open_dataset("cityscapes", tmp_path, split, size=(32, 64))
        for item, value in zip(data, values, strict=True):
            equal(item["picture"], torch.full((3, 32, 64), value / 255))


def test_interrupted_small_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(folder: Path, *arguments: object) -> str:
        if len(list((folder / "train" / "image").glob("*"))) == 3:
            raise KeyboardInterrupt
        return write(folder, *arguments)

    write = small.WRITERS["cityscapes"]
    monkeypatch.setitem(small.WRITERS, "cityscapes", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make_small(tmp_path, "cityscapes", train=8, val=4, size=(8, 16))
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileNotFoundError):
        open_dataset("cityscapes", tmp_path, "train")
    monkeypatch.undo()
    make_small(tmp_path, "cityscapes", train=8, val=4, size=(8, 16))
    assert len(open_dataset("cityscapes", tmp_path, "train")) == 8


def test_another_process_is_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def overtaken(*arguments: object) -> None:
        monkeypatch.undo()
        make_small(tmp_path, "nyud", train=2, val=1)
        write(*arguments)

    write = small._write
    monkeypatch.setattr(small, "_write", overtaken)
    make_small(tmp_path, "nyud", train=2, val=1)
    assert [path.name for path in tmp_path.iterdir()] == ["NYUD_MT"]
    assert len(open_dataset("nyud", tmp_path, "train")) == 2


@pytest.mark.parametrize("arguments", [{"name": "kitti"}, {"train": 0}, {"size": (0, 8)}])
def test_bad_small_data(tmp_path: Path, arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        make_small(**{"root": tmp_path, "name": "nyud", **arguments})


# The mean square of the picture; then of disparity, normals and edges where known, each with the
# known share.
STEREO = [
    [0.9998006, 1.391189, 0.9309728, 0.3333333, 0.7615045, 0.08323389, 0.9961484],
    [1.019189, 1.377113, 0.9168431, 0.3333333, 0.7242608, 0.1011196, 0.993414],
]


def test_numbers_of_the_stereo_photograph() -> None:
    """Mean squares of the demo's maps where known, and known shares: its records are of these."""
    for scene, expected in zip(stereo.load(), STEREO, strict=True):
        numbers = [scene.picture.double().square().mean().item()]
        for target in scene.targets.values():
            known = target != IGNORE
            numbers.append(target.double()[known].square().mean().item())
            numbers.append(known.double().mean().item())
        assert numbers == pytest.approx(expected, rel=1e-5)
