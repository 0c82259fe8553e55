"""What the engine tells its callers when something cannot be done: typed, with a stable code and a way out."""


class EngineError(Exception):
    """The base of all errors that the engine raises on purpose.

    `code` is stable and machine-readable; `hint` says what to do, or is empty.
    """

    code = "engine_error"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".rstrip()


class ModelNotFound(EngineError):
    """No model of that name is on this machine, and none could be fetched."""

    code = "model_not_found"


class ModelNotSupported(EngineError):
    """The model's files were found, but this engine cannot run what they describe."""

    code = "model_not_supported"


class ConfigError(EngineError):
    """An engine option is out of range, or contradicts another."""

    code = "invalid_config"


class RequestError(EngineError):
    """One request cannot be served; its neighbours are not concerned. `field` names the offending part of it."""

    code = "invalid_request"

    def __init__(
        self, message: str, *, code: str = "invalid_request", field: str | None = None, hint: str = ""
    ) -> None:
        super().__init__(message, hint=hint)
        self.code = code
        self.field = field


def not_numbers(what: str, *, code: str) -> RequestError:
    """The error of a request whose computation overflowed; `what` is plural, and of the model."""
    return RequestError(
        f"The model's {what} are not numbers.",
        code=code,
        hint="With dtype float16 this is often an overflow: try bfloat16 or float32.",
    )


class EngineDied(EngineError):
    """The engine process ended while requests were in flight."""

    code = "engine_died"


class OutOfMemory(EngineError):
    """A step did not fit the device's memory; nothing of it counts, and a smaller one may fit."""

    code = "out_of_memory"
