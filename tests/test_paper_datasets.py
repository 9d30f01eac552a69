"""The paper's data sets: hand-computed targets, augmentation, errors, and the small data.

The tests write the published layouts themselves: `paper.small` and `paper.datasets` might agree on
a wrong layout.
"""

import itertools
import re
import shutil
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
from torch.utils.data import DataLoader, default_collate

pytestmark = pytest.mark.paper

EVERY = pytest.mark.parametrize("name", list(FOLDERS))
MEAN = np.array([0.485, 0.456, 0.406]).reshape(3, 1, 1)
STD = np.array([0.229, 0.224, 0.225]).reshape(3, 1, 1)
NORMAL = np.float32([0.6, 0, 0.8]).reshape(3, 1, 1)
GREY = np.full((6, 6, 3), 128)
ORDINALS = np.arange(1, 37).reshape(6, 6)
ONES = np.ones((6, 6), np.uint8)
LABELS = np.random.default_rng(0).choice([11, 12, 13], (6, 6)).astype(np.uint16)
"""PASCAL-Context labels: 12 has no normals and, as the mean of 11 and 13, can cancel edges."""


def write(folder, files):
    """Writes pictures, arrays, MATLAB structures, text or bytes, by the suffixes of the names."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif path.suffix == ".txt":
            path.write_text(content)
        elif path.suffix == ".npy":
            np.save(path, content)
        elif path.suffix == ".mat":
            savemat(path, content if isinstance(content, dict) else {"LabelMap": content})
        else:
            Image.fromarray(np.asarray(content, np.uint8)).save(path, quality=100)


def write_nyud(root, name, picture, **arrays):
    """Writes a picture and its targets; by default, one class, depth 1, no normals, no edges."""
    blank = np.zeros(picture.shape, np.float32)
    arrays = {"depth": blank[..., 0] + 1, "normals": blank, "edge": blank[..., 0]} | arrays
    segmentation = arrays.pop("segmentation", blank[..., 0] + 1)
    files = {f"images/{name}.jpg": picture, f"segmentation/{name}.png": segmentation}
    files |= {f"{part}/{name}.npy": array for part, array in arrays.items()}
    write(root / "NYUD_MT", files)


def structure(fields, *rows):
    return np.array([list(rows)], [(field, object) for field in fields])


def parts(*things):
    """The annotation of objects with a class, a mask, and the names and masks of their parts."""
    rows = []
    for index, mask, named in things:
        masks = structure(["part_name", "mask"], *named) if named else np.zeros((0, 0))
        rows.append(("thing", float(index), mask, masks))
    objects = structure(["class", "class_ind", "mask", "parts"], *rows)
    return {"anno": structure(["imname", "objects"], ("name", objects))}


def row(n, columns=slice(None)):
    mask = 0 * ONES
    mask[n, columns] = 1
    return mask


def write_cityscapes(root, split, index):
    """Pictures get brighter from left to right, and depth identifies each pixel."""
    picture = np.tile(np.arange(6, dtype="f4") / 10, (6, 1))[..., None].repeat(3, 2)
    depth = np.where(ORDINALS == 36, 0, ORDINALS / 100).astype("f4")[..., None]
    arrays = {"image": picture, "label_7": ORDINALS % 8 - 1.0, "depth": depth}
    files = {f"{split}/{part}/{index}.npy": array for part, array in arrays.items()}
    write(root / "cityscapes", files)


@pytest.fixture
def root(tmp_path) -> Path:
    """Data sets: NYUD's n1 and n2 are equal; in PASCAL, only p1 has a person and VOC12 classes."""
    normals = np.broadcast_to(NORMAL, (3, 6, 6)).transpose(1, 2, 0).copy()
    normals[0] = 0
    for name in ("n1", "n2", "n3"):
        segmentation = np.where(ORDINALS == 36, 0, ORDINALS)
        depth = np.where(ORDINALS == 1, 0, ORDINALS / 8).astype("f4")
        arrays = {"depth": depth, "normals": normals, "edge": row(slice(None), 2).astype("f4")}
        write_nyud(tmp_path, name, GREY, segmentation=segmentation, **arrays)
    write(tmp_path / "NYUD_MT" / "gt_sets", {"train.txt": "n1\nn2\n", "val.txt": "n3\n"})
    sal = 127 * row(0, 0) + 128 * row(0, 1) + 255 * row(0, 2)
    person = 15, ONES, [("hair", row(0, [0, 1])), ("rfoot", row(5))]
    files = {
        "semseg/VOC12/p1.png": 20 * row(1, 1) + 255 * row(2, 2),
        "human_parts/p1.mat": parts((5, ONES, [("tail", row(5))]), person, (15, ONES, [])),
        "human_parts/p2.mat": parts((5, ONES, [])),
        "ImageSets/Context/train.txt": "p1\np2\n",
        "ImageSets/Context/val.txt": "p2\n",
    }
    for name in ("p1", "p2"):
        files |= {
            f"JPEGImages/{name}.jpg": GREY,
            f"semseg/pascal-context/{name}.png": 3 * ONES,
            f"normals_distill/{name}.png": np.full((6, 6, 3), (255, 0, 255)),
            f"sal_distill/{name}.png": sal,
            f"pascal-context/trainval/{name}.mat": LABELS,
        }
    write(tmp_path / "PASCAL_MT", files)
    for split, index in (("train", 0), ("train", 1), ("val", 0)):
        write_cityscapes(tmp_path, split, index)
    return tmp_path


