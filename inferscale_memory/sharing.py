"""What is open cannot be copied: a copy shares it, as copies of a database client do, and pickle refuses it."""

from __future__ import annotations

from typing import Any, NoReturn, Self

from inferscale_memory.errors import CopyError


class Shared:
    """An open object. `copy.copy` and `copy.deepcopy` give the object itself."""

    _remedy = "pass its configuration, and make another one where it is needed"

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raises CopyError."""
        raise CopyError(
            f"{type(self).__name__} is open in this process and cannot be pickled: {self._remedy}"
        )
