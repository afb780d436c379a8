"""CUDA kernels, compiled at run time. Importing this package needs neither a GPU nor a driver."""