def open_small(name, root, split="train", **options):
    return open_dataset(name, root, split, size=(6, 6), **options)


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def close(one, other) -> bool:
    return all(torch.allclose(x.float(), other[part].float(), atol=1e-5) for part, x in one.items())


def equal(actual, expected):
    expected = torch.as_tensor(np.asarray(expected), dtype=actual.dtype)
    torch.testing.assert_close(actual, expected.expand_as(actual))


def edges_of(labels, mode="reflect"):
    """Edges before thinning; by default, padding does not repeat the border pixel."""
    padded = np.pad(labels.astype(int), 1, mode=mode)
    neighbours = padded[:-2, 1:-1] + padded[2:, 1:-1] + padded[1:-1, :-2] + padded[1:-1, 2:]
    return neighbours != 4 * labels.astype(int)


GREYS = (128 / 255 - MEAN) / STD
EXPECTED = {
    "nyud": {
        "picture": GREYS,
        "semseg": np.where(ORDINALS == 36, 255, ORDINALS - 1),
        "depth": np.where(ORDINALS == 1, 255, ORDINALS / 8),
        "edge": row(slice(None), 2),
        "normals": np.where(row(0), 255, NORMAL),
    },
    "pascal": {
        "picture": GREYS,
        "semseg": 20 * row(1, 1) + 255 * row(2, 2),
        "human_parts": row(0, [0, 1]) + 6 * row(5),
        "sal": row(0, [1, 2]),
        "normals": np.where(LABELS == 12, 255, np.reshape([1, -1, 1], (3, 1, 1)) / 3**0.5),
        "edge": thin(edges_of(LABELS)),
    },
    "cityscapes": {
        "picture": np.arange(6) / 10,
        "semseg": np.where(ORDINALS % 8 == 0, 255, ORDINALS % 8 - 1),
        "depth": np.where(ORDINALS == 36, 255, ORDINALS / 100),
    },
}


@EVERY
def test_items(root, name):
    data = open_small(name, root)
    item, tasks = data[0], TASKS[name]
    assert (len(data), data.tasks, list(item)) == (2, tasks, ["picture", *tasks])
    assert same(item, data[-2])
    shapes = {"picture": (3, 6, 6)}
    for task, target in tasks.items():
        shapes[task] = (6, 6) if target.kind == "classes" else (target.channels, 6, 6)
    for part, expected in EXPECTED[name].items():
        assert item[part].shape == shapes[part]
        assert item[part].dtype == (torch.int64 if len(shapes[part]) == 2 else torch.float32)
        equal(item[part], expected)
    assert default_collate([*data])["picture"].shape == (2, 3, 6, 6)
    with pytest.raises(IndexError, match="index 2 is out of range"):
        data[2]
    (published,) = open_dataset(name, root, "val")
    assert published["picture"].shape[1:] == SIZES[name]


def test_the_second_item_of_pascal(root):
    """The segmentation is from pascal-context; without a person, all human parts are unknown."""
    assert (thin(edges_of(LABELS)) != thin(edges_of(LABELS, "symmetric"))).any()
    item = open_small("pascal", root)[1]
    equal(item["semseg"], 3)
    equal(item["human_parts"], 255)


