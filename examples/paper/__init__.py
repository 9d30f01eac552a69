"""The paper's experiments: `make paper TABLE=...`, or `python -m paper` in the parent folder."""

import torchvision_operators

torchvision_operators.define()  # timm and torchmetrics import torchvision.
