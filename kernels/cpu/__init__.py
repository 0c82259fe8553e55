"""Kernels for CPUs in C++, compiled on first use; see `kernels.cpu.extension`."""
