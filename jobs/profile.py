"""What an engine was measured to do on a machine: kept in the state folder, and what estimates of time are based on."""

from bisect import bisect_left
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from jobs.settings import Settings
from jobs.spec import model_key


@dataclass(frozen=True, slots=True)
class Capacity:
    """What an engine has room for: `kv_tokens` in its KV pool, which is 0 where the model itself does not fit."""

    kv_tokens: int
    max_num_seqs: int
    max_model_len: int
    block_size: int
    basis: str


class DecodeRate(BaseModel):
    """How many tokens a second all rows together got, with so many in a step."""

    model_config = ConfigDict(frozen=True)

    rows: int
    tokens_per_second: float


class Profile(BaseModel):
    """Measured by `pagemill bench model`. `decode` is in rising order of rows; the KV pool holds `kv_tokens`."""

    model_config = ConfigDict(frozen=True)

    model: str
    dtype: str
    device: str
    host: str
    measured_at: int
    max_model_len: int
    max_num_seqs: int
    block_size: int
    kv_tokens: int
    prefill_tokens_per_second: float
    decode: tuple[DecodeRate, ...]

    def decode_tokens_per_second(self, rows: float) -> float:
        """The rate with so many rows in a step: between what was measured, a straight line; beyond it, its ends."""
        at = bisect_left(self.decode, rows, key=lambda rate: rate.rows)
        if at == 0:
            return self.decode[0].tokens_per_second * rows / self.decode[0].rows
        if at == len(self.decode):
            return self.decode[-1].tokens_per_second
        low, high = self.decode[at - 1], self.decode[at]
        part = (rows - low.rows) / (high.rows - low.rows)
        return low.tokens_per_second + part * (high.tokens_per_second - low.tokens_per_second)

    @property
    def capacity(self) -> Capacity:
        return Capacity(self.kv_tokens, self.max_num_seqs, self.max_model_len, self.block_size, self.basis)

    @property
    def basis(self) -> str:
        """In words, what the figures come from."""
        day = datetime.fromtimestamp(self.measured_at).strftime("%Y-%m-%d %H:%M")
        return f"{self.model} in {self.dtype} on {self.device} of {self.host}, measured on {day}"


def profile_path(model: str, quantize: str | None, settings: Settings, *, kv_cache_dtype: str = "auto") -> Path:
    """Where a model's measurement is kept: quantised, it or its KV cache, it runs otherwise, and has one of its own."""
    name = model_key(model) if quantize is None else f"{model_key(model)}-{quantize}"
    own_cache = "" if kv_cache_dtype == "auto" else f"-kv-{kv_cache_dtype}"
    return settings.state_dir / "profiles" / f"{name}{own_cache}.json"


def load_profile(
    model: str, quantize: str | None, settings: Settings, *, kv_cache_dtype: str = "auto"
) -> Profile | None:
    """The last measurement of a model, if there is one that can be read: one of another version cannot."""
    try:
        path = profile_path(model, quantize, settings, kv_cache_dtype=kv_cache_dtype)
        return Profile.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
