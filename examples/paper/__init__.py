"""The paper's experiments: `make paper TABLE=...`, or `python -m paper` in the folder above."""

import torchvision_operators

torchvision_operators.define()  # timm and torchmetrics import torchvision.
