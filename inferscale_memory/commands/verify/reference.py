"""What an answer from moved blobs should be, computed with nothing of ours in between.

No text prompt has the keys of a moved fact: it attends to its own context, which is not in the prompt. So
they are computed in place, by one forward of a plain transformers model, without a cache, a hook or a
rotation of ours: a copy of the fact's context stands right before the fact, at the positions before it, and
the mask lets nobody but this context and this fact see the copy. RoPE depends on distances only, so the keys
that the fact then has at its place are those that it had in its encode, rotated there.

    ids         C1 C1 C1  F1 F1   C2 C2  F2 F2   S  S  S
    positions   -3 -2 -1   0  1    0  1   2  3   4  5  6
    who sees    C1, F1     S too   C2, F2  S too

It always computes in float32, from the weights as the engine has rounded them: a measure must be finer than
what it measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as hf_logging

from inferscale_memory.engine.hf.families import attention_implementation
from inferscale_memory.errors import ConfigurationError, EngineError
from inferscale_memory.model_files.fingerprint import read_config

Ids = tuple[int, ...]
Part = tuple[Ids, Ids]
"""(context, fact): the ids a fact was encoded after, and its own."""

_FULL, _SLIDING = "full_attention", "sliding_attention"


class Reference:
    """A plain model. Loads its weights at the first use, on CUDA where they fit.

    Args:
        folder: of a Hugging Face model.

    Raises:
        ConfigurationError: no readable model in that folder.
    """

    def __init__(self, folder: Path) -> None:
        read_config(folder)
        try:
            self._config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # whatever a configuration class raises on values it does not like
            raise ConfigurationError(
                f"transformers cannot read the config.json of {folder} ({error}): "
                "update transformers, or pass another model"
            ) from error
        self._folder = folder
        self._windows = _windows(self._config.get_text_config())
        self._model: Any = None

    @property
    def unsupported(self) -> str | None:
        """Why there is no reference for this model; None where there is one."""
        unknown = self._windows.keys() - {_FULL, _SLIDING}
        return f"no mask here expresses layers of type {', '.join(sorted(unknown))}" if unknown else None

    @property
    def positions(self) -> int | None:
        """Most positions of the model, where its configuration says so."""
        most = getattr(self._config.get_text_config(), "max_position_embeddings", None)
        return None if most is None else int(most)

    def load(self, dtype: str) -> None:
        """Load the weights, rounded to `dtype` as the engine's were.

        Raises:
            EngineError: the weights cannot be loaded.
        """
        bars = hf_logging.is_progress_bar_enabled()
        hf_logging.disable_progress_bar()
        try:
            model = AutoModelForCausalLM.from_pretrained(
                self._folder,
                dtype=getattr(torch, dtype),
                attn_implementation=attention_implementation(self._config.get_text_config()),
                local_files_only=True,
                trust_remote_code=False,
            )
        except Exception as error:  # whatever transformers raises on a folder that is not whole
            raise EngineError(f"{self._folder} could not be loaded as the reference ({error})") from error
        finally:
            if bars:
                hf_logging.enable_progress_bar()
        self._model = model.float().eval().requires_grad_(False).to(_device(model))

    @torch.inference_mode()
    def logprobs(self, parts: Sequence[Part], text: Ids, last: int, *, moved: bool = True) -> torch.Tensor:
        """Log-probabilities after each of the `last` tokens of `text`, which stands behind the facts.

        Args:
            parts: the composition, in its order.
            moved: False leaves keys rotated to where they were encoded, as a broken engine might.

        Returns:
            [last, vocabulary], float32, on the CPU.
        """
        ids: list[int] = []
        places: list[int] = []  # where a token stands
        angles: list[int] = []  # the position its query and key are rotated to
        groups: list[int] = []  # the part it belongs to; -1 for `text`
        shown: list[bool] = []  # whether `text` sees it
        q = 0
        for number, (context, fact) in enumerate(parts):
            p, tokens = len(context), len(context) + len(fact)
            ids += [*context, *fact]
            places += range(q - p, q - p + tokens)
            angles += range(q - p, q - p + tokens) if moved else range(tokens)
            groups += [number] * tokens
            shown += [False] * p + [True] * len(fact)
            q += len(fact)
        ids += text
        places += range(q, q + len(text))
        angles += range(q, q + len(text))
        groups += [-1] * len(text)
        shown += [True] * len(text)
        first = min(angles)  # tables of angles begin at 0
        device = self._model.device
        output = self._model(
            input_ids=torch.tensor([ids], device=device),
            position_ids=torch.tensor([angles], device=device) - min(0, first),
            attention_mask=self._masks(
                torch.tensor(places, device=device),
                torch.tensor(groups, device=device),
                torch.tensor(shown, device=device),
            ),
            use_cache=False,
            logits_to_keep=last,
        )
        logprobs: torch.Tensor = output.logits[0].float().log_softmax(-1).cpu()
        return logprobs

    def _masks(self, places: torch.Tensor, groups: torch.Tensor, shown: torch.Tensor) -> Any:
        """What each token (row) adds to its scores of each (column): 0 or the least number. One mask per kind
        of layer where there are several."""
        order = torch.arange(len(places), device=places.device)
        same = groups[:, None] == groups
        seen = (order <= order[:, None]) & (same | ((groups == -1)[:, None] & shown))
        masks = {}
        for kind, window in self._windows.items():
            near = seen if window is None else seen & (places[:, None] - places < window)
            least = torch.finfo(torch.float32).min
            masks[kind] = torch.zeros(near.shape, device=near.device).masked_fill(~near, least)[None, None]
        return masks if len(masks) > 1 else next(iter(masks.values()))


def _windows(config: Any) -> dict[str, int | None]:
    """The attention window of each kind of layer; None where there is none."""
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or [_FULL if window is None else _SLIDING])
    return {kind: window if kind == _SLIDING else None for kind in sorted(kinds)}


def _device(model: Any) -> str:
    """CUDA where the weights in float32 leave a quarter of the free memory."""
    if not torch.cuda.is_available():
        return "cpu"
    free, _ = torch.cuda.mem_get_info()
    return "cuda" if 4 * sum(weight.numel() for weight in model.parameters()) < 0.75 * free else "cpu"
