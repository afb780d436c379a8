"""A small segmentation net with dilated and depthwise convolutions, optimized; images of two sizes.

python examples/segmentation_net.py
"""

from __future__ import annotations

import sys
from typing import Any

try:
    import torch
except ImportError:
    sys.exit("this example needs PyTorch: pip install 'tapwise[torch]'")

from torch import nn

import tapwise.torch


def separable(c: int, k: int, stride: int = 1, dilation: int = 1) -> nn.Sequential:
    """A filter a channel, then a mix of channels."""
    return nn.Sequential(
        nn.Conv2d(c, c, 3, stride, dilation, dilation, groups=c, bias=False), nn.BatchNorm2d(c), nn.ReLU6(),
        nn.Conv2d(c, k, 1, bias=False), nn.BatchNorm2d(k), nn.ReLU6(),
    )  # fmt: skip


class Segmenter(nn.Module):
    """Classes of every pixel, from features at a quarter of the size seen at three distances."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6())
        self.features = nn.Sequential(separable(16, 32, stride=2), separable(32, 32))
        self.distances = nn.ModuleList(separable(32, 32, dilation=distance) for distance in (1, 3, 6))
        self.classify = nn.Conv2d(96, classes, 1)

    def forward(self, x: Any) -> Any:
        features = self.features(self.stem(x))
        seen = torch.cat([distance(features) for distance in self.distances], 1)
        return nn.functional.interpolate(self.classify(seen), size=x.shape[2:], mode="bilinear")


def main() -> None:
    torch.manual_seed(0)
    model = Segmenter(classes=5).eval()
    fast = tapwise.torch.optimize(model, torch.randn(1, 3, 64, 96), memory_format="contiguous")
    print(fast.report)
    for size in ((64, 96), (48, 48)):
        images = torch.randn(2, 3, *size)
        with torch.no_grad():
            found, expected = fast(images), model(images)
        same = (found.argmax(1) == expected.argmax(1)).float().mean()
        print(f"{size[0]} x {size[1]}: {same:.1%} of the pixels in the same class")
        assert torch.allclose(found, expected, rtol=1e-3, atol=1e-4)


if __name__ == "__main__":
    main()
