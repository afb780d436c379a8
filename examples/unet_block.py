"""A residual block of a diffusion model's UNet, compiled with and without tapwise.

python examples/unet_block.py
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


class ResidualBlock(nn.Module):
    """Two convolutions behind group norms, what they are told of the time, and what goes past them."""

    def __init__(self, c: int, k: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, c), nn.Conv2d(c, k, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(8, k), nn.Conv2d(k, k, 3, padding=1)
        self.told = nn.Linear(time, k)
        self.past = nn.Conv2d(c, k, 1)
        self.act = nn.SiLU()

    def forward(self, x: Any, time: Any) -> Any:
        y = self.conv1(self.act(self.norm1(x)))
        y = y + self.told(self.act(time))[:, :, None, None]
        return self.conv2(self.act(self.norm2(y))) + self.past(x)


def main() -> None:
    torch.manual_seed(0)
    block = ResidualBlock(32, 64, 128).eval()
    inputs = torch.randn(2, 32, 24, 24), torch.randn(2, 128)
    fast = tapwise.torch.optimize(block, inputs, memory_format="contiguous", report=True)
    # Inductor would fuse what is left; "aot_eager" needs no compiler.
    compiled = torch.compile(fast, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        expected = block(*inputs)
        for name, model in (("optimized", fast), ("compiled, too", compiled)):
            difference = (model(*inputs) - expected).abs().max()
            print(f"{name}: largest difference {difference:.1e}")
            assert difference < 1e-3


if __name__ == "__main__":
    main()
