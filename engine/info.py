"""What an engine says of itself: once when it is loaded, and after every step."""

from dataclasses import dataclass
from typing import Literal

from engine.config import Quantize

Task = Literal["generate", "embed", "score"]


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """A loaded engine's settings, as resolved for this model and this machine.

    `dtype` is torch's name: `bfloat16`; `quantize` is what the linears were quantised to, `kv_cache_dtype` one of
    `EngineConfig`'s but `auto`, or `float32`. An engine without a KV cache has no blocks, and None for their dtype.
    `tasks` are what it can be asked. `revision` is the commit of the hub's repository that `model` was resolved to, or
    None for local files.
    """

    model: str
    dtype: str
    device: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    num_kv_blocks: int
    block_size: int
    tasks: tuple[Task, ...] = ("generate",)
    revision: str | None = None
    quantize: Quantize | None = None
    kv_cache_dtype: str | None = None

    @property
    def linear_dtype(self) -> str:
        """What the linears multiply: `quantize` where they are quantised, else `dtype`."""
        return self.quantize or self.dtype

    @property
    def precision(self) -> str:
        """What answers depend on beside the model: `linear_dtype`, and the KV cache's where it is not the model's."""
        own = self.kv_cache_dtype not in (None, self.dtype)
        return f"{self.linear_dtype} kv-{self.kv_cache_dtype}" if own else self.linear_dtype


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot between two steps.

    Attributes:
        running: Sequences that hold KV blocks.
        waiting: Sequences that hold none: not started, or preempted.
        kv_blocks_used: Blocks referenced by running sequences; cached blocks that nobody holds are free.
        kv_blocks_total: Blocks that can be used at all.
        prompt_tokens: Prompt tokens of the requests started so far.
        cached_tokens: How many of those came from the prefix cache.
        generated_tokens: Tokens sampled so far.
        steps: Forward passes so far.
        step_rows: Sequences in all of them together: over `steps`, how many ran in one.
        tail_steps: Passes in which nobody waited: more sequences could have run, had there been any.
        tail_step_rows: Sequences in those together.
        preemptions: How often a running sequence gave up its blocks to an older one.
        swaps: How many of the preemptions kept the blocks' contents, in host memory. The others compute them again.
        swapped_blocks_out: Blocks copied to host memory so far.
        swapped_blocks_in: Blocks copied back so far.
        swap_blocks_used: Blocks of host memory that preempted sequences hold.
        swap_blocks_total: Blocks of host memory that can be used at all.
        lora_loads: Adapters read into memory so far; many more than there are adapters: max_loras is too small.
    """

    running: int = 0
    waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    step_rows: int = 0
    tail_steps: int = 0
    tail_step_rows: int = 0
    preemptions: int = 0
    swaps: int = 0
    swapped_blocks_out: int = 0
    swapped_blocks_in: int = 0
    swap_blocks_used: int = 0
    swap_blocks_total: int = 0
    lora_loads: int = 0

    @property
    def kv_usage(self) -> float:
        """The share of the KV pool in use, 0 to 1."""
        return self.kv_blocks_used / self.kv_blocks_total if self.kv_blocks_total else 0.0
