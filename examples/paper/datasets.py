"""NYUD-v2, PASCAL-Context and Cityscapes in the layouts of their multi-task archives.

The repositories in `SOURCES` describe the archives:

- NYUD_MT/: images/{id}.jpg, segmentation/{id}.png, depth/{id}.npy, normals/{id}.npy, edge/{id}.npy,
  gt_sets/{train,val}.txt;
- PASCAL_MT/: JPEGImages/{id}.jpg, semseg/VOC12/{id}.png or else semseg/pascal-context/{id}.png,
  human_parts/{id}.mat, normals_distill/{id}.png, sal_distill/{id}.png,
  pascal-context/trainval/{id}.mat, ImageSets/Context/{train,val}.txt;
- cityscapes/{train,val}/: image/{i}.npy, label_7/{i}.npy, depth/{i}.npy, channels last.
"""

import hashlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from PIL import Image
from scipy import ndimage
from scipy.io import loadmat
from skimage.morphology import thin
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from paper.tasks import IGNORE, TASKS, Task

SOURCES = {
    "nyud": "https://github.com/SimonVandenhende/Multi-Task-Learning-PyTorch",
    "pascal": "https://github.com/SimonVandenhende/Multi-Task-Learning-PyTorch",
    "cityscapes": "https://github.com/lorenmt/mtan",
}
"""The repository whose README describes the archive."""

FOLDERS = {"nyud": "NYUD_MT", "pascal": "PASCAL_MT", "cityscapes": "cityscapes"}
SIZES = {"nyud": (480, 640), "pascal": (512, 512), "cityscapes": (128, 256)}

SCALES = (1.0, 1.2, 1.5)

IMAGENET_MEAN = torch.tensor([0.485, 0.456, 0.406]).reshape(3, 1, 1)
IMAGENET_STD = torch.tensor([0.229, 0.224, 0.225]).reshape(3, 1, 1)

PERSON = 15
"""The class index of a person in the annotations of parts."""

_GROUPS = (
    ("hair", "head", "lear", "lebrow", "leye", "mouth", "nose", "rear", "rebrow", "reye"),
    ("neck", "torso"),
    ("luarm", "ruarm"),
    ("lhand", "llarm", "rhand", "rlarm"),
    ("luleg", "ruleg"),
    ("lfoot", "llleg", "rfoot", "rlleg"),
)
PARTS = {part: group for group, parts in enumerate(_GROUPS, 1) for part in parts}
"""The part names of PASCAL-Part in six groups; 0 is the background."""

CONTEXT_CLASSES = 459

# The classes of PASCAL-Context whose names NYUD has too, except "unknown", plus tvmonitor; from
# data/db_info/{context,nyu}_classes.json in the archive's repository. The normals were predicted by
# a network trained on NYUD, so they are valid for these classes only.
# fmt: off
NORMALS_CLASSES = (
    3, 4, 6, 9, 10, 11, 13, 15, 17, 18, 22, 23, 29, 30, 33, 34, 36, 37, 38, 39, 41, 43, 46, 49,
    50, 51, 53, 55, 56, 59, 61, 62, 65, 66, 68, 69, 72, 73, 78, 83, 84, 85, 87, 88, 95, 96, 101,
    104, 105, 107, 111, 113, 115, 122, 124, 135, 141, 142, 143, 146, 150, 154, 157, 158, 159, 165,
    172, 174, 181, 183, 184, 191, 193, 195, 197, 199, 202, 213, 215, 216, 219, 220, 223, 225, 228,
    230, 232, 233, 238, 239, 242, 243, 246, 250, 251, 252, 255, 260, 261, 263, 269, 272, 273, 275,
    281, 283, 284, 285, 286, 287, 288, 290, 291, 292, 293, 295, 304, 307, 309, 310, 314, 315, 319,
    323, 329, 330, 331, 336, 342, 345, 349, 350, 351, 352, 355, 357, 368, 370, 371, 374, 379, 380,
    383, 384, 397, 401, 403, 405, 407, 408, 411, 412, 413, 414, 417, 419, 421, 423, 427, 429, 430,
    432, 440, 441, 442, 443, 444, 446, 454, 457,
)
# fmt: on