def test_classes_and_parts():
    """Left and right parts have the same class, so a flip need not exchange them."""
    groups, classes = datasets.PARTS, datasets.NORMALS_CLASSES
    assert len(groups) == 24
    assert {*groups.values()} == {1, 2, 3, 4, 5, 6}
    assert all(groups[f"l{p[1:]}"] == groups[p] for p in groups if p.startswith("r"))
    assert list(classes) == sorted(set(classes))
    # A bag, fork, person, table, tvmonitor and wall; not aeroplane, grass, sky, train or unknown.
    assert {9, 165, 284, 397, 427, 440} <= {*classes}
    assert not {2, 187, 360, 416, 431} & {*classes}


# By scale, the indices of the pixels that six output pixels sample: in a zoom about the center, and
# in a crop at the start.
ZOOMS = {1.0: [0, 1, 2, 3, 4, 5], 1.2: [0, 1, 2, 3, 4, 5], 1.5: [1, 2, 2, 3, 4, 4]}
CROPS = {1.0: [0, 1, 2, 3, 4, 5], 1.2: [0, 1, 2, 2, 3, 4], 1.5: [0, 1, 1, 2, 3, 3]}


@pytest.mark.parametrize(("name", "indices"), [("nyud", ZOOMS), ("cityscapes", CROPS)])
def test_augmentation(root, name, indices):
    data, plain, candidates = open_small(name, root, augment=True), open_small(name, root)[0], {}
    for scale, taken in indices.items():
        room = range(6 - max(taken) if name == "cityscapes" else 1)
        for top, left, flip in itertools.product(room, room, (1, -1)):
            rows, columns = np.ix_([top + i for i in taken], [left + i for i in taken][::flip])
            item = {part: value[..., rows, columns] for part, value in plain.items()}
            item["depth"] = torch.where(item["depth"] == 255, 255, item["depth"] / scale)
            if name == "nyud":
                sides = item["normals"][0]
                sides[sides != 255] *= flip
            else:
                size = {1.0: 6, 1.2: 5, 1.5: 4}[scale]
                line = (left + (torch.arange(6) + 0.5) * size / 6 - 0.5).clamp(0, 5) / 10
                item["picture"] = (line if flip == 1 else line.flip(0)).expand(3, 6, 6)
            candidates[scale, top, left, flip] = item
    seen = set()
    for epoch in range(120):
        data.set_epoch(epoch)
        item = data[0]
        [drawn] = [drawn for drawn, other in candidates.items() if close(item, other)]
        seen.add(drawn)
    for part in (slice(3), slice(None, None, 3)):  # Not every crop is drawn with every flip.
        assert {drawn[part] for drawn in seen} == {drawn[part] for drawn in candidates}


def test_parts_that_a_zoom_leaves_outside_are_unknown(root):
    """The zoom by 1.5 excludes head and feet; all pixels are then unknown, as without parts."""
    data, seen = open_small("pascal", root, augment=True), set()
    for epoch in range(20):
        data.set_epoch(epoch)
        seen.add(tuple(data[0]["human_parts"].unique().tolist()))
    assert seen == {(0, 1, 6), (255,)}


@EVERY
def test_draws_depend_on_seed_epoch_and_index_alone(root, name):
    """Workers draw the same numbers, even if they were started before the epoch."""

    def epochs(numbers, seed=0, augment=True, **options):
        data, batches = open_small(name, root, seed=seed, augment=augment), []
        loader = DataLoader(data, batch_size=2, **options)
        for number in numbers:
            data.set_epoch(number)
            batches += loader
        return batches

    first = epochs(range(8))
    np.random.seed(1)
    torch.manual_seed(1)
    assert all(map(same, reversed(epochs(reversed(range(8)))), first))
    assert not all(same(batch, first[0]) for batch in first[:4])
    assert not all(map(same, epochs(range(8), seed=1), first))
    assert any(not torch.equal(*batch["semseg"]) for batch in first)  # NYUD: only draws differ.
    assert same(*epochs(range(2), augment=False))
    for persistent in (False, True) if name == "nyud" else ():
        options = {"num_workers": 1, "persistent_workers": persistent}
        assert all(map(same, epochs(range(4), **options), first))


