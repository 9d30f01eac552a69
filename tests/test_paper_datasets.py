"""The paper's data sets: targets against hand values, augmentation, errors, and the small data.

The trees are written here, in the published layouts, so that `paper.small` and `paper.datasets`
cannot agree on a wrong one.
"""

import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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
NORMAL = torch.tensor([0.6, 0, 0.8]).reshape(3, 1, 1)
GREY = np.full((6, 6, 3), 128)
ORDINALS = np.arange(1, 37).reshape(6, 6)


def write(folder: Path, files: dict[str, Any]) -> None:
    """Pictures, arrays, MATLAB's structures and text, as the names' endings say."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".txt":
            path.write_text(content)
        elif path.suffix == ".npy":
            np.save(path, content)
        elif path.suffix == ".mat":
            savemat(path, content)
        else:
            Image.fromarray(np.asarray(content, np.uint8)).save(path, quality=100)


def write_nyud(root: Path, name: str, picture: np.ndarray, **arrays: np.ndarray) -> None:
    """By default one class, depth 1, and neither normals nor edges."""
    blank = np.zeros(picture.shape, np.float32)
    arrays = {"depth": blank[..., 0] + 1, "normals": blank, "edge": blank[..., 0]} | arrays
    segmentation = arrays.pop("segmentation", blank[..., 0] + 1)
    files = {f"images/{name}.jpg": picture, f"segmentation/{name}.png": segmentation}
    files |= {f"{part}/{name}.npy": array for part, array in arrays.items()}
    write(root / "NYUD_MT", files)


def make_nyud(root: Path) -> None:
    """Training pictures n1 and n2, alike; n3 to evaluate."""
    normals = NORMAL.expand(3, 6, 6).permute(1, 2, 0).numpy().copy()
    normals[0] = 0
    arrays = {
        "segmentation": np.where(ORDINALS == 36, 0, ORDINALS),
        "depth": np.where(ORDINALS == 1, 0, ORDINALS / 8).astype("f4"),
        "normals": normals,
        "edge": np.tile(np.eye(6, dtype="f4")[2], (6, 1)),
    }
    for name in ("n1", "n2", "n3"):
        write_nyud(root, name, GREY, **arrays)
    write(root / "NYUD_MT" / "gt_sets", {"train.txt": "n1\nn2\n", "val.txt": "n3\n"})


def structure(fields: list[str], *rows: tuple[object, ...]) -> np.ndarray:
    return np.array([list(rows)], [(field, object) for field in fields])


def parts(*things: tuple[int, np.ndarray, list[tuple[str, np.ndarray]]]) -> dict[str, np.ndarray]:
    """The annotation of things with a class, a mask, and the names and masks of parts."""
    rows = []
    for index, mask, named in things:
        masks = structure(["part_name", "mask"], *named) if named else np.zeros((0, 0))
        rows.append(("thing", float(index), mask, masks))
    objects = structure(["class", "class_ind", "mask", "parts"], *rows)
    return {"anno": structure(["imname", "objects"], ("name", objects))}


def make_pascal(root: Path) -> None:
    """p1 has a person; p2 has none, and its segmentation is the one of pascal-context."""
    whole, hair, feet = np.zeros((3, 6, 6), np.uint8)
    whole[:] = hair[0, :2] = feet[5] = 1
    semseg, sal = np.zeros((2, 6, 6))
    semseg[1, 1], semseg[2, 2] = 20, 255
    sal[0, :3] = 127, 128, 255
    labels = np.full((6, 6), 2, np.uint16)  # An aeroplane, and right of it a bag, which NYUD has.
    labels[:, 3:] = 9
    person = 15, whole, [("hair", hair), ("rfoot", feet)]
    files = {
        "semseg/VOC12/p1.png": semseg,
        "human_parts/p1.mat": parts((5, whole, [("tail", feet)]), person, (15, whole, [])),
        "human_parts/p2.mat": parts((5, whole, [])),
        "ImageSets/Context/train.txt": "p1\np2\n",
        "ImageSets/Context/val.txt": "p2\n",
    }
    for name in ("p1", "p2"):
        files |= {
            f"JPEGImages/{name}.jpg": GREY,
            f"semseg/pascal-context/{name}.png": np.full((6, 6), 3),
            f"normals_distill/{name}.png": np.full((6, 6, 3), (255, 0, 255)),
            f"sal_distill/{name}.png": sal,
            f"pascal-context/trainval/{name}.mat": {"LabelMap": labels},
        }
    write(root / "PASCAL_MT", files)


RAMP = np.broadcast_to(np.arange(6, dtype=np.float32)[None, :, None] / 10, (6, 6, 3))


def write_cityscapes(root: Path, split: str, index: int, picture: np.ndarray = RAMP) -> None:
    """By default, pictures grow from left to right; depth names each pixel."""
    depth = np.where(ORDINALS == 36, 0, ORDINALS / 100).astype("f4")[..., None]
    arrays = {"image": picture, "label_7": ORDINALS % 8 - 1.0, "depth": depth}
    files = {f"{part}/{index}.npy": array for part, array in arrays.items()}
    write(root / "cityscapes" / split, files)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_nyud(tmp_path)
    make_pascal(tmp_path)
    for split, index in (("train", 0), ("train", 1), ("val", 0)):
        write_cityscapes(tmp_path, split, index)
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
    equal(item["normals"][:, 1:], NORMAL.expand(3, 5, 6))


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
    write(root / "PASCAL_MT", {"pascal-context/trainval/p1.mat": {"LabelMap": labels}})

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


def test_pictures_of_cityscapes_are_in_the_order_of_their_numbers(root: Path) -> None:
    for index in range(11):
        write_cityscapes(root, "train", index, np.full((6, 6, 3), index / 10, np.float32))
    data = open_small("cityscapes", root)
    equal(torch.stack([item["picture"].mean() for item in data]), torch.arange(11) / 10)


# The indices that a zoom about the centre takes from six pixels, and a crop of the first ones.
ZOOMS = {1.0: [0, 1, 2, 3, 4, 5], 1.2: [0, 1, 2, 3, 4, 5], 1.5: [1, 2, 2, 3, 4, 4]}
CROPS = {1.0: [0, 1, 2, 3, 4, 5], 1.2: [0, 1, 2, 2, 3, 4], 1.5: [0, 1, 1, 2, 3, 3]}


@pytest.mark.parametrize(("name", "indices"), [("nyud", ZOOMS), ("cityscapes", CROPS)])
def test_augmentation(root: Path, name: str, indices: dict[float, list[int]]) -> None:
    data, plain = open_small(name, root, augment=True), open_small(name, root)[0]
    candidates = {}
    for scale, taken in indices.items():
        places = 6 - max(taken) if name == "cityscapes" else 1
        for top, left, flipped in np.ndindex(places, places, 2):
            columns = [left + index for index in taken][:: -1 if flipped else 1]
            pixels = np.ix_([top + index for index in taken], columns)
            depth = plain["depth"][0][pixels]
            depth = torch.where(depth == 255, depth, depth / scale)
            candidates[scale, top, left, flipped] = pixels, depth
    seen = set()
    for epoch in range(120):
        data.set_epoch(epoch)
        item = data[0]
        [(scale, top, left, flipped)] = [
            drawn
            for drawn, (_, depth) in candidates.items()
            if torch.allclose(item["depth"][0], depth)
        ]
        seen.add((scale, top, left, flipped))
        pixels = candidates[scale, top, left, flipped][0]
        assert torch.equal(item["semseg"], plain["semseg"][pixels])
        if name == "nyud":
            assert torch.equal(item["edge"][0], plain["edge"][0][pixels])
            unknown = 0 if scale == 1.5 else 1  # Row 0.
            assert (item["normals"][:, :unknown] == 255).all()
            normal = NORMAL * torch.tensor([-1 if flipped else 1, 1, 1]).reshape(3, 1, 1)
            equal(item["normals"][:, unknown:], normal.expand(3, 6 - unknown, 6))
            equal(item["picture"], plain["picture"])
        else:
            size = {1.0: 6, 1.2: 5, 1.5: 4}[scale]
            row = (left + (torch.arange(6) + 0.5) * size / 6 - 0.5).clamp(0, 5) / 10
            equal(item["picture"], (row.flip(0) if flipped else row).expand(3, 6, 6))
    assert {drawn[:3] for drawn in seen} == {drawn[:3] for drawn in candidates}
    assert {drawn[::3] for drawn in seen} == {drawn[::3] for drawn in candidates}


def test_parts_that_a_zoom_leaves_outside_are_unknown(root: Path) -> None:
    """As those of a picture without parts: after the zoom by 1.5, head and feet are outside."""
    data = open_small("pascal", root, augment=True)
    seen = set()
    for epoch in range(40):
        data.set_epoch(epoch)
        seen.add(tuple(data[0]["human_parts"].unique().tolist()))
    assert seen == {(0, 1, 6), (255,)}


@pytest.mark.parametrize("name", NAMES)
def test_draws_depend_on_seed_epoch_and_index_alone(root: Path, name: str) -> None:
    def epochs(numbers: Iterable[int], **options: object) -> list[dict[str, Tensor]]:
        data, found = open_small(name, root, **options), []
        for number in numbers:
            data.set_epoch(number)
            found.append(default_collate([data[index] for index in range(len(data))]))
        return found

    first = epochs(range(8), augment=True)
    np.random.seed(1)
    torch.manual_seed(1)
    assert all(map(same, epochs(reversed(range(8)), augment=True), reversed(first)))
    assert not all(same(item, first[0]) for item in first)
    assert not all(map(same, epochs(range(8), augment=True, seed=1), first))
    # Both training pictures of NYUD are alike.
    assert any(not torch.equal(*item["semseg"]) for item in first)
    assert same(*epochs(range(2)))


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_see_the_epoch(root: Path, persistent: bool) -> None:
    def batches(**options: object) -> list[dict[str, Tensor]]:
        data = open_small("nyud", root, augment=True)
        loader, found = DataLoader(data, batch_size=2, **options), []
        for epoch in range(6):
            data.set_epoch(epoch)
            found += list(loader)
        return found

    expected = batches()
    assert not all(same(batch, expected[0]) for batch in expected)
    actual = batches(num_workers=2, persistent_workers=persistent)
    assert all(same(*pair) for pair in zip(actual, expected, strict=True))


def test_resized_targets(root: Path) -> None:
    # 6 x 6 to 2 x 3: the pixels around (1.5, 4.5) and (1, 3, 5) of the edges' scale.
    cells = np.ix_([1, 4], [1, 3, 5])
    nyud = open_dataset("nyud", root, "train", size=(2, 3))[0]
    equal(nyud["semseg"], np.where(ORDINALS == 36, 255, ORDINALS - 1)[cells])
    equal(nyud["depth"][0], (ORDINALS / 8)[cells])
    assert nyud["edge"].unique().tolist() == [0]
    equal(nyud["normals"], NORMAL.expand(3, 2, 3))
    # Twice as large: between the rows, normals are those of the known row.
    large = open_dataset("nyud", root, "train", size=(12, 12))[0]
    equal(large["depth"][0], np.where(ORDINALS == 1, 255, ORDINALS / 8).repeat(2, 0).repeat(2, 1))
    assert (large["normals"][:, :2] == 255).all()
    equal(large["normals"][:, 2:], NORMAL.expand(3, 10, 12))


def test_normals_are_interpolated(root: Path) -> None:
    normals = np.array([[(1, 0, 0), (0, 0, 1)]], np.float32)
    write_nyud(root, "n3", GREY[:1, :2], normals=normals)
    item = open_dataset("nyud", root, "val", size=(1, 4))[0]
    between = torch.tensor([3.0, 0, 1]) / 10**0.5
    first, _, last = torch.eye(3)
    equal(item["normals"][:, 0].T, torch.stack([first, between, between.flip(0), last]))


def test_resized_pictures_stay_in_range(root: Path) -> None:
    step = np.zeros((8, 16, 3))
    step[:, 8:] = 255
    write_nyud(root, "n3", step)
    item = open_dataset("nyud", root, "val", size=(16, 32))[0]
    picture = item["picture"] * STD + MEAN
    assert picture.min() > -1e-6
    assert picture.max() < 1 + 1e-6
    # Cubic, with the weights of a = -0.75 a quarter of a pixel beside the step.
    equal(picture[:, :, 15], torch.full((3, 16), 0.2265625))


OPTIONAL = "/(val|n3|VOC12|pascal-context/p1.png|image/1.npy)"
"""Files of the other part, one of two segmentations, the last of the numbered pictures."""


@pytest.mark.parametrize("name", NAMES)
def test_missing_files(root: Path, name: str) -> None:
    open_small(name, root)
    folder = root / FOLDERS[name]
    for path in [folder, *folder.rglob("*")]:
        moved = path.rename(root / "moved")
        if re.search(OPTIONAL, str(path.relative_to(root))):
            open_small(name, root)
        else:
            with pytest.raises(FileNotFoundError, match=f"{path}.*the README of {SOURCES[name]}"):
                open_small(name, root)
        moved.rename(path)


@pytest.mark.parametrize(
    ("name", "place", "message"),
    [
        ("nyud", "gt_sets/train.txt", "lists no pictures"),
        ("pascal", "ImageSets/Context/train.txt", "lists no pictures"),
        ("cityscapes", "train/image", "contains no pictures"),
    ],
)
def test_empty_splits(root: Path, name: str, place: str, message: str) -> None:
    path = root / FOLDERS[name] / place
    if path.is_dir():
        for file in path.iterdir():
            file.unlink()
    else:
        path.write_text("\n")
    with pytest.raises(ValueError, match=message) as error:
        open_small(name, root)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("name", NAMES)
def test_files_that_cannot_be_read(root: Path, name: str) -> None:
    """Cut in the middle, or of another format."""
    paths = sorted((root / FOLDERS[name]).rglob({"cityscapes": "train/*/0.*"}.get(name, "[np]1.*")))
    paths = [path for path in paths if not path.match("semseg/pascal-context/*")]  # p2's.
    assert len(paths) == 1 + len(TASKS[name])
    for path in paths:
        whole = path.read_bytes()
        for content in (whole[: len(whole) // 2], b"not the format"):
            path.write_bytes(content)
            with pytest.raises(ValueError, match=f"{path} cannot be read"):
                open_small(name, root)[0]
        path.write_bytes(whole)


def read(path: Path) -> np.ndarray:
    if path.suffix == ".npy":
        return np.load(path)
    return loadmat(path)["LabelMap"] if path.suffix == ".mat" else np.asarray(Image.open(path))


DEPTH, LABELS, WHOLE, FLOAT = "0 to 255", "-1 to 6", "whole numbers", "floating point"


@pytest.mark.parametrize(
    ("name", "file", "wrong"),
    [
        ("nyud", "segmentation/n1.png", {41: "0 to 40"}),
        ("nyud", "depth/n1.npy", {"i4": FLOAT, 255.0: DEPTH, -1.0: DEPTH, np.nan: DEPTH}),
        ("nyud", "normals/n1.npy", {"u1": FLOAT, 2.0: "-1.001 to 1.001"}),
        ("nyud", "edge/n1.npy", {"c8": FLOAT, 255.0: "0 to 1"}),
        ("pascal", "semseg/VOC12/p1.png", {21: "0 to 20 or 255"}),
        ("pascal", "pascal-context/trainval/p1.mat", {460: "0 to 459", 1.5: WHOLE}),
        ("pascal", "normals_distill/p1.png", {}),
        ("pascal", "sal_distill/p1.png", {}),
        ("cityscapes", "train/image/0.npy", {"u1": FLOAT, 9.0: "-0.001 to 1.001"}),
        ("cityscapes", "train/label_7/0.npy", {"c8": "integer", 7: LABELS, 0.5: WHOLE}),
        ("cityscapes", "train/depth/0.npy", {"i4": FLOAT, np.inf: "-1 to 255"}),
    ],
)
def test_wrong_shapes_dtypes_and_values(
    root: Path, name: str, file: str, wrong: dict[str | float, str]
) -> None:
    path = root / FOLDERS[name] / file
    right = read(path)
    narrow = right[..., :-1]
    arrays = [(narrow, f"has shape {[*narrow.shape]}, expected")]
    for value, allowed in wrong.items():
        if isinstance(value, str):
            message = f"has dtype {np.dtype(value)}, expected {allowed}"
            arrays.append((right.astype(value), message))
        else:
            array = np.full(right.shape, value, np.result_type(right, type(value)))
            arrays.append((array, f"contains {value}, expected {allowed}"))
    for array, message in arrays:
        write(path.parent, {path.name: {"LabelMap": array} if path.suffix == ".mat" else array})
        with pytest.raises(ValueError, match=re.escape(f"{path} {message}")):
            open_small(name, root)[0]


ONES = np.ones((6, 6), np.uint8)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("pascal-context/trainval/p1.mat", {"Map": ONES}, "LabelMap"),
        ("human_parts/p1.mat", {"other": ONES}, "anno"),
        ("human_parts/p1.mat", parts((15, ONES, [("tail", ONES)])), "unknown part 'tail'"),
        ("human_parts/p1.mat", parts((15, ONES, [("head", ONES[1:])])), r"shape \[5, 6\]"),
    ],
)
def test_wrong_structures(root: Path, file: str, content: dict, message: str) -> None:
    path = root / "PASCAL_MT" / file
    write(path.parent, {path.name: content})
    with pytest.raises(ValueError, match=f"{path}.*{message}"):
        open_small("pascal", root)[0]


def test_what_cityscapes_may_contain(root: Path) -> None:
    """Pictures a little outside [0, 1], inverse depth below 0, and files of an archiver."""
    picture, depth = np.full((6, 6, 3), 1.0000001, "f4"), np.full((6, 6, 1), -0.0039, "f4")
    files = {"image/0.npy": picture, "depth/0.npy": depth, "image/._0.npy": picture}
    write(root / "cityscapes" / "train", files)
    dataset = open_small("cityscapes", root)
    assert len(dataset) == 2
    equal(dataset[0]["picture"], np.ones((3, 6, 6)))
    equal(dataset[0]["depth"], np.full((1, 6, 6), -0.0039))


@pytest.mark.parametrize("name", NAMES)
def test_a_fingerprint_is_of_pictures_and_splits(root: Path, tmp_path: Path, name: str) -> None:
    first, copied = datasets.fingerprint(name, root), tmp_path / "copied"
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


@pytest.mark.parametrize(
    ("name", "size"), [("nyud", (32, 40)), ("pascal", (32, 32)), ("cityscapes", (32, 64))]
)
def test_small_data(tmp_path: Path, name: str, size: tuple[int, int]) -> None:
    make_small(tmp_path, name, train=8, val=4, size=size)
    assert [path.name for path in tmp_path.iterdir()] == [FOLDERS[name]]
    used: dict[str, set[float]] = {task: set() for task in TASKS[name]}
    for split, count in (("train", 8), ("val", 4)):
        data = open_dataset(name, tmp_path, split, size=size)
        assert len(data) == count
        for item in data:
            assert item["picture"].shape == (3, *size)
            assert item["picture"].std() > 0.05
            for task, target in TASKS[name].items():
                known = item[task][item[task] != IGNORE]
                used[task] |= {*known.unique().tolist()}
                least = {"normals": 3 * 0.4, "human_parts": -1}.get(task, 0.6)
                assert len(known) > least * size[0] * size[1]
                if target.kind == "normals":
                    equal(known.reshape(3, -1).norm(dim=0), torch.ones(len(known) // 3))
    if "depth" in used:  # Up to 59.9 pixels of disparity.
        assert 0 < min(used["depth"]) < max(used["depth"]) <= {"nyud": 2, "cityscapes": 0.5}[name]
    for task, target in TASKS[name].items():
        if target.kind in ("edges", "saliency"):
            assert used[task] == {0, 1}
    assert used["semseg"] == {*range({"nyud": 6, "pascal": 6, "cityscapes": 7}[name])}


@pytest.mark.parametrize("name", NAMES)
def test_small_data_that_exist(tmp_path: Path, name: str) -> None:
    """The same settings change nothing; others, or the archive itself, are refused."""

    def state() -> dict[Path, tuple[int, int]]:
        return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")}

    make_small(tmp_path, name, train=2, val=1, size=(8, 16))
    before = state()
    make_small(tmp_path, name, train=2, val=1, size=(8, 16))
    with pytest.raises(FileExistsError, match="exists with the settings"):
        make_small(tmp_path, name, train=3, val=1, size=(8, 16))
    assert state() == before
    (tmp_path / FOLDERS[name] / "settings.json").unlink()
    with pytest.raises(FileExistsError, match="no settings of a small data set"):
        make_small(tmp_path, name, train=2, val=1, size=(8, 16))


def test_parts_of_small_data(tmp_path: Path) -> None:
    """All groups appear, where the published reader finds them; every fourth picture has none."""
    make_small(tmp_path, "pascal", train=8, val=4)
    classes = []
    for path in sorted((tmp_path / "PASCAL_MT" / "human_parts").iterdir()):
        thing = loadmat(path)["anno"][0][0][1][0][0]  # By position.
        assert thing[2].shape == (64, 64)
        classes.append(int(thing[1][0][0]))
    assert classes == [15, 15, 15, 5] * 3
    groups = [
        {*item["human_parts"].unique().tolist()}
        for split in ("train", "val")
        for item in open_dataset("pascal", tmp_path, split, size=(64, 64))
    ]
    assert groups[3::4] == [{IGNORE}] * 3
    assert set.union(*groups) == {*range(7), IGNORE}


def test_small_crops_keep_to_their_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The photograph is replaced by one whose red channel tells the part."""
    photograph, scene = stereo.read()
    marked = np.zeros_like(photograph)
    for columns, value in ((slice(230), 80), (slice(250, 490), 160), (slice(510, 740), 240)):
        marked[:, columns] = value
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
