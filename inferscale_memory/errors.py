"""Every error this library raises on purpose. Each message names a remedy."""


class InferScaleError(Exception):
    """Base of all errors of this library."""


class ConfigurationError(InferScaleError, ValueError):
    """Something the caller passed cannot work: a model folder, a dtype, an option."""


class EngineError(InferScaleError, RuntimeError):
    """The engine could not be started, or ended."""


class ClosedError(EngineError):
    """A memory, a session or an engine was asked for something after its `close()`, or was closed meanwhile."""


class ForkedError(EngineError):
    """The engine runs in the process that this one was forked from, and answers only there."""


class CopyError(InferScaleError, TypeError):
    """Something that is open in this process was to be pickled, as for another process."""


class ExtractionError(InferScaleError, RuntimeError):
    """Facts could not be drawn out of what was said: the model's answer was cut off, was no JSON, or none came.
    The words stay in the turn log."""


class PromptError(InferScaleError, ValueError):
    """A prompt cannot be built: an empty question, a broken chat template, tools that are none."""


class ContextOverflowError(PromptError):
    """A conversation is longer than the model's context, even without memories."""


class BlobError(InferScaleError, ValueError):
    """A blob's bytes are truncated, corrupt, too large or of another model."""


class MigrationError(InferScaleError, RuntimeError):
    """A store or an embedder failed while memories were copied."""


class FetchError(InferScaleError, RuntimeError):
    """A model could not be fetched, unpacked, converted or stored."""


class StoreError(InferScaleError, ValueError):
    """The vector store was given or asked something it cannot take: vectors of another length, a filter
    operator that does not exist, a file of another format."""


def first_line(error: BaseException) -> str:
    """What an error of another library says, for a sentence of ours: its first line, or its name if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
