"""`python -m kernels.cpu` compiles the kernels now, for an image that is to have no compiler."""

import logging
import platform

from kernels.cpu import extension

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    if extension.is_for_this_machine():
        logging.info("compiled: %s", extension.built())
    else:
        logging.info("nothing to compile for %s: torch's own operations serve", platform.machine())