@dataclass(frozen=True)
class Window:
    """The sampled region of a picture, in pixels of the file, and its magnification."""

    top: float
    left: float
    height: float
    width: float
    scale: float = 1.0


def nearest(start: float, length: float, out: int, limit: int) -> np.ndarray:
    """The indices of the pixels that contain the centers of `out` equal intervals, int64 [out].

    Args:
        start: The start of the sampled interval, in pixels.
        length: The length of the sampled interval, in pixels.
        out: The number of indices.
        limit: The number of pixels.

    """
    return np.clip(np.floor(_centres(start, length, out)), 0, limit - 1).astype(np.int64)


def _centres(start: float, length: float, out: int) -> np.ndarray:
    return start + (np.arange(out) + 0.5) * (length / out)


def _interpolated(
    maps: Tensor, window: Window, size: tuple[int, int], mode: Literal["bilinear", "bicubic"]
) -> Tensor:
    """The window of float32 [C, H, W], resampled to `size`."""
    height, width = maps.shape[1:]
    y = torch.from_numpy(2 * _centres(window.top, window.height, size[0]) / height - 1)
    x = torch.from_numpy(2 * _centres(window.left, window.width, size[1]) / width - 1)
    grid = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1).to(maps.dtype)
    return F.grid_sample(
        maps[None], grid[None], mode=mode, padding_mode="border", align_corners=False
    )[0]