def test_resized_targets(root):
    """Size 2 x 3 takes rows 1 and 4 and columns 1, 3 and 5; size 12 x 12 repeats all pixels."""
    plain = EXPECTED["nyud"]
    item = open_dataset("nyud", root, "train", size=(2, 3))[0]
    for task in ("semseg", "depth"):
        equal(item[task], plain[task][np.ix_([1, 4], [1, 3, 5])])
    equal(item["edge"], 0)
    equal(item["normals"], NORMAL)
    large = open_dataset("nyud", root, "train", size=(12, 12))[0]
    for task in ("depth", "normals"):  # Interpolated from known rows alone.
        equal(large[task], plain[task].repeat(2, -2).repeat(2, -1))


def test_interpolation(root):
    """Interpolated normals have length 1; bicubic interpolation at an edge does not overshoot."""
    write_nyud(root, "n3", GREY[:1, :2], normals=np.float32([[(1, 0, 0), (0, 0, 1)]]))
    item = open_dataset("nyud", root, "val", size=(1, 4))[0]
    between = np.array([3, 0, 1]) / 10**0.5
    equal(item["normals"][:, 0].T, [(1, 0, 0), between, between[::-1], (0, 0, 1)])

    write_nyud(root, "n3", 255 * np.arange(2).repeat(8)[None, :, None].repeat(8, 0).repeat(3, 2))
    item = open_dataset("nyud", root, "val", size=(16, 32))[0]
    picture = item["picture"] * torch.tensor(STD) + torch.tensor(MEAN)
    assert picture.min() > -1e-6
    assert picture.max() < 1 + 1e-6
    equal(picture[:, :, 15], 0.2265625)  # Bicubic, a = -0.75, a quarter pixel from the edge.


OPTIONAL = "/(val|n3|VOC12|pascal-context/p1.png|image/1.npy)"
"""Files that may be missing: the other split, one of two segmentations, the last picture."""


@EVERY
def test_missing_files(root, name):
    folder = root / FOLDERS[name]
    for path in [folder, *folder.rglob("*")]:
        moved = path.rename(root / "moved")
        if re.search(OPTIONAL, str(path.relative_to(root))):
            open_small(name, root)
        else:
            with pytest.raises(FileNotFoundError, match=f"{path}.*the README of {SOURCES[name]}"):
                open_small(name, root)
        moved.rename(path)


def test_empty_splits(root):
    write(root, {"NYUD_MT/gt_sets/train.txt": "\n", "PASCAL_MT/ImageSets/Context/val.txt": ""})
    for number in range(2):
        (root / f"cityscapes/train/image/{number}.npy").unlink()
    for name, split in (("nyud", "train"), ("pascal", "val"), ("cityscapes", "train")):
        with pytest.raises(ValueError, match=f"{FOLDERS[name]}/.* (lists|contains) no pictures"):
            open_small(name, root, split)


DEPTH, WHOLE, FLOAT = "0 to 255", "whole numbers", "floating point"
WRONG = {
    "NYUD_MT/images/n1.jpg": None,
    "NYUD_MT/segmentation/n1.png": {41: "0 to 40"},
    "NYUD_MT/depth/n1.npy": {"i4": FLOAT, 255.0: DEPTH, -1.0: DEPTH, np.nan: DEPTH},
    "NYUD_MT/normals/n1.npy": {"u1": FLOAT, 2.0: "-1.001 to 1.001"},
    "NYUD_MT/edge/n1.npy": {"c8": FLOAT, 255.0: "0 to 1"},
    "PASCAL_MT/JPEGImages/p1.jpg": None,
    "PASCAL_MT/human_parts/p1.mat": None,
    "PASCAL_MT/semseg/VOC12/p1.png": {21: "0 to 20 or 255"},
    "PASCAL_MT/pascal-context/trainval/p1.mat": {460: "0 to 459", 1.5: WHOLE},
    "PASCAL_MT/normals_distill/p1.png": {},
    "PASCAL_MT/sal_distill/p1.png": {},
    "cityscapes/train/image/0.npy": {"u1": FLOAT, 9.0: "-0.001 to 1.001"},
    "cityscapes/train/label_7/0.npy": {"c8": "integer", 7: "-1 to 6", 0.5: WHOLE},
    "cityscapes/train/depth/0.npy": {"i4": FLOAT, np.inf: "-1 to 255"},
}
"""By file: wrong dtypes and values, each with the allowed ones; None if any shape is allowed."""


def read(path):
    if path.suffix == ".npy":
        return np.load(path)
    return loadmat(path)["LabelMap"] if path.suffix == ".mat" else np.asarray(Image.open(path))


