"""Compile CUDA C++ with NVRTC, keep the cubins, load and launch them."""