class MultiTaskDataset(Dataset[dict[str, Tensor]], ABC):
    """Pictures with a target for each task; create one with `open_dataset`.

    An item contains "picture", float32 [3, H, W], and each task's target in the format of
    `paper.tasks.Task`, with 255 where the target is unknown. A file with a known depth of 255 or
    more is refused.

    Attributes:
        names: The id of each picture.
        tasks: The tasks by name.
        size: The height and width of the items.

    """

    name: ClassVar[str]
    picture_mode: ClassVar[Literal["bilinear", "bicubic"]] = "bicubic"

    def __init__(
        self, root: Path, split: str, size: tuple[int, int] | None, augment: bool, seed: int
    ) -> None:
        self.folder = Path(root) / FOLDERS[self.name]
        self.split = split
        self.tasks: dict[str, Task] = TASKS[self.name]
        self.size = SIZES[self.name] if size is None else (size[0], size[1])
        self.augment = augment
        self.seed = seed
        # In shared memory, since persistent workers hold copies of everything else.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        self._require(self.folder)
        self.names: list[str] = self._find()

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the augmentation; call this before requesting the epoch's first batch.

        A DataLoader's workers see the new epoch too, even persistent ones.
        """
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        """The number of pictures."""
        return len(self.names)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One picture and its targets.

        Raises:
            ValueError: A file is corrupt, or its size, dtype or values are not the published ones.

        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} pictures")
        index %= len(self)
        picture, arrays = self._read(self.names[index])
        window, flip = self._draw(index, *picture.shape[:2])
        return self._finish(self._sample(picture, arrays, window, flip))

    @abstractmethod
    def picture_file(self, name: str) -> Path:
        """The file of a picture."""

    @abstractmethod
    def _find(self) -> list[str]:
        """Checks that all files of the split exist; returns its ids."""

    @abstractmethod
    def _read(self, name: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """A picture, float32 [H, W, 3] in [0, 1], and its targets: [H, W], normals [H, W, 3]."""

    def _window(self, scale: float, height: int, width: int, draws: np.random.Generator) -> Window:
        """A zoom about the center, as in the paper for both NYUD and PASCAL.

        The published code of MTI-Net rotates PASCAL by up to 20 degrees and scales it by a factor
        in [0.75, 1.25] instead.
        """
        return Window(
            (height - height / scale) / 2,
            (width - width / scale) / 2,
            height / scale,
            width / scale,
            scale,
        )

    def _finish(self, item: dict[str, Tensor]) -> dict[str, Tensor]:
        item["picture"] = (item["picture"] - IMAGENET_MEAN) / IMAGENET_STD
        return item

    def _draw(self, index: int, height: int, width: int) -> tuple[Window, bool]:
        if not self.augment:
            return Window(0, 0, height, width), False
        draws = np.random.default_rng((self.seed, int(self._epoch), index))
        scale = SCALES[draws.integers(len(SCALES))]
        flip = bool(draws.random() < 0.5)
        return self._window(scale, height, width, draws), flip

    def _sample(
        self, picture: np.ndarray, arrays: dict[str, np.ndarray], window: Window, flip: bool
    ) -> dict[str, Tensor]:
        """Zooms and resizes the window to the item's size, in a single resampling."""
        height, width = picture.shape[:2]
        whole = window == Window(0, 0, *self.size)
        rows = nearest(window.top, window.height, self.size[0], height)
        columns = nearest(window.left, window.width, self.size[1], width)

        def mirrored(tensor: Tensor) -> Tensor:
            return tensor.flip(-1) if flip else tensor

        pixels = torch.from_numpy(np.ascontiguousarray(picture.transpose(2, 0, 1)))
        if not whole:
            # Clamped, since bicubic interpolation overshoots.
            pixels = _interpolated(pixels, window, self.size, self.picture_mode).clamp(0, 1)
        item = {"picture": mirrored(pixels)}
        for name, task in self.tasks.items():
            array = arrays[name]
            target = torch.from_numpy(array[np.ix_(rows, columns)])
            if task.kind == "classes":
                item[name] = mirrored(target.to(torch.int64))
                continue
            target = target.to(torch.float32)
            if task.kind == "normals":
                known = (target != IGNORE).all(-1)
                if whole:
                    target = target.permute(2, 0, 1)
                else:
                    vectors = np.where((array == IGNORE).any(-1, keepdims=True), 0, array)
                    maps = torch.from_numpy(vectors.transpose(2, 0, 1).astype(np.float32))
                    target = _interpolated(maps, window, self.size, "bilinear")
                    length = target.norm(dim=0)
                    known &= length > 1e-6  # Opposite normals cancel out.
                    target = target / length.clamp(min=1e-6)
                if flip:
                    target = target * torch.tensor([-1.0, 1.0, 1.0]).reshape(3, 1, 1)
                item[name] = mirrored(target.masked_fill(~known, IGNORE)).contiguous()
                continue
            if task.kind == "depth":
                # An object enlarged by the scale is nearer by the same factor.
                target = torch.where(target == IGNORE, target, target / window.scale)
            item[name] = mirrored(target[None]).contiguous()
        return item

    def _require(self, folder: Path) -> None:
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is not a folder; {self._source()}")

    def _source(self) -> str:
        return f"the README of {SOURCES[self.name]} describes the archive"

    def _split_file(self, folder: str) -> list[str]:
        path = self.folder / folder / f"{self.split}.txt"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing; {self._source()}")
        names = path.read_text().split()
        if not names:
            raise ValueError(f"{path} lists no pictures")
        return names

    def _files(self, folder: Path) -> set[str]:
        """The names of a folder's files, from one listing instead of a stat per file."""
        self._require(folder)
        with os.scandir(folder) as entries:
            return {entry.name for entry in entries}

    def _check_files(self, names: list[str], folder: Path, suffix: str) -> None:
        files = self._files(folder)
        for name in names:
            if name + suffix not in files:
                raise FileNotFoundError(f"{folder / (name + suffix)} is missing; {self._source()}")


