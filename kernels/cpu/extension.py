"""The compiled kernels: built once with the compiler at hand, kept in a cache, and loaded as operations of torch.

    PAGEMILL_CPU_ISA          `avx2` where AVX-512 is there too, or `torch` for none of them
    PAGEMILL_KERNEL_CACHE     where the library is kept; else `pagemill` in the user's cache folder

The library is named by the hash of what it is made from. An image brings it along by building it once: where the file
is there, no compiler is needed. Where there is neither, torch's own operations serve, and the log says so once.

No OpenMP runtime is linked. Its symbols are found in the one that torch has loaded, so that both share one pool of
threads; a second pool would fight the first for the cores.
"""

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch.utils import cpp_extension

log = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_SOURCES = ("ops.cpp", "avx512.cpp", "avx2.cpp")
# Without contraction a sum has the bits that the source says, and those of torch's own operations.
_FLAGS = ("-O3", "-std=c++20", "-fPIC", "-fopenmp", "-ffp-contract=off")


@cache
def is_served() -> bool:
    """Whether `torch.ops.pagemill_cpu` is there; builds and loads it if need be."""
    if os.environ.get("PAGEMILL_CPU_ISA") == "torch" or not is_for_this_machine():
        return False
    try:
        torch.ops.load_library(str(built()))
        name = torch.ops.pagemill_cpu.instruction_set()
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        log.warning("the CPU kernels are not compiled, torch's own operations serve, slower: %s", _reason(error))
        return False
    log.debug("CPU kernels for %s", name)
    return True


def is_for_this_machine() -> bool:
    """Whether the sources are for its kind of processor."""
    return platform.machine() in ("x86_64", "AMD64")


def built() -> Path:
    """The library, compiled if it is not in the cache. Raises OSError without a compiler or a place to put it, and
    CalledProcessError where the compiler fails.
    """
    library = _cache_folder() / f"cpu-{_fingerprint()}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            _compile(Path(folder), library.name)
            # Two processes may build at once: each renames a whole library, and the last stays.
            (Path(folder) / library.name).replace(library)
    return library


def _cache_folder() -> Path:
    if chosen := os.environ.get("PAGEMILL_KERNEL_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagemill"


def _fingerprint() -> str:
    digest = hashlib.sha256(repr((torch.__version__, platform.machine(), _FLAGS)).encode())
    for path in sorted([*_FOLDER.glob("*.cpp"), *_FOLDER.glob("*.h")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(folder: Path, name: str) -> None:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise OSError("there is no C++ compiler")
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    includes = [f"-isystem{path}" for path in cpp_extension.include_paths()]
    objects = [folder / f"{source}.o" for source in _SOURCES]
    log.info("compiling the CPU kernels, once")
    commands = [
        [compiler, *_FLAGS, abi, *includes, "-c", str(_FOLDER / source), "-o", str(target)]
        for source, target in zip(_SOURCES, objects, strict=True)
    ]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE) for command in commands]
    outputs = [process.communicate()[1] for process in running]
    for command, process, output in zip(commands, running, outputs, strict=True):
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command, stderr=output)
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    link = [compiler, "-shared", *map(str, objects), *libraries, "-ltorch_cpu", "-lc10", "-o", str(folder / name)]
    subprocess.run(link, check=True, capture_output=True)


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return (error.stderr or b"").decode(errors="replace").strip()[-2000:] or str(error)
    return str(error)
