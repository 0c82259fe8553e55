"""From a loaded encoder to an engine that is ready to step."""

import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.device import device_of
from engine.encoder.runner import EncoderRunner
from engine.encoder.scheduler import EncoderScheduler
from engine.errors import ConfigError
from engine.info import EngineInfo
from engine.loader.encoder_loader import LoadedEncoder
from engine.loop import PlainLoop
from engine.pooling.intake import PoolingIntake, PoolingModel

# Rows and tokens of one step, see engine.build. Rows cost an encoder nothing: the tokens decide.
_CPU_BUDGETS = (256, 2048)
_CUDA_BUDGETS = (1024, 16384)

# They size or fill a KV cache, or change how a decoder is loaded or run.
_SAY_NOTHING = (
    "num_kv_blocks",
    "kv_cache_memory",
    "kv_cache_dtype",
    "swap_space",
    "gpu_memory_utilization",
    "max_loras",
    "async_scheduling",
)


def assemble_encoder_engine(config: EngineConfig, loaded: LoadedEncoder, device: torch.device) -> EngineCore:
    """Put the loop together around an encoder that is loaded on `device`.

    Raises `ConfigError` for options that do not fit the model.
    """
    for name in _SAY_NOTHING:
        if getattr(config, name) not in (None, 0, "auto"):
            raise ConfigError(f"{name} says nothing for an encoder, which has no KV cache.", hint="Leave it out.")
    default_seqs, default_tokens = _CUDA_BUDGETS if device.type == "cuda" else _CPU_BUDGETS
    max_num_seqs = config.max_num_seqs or default_seqs
    max_length = _max_length(config, loaded)
    max_num_batched_tokens = config.max_num_batched_tokens or max(default_tokens, max_length)
    model = _pooling_model(loaded)
    info = EngineInfo(
        model=config.model,
        dtype=str(loaded.encoder.config.dtype).removeprefix("torch."),
        device=str(device),
        max_model_len=max_length,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        vocab_size=loaded.encoder.config.vocab_size,
        num_kv_blocks=0,
        block_size=0,
        tasks=(model.task,),
        revision=loaded.revision,
    )
    scheduler = EncoderScheduler(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, max_length=max_length
    )
    return EngineCore(
        scheduler,
        PlainLoop(scheduler, EncoderRunner(loaded.encoder, device_of(device)), max_num_batched_tokens),
        info,
        tokenizer=loaded.tokenizer,
        eos_token_ids=frozenset(),
        seed=config.seed,
        pooling=PoolingIntake(model, loaded.tokenizer, vocab_size=info.vocab_size, max_length=max_length),
    )


def _max_length(config: EngineConfig, loaded: LoadedEncoder) -> int:
    """The longest prompt in tokens: what is asked for, else what the model was made for, and what one step can hold."""
    longest = loaded.encoder.config.max_length
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(f"max_model_len ({config.max_model_len}) is beyond the model's own limit of {longest}.")
    step = config.max_num_batched_tokens
    if config.max_model_len is None:
        return min(longest, loaded.pooling.max_length or longest, step or longest)
    if step is not None and step < config.max_model_len:
        raise ConfigError(
            f"max_model_len ({config.max_model_len}) is beyond max_num_batched_tokens ({step}), and an encoder reads a "
            "prompt in one step.",
            hint="Raise max_num_batched_tokens, or lower max_model_len.",
        )
    return config.max_model_len


def _pooling_model(loaded: LoadedEncoder) -> PoolingModel:
    config, defaults = loaded.encoder.config, loaded.pooling
    return PoolingModel(
        task="embed" if config.num_labels is None else "score",
        size=config.num_labels or config.hidden_size,
        pooling=defaults.pooling,
        normalize=defaults.normalize,
        uses_sigmoid=loaded.score_activation == "sigmoid",
        lowercase=defaults.lowercase,
    )
