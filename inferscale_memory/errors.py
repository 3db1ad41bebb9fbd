"""Every error this library raises on purpose. Each message names a remedy."""


class InferScaleError(Exception):
    """Base of all errors of this library."""


class ConfigurationError(InferScaleError, ValueError):
    """Something the caller passed cannot work: a model folder, a dtype, an option."""


class EngineError(InferScaleError, RuntimeError):
    """The engine could not be started, or ended."""


class PromptError(InferScaleError, ValueError):
    """A prompt cannot be built: an empty question, a broken chat template, a context that overflows."""


class BlobError(InferScaleError, ValueError):
    """A blob's bytes are truncated, corrupt, too large or of another model."""


class FetchError(InferScaleError, RuntimeError):
    """A model could not be fetched, unpacked, converted or stored."""


class StoreError(InferScaleError, ValueError):
    """The vector store was given or asked something it cannot take: vectors of another length, a filter
    operator that does not exist, a file of another format."""
