"""What a loader says of files that are not what they claim to be."""

from engine.errors import EngineError


class ModelFileInvalid(EngineError):
    """A model's file is corrupt, truncated, or does not hold what its configuration promises."""

    code = "model_file_invalid"
