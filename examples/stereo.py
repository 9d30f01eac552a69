"""Three dense tasks from one stereo photograph: Middlebury's 'Motorcycle', with scanned disparity.

scikit-image contains the photograph. The left picture is the input; the targets are

- disparity, in units of 32 pixels, where it was scanned (kind "depth"; it grows towards the
  camera);
- surface normals: (-dx, -dy, 1) divided by its length, where (dx, dy) is four times the slope of
  the smoothed disparity in pixels per pixel, where the scan is dense;
- edges: where disparity jumps by more than 2 pixels within 3 x 3.

Training crops come from the left region of the picture; evaluation uses the right region. The
columns in between separate the filters of the targets.
"""

from dataclasses import dataclass

import numpy as np
import torch
from paper.tasks import ANGLES, IGNORE, Measure, Task
from scipy import ndimage
from skimage.data import stereo_motorcycle
from torch import Tensor

TRAIN_COLUMNS = slice(0, 480)
TEST_COLUMNS = slice(500, 740)
ROWS = slice(0, 496)  # A multiple of the network's stride.
TASKS = {
    "disparity": Task("depth", 1),
    "normals": Task("normals", 3),
    "edges": Task("edges", 1),
}
MEASURES = [
    Measure("disparity", "rmse", "rmse↓", 2, lower=True, counts=True),
    Measure("disparity", "abs_rel", "abs rel↓", 3, lower=True, counts=False),
    *ANGLES,
    Measure("edges", "F", "F↑", 2, lower=False, counts=True),
]
DISPARITY_SCALE = 32.0


@dataclass
class Scene:
    """A picture [3, H, W], and each task's target [C, H, W], which is 255 where unknown."""

    picture: Tensor
    targets: dict[str, Tensor]

    def crop(self, rows: slice, columns: slice) -> "Scene":
        """A region of the scene."""
        return Scene(
            self.picture[:, rows, columns],
            {task: target[:, rows, columns] for task, target in self.targets.items()},
        )


def stack(scenes: list[Scene]) -> Scene:
    """Scenes of one size as a batch, with a leading dimension."""
    return Scene(
        torch.stack([scene.picture for scene in scenes]),
        {task: torch.stack([scene.targets[task] for scene in scenes]) for task in TASKS},
    )


def read() -> tuple[np.ndarray, Scene]:
    """The whole photograph, uint8 [H, W, 3], and its scene."""
    left, _, disparity = stereo_motorcycle()
    scanned = np.isfinite(disparity)
    # Holes get the nearest scanned pixel's value, since filters need values everywhere.
    holes, nearest = ndimage.distance_transform_edt(~scanned, return_indices=True)
    filled = disparity[tuple(nearest)]

    smooth = ndimage.gaussian_filter(filled, 1.5)
    slope_y, slope_x = np.gradient(smooth)
    normals = np.stack([-4 * slope_x, -4 * slope_y, np.ones_like(smooth)])
    normals /= np.linalg.norm(normals, axis=0)
    jump = ndimage.maximum_filter(filled, 3) - ndimage.minimum_filter(filled, 3)

    picture = left.astype(np.float32) / 255
    picture = (picture - picture.mean((0, 1))) / picture.std((0, 1))

    def maps(array: np.ndarray, known: np.ndarray | bool = True) -> Tensor:
        array = np.where(known, array, IGNORE)
        return torch.tensor(array.astype(np.float32)).reshape(-1, *scanned.shape)

    scene = Scene(
        maps(picture.transpose(2, 0, 1)),
        {
            "disparity": maps(filled / DISPARITY_SCALE, scanned),
            "normals": maps(normals, ndimage.binary_erosion(scanned, iterations=2)),
            # Jumps cause holes, so edges count as known up to two pixels into a hole.
            "edges": maps(jump > 2, holes <= 2),
        },
    )
    return left, scene


def load() -> tuple[Scene, Scene]:
    """The regions for training and for evaluation."""
    _, scene = read()
    return scene.crop(ROWS, TRAIN_COLUMNS), scene.crop(ROWS, TEST_COLUMNS)


class Crops:
    """Random training crops, the same for every method with the same seed.

    Args:
        scene: The scene to crop.
        size: The height and width of crops.
        batch: The number of crops in a batch, over all ranks.
        seed: The seed of the crops, equal on all ranks.
        rank: The index of this rank.
        ranks: The number of ranks.

    Raises:
        ValueError: The batch is not divisible by the number of ranks.

    """

    def __init__(
        self, scene: Scene, size: int, batch: int, seed: int, rank: int = 0, ranks: int = 1
    ) -> None:
        if batch % ranks:
            raise ValueError(
                f"batch must be divisible by the number of ranks, got {batch} crops for {ranks}"
            )
        self.scene = scene
        self.size = size
        self.batch = batch
        self._part = slice(rank * batch // ranks, (rank + 1) * batch // ranks)
        self._generator = torch.Generator("cpu").manual_seed(seed)

    def _random(self, end: int) -> int:
        return int(torch.randint(end, (), generator=self._generator, device="cpu"))

    def draw(self) -> Scene:
        """Draws the whole batch on every rank; returns the share of this rank."""
        _, height, width = self.scene.picture.shape
        corners = [
            [self._random(limit - self.size + 1) for limit in (height, width)]
            for _ in range(self.batch)
        ]
        return stack(
            [
                self.scene.crop(slice(top, top + self.size), slice(left, left + self.size))
                for top, left in corners[self._part]
            ]
        )
