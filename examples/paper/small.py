"""Small real data sets in the archives' layouts, from the demo's stereo photograph.

They do not replace the paper's data, but allow whole experiments to run with measured instead of
random targets. `stereo.py` describes where the targets come from.
"""

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from scipy.io import savemat
from stereo import DISPARITY_SCALE, ROWS, read

from paper.datasets import DATASETS, FOLDERS, IGNORE, NORMALS_CLASSES, PARTS, PERSON, nearest

BANDS = 6
SHORT_SIDE = 128
UNKNOWN_CLASS = 360
"""A class of PASCAL-Context without valid normals: the sky."""
BOTTLE = 5
MOST_DISPARITY = 60 / DISPARITY_SCALE
"""The photograph's disparity is at most 59.9 pixels."""
COLUMNS = {"train": (slice(0, 230), slice(510, 740)), "val": (slice(250, 490),)}
"""Regions of the photograph; the columns in between separate the filters of the targets."""
VERSION = 2
"""Increase this number if the same settings write different files."""


@dataclass
class _Maps:
    """The whole photograph, or a crop of it; the arrays are [H, W] or [H, W, 3]."""

    picture: np.ndarray
    """uint8"""
    disparity: np.ndarray
    """In units of 32 pixels; 0 where unknown."""
    band: np.ndarray
    """0 (farthest) to 5 (nearest); -1 where disparity is unknown."""
    normals: np.ndarray
    """0 where unknown."""
    edge: np.ndarray
    low: np.ndarray
    """Whether a pixel is in the lowest fifth of the photograph."""

    def crop(self, top: int, left: int, side: tuple[int, int], size: tuple[int, int]) -> "_Maps":
        """A crop of `side` pixels, reduced to `size`: the picture is filtered, maps are sampled."""
        part = (slice(top, top + side[0]), slice(left, left + side[1]))
        rows = nearest(0, side[0], size[0], side[0])
        columns = nearest(0, side[1], size[1], side[1])
        picture = Image.fromarray(self.picture[part]).resize(size[::-1], Image.Resampling.BICUBIC)
        maps = (self.disparity, self.band, self.normals, self.edge, self.low)
        return _Maps(np.asarray(picture), *(array[part][np.ix_(rows, columns)] for array in maps))


def make_small(
    root: Path, name: str, *, train: int = 32, val: int = 12, size: tuple[int, int] = (64, 64)
) -> None:
    """Writes a small data set that `open_dataset(name, root, ...)` opens.

    Crops have the proportions of `size` and a short side of 128 pixels, or less in a narrower
    region of the photograph. Training crops come alternately from its left and right regions, the
    others from its middle. A second call with the same settings changes nothing. Disparity, in
    units of 32 pixels, is split into six bands of equal area. The targets are

    - nyud: disparity as depth, which is not in meters and grows towards the camera; the bands as
      classes; the demo's normals and edges;
    - pascal: the bands as classes, with the farthest as background; the two nearest bands as
      salient pixels; six directions of the nearest band's slope as "human parts", except in every
      fourth picture and in pictures without that band; normals; edges between bands and around
      unknown regions;
    - cityscapes: the bands and the lowest fifth of the photograph as classes; disparity, scaled to
      [0, 0.5], as inverse depth.

    Args:
        root: The folder in which the data set's folder is made.
        name: "nyud", "pascal" or "cityscapes".
        train: The number of training pictures.
        val: The number of pictures for evaluation.
        size: The height and width of the pictures.

    Raises:
        FileExistsError: The folder exists and was not written with these settings.
        ValueError: The name is unknown, or a number is not positive.

    """
    if name not in DATASETS:
        raise ValueError(f"name must be one of {', '.join(DATASETS)}, got {name!r}")
    if min(train, val, *size) < 1:
        raise ValueError(f"train, val and size must be positive, got {train}, {val} and {size}")
    settings = {"name": name, "train": train, "val": val, "size": list(size), "version": VERSION}
    folder = Path(root) / FOLDERS[name]
    if _exists(folder, settings):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Readers ignore this name; an interrupted write leaves nothing else behind.
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        whole = temporary / folder.name
        _write(whole, name, {"train": train, "val": val}, size)
        (whole / "settings.json").write_text(json.dumps(settings) + "\n")
        try:
            whole.rename(folder)
        except OSError:
            # Another process may have finished first.
            if not _exists(folder, settings):
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _exists(folder: Path, settings: dict[str, Any]) -> bool:
    if not folder.exists():
        return False
    path = folder / "settings.json"
    found = json.loads(path.read_text()) if path.is_file() else None
    if found != settings:
        raise FileExistsError(
            f"{folder} exists with "
            + ("no settings of a small data set" if found is None else f"the settings {found}")
            + f", expected {settings}"
        )
    return True


def _write(folder: Path, name: str, counts: dict[str, int], size: tuple[int, int]) -> None:
    maps = _measure()
    draws = np.random.default_rng(0)
    write = WRITERS[name]
    number = 0
    for split, parts in COLUMNS.items():
        height = ROWS.stop - ROWS.start
        width = min(columns.stop - columns.start for columns in parts)
        factor = min(SHORT_SIDE / min(size), height / size[0], width / size[1])
        side = (max(1, int(size[0] * factor)), max(1, int(size[1] * factor)))
        names = []
        for index in range(counts[split]):
            top = ROWS.start + int(draws.integers(height - side[0] + 1))
            left = parts[index % len(parts)].start + int(draws.integers(width - side[1] + 1))
            names.append(write(folder, split, index, number, maps.crop(top, left, side, size)))
            number += 1
        if name in SPLITS:
            path = _made(folder / SPLITS[name] / f"{split}.txt")
            path.write_text("".join(f"{name}\n" for name in names))