@pytest.mark.parametrize(("file", "wrong"), WRONG.items(), ids=WRONG)
def test_wrong_files(root, file, wrong):
    """Refuses truncated files, and files with a wrong format, shape, dtype or value."""
    path, whole = root / file, (root / file).read_bytes()
    name = next(name for name in FOLDERS if file.startswith(FOLDERS[name]))
    cases = [(part, "cannot be read") for part in (whole[: len(whole) // 2], b"not the format")]
    if wrong is not None:
        right = read(path)
        cases.append((right[..., :-1], f"has shape {[*right[..., :-1].shape]}, expected"))
    for value, allowed in (wrong or {}).items():
        if isinstance(value, str):
            cases.append((right.astype(value), f"has dtype {np.dtype(value)}, expected {allowed}"))
        else:
            array = np.full(right.shape, value, np.result_type(right, type(value)))
            cases.append((array, f"contains {value}, expected {allowed}"))
    for content, message in cases:
        write(root, {file: content})
        with pytest.raises(ValueError, match=re.escape(f"{path} {message}")):
            open_small(name, root)[0]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("pascal-context/trainval/p1.mat", {"Map": ONES}, "LabelMap"),
        ("human_parts/p1.mat", {"other": ONES}, "anno"),
        ("human_parts/p1.mat", parts((15, ONES, [("tail", ONES)])), "unknown part 'tail'"),
        ("human_parts/p1.mat", parts((15, ONES, [("head", ONES[1:])])), r"shape \[5, 6\]"),
    ],
)
def test_wrong_structures(root, file, content, message):
    write(root / "PASCAL_MT", {file: content})
    with pytest.raises(ValueError, match=f"{file}.*{message}"):
        open_small("pascal", root)[0]


def test_what_cityscapes_may_contain(root):
    """Pictures slightly outside [0, 1], inverse depth below 0, an archiver's files, many files."""
    for index in range(11):
        write_cityscapes(root, "train", index)
        write(root, {f"cityscapes/train/image/{index}.npy": np.full((6, 6, 3), index / 10, "f4")})
    picture, depth = np.full((6, 6, 3), 1.0000001, "f4"), np.full((6, 6, 1), -0.0039, "f4")
    files = {"image/10.npy": picture, "depth/10.npy": depth, "image/._0.npy": picture}
    write(root / "cityscapes" / "train", files)
    items = [*open_small("cityscapes", root)]
    equal(torch.stack([item["picture"] for item in items]), np.arange(11).reshape(11, 1, 1, 1) / 10)
    equal(items[10]["depth"], -0.0039)
    assert items[10]["picture"].max() == 1


@EVERY
def test_fingerprints_cover_pictures_and_splits(root, tmp_path, name):
    first, copied = datasets.fingerprint(name, root), tmp_path / "copied"
    shutil.copytree(root, copied)
    assert datasets.fingerprint(name, copied) == first
    dataset = open_small(name, copied)
    path = dataset.picture_file(dataset.names[0])
    path.write_bytes(path.read_bytes() + b" ")
    assert datasets.fingerprint(name, copied) != first


KITTI = "name must be one of nyud, pascal, cityscapes, got 'kitti'"


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    [
        (
            open_small,
            {"name": "kitti"},
            KITTI,
        ),
        (open_small, {"split": "test"}, "split must be 'train' or 'val', got 'test'"),
        (open_small, {"seed": -1}, "seed must not be negative, got -1"),
        (open_dataset, {"split": "val", "size": (0, 4)}, r"size must be .*, got \(0, 4\)"),
        (
            make_small,
            {"name": "kitti"},
            KITTI,
        ),
        (make_small, {"train": 0}, "train, val and size must be positive, got 0"),
        (make_small, {"size": (0, 8)}, "must be positive"),
    ],
)
def test_bad_arguments(root, call, arguments, message):
    with pytest.raises(ValueError, match=message):
        call(**{"name": "nyud", "root": root, **arguments})


