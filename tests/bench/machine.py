"""What a figure was measured on."""

import platform
from pathlib import Path

_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")


def processor() -> str:
    """The processor's name, and which of the instructions that matter here it has."""
    fields = _cpuinfo()
    flags = set(fields.get("flags", "").split())
    named = fields.get("model name", platform.processor() or platform.machine())
    return " ".join((named, f"(family {fields.get('cpu family', '?')})", *(flag for flag in _FLAGS if flag in flags)))


def _cpuinfo() -> dict[str, str]:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").split("\n\n", 1)[0].splitlines() if path.exists() else []
    pairs = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in pairs}