def _measure() -> _Maps:
    picture, scene = read()
    disparity = scene.targets["disparity"][0].numpy()
    scanned = disparity != IGNORE
    limits = np.quantile(disparity[scanned], np.arange(1, BANDS) / BANDS)
    normals = scene.targets["normals"].numpy().transpose(1, 2, 0)
    low = np.zeros(scanned.shape, bool)
    low[scanned.shape[0] * 4 // 5 :] = True
    return _Maps(
        picture,
        np.where(scanned, disparity, 0),
        np.where(scanned, np.searchsorted(limits, disparity), -1),
        np.where(normals != IGNORE, normals, 0),
        # The format has no label for unknown pixels, so only known edges are marked.
        scene.targets["edges"][0].numpy() == 1,
        low,
    )


def _made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _png(path: Path, array: np.ndarray) -> None:
    Image.fromarray(array.astype(np.uint8)).save(_made(path))


def _npy(path: Path, array: np.ndarray) -> None:
    np.save(_made(path), array)


def _write_nyud(folder: Path, split: str, index: int, number: int, maps: _Maps) -> str:
    name = f"{number:04d}"
    Image.fromarray(maps.picture).save(_made(folder / "images" / f"{name}.jpg"), quality=95)
    _png(folder / "segmentation" / f"{name}.png", maps.band + 1)
    _npy(folder / "depth" / f"{name}.npy", maps.disparity.astype(np.float32))
    _npy(folder / "normals" / f"{name}.npy", maps.normals.astype(np.float32))
    _npy(folder / "edge" / f"{name}.npy", maps.edge.astype(np.float32))
    return name


def _write_pascal(folder: Path, split: str, index: int, number: int, maps: _Maps) -> str:
    name = f"{number:06d}"
    known = maps.band >= 0
    Image.fromarray(maps.picture).save(_made(folder / "JPEGImages" / f"{name}.jpg"), quality=95)
    _png(folder / "semseg" / "VOC12" / f"{name}.png", np.where(known, maps.band, IGNORE))
    _png(folder / "sal_distill" / f"{name}.png", np.where(maps.band >= BANDS - 2, 255, 0))
    _png(folder / "normals_distill" / f"{name}.png", np.rint((maps.normals + 1) / 2 * 255))
    classes = np.array(NORMALS_CLASSES[:BANDS])[maps.band]
    classes = np.where(known & maps.normals.any(-1), classes, UNKNOWN_CLASS)
    path = _made(folder / "pascal-context" / "trainval" / f"{name}.mat")
    savemat(path, {"LabelMap": classes.astype(np.uint16)}, do_compression=True)

    person = index % 4 != 3
    mask = maps.band == BANDS - 1
    thing = (
        "person" if person else "bottle",
        float(PERSON if person else BOTTLE),
        mask.astype(np.uint8),
        _structs(("part_name", "mask"), _slopes(maps, mask)) if person else np.zeros((0, 0)),
    )
    things = _structs(("class", "class_ind", "mask", "parts"), [thing])
    anno = _structs(("imname", "objects"), [(name, things)])
    path = _made(folder / "human_parts" / f"{name}.mat")
    savemat(path, {"anno": anno}, do_compression=True)
    return name


def _slopes(maps: _Maps, mask: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Splits the mask into six sectors by slope direction; each gets a part name of one group."""
    names = {group: part for part, group in PARTS.items()}
    angle = np.arctan2(maps.normals[..., 1], maps.normals[..., 0])  # In [-pi, pi].
    sector = np.clip(np.floor((angle + np.pi) / (2 * np.pi) * 6), 0, 5).astype(int) + 1
    mask = mask & maps.normals.any(-1)
    return [
        (names[group], (mask & (sector == group)).astype(np.uint8))
        for group in range(1, 7)
        if (mask & (sector == group)).any()
    ]


def _structs(fields: tuple[str, ...], rows: list[tuple[object, ...]]) -> np.ndarray:
    """A structure array [1, rows], for `savemat`."""
    return np.array([rows], [(field, object) for field in fields])


def _write_cityscapes(folder: Path, split: str, index: int, number: int, maps: _Maps) -> str:
    folder = folder / split
    classes = np.where((maps.band >= 0) & maps.low, BANDS, maps.band)
    _npy(folder / "image" / f"{index}.npy", maps.picture.astype(np.float32) / 255)
    _npy(folder / "label_7" / f"{index}.npy", classes.astype(np.float32))
    depth = maps.disparity * (0.5 / MOST_DISPARITY)
    _npy(folder / "depth" / f"{index}.npy", depth[..., None].astype(np.float32))
    return str(index)


WRITERS: dict[str, Callable[[Path, str, int, int, _Maps], str]] = {
    "nyud": _write_nyud,
    "pascal": _write_pascal,
    "cityscapes": _write_cityscapes,
}
SPLITS = {"nyud": "gt_sets", "pascal": "ImageSets/Context"}
