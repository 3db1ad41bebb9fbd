"""Methods of `Chat` under the names they had one release ago."""

from __future__ import annotations

from typing import Any

from inferscale_memory.deprecation import warn


class OldChatNames:
    """Each method warns, and calls the one that took its place."""

    def stand(self, *args: Any, **options: Any) -> Any:
        """The old name of `is_current`."""
        return self._renamed("stand", "is_current")(*args, **options)

    async def astand(self, *args: Any, **options: Any) -> Any:
        """The old name of `ais_current`."""
        return await self._renamed("astand", "ais_current")(*args, **options)

    def version(self, *args: Any, **options: Any) -> Any:
        """The old name of `fingerprint`."""
        return self._renamed("version", "fingerprint")(*args, **options)

    async def aversion(self, *args: Any, **options: Any) -> Any:
        """The old name of `afingerprint`."""
        return await self._renamed("aversion", "afingerprint")(*args, **options)

    def _renamed(self, old: str, new: str) -> Any:
        warn(f"Chat.{old}() is now Chat.{new}(): the old name works in this release and goes in the next")
        return getattr(self, new)
