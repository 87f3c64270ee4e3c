"""Errors that a user can cause. All are ValueErrors; the message names the file, key, flag or value, and what to do."""


class ConfigError(ValueError):
    """A model's configuration that cannot be served."""


class OptionError(ValueError):
    """An option with a value that cannot be served."""


class PromptError(ValueError):
    """A prompt that cannot be served."""


class PromptTooLong(PromptError):
    """A prompt that leaves no room for an answer."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read."""


class NonFiniteError(ValueError):
    """Logits that are NaN or infinite where a token was to be picked: no token can be right."""


class DeviceMemoryError(ValueError):
    """Models, programs or answers that do not fit the devices' memory."""
