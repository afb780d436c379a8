"""A classifier with its convolutions by tapwise: batch norm, activation and residual fused.

python examples/optimized_model.py
"""

from __future__ import annotations

import sys
from typing import Any

try:
    import torch
except ImportError:
    sys.exit("this example needs PyTorch: pip install 'tapwise[torch]'")

import tapwise.torch


class Block(torch.nn.Module):
    """Two convolutions with batch norm, and what goes past them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = torch.nn.BatchNorm2d(channels)
        self.conv2 = torch.nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = torch.nn.BatchNorm2d(channels)

    def forward(self, x: Any) -> Any:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + x)


def main() -> None:
    torch.manual_seed(0)
    stem = torch.nn.Conv2d(3, 32, 3, stride=2, padding=1)
    model = torch.nn.Sequential(stem, torch.nn.ReLU(), Block(32), Block(32), torch.nn.AdaptiveAvgPool2d(1)).eval()
    images = torch.randn(1, 3, 64, 64)
    fast = tapwise.torch.optimize(model, images, report=True)
    with torch.no_grad():
        difference = (fast(images) - model(images)).abs().max()
    print(f"largest difference: {difference:.1e}")
    assert difference < 1e-4


if __name__ == "__main__":
    main()