@pytest.mark.parametrize(
    ("name", "size"), [("nyud", (32, 40)), ("pascal", (64, 64)), ("cityscapes", (32, 64))]
)
def test_small_data(tmp_path, name, size):
    make_small(tmp_path, name, train=8, val=4, size=size)
    assert [path.name for path in tmp_path.iterdir()] == [FOLDERS[name]]
    train, val = (open_dataset(name, tmp_path, split, size=size) for split in ("train", "val"))
    assert (len(train), len(val)) == (8, 4)
    items, values = [*train, *val], {}
    assert all(item["picture"].std() > 0.05 for item in items)
    for task, target in TASKS[name].items():
        known = [item[task][item[task] != IGNORE] for item in items]
        values[task] = {*torch.cat(known).unique().tolist()}
        least = {"normals": 3 * 0.4, "human_parts": -1}.get(task, 0.6)
        assert min(map(len, known)) > least * size[0] * size[1]
        if target.kind == "normals":
            equal(torch.cat([part.reshape(3, -1) for part in known], 1).norm(dim=0), 1)
        elif target.kind in ("edges", "saliency"):
            assert values[task] == {0, 1}
    assert values["semseg"] == {*range(7 if name == "cityscapes" else 6)}
    if name == "pascal":  # Every fourth picture has no parts.
        groups = [{*item["human_parts"].unique().tolist()} for item in items]
        assert groups[3::4] == [{IGNORE}] * 3
        assert set.union(*groups) == {*range(7), IGNORE}
        for number in range(12):  # The published reader reads fields by position.
            path = tmp_path / "PASCAL_MT" / "human_parts" / f"{number:06d}.mat"
            thing = loadmat(path)["anno"][0][0][1][0][0]
            assert int(thing[1][0][0]) == (5 if number % 4 == 3 else 15)
            assert thing[2].shape == size
    else:  # The photograph's disparity is at most 59.9 pixels.
        most = {"nyud": 2, "cityscapes": 0.5}[name]
        assert 0 < min(values["depth"]) < max(values["depth"]) <= most


def test_small_data_that_exist(tmp_path):
    """A second call with the same settings changes nothing; other settings or data are refused."""

    def state():
        return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")}

    def make(train):
        make_small(tmp_path, "nyud", train=train, val=1, size=(8, 16))

    make(2)
    before = state()
    make(2)
    with pytest.raises(FileExistsError, match="exists with the settings"):
        make(3)
    assert state() == before
    (tmp_path / "NYUD_MT" / "settings.json").unlink()
    with pytest.raises(FileExistsError, match="no settings of a small data set"):
        make(2)


def test_small_crops_keep_to_their_part(tmp_path, monkeypatch):
    """In a stand-in for the photograph, brightness identifies the region."""
    photograph, scene = stereo.read()
    marked = np.zeros_like(photograph)
    for columns, value in ((slice(230), 80), (slice(250, 490), 160), (slice(510, 740), 240)):
        marked[:, columns] = value
    monkeypatch.setattr(small, "read", lambda: (marked, scene))
    make_small(tmp_path, "cityscapes", train=20, val=20, size=(32, 64))
    for split, values in (("train", [80, 240] * 10), ("val", [160] * 20)):
        data = open_dataset("cityscapes", tmp_path, split, size=(32, 64))
        for item, value in zip(data, values, strict=True):
            equal(item["picture"], value / 255)


def test_interrupted_and_overtaken_small_data(tmp_path, monkeypatch):
    """An interrupted write leaves nothing behind; another process may finish first."""
    write = small._write

    def interrupted(*arguments):
        write(*arguments)
        raise KeyboardInterrupt

    def overtaken(*arguments):
        monkeypatch.undo()
        make_small(tmp_path, "nyud", train=2, val=1)
        write(*arguments)

    monkeypatch.setattr(small, "_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_small(tmp_path, "nyud", train=2, val=1)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(small, "_write", overtaken)
    make_small(tmp_path, "nyud", train=2, val=1)
    assert [path.name for path in tmp_path.iterdir()] == ["NYUD_MT"]
    assert len(open_dataset("nyud", tmp_path, "train")) == 2


# The mean square of the picture; then, for disparity, normals and edges, the mean square of known
# pixels and their fraction.
STEREO = [
    [0.9998006, 1.391189, 0.9309728, 0.3333333, 0.7615045, 0.08323389, 0.9961484],
    [1.019189, 1.377113, 0.9168431, 0.3333333, 0.7242608, 0.1011196, 0.993414],
]


def test_numbers_of_the_stereo_photograph():
    """The demo's records depend on these maps."""
    for scene, expected in zip(stereo.load(), STEREO, strict=True):
        numbers = [scene.picture.double().square().mean().item()]
        for target in scene.targets.values():
            known = target[target != IGNORE].double()
            numbers += [known.square().mean().item(), known.numel() / target.numel()]
        assert numbers == pytest.approx(expected, rel=1e-5)