class NYUD(MultiTaskDataset):
    """NYUD-v2: 795 pictures to train on and 654 to evaluate on."""

    name = "nyud"

    def picture_file(self, name: str) -> Path:
        """A JPEG file."""
        return self.folder / "images" / f"{name}.jpg"

    def _find(self) -> list[str]:
        names = self._split_file("gt_sets")
        self._check_files(names, self.folder / "images", ".jpg")
        self._check_files(names, self.folder / "segmentation", ".png")
        for folder in ("depth", "normals", "edge"):
            self._check_files(names, self.folder / folder, ".npy")
        return names

    def _read(self, name: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        picture = _picture(self.picture_file(name))
        shape = picture.shape[:2]

        path = self.folder / "segmentation" / f"{name}.png"
        labels = _whole_numbers(path, _load(path, _image), shape)
        _check_range(path, labels, 0, self.tasks["semseg"].channels)
        # Label 0 means no class.
        semseg = np.where(labels == 0, IGNORE, labels - 1)

        path = self.folder / "depth" / f"{name}.npy"
        depth = _depth(path, _load(path, np.load), shape)

        path = self.folder / "normals" / f"{name}.npy"
        normals = _floats(path, _load(path, np.load), (*shape, 3))
        _check_range(path, normals, -1.001, 1.001)

        # The published loss counts a value of 0.5 or more as an edge.
        path = self.folder / "edge" / f"{name}.npy"
        edge = _load(path, np.load)
        _check_shape(path, edge, shape)
        _check_dtype(path, edge, "fiub")
        _check_range(path, edge, 0, 1)
        return picture, {
            "semseg": semseg,
            "depth": depth,
            "edge": edge >= 0.5,
            "normals": _unit(normals),
        }


class PASCAL(MultiTaskDataset):
    """PASCAL-Context: 4998 pictures to train on and 5105 to evaluate on."""

    name = "pascal"

    def picture_file(self, name: str) -> Path:
        """A JPEG file."""
        return self.folder / "JPEGImages" / f"{name}.jpg"

    def _find(self) -> list[str]:
        names = self._split_file("ImageSets/Context")
        self._check_files(names, self.folder / "JPEGImages", ".jpg")
        for folder in ("human_parts", "pascal-context/trainval"):
            self._check_files(names, self.folder / folder, ".mat")
        for folder in ("normals_distill", "sal_distill"):
            self._check_files(names, self.folder / folder, ".png")

        folders = [self.folder / "semseg" / part for part in ("VOC12", "pascal-context")]
        files = {folder: self._files(folder) for folder in folders if folder.is_dir()}
        self._semseg: dict[str, Path] = {}
        for name in names:
            file = f"{name}.png"
            for folder in folders:
                if file in files.get(folder, ()):
                    self._semseg[name] = folder / file
                    break
            else:
                raise FileNotFoundError(
                    f"{folders[0] / file} and {folders[1] / file} are missing; {self._source()}"
                )
        return names

    def _read(self, name: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        picture = _picture(self.picture_file(name))
        shape = picture.shape[:2]

        path = self._semseg[name]
        semseg = _whole_numbers(path, _load(path, _image), shape)
        _check_range(path, semseg, 0, self.tasks["semseg"].channels - 1, or_ignore=True)

        path = self.folder / "pascal-context" / "trainval" / f"{name}.mat"
        labels = _whole_numbers(path, _load(path, lambda file: loadmat(file)["LabelMap"]), shape)
        _check_range(path, labels, 0, CONTEXT_CLASSES)
        # The 3 x 3 Laplacian with 4 neighbors; mirroring does not repeat the border pixel.
        edge = thin(ndimage.laplace(labels.astype(np.float64), mode="mirror") != 0)

        path = self.folder / "normals_distill" / f"{name}.png"
        colours = _load(path, _image)
        _check_shape(path, colours, (*shape, 3))
        _check_dtype(path, colours, "u")
        normals = _unit(2 * (colours.astype(np.float32) / 255) - 1)
        normals[~np.isin(labels, NORMALS_CLASSES)] = IGNORE

        path = self.folder / "sal_distill" / f"{name}.png"
        sal = _whole_numbers(path, _load(path, _image), shape) / 255 > 0.5

        path = self.folder / "human_parts" / f"{name}.mat"
        human_parts = np.zeros(shape, np.int64)
        for mask, group in _load(path, _parts):
            _check_shape(path, mask, shape)
            human_parts[mask] = group
        return picture, {
            "semseg": semseg,
            "human_parts": human_parts,
            "sal": sal,
            "normals": normals,
            "edge": edge,
        }

    def _finish(self, item: dict[str, Tensor]) -> dict[str, Tensor]:
        # As in the published code, a picture without human parts after the zoom has no loss.
        if not item["human_parts"].any():
            item["human_parts"].fill_(IGNORE)
        return super()._finish(item)


class Cityscapes(MultiTaskDataset):
    """Cityscapes, 7 classes and inverse depth: 2975 pictures to train on, 500 to evaluate on.

    The pictures are in [0, 1] and not normalized, as in the literature. The augmentation follows
    CAGrad's published code: a random crop of 1 / scale of each side, enlarged bilinearly, with
    depth divided by the scale although it is inverse depth, and a flip. Unlike that code, which
    aligns the corners of the crop, this class aligns pixel centers, as for the other data sets.
    """

    name = "cityscapes"
    picture_mode = "bilinear"

    def picture_file(self, name: str) -> Path:
        """An array file."""
        return self.folder / self.split / "image" / f"{name}.npy"

    def _find(self) -> list[str]:
        folder = self.folder / self.split
        files = self._files(folder / "image")
        count = sum(re.fullmatch(r"\d+\.npy", file) is not None for file in files)
        if not count:
            raise ValueError(f"{folder / 'image'} contains no pictures")
        names = [str(index) for index in range(count)]
        for part in ("image", "label_7", "depth"):
            self._check_files(names, folder / part, ".npy")
        return names

    def _read(self, name: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        folder = self.folder / self.split
        path = self.picture_file(name)
        picture = _load(path, np.load)
        if picture.ndim != 3 or picture.shape[2] != 3:
            raise ValueError(f"{path} has shape {list(picture.shape)}, expected [H, W, 3]")
        _check_dtype(path, picture, "f")
        _check_range(path, picture, -0.001, 1.001)
        shape = picture.shape[:2]

        path = folder / "label_7" / f"{name}.npy"
        labels = _whole_numbers(path, _load(path, np.load), shape)
        _check_range(path, labels, -1, self.tasks["semseg"].channels - 1)

        path = folder / "depth" / f"{name}.npy"
        depth = _load(path, np.load)
        _check_shape(path, depth, (*shape, 1))
        return picture.astype(np.float32).clip(0, 1), {
            "semseg": np.where(labels == -1, IGNORE, labels),
            # As in the published code, only 0 is invalid; an inverse depth may be negative.
            "depth": _depth(path, depth[..., 0], shape, low=-1),
        }

    def _window(self, scale: float, height: int, width: int, draws: np.random.Generator) -> Window:
        rows, columns = int(height / scale), int(width / scale)
        top = int(draws.integers(height - rows + 1))
        left = int(draws.integers(width - columns + 1))
        return Window(top, left, rows, columns, scale)

    def _finish(self, item: dict[str, Tensor]) -> dict[str, Tensor]:
        return item


DATASETS: dict[str, type[MultiTaskDataset]] = {
    dataset.name: dataset for dataset in (NYUD, PASCAL, Cityscapes)
}


def open_dataset(
    name: Literal["nyud", "pascal", "cityscapes"],
    root: Path,
    split: Literal["train", "val"],
    *,
    size: tuple[int, int] | None = None,
    augment: bool = False,
    seed: int = 0,
) -> MultiTaskDataset:
    """A data set of the paper.

    The same (seed, epoch, index) gives the same item, in any process and in any order.

    Args:
        name: "nyud", "pascal" or "cityscapes".
        root: The folder that contains NYUD_MT, PASCAL_MT or cityscapes.
        split: "train" or "val".
        size: The height and width of pictures and targets; None for the published size.
        augment: Whether pictures are enlarged by 1, 1.2 or 1.5 and mirrored with probability 0.5.
        seed: The seed of the augmentation, not negative.

    Raises:
        FileNotFoundError: A folder, the split's file, or a file of one of its pictures is missing.
        ValueError: The name, split, size or seed is invalid, or the split is empty.

    """
    if name not in DATASETS:
        raise ValueError(f"name must be one of {', '.join(DATASETS)}, got {name!r}")
    if split not in ("train", "val"):
        raise ValueError(f"split must be 'train' or 'val', got {split!r}")
    if size is not None and (len(size) != 2 or min(size) < 1):
        raise ValueError(f"size must be a height and a width, got {size}")
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")
    return DATASETS[name](Path(root), split, size, augment, seed)


def fingerprint(name: str, root: Path) -> str:
    """A hash of both splits' picture ids and file sizes, which identifies the data.

    Raises:
        FileNotFoundError: As `open_dataset`.
        ValueError: As `open_dataset`.

    """
    found = hashlib.sha256()
    for split in ("train", "val"):
        dataset = open_dataset(name, root, split)
        for index in dataset.names:
            found.update(f"{split} {index} {dataset.picture_file(index).stat().st_size}\n".encode())
    return found.hexdigest()[:16]


def _load(path: Path, reader: Callable[[Path], Any]) -> Any:
    try:
        return reader(path)
    except FileNotFoundError:
        raise
    except Exception as error:  # Each reader has its own errors for a corrupt file.
        raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _image(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


def _picture(path: Path) -> np.ndarray:
    def read(file: Path) -> np.ndarray:
        with Image.open(file) as image:
            return np.asarray(image.convert("RGB"))

    return _load(path, read).astype(np.float32) / 255


def _parts(path: Path) -> list[tuple[np.ndarray, int]]:
    """The masks of human parts, bool [H, W], each with its group.

    The file has a structure `anno` (name, objects); an object has the fields class, class index,
    mask and parts; a part has a name and a mask. Fields are read by position.
    """
    parts = []
    for thing in loadmat(path)["anno"].ravel()[0][1].ravel():
        if int(thing[1].item()) != PERSON:
            continue
        for part in thing[3].ravel():
            name = str(part[0].item())
            if name not in PARTS:
                raise ValueError(f"unknown part {name!r}")
            parts.append((part[1].astype(bool), PARTS[name]))
    return parts


def _check_shape(path: Path, array: np.ndarray, shape: tuple[int, ...]) -> None:
    # Published code resizes labels of other sizes; in these archives, all have the picture's size.
    if array.shape != shape:
        raise ValueError(
            f"{path} has shape {list(array.shape)}, expected {list(shape)} for a picture of "
            f"{shape[0]} x {shape[1]}"
        )


def _check_dtype(path: Path, array: np.ndarray, kinds: str) -> None:
    if array.dtype.kind not in kinds:
        names = {"f": "floating point", "i": "integer", "u": "unsigned integer", "b": "bool"}
        expected = " or ".join(names[kind] for kind in kinds)
        raise ValueError(f"{path} has dtype {array.dtype}, expected {expected}")


def _check_range(
    path: Path, array: np.ndarray, low: float, high: float, *, or_ignore: bool = False
) -> None:
    inside = (array >= low) & (array <= high)  # False for NaN.
    if or_ignore:
        inside |= array == IGNORE
    if not inside.all():
        allowed = f"{low:g} to {high:g}" + (f" or {IGNORE}" if or_ignore else "")
        raise ValueError(f"{path} contains {array[~inside][0]}, expected {allowed}")


def _whole_numbers(path: Path, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Labels as int64; files of Cityscapes contain floating-point labels."""
    _check_shape(path, array, shape)
    _check_dtype(path, array, "iuf")
    broken = array != np.floor(array)  # True for NaN.
    if broken.any():
        raise ValueError(f"{path} contains {array[broken][0]}, expected whole numbers")
    return array.astype(np.int64)


def _floats(path: Path, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    _check_shape(path, array, shape)
    _check_dtype(path, array, "f")
    return array.astype(np.float32)


def _depth(path: Path, array: np.ndarray, shape: tuple[int, ...], low: float = 0) -> np.ndarray:
    """Depth with 255 for 0, which means unknown; a known depth must be below 255."""
    depth = _floats(path, array, shape)
    _check_range(path, depth, low, np.nextafter(np.float32(IGNORE), np.float32(0)))
    return np.where(depth == 0, np.float32(IGNORE), depth)


def _unit(normals: np.ndarray) -> np.ndarray:
    """Normals of length 1, and 255 where the length is 0."""
    length = np.linalg.norm(normals, axis=-1, keepdims=True)
    return np.where(length == 0, np.float32(IGNORE), normals / np.where(length == 0, 1, length))
