"""`python -m kernels.cpu` compiles the kernels now, for an image that is to have no compiler."""

import platform

from kernels.cpu import extension

if __name__ == "__main__":
    if extension.is_for_this_machine():
        print(extension.built())
    else:
        print(f"nothing to compile for {platform.machine()}: torch's own operations serve")
